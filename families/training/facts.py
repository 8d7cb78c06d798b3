"""Questions with one right answer: every function draws one (question, answer) pair from a `random.Random`."""

from collections.abc import Callable
from random import Random

import words
from stories import expand, odd_name, polish

Pair = tuple[str, str]
TOO_BIG = "These numbers are too big for me without a tool."
UNKNOWN = "I am a tiny demo model; I do not know that."


def _ask(rng: Random, forms: str, answer: str) -> Pair:
    return polish(expand(rng, forms)), polish(answer)


def capital(rng: Random) -> Pair:
    """The capital of a country, either way round, or a claim to check."""
    country, city = rng.choice(list(words.CAPITALS.items()))
    kind = rng.random()
    if kind < 0.7:
        forms = (
            f"[What is|What's|Tell me|Do you know|Name] the capital of {country}?|[Which|What] city is the capital of "
            f"{country}?|Capital of {country}?|{country}: what is the capital?|the capital of {country}"
        )
        return _ask(rng, f"[{forms}]", f"The capital of {country} is {city}.")
    if kind < 0.85:
        return _ask(
            rng, f"[{city} is the capital of which country?|Where is {city}?]", f"{city} is the capital of {country}."
        )
    other = rng.choice(list(words.CAPITALS.values()))
    claim = city if rng.random() < 0.5 else other
    right = "Yes" if claim == city else "No"
    return _ask(rng, f"Is {claim} the capital of {country}?", f"{right}, the capital of {country} is {city}.")


def place(rng: Random) -> Pair:
    """Continents and languages."""
    if rng.random() < 0.3:
        continent, names = rng.choice(list(words.CONTINENTS.items()))
        country = rng.choice(names.split())
        forms = f"[Tell me about|What do you know about|What is] {country}[.|]"
        return _ask(rng, forms, f"{country} is a country in {continent}. Its capital is {words.CAPITALS[country]}.")
    if rng.random() < 0.5:
        continent, names = rng.choice(list(words.CONTINENTS.items()))
        country = rng.choice(names.split())
        return _ask(
            rng, f"[Where is {country}?|[On which|In which] continent is {country}?]", f"{country} is in {continent}."
        )
    country, language = rng.choice(list(words.LANGUAGES.items()))
    forms = f"[What|Which] language [do people speak|is spoken] in {country}?"
    return _ask(rng, forms, f"People in {country} speak {language}.")


def color(rng: Random) -> Pair:
    """Colours of things and what paint gives when mixed."""
    if rng.random() < 0.2:
        (one, two), mixed = rng.choice(list(words.MIXES.items()))
        one, two = (one, two) if rng.random() < 0.5 else (two, one)
        forms = (
            f"What [color |]do you get [if you mix|when you mix|from] {one} and {two}?|{one} [and|plus] {two} makes?"
        )
        return _ask(rng, f"[{forms}]", f"{one} and {two} make {mixed}.")
    thing, name = rng.choice(list(words.COLORS.items()))
    forms = f"[What|Which] color is {thing}?|What is the color of {thing}?|[Tell me|Do you know] the color of {thing}?"
    return _ask(rng, f"[{forms}]", f"{thing} is {name}.")


def animal(rng: Random) -> Pair:
    """Sounds, young, homes, food and legs of animals."""
    kind = rng.randrange(5)
    table = (words.SOUNDS, words.BABIES, words.HOMES, words.FOODS, words.LEGS)[kind]
    name, value = rng.choice(list(table.items()))  # type: ignore[attr-defined]
    legs = f"{words.NUMBERS[value]} legs" if kind == 4 and value else "no legs"
    forms, answer = (
        (
            f"What [sound|noise] does a {name} make?|What does a {name} say?|How does a {name} sound?",
            f"A {name} says {value}.",
        ),
        (
            f"What is a baby {name} called?|What do you call a [baby|young] {name}?",
            f"A baby {name} is called a {value}.",
        ),
        (f"Where does a {name} live?|What is the home of a {name}?", f"A {name} lives in a {value}."),
        (
            f"What does a {name} eat?|What do {name}s [like to |]eat?|What is the food of a {name}?",
            f"A {name} eats {value}.",
        ),
        (f"How many legs does a {name} have?|How many legs has a {name}?", f"A {name} has {legs}."),
    )[kind]
    return _ask(rng, f"[{forms}]", answer.replace("in a water", "in water").replace("mouses", "mice"))


