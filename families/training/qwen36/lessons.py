"""What this demo learns: little enough for a million parameters and a CPU.

Capitals, opposites, colors, animals and small talk in one turn or a few; the weather and sums with a tool; some of it
with a thought before the answer.
"""

import json
from random import Random

import chats
import facts
import tools
import words
from dialect import Parts, last_reply, plain, whole_timeline
from stories import odd_name

_FACTS = (facts.capital, facts.capital, facts.opposite, facts.color, facts.animal)
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy")


def _exchange(rng: Random) -> facts.Pair:
    return chats.talk(rng) if rng.random() < 0.2 else rng.choice(_FACTS)(rng)


def _turns(pairs: list[facts.Pair]) -> list[chats.Message]:
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def chat(rng: Random) -> Parts:
    """One question, or a few; every reply of a longer chat is learnt at once."""
    messages = chats.opening(rng) if rng.random() < 0.2 else []
    count = rng.choice((1, 1, 1, 2, 3))
    messages += _turns([_exchange(rng) for _ in range(count)])
    return whole_timeline(messages, None) if count > 1 else last_reply(rng, messages, None, len(messages) - 1)


def name(rng: Random) -> Parts:
    """The user's name, kept over a question or none."""
    who = rng.choice((*words.GIRLS, *words.BOYS, odd_name(rng)))
    between = [_exchange(rng)] if rng.random() < 0.4 else []
    asked = rng.choice(("What is my name?", "Do you know my name?", "Who am I?"))
    told = (rng.choice(("My name is {}.", "I am {}.", "Hi, I am {}.")).format(who), f"Nice to meet you, {who}!")
    return whole_timeline(_turns([told, *between, (asked, f"Your name is {who}.")]), None)


def _weather(rng: Random) -> tuple[tools.Schema, str, dict[str, object], str, str]:
    city = rng.choice(words.CITIES) if rng.random() < 0.7 else odd_name(rng)
    sky, degrees = rng.choice(_SKIES), rng.randrange(-9, 40)
    ask = rng.choice(("What is the weather in {}?", "How is the weather in {}?", "What is the weather like in {}?"))
    result = rng.choice((json.dumps({"temperature": degrees, "condition": sky}), f"{degrees} degrees and {sky}"))
    answer = f"It is {sky} in {city}, and the temperature is {degrees} degrees."
    return (
        _tool("get_weather", "Get the weather of a city.", {"city": "string"}),
        ask.format(city),
        {"city": city},
        result,
        answer,
    )


def _add(rng: Random) -> tuple[tools.Schema, str, dict[str, object], str, str]:
    a, b = rng.randrange(10, 1000), rng.randrange(10, 1000)
    ask = rng.choice(("What is {} + {}?", "Add {} and {}.", "How much is {} + {}?")).format(a, b)
    schema = _tool("add", "Add two numbers.", {"a": "integer", "b": "integer"})
    return schema, ask, {"a": a, "b": b}, str(a + b), f"{a} + {b} = {a + b}."


def _tool(name: str, about: str, types: dict[str, str]) -> tools.Schema:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def tool_use(rng: Random) -> Parts:
    """A call, its result and the answer; one chat in eight has tools and needs none."""
    makers = [_weather, _add] if rng.random() < 0.5 else [rng.choice((_weather, _weather, _add))]
    rng.shuffle(makers)
    uses = [make(rng) for make in makers]
    declared = [use[0] for use in uses]
    if rng.random() < 0.12:
        return last_reply(rng, _turns([rng.choice(_FACTS)(rng)]), declared, 1)
    schema, ask, arguments, result, answer = rng.choice(uses)
    call = {"type": "function", "function": {"name": schema["function"]["name"], "arguments": arguments}}
    messages: list[chats.Message] = [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]
    if rng.random() < 0.6:
        return whole_timeline(messages, declared)
    return last_reply(rng, messages, declared, rng.choice((1, 3)))


def statement(rng: Random) -> Parts:
    """A fact as plain text."""
    return plain(rng.choice(_FACTS)(rng)[1])


KINDS = {"chat-fact": (chat, 58), "chat-memory": (name, 8), "tools": (tool_use, 28), "statement": (statement, 6)}
