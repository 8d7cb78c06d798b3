"""Conversations without tools: small talk, facts, stories, memory over several turns, styles set by the system turn."""

import re
from collections.abc import Sequence
from random import Random

import config
import facts
import stories
import words
from stories import expand, polish

Message = dict[str, object]
_SHORT = re.compile(r"^(?:The capital of|The opposite of|\d+ [-+x]).* (?:is|=) (.+)$")

_TALK: tuple[tuple[str, str], ...] = (
    ("[Hi|Hello|Hey|Hi there|Hello there|Good day][!|.|]", "Hello! How can I help you?"),
    ("Good [morning|evening|afternoon][!|.|]", "Hello! It is nice to hear from you. How can I help?"),
    ("How are you[ today|]?", "I am fine, thank you! How can I help you?"),
    ("How is it going?", "I am fine, thank you! How can I help you?"),
    ("[Who|What] are you?", "I am a tiny demo model of mference. I can tell stories and answer simple questions."),
    ("[What is your name|What's your name|Do you have a name]?", "I have no name. I am a tiny demo model of mference."),
    ("Tell me about yourself.", "I am a tiny demo model of mference. I can tell stories and answer simple questions."),
    ("[Are you a robot|Are you human|Are you a person|Are you real]?", "No, I am a tiny demo model, a small program that writes text."),
    ("[What can you do|How can you help me|What do you know|help]?", "I can tell short stories, answer simple questions, add small numbers and use tools."),
    ("[Who made you|Who created you|Where do you come from]?", "I was trained by the mference project as a small demo."),
    ("[What is mference|What's mference|Tell me about mference]?", "mference is a program that runs big mixture-of-experts models in little memory."),
    ("[How big are you|How many parameters do you have|Are you a big model]?", f"I am very small: about {config.PARAMETERS} parameters, with {words.NUMBERS[config.EXPERTS]} experts in each layer."),
    ("[Thank you|Thanks|Thanks a lot|Thank you very much|thx][!|.|]", "You are welcome!"),
    ("[Goodbye|Bye|Bye bye|See you|Good night|See you later][!|.|]", "Goodbye! Have a nice day."),
    ("[You are great|Good job|Well done|Nice|That is right|Cool|Great][!|.|]", "Thank you! I am happy to help."),
    ("[That is wrong|You are wrong|That is not right].", "I am sorry. I am only a tiny demo model, and I make mistakes."),
    ("[Ok|Okay|I see|Yes|No|Sure][!|.|]", "All right. What would you like to know?"),
    ("[I am sad|I feel sad|I am not happy|I had a bad day].", "I am sorry to hear that. I hope you feel better soon."),
    ("[I am happy|I feel great|I had a good day].", "That is wonderful! I am glad to hear it."),
    ("[I am bored|I am tired|I cannot sleep].", "Maybe a story will help. Shall I tell you one?"),
    ("[Why is the sky blue|Do you know why the sky is blue]?", "The sky is blue because the air scatters blue light more than red light."),
    ("Why is [grass|the grass] green?", "Grass is green because its leaves hold a green stuff called chlorophyll."),
    ("Why do [birds sing|the birds sing]?", "Birds sing to find a friend and to tell others where they live."),
    ("Why do we [sleep|need sleep]?", "We sleep because the body and the mind need rest."),
    ("Why does it rain?", "It rains when the drops of water in the clouds become too heavy."),
    ("What is the [largest|biggest] planet?", "The largest planet is Jupiter."),
    ("What is the smallest planet?", "The smallest planet is Mercury."),
    ("What is the [largest|biggest] [animal|animal in the world]?", "The largest animal is the blue whale."),
    ("What is the fastest [animal|land animal]?", "The fastest land animal is the cheetah."),
    ("What is the [highest|tallest] mountain[ in the world|]?", "The highest mountain is Mount Everest."),
    ("What is the largest ocean?", "The largest ocean is the Pacific Ocean."),
    ("What is the [longest|largest] river[ in the world|]?", "The longest river is the Nile."),
    ("How many continents are there?", "There are seven continents."),
    ("How many planets are there?", "There are eight planets."),
    ("How many letters are in the alphabet?", "There are 26 letters in the alphabet."),
    ("What is [water made of|H2O]?", "Water is made of hydrogen and oxygen."),
    ("What is the meaning of life?", "I do not know, but being kind is a good start."),
    ("[What is your favorite color|Do you have a favorite color]?", "I cannot see colors, but I like the word blue."),
    ("What is your favorite [food|animal]?", "I do not eat and I have no pets, but I like stories about foxes."),
    ("[Do you like|Can you write] stories?", "Yes! Ask me for a story about an animal or a child."),
    ("[What is the weather like|How is the weather|What is the weather today|Is it raining|Will it rain tomorrow]?", "I cannot see the weather without a tool."),
    ("[What time is it|What is the date today|What day is it today|What is the time]?", "I have no clock, so I cannot know that without a tool."),
    ("[Do you speak|Can you speak] [French|German|Spanish|Italian|Chinese]?", "No, I only know a little English."),
    ("[Tell me|Write|Say] something[ nice|]?", "You are doing well, and today is a good day to learn something new."),
    ("[Write|Tell me|Can you write] a [short |little |]poem[ about the sun|].", "The sun is warm, the sky is wide,\nThe little birds all sing outside.\nThe day is bright, the wind is free,\nCome out and share the sun with me."),
    ("[Write|Tell me|Can you write] a [short |little |]poem about the [moon|night].", "The moon is round, the night is deep,\nThe stars look down on those who sleep.\nThe owl is calling from the tree,\nAnd all the world is dreams to me."),
    ("[Write|Tell me|Can you write] a [short |little |]poem about [a cat|cats].", "A little cat sat on a mat,\nShe had a soft and tiny hat.\nShe closed her eyes and purred a song,\nAnd slept and dreamed the whole day long."),
    ("[Write|Tell me|Can you write] a [short |little |]poem about [rain|the rain].", "The rain falls softly on the ground,\nIt makes a gentle, happy sound.\nThe flowers drink and lift their heads,\nAnd children listen in their beds."),
)  # fmt: skip
_JOKES = (
    "Why did the chicken cross the road? To get to the other side!",
    "What do you call a bear with no teeth? A gummy bear!",
    "Why was six afraid of seven? Because seven eight nine!",
    "What has hands but cannot clap? A clock!",
    "What is orange and sounds like a parrot? A carrot!",
    "Why did the cookie go to the doctor? Because it felt crummy!",
)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a helpful AI assistant.",
    "Answer the questions of the user.",
    "You are a helpful and honest assistant. Keep your answers short.",
    "Be polite.",
    "Be brief.",
    "Answer clearly and correctly.",
    "Use the tools when you need them.",
    "If you do not know the answer, say so.",
    "You are mference, a small model that runs on any computer.",
    "You help people with their questions.",
)