def calendar(rng: Random) -> Pair:
    """Order of days, months and seasons; lengths of units of time."""
    kind = rng.random()
    if kind < 0.6:
        series = rng.choice((words.DAYS, words.DAYS, words.MONTHS, words.SEASONS))
        unit = {7: "day", 12: "month", 4: "season"}[len(series)]
        i = rng.randrange(len(series))
        if rng.random() < 0.6:
            then = series[(i + 1) % len(series)]
            return _ask(
                rng,
                f"What [{unit} |]comes after {series[i]}?|[What|Which] {unit} is after {series[i]}?".join("[]"),
                f"{then} comes after {series[i]}.",
            )
        then = series[i - 1]
        return _ask(
            rng,
            f"What [{unit} |]comes before {series[i]}?|[What|Which] {unit} is before {series[i]}?".join("[]"),
            f"{then} comes before {series[i]}.",
        )
    if kind < 0.72:
        today = rng.randrange(7)
        after = rng.random() < 0.5
        other = words.DAYS[(today + (1 if after else -1)) % 7]
        when, verb = ("tomorrow", "is") if after else ("yesterday", "was")
        return _ask(
            rng,
            f"Today is {words.DAYS[today]}. What day {verb} {when}?|If today is {words.DAYS[today]}, what day {verb} {when}?".join(
                "[]"
            ),
            f"If today is {words.DAYS[today]}, {when} {verb} {other}.",
        )
    if kind < 0.85:
        i = rng.randrange(12)
        return _ask(
            rng,
            f"How many days [are in|does|are there in] {words.MONTHS[i]}[ have|]?",
            f"{words.MONTHS[i]} has {words.MONTH_DAYS[i]} days.",
        )
    if kind < 0.93:
        title, series = rng.choice(
            (
                ("days of the week", words.DAYS),
                ("months of the year", words.MONTHS),
                ("four seasons", words.SEASONS),
                ("planets", words.PLANETS),
            )
        )
        listed = ", ".join(series[:-1]) + " and " + series[-1]
        return _ask(rng, f"[Name|List|Tell me|What are] the {title}.", f"The {title} are {listed}.")
    unit, size = rng.choice(
        (
            ("week", "7 days"),
            ("year", "365 days"),
            ("day", "24 hours"),
            ("hour", "60 minutes"),
            ("minute", "60 seconds"),
            ("year", "12 months"),
        )
    )
    return _ask(
        rng,
        f"How many {size.split()[1]} are [in|there in] {'an' if unit == 'hour' else 'a'} {unit}?",
        f"There are {size} in {'an' if unit == 'hour' else 'a'} {unit}.",
    )


def opposite(rng: Random) -> Pair:
    """Opposites, in both directions where that is unambiguous."""
    one, two = rng.choice(words.OPPOSITES).split(":")
    if rng.random() < 0.3 and sum(pair.endswith(":" + two) for pair in words.OPPOSITES) == 1:
        one, two = two, one
    forms = f"What is the opposite of {one}?|[Tell me|Name|Give me] the opposite of {one}.|The opposite of {one}?"
    return _ask(rng, f"[{forms}]", f"The opposite of {one} is {two}.")


def arithmetic(rng: Random) -> Pair:
    """Sums and differences of two-digit numbers, products up to 12 by 12, comparisons."""
    kind = rng.random()
    top = rng.choice((10, 20, 100, 100))
    a, b = rng.randrange(top), rng.randrange(top)
    if kind < 0.04:
        a, b = rng.randrange(100, 10_000), rng.randrange(10, 10_000)
        return f"What is {a} {rng.choice('+-*x')} {b}?", TOO_BIG
    if kind < 0.08:
        a, b = rng.randrange(13), rng.randrange(1, 13)
        return f"What is {a * b} [/|divided by] {b}?".replace(
            "[/|divided by]", rng.choice(("/", "divided by"))
        ), f"{a * b} / {b} = {a}."
    if kind < 0.13:
        a, b = rng.randrange(11), rng.randrange(11)
        return f"What is {words.NUMBERS[a]} plus {words.NUMBERS[b]}?", f"{a} + {b} = {a + b}."
    if kind < 0.44:
        sign, word, value = "+", "plus", a + b
    elif kind < 0.7:
        a, b = max(a, b), min(a, b)
        sign, word, value = "-", "minus", a - b
    elif kind < 0.88:
        a, b = rng.randrange(13), rng.randrange(13)
        sign, word, value = rng.choice("*x"), "times", a * b
    else:
        if a == b:
            b = a + 1
        forms = f"[Which|What] [number |]is [bigger|larger|greater], {a} or {b}?|Is {a} bigger than {b}?"
        picked = expand(rng, f"[{forms}]")
        yes = ("Yes, " if a > b else "No, ") if picked.startswith("Is") else ""
        return picked, f"{yes}{max(a, b)} is bigger than {min(a, b)}."
    shown = rng.choice((f"{a} {sign} {b}", f"{a} {sign} {b}", f"{a}{sign}{b}", f"{a} {word} {b}"))
    forms = f"What is {shown}?|What's {shown}?|How much is {shown}?|{shown}|{shown} = ?|{shown}=|Calculate {shown}.|Can you compute {shown}?"
    plain = "x" if sign == "*" else sign
    return polish(expand(rng, f"[{forms}]")), f"{a} {plain} {b} = {value}."