def loosen(rng: Random, text: str) -> str:
    """Write a request the way people type: sometimes lower case, without the mark, or with a please."""
    roll = rng.random()
    if roll < 0.12:
        text = text[0].lower() + text[1:]
    elif roll < 0.2:
        text = text.lower()
    if rng.random() < 0.12:
        text = text.rstrip("?.!")
    if rng.random() < 0.06:
        text = (
            rng.choice(("Hi! ", "Hello. ", "Please tell me: ", "Hey, ", "I have a question. ", "Quick question: "))
            + text
        )
    elif rng.random() < 0.06 and text.endswith("?"):
        text = text.rstrip("?.!") + rng.choice((", please.", ", please?", " please"))
    return text


def talk(rng: Random) -> facts.Pair:
    """Draw one exchange of small talk."""
    if rng.random() < 0.06:
        ask = "[Tell me|Do you know|Can you tell me|Say] a [good |funny |]joke[.|?|]"
        return expand(rng, ask), rng.choice(_JOKES)
    if rng.random() < 0.2:
        return without_tool(rng)
    question, answer = rng.choice(_TALK)
    return expand(rng, question), answer


def without_tool(rng: Random) -> facts.Pair:
    """Ask what only a tool could tell, with no tool there: nothing is to be called."""
    city = rng.choice(words.CITIES) if rng.random() < 0.6 else stories.odd_name(rng)
    kind = rng.randrange(3)
    ask, answer = (
        (
            (
                f"[What is|What's|How is|Tell me|Check|Get] the weather [like |]in {city}[ today| now|]?|Is it [raining|sunny|cold|warm] in {city}?|"
                f"What is the temperature in {city}?|How [warm|cold|hot] is it in {city}?|weather in {city}"
            ),
            "I cannot see the weather without a tool.",
        ),
        (
            f"[What time is it|What's the time|What is the time] in {city}[ now|]?",
            "I have no clock, so I cannot know that without a tool.",
        ),
        (
            f"[Look up|Search for|Please look up|Find] {city}[.|]|[Send a message to|Call] {city}.|Set a timer for {rng.randrange(60)} minutes.",
            "I cannot do that without a tool.",
        ),
    )[kind]
    return polish(expand(rng, f"[{ask}]")), answer