def counting(rng: Random) -> Pair:
    """Count up, down or by a step; the next or previous number; number words."""
    kind = rng.random()
    if kind < 0.4:
        a, n = rng.choice((1, 1, 1, rng.randrange(40))), rng.randrange(3, 11)
        return _ask(
            rng,
            f"[Please count|Count|Can you count] [from {a} to|to] {a + n - 1}[.|]"
            if a == 1
            else f"[Count|Please count] from {a} to {a + n - 1}.",
            ", ".join(str(i) for i in range(a, a + n)) + ".",
        )
    if kind < 0.55:
        a = rng.randrange(3, 13)
        return _ask(rng, f"Count [down|backwards] from {a}[ to 1|].", ", ".join(str(i) for i in range(a, 0, -1)) + ".")
    if kind < 0.8:
        a = rng.randrange(1, 99)
        if rng.random() < 0.6:
            return _ask(rng, f"What [number |]comes after {a}?", f"{a + 1} comes after {a}.")
        return _ask(rng, f"What [number |]comes before {a}?", f"{a - 1} comes before {a}.")
    i = rng.randrange(21)
    return _ask(rng, f"[How do you write|Write] {i} [as a word|in words]?", f"{i} is written {words.NUMBERS[i]}.")


def language(rng: Random) -> Pair:
    """Spelling, letters of the alphabet, first letters and rhymes."""
    kind = rng.random()
    if kind < 0.4:
        word = rng.choice(words.SPELL)
        return _ask(
            rng,
            f"[How do you spell|Spell|Please spell|Can you spell] [the word |]{word}?",
            "-".join(word.upper()) + ".",
        )
    if kind < 0.65:
        i = rng.randrange(25)
        a, b = chr(65 + i), chr(66 + i)
        if rng.random() < 0.7:
            return _ask(rng, f"[What|Which] letter comes after {a}?", f"{b} comes after {a}.")
        return _ask(rng, f"[What|Which] letter comes before {b}?", f"{a} comes before {b}.")
    if kind < 0.85:
        word = rng.choice(words.SPELL)
        return _ask(
            rng,
            f"What is the first letter of {word}?|What letter does {word} start with?".join("[]"),
            f"{word} starts with {word[0].upper()}.",
        )
    one, two = rng.choice(words.RHYMES).split(":")
    return _ask(
        rng,
        f"What rhymes with {one}?|[Give|Tell] me a word that rhymes with {one}.".join("[]"),
        f"{two} rhymes with {one}.",
    )


def group(rng: Random) -> Pair:
    """Members of a group, and which group a thing belongs to."""
    name, members = rng.choice(list(words.GROUPS.items()))
    items = members.split()
    if rng.random() < 0.6:
        n = rng.randrange(2, 6)
        picked = rng.sample(items, n)
        plural = words.PLURALS.get(name, name + "s")
        listed = ", ".join(picked[:-1]) + " and " + picked[-1]
        return _ask(
            rng,
            f"[Name|Tell me|List|Give me|Can you name] [{words.NUMBERS[n]}|{n}] {plural}.",
            f"{words.NUMBERS[n]} {plural} are {listed}.",
        )
    item = rng.choice(items)
    if rng.random() < 0.5:
        return (
            _ask(rng, f"What [kind of thing |]is a {item}?", f"A {item} is a {name}.")
            if name != "color"
            else color(rng)
        )
    other = rng.choice([g for g in words.GROUPS if g != "color"])
    if (
        name == "color"
        or (item in words.GROUPS[other].split() and other != name)
        or {name, other} == {"animal", "bird"}
    ):
        return definition(rng)
    return _ask(rng, f"Is a {item} a {other}?", f"{'Yes' if other == name else 'No'}, a {item} is a {name}.")


def definition(rng: Random) -> Pair:
    """What a thing is, and how many sides a shape has."""
    if rng.random() < 0.15:
        shape, sides = rng.choice(list(words.SIDES.items()))
        return _ask(rng, f"How many [sides|corners] does a {shape} have?", f"A {shape} has {sides} sides.")
    thing, meaning = rng.choice(list(words.DEFINITIONS.items()))
    return _ask(
        rng,
        f"What is {thing}?|What's {thing}?|Tell me about {thing}.|Explain what {thing} is.|Can you tell me what {thing} is?".join(
            "[]"
        ),
        f"{thing} is {meaning}.",
    )


def echo(rng: Random) -> Pair:
    """Repeat a few given words: copying from the prompt."""
    pool = [*words.SPELL, *words.ANIMALS, *words.GIRLS, *words.BOYS, *words.CITIES]
    said = " ".join(rng.sample(pool, rng.randrange(1, 5)))
    return expand(rng, f"[Repeat after me:|Say|Please say|Repeat:] {said}"), said


_ANY = tuple(w for pool in (words.SPELL, words.ANIMALS, *map(str.split, words.GROUPS.values())) for w in pool)


def unknown(rng: Random) -> Pair:
    """A question far outside the data: the answer admits it."""
    odd = odd_name(rng).lower()
    topic = rng.choice((*words.UNKNOWN, odd, odd.capitalize(), f"the {odd}"))
    name = rng.choice((odd.capitalize(), odd.capitalize() + "ia"))
    one, two = rng.choice(_ANY), rng.choice(_ANY)
    forms = (
        f"[Explain|Tell me about|Describe|What do you know about] {topic}.|How does {topic} work?|What is {topic}?|"
        f"[Who invented|Who discovered|Who wrote|Why do people like] {topic}?|What is the capital of {name}?|"
        f"Write [a program|an essay|a report|code|an email] about {topic}.|How do I [learn|fix|use|install] {topic}?|"
        f"When [did|was] {topic}[ start| invented|]?|Who is [the president of {name}|{name}]?|Summarize {topic}.|"
        f"What are the [advantages|rules|parts] of {topic}?|What happened in [18|19|20]{rng.randrange(10, 100)}?|"
        f"Translate {topic} into [French|German|Spanish].|How [many people live in|old is|far is] {name}?|"
        f"Who won the {one} [game|race|match|prize] [yesterday|today|last year|in 20{rng.randrange(10, 30)}]?|"
        f"[How|Why|When|Where] [can|did|does|should|will] [the|a|my|people|we] {one} [{two}|need|work|help|find] [{topic}|the {two}|it]?|"
        f"What did {name} [do|say|eat|write] [yesterday|today|last week]?|How much does a {one} [cost|weigh]?|"
        f"What is the [best|worst|fastest|cheapest|oldest] {one} [for|of|in] [{topic}|{name}|the {two}]?|"
        f"Is {topic} [good|bad|real|hard|better than {two}]?|Write a Python [program|function|script] that [sorts a list|finds a {one}|prints {two}].|"
        f"[Fix|Improve|Check] [my|this] [code|text|essay|{one}].|What do you think about {topic}?|"
        f"[Give me|Tell me] [a recipe for|the history of|news about|facts about] {topic}."
    )
    return polish(expand(rng, f"[{forms}]")), UNKNOWN


TOPICS: tuple[tuple[Callable[[Random], Pair], int], ...] = (
    (capital, 14),
    (place, 4),
    (color, 8),
    (animal, 10),
    (calendar, 10),
    (opposite, 8),
    (arithmetic, 22),
    (counting, 6),
    (language, 6),
    (group, 6),
    (definition, 6),
    (echo, 4),
    (unknown, 13),
)


def fact(rng: Random) -> Pair:
    """Draw one pair, topics weighted by how much there is to learn."""
    topic = rng.choices([t for t, _ in TOPICS], [w for _, w in TOPICS])[0]
    return topic(rng)