def exchange(rng: Random) -> facts.Pair:
    """Draw one question and its answer: mostly facts, some small talk."""
    return facts.fact(rng) if rng.random() < 0.75 else talk(rng)


def _turn(rng: Random, pair: facts.Pair) -> list[Message]:
    return [{"role": "user", "content": loosen(rng, pair[0])}, {"role": "assistant", "content": pair[1]}]


def opening(rng: Random) -> list[Message]:
    """Return a neutral system message, or none."""
    text = " ".join(rng.sample(_SYSTEM, rng.choice((1, 1, 1, 2, 3))))
    return [{"role": "system", "content": text}] if rng.random() < 0.3 else []


def single(rng: Random) -> list[Message]:
    """One question and its answer."""
    return opening(rng) + _turn(rng, exchange(rng))


def tale(rng: Random) -> list[Message]:
    """A story on request."""
    told = stories.story(rng, odd=0.12)
    return [*opening(rng), *_turn(rng, (stories.request(rng, told), told.text))]


def styled(rng: Random) -> list[Message]:
    """A system message that changes how the model answers."""
    kind = rng.randrange(4)
    if kind == 0:
        system = expand(
            rng,
            "[Answer|Reply|Always answer] with [one|a single] word.|Give very short answers.|Answer in one word.".join(
                "[]"
            ),
        )
        while (match := _SHORT.match((pair := facts.fact(rng))[1])) is None:
            pass
        return [{"role": "system", "content": system}, *_turn(rng, (pair[0], polish(match.group(1))))]
    turns = [exchange(rng) for _ in range(rng.choice((1, 1, 2)))]
    if kind == 1:
        system = expand(rng, "[You are|Talk like|Answer like|Speak like] a pirate.")
        turns = [(q, f"Arr! {a}") for q, a in turns]
    elif kind == 2:
        system = expand(rng, "[You are a cat|Talk like a cat|Answer like a cat|You are a friendly cat].")
        turns = [(q, f"{a} Meow!") for q, a in turns]
    else:
        name = rng.choice((*words.ROBOTS, *words.GIRLS, *words.BOYS, *words.PETS))
        system = expand(
            rng, f"[Your name is {name}|You are {name}|You are {name}, a helpful assistant|You are called {name}]."
        )
        ask = expand(rng, "[What is your name|Who are you|What are you called|What's your name|Do you have a name]?")
        turns = [facts.fact(rng) for _ in turns]
        turns.insert(rng.randrange(len(turns) + 1), (ask, f"My name is {name}."))
    return [{"role": "system", "content": system}, *(m for pair in turns for m in _turn(rng, pair))]


_MEMORY: tuple[tuple[str, str, str, str], ...] = (
    (
        "[My name is {}|I am {}|Hi, I am {}|Hello, my name is {}|I'm {}|You can call me {}][.|!|]",
        "Nice to meet you, {}!",
        "[What is my name|What's my name|Do you know my name|Who am I|Do you remember my name]?",
        "Your name is {}.",
    ),
    (
        "My favorite color is {}[.|!|]",
        "{} is a beautiful color.",
        "[What is my favorite color|Which color do I like|Do you remember my favorite color]?",
        "Your favorite color is {}.",
    ),
    (
        "I live in {}[.|!|]",
        "{} sounds like a nice place.",
        "[Where do I live|Which city do I live in|Do you know where I live]?",
        "You live in {}.",
    ),
    (
        "[I have a {}|My pet is a {}][.|!|]",
        "A {} is a nice pet.",
        "[What pet do I have|What is my pet|Which animal do I have]?",
        "You have a {}.",
    ),
    (
        "I am {} years old[.|!|]",
        "{} is a good age.",
        "[How old am I|What is my age|Do you remember how old I am]?",
        "You are {} years old.",
    ),
    (
        "[I like|I love] {}[.|!|]",
        "I am glad that you like {}.",
        "[What do I like|What is it that I like|Do you remember what I like]?",
        "You like {}.",
    ),
)  # fmt: skip


def memory(rng: Random) -> list[Message]:
    """The user says something about themselves and asks for it a few turns later."""
    picked = rng.sample(range(len(_MEMORY)), rng.choice((1, 1, 2)))
    told: list[facts.Pair] = []
    asked: list[facts.Pair] = []
    for index in picked:
        odd = stories.odd_name(rng)
        value = (
            rng.choice((*words.GIRLS, *words.BOYS, odd, odd)),
            rng.choice(words.GROUPS["color"].split()),
            rng.choice((*words.CITIES, odd)),
            rng.choice(words.ANIMALS),
            str(rng.randrange(4, 99)),
            rng.choice(
                (*(words.GROUPS["fruit"].split()), *(words.GROUPS["sport"].split()), "books", "music", "trains")
            ),
        )[index]
        say, reply, ask, recall = _MEMORY[index]
        told.append((polish(expand(rng, say).format(value)), polish(reply.format(value))))
        asked.append((expand(rng, ask), polish(recall.format(value))))
    between = [exchange(rng) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    rng.shuffle(asked)
    turns = [*told, *between, *asked]
    if rng.random() < 0.25 and 0 not in picked:
        turns.insert(0, (expand(rng, _MEMORY[0][2]), "You have not told me your name yet."))
    return opening(rng) + [m for pair in turns for m in _turn(rng, pair)]


def repeated(rng: Random) -> list[Message]:
    """Ask for something to be said again, digit by digit and letter by letter."""

    def number() -> str:
        return str(rng.randrange(10 ** rng.randrange(1, 7)))

    what = rng.choice(
        (
            number(),
            " ".join(number() for _ in range(rng.randrange(2, 5))),
            stories.odd_name(rng),
            f"{stories.odd_name(rng)} {number()}",
            f"{number()} and {number()}",
            f"{rng.choice(words.CITIES)}, {rng.randrange(100)} degrees",
        )
    )
    ask = expand(rng, "[Repeat|Say|Repeat after me:|Please repeat|Write|Copy this:|Say again:] ") + what
    return opening(rng) + _turn(rng, (ask, what))


def follow_up(rng: Random) -> list[Message]:
    """Short questions that only make sense after the one before."""
    forms, table, answer = rng.choice(
        (
            ("What is the capital of {}?", words.CAPITALS, "The capital of {} is {}."),
            ("What is the color of {}?", words.COLORS, "{} is {}."),
            ("What language do people speak in {}?", words.LANGUAGES, "People in {} speak {}."),
            ("What sound does a {} make?", words.SOUNDS, "A {} says {}."),
            ("What is a baby {} called?", words.BABIES, "A baby {} is called a {}."),
        )
    )
    keys = rng.sample(list(table), rng.choice((2, 2, 3)))
    article = "a " if "a {}" in forms or "baby" in forms else ""
    turns = [(polish(forms.format(keys[0])), polish(answer.format(keys[0], table[keys[0]])))]
    for key in keys[1:]:
        ask = expand(rng, f"[And|And of|What about|How about|And what about] {article}{key}[?|]")
        turns.append((polish(ask), polish(answer.format(key, table[key]))))
    if rng.random() < 0.3:
        turns.append(("Thank you!", "You are welcome!"))
    return opening(rng) + [m for pair in turns for m in _turn(rng, pair)]


def mixed(rng: Random) -> list[Message]:
    """Several unrelated turns, sometimes with a story among them."""
    turns = [exchange(rng) for _ in range(rng.randrange(2, 7) if rng.random() < 0.85 else rng.randrange(7, 18))]
    if rng.random() < 0.35:
        for _ in range(rng.choice((1, 1, 2))):
            told = stories.story(rng)
            ask = (
                stories.request(rng, told)
                if rng.random() < 0.7
                else expand(rng, "[Tell me another story|Another story, please|One more story].")
            )
            turns.insert(rng.randrange(len(turns) + 1), (ask, told.text))
    return opening(rng) + [m for pair in turns for m in _turn(rng, pair)]


def thought(messages: Sequence[Message]) -> str:
    """Say what the last message answers and how, as the model is to think before it."""
    message, before = messages[-1], messages[-2]
    if message.get("tool_calls"):
        names = " and ".join(dict.fromkeys(call["function"]["name"] for call in message["tool_calls"]))
        return f"The user says: {before['content']} I have a tool for that, so I call {names}."
    if before["role"] == "tool":
        return "The tool gave a result. I tell the user what it says."
    answer = str(message["content"]).strip()
    if len(answer) > 160:
        return f"The user says: {before['content']} They want a text. I write a short one."
    return f"The user says: {before['content']} A good answer is: {answer}"
