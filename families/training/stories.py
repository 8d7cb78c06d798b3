"""Short stories from the grammar in plots.txt: pure Python, driven by one `random.Random`."""

import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from random import Random

import words

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{([\w.]+)\}")
_SENTENCE = re.compile(r"(^|[.!?] |\.\" |[!?]\" (?=(?:his|her) )|\n|(?:^|[\s(])\")([a-z])")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeioAEIO]|u(?!ni))")

_TRAITS = "little small young kind brave shy happy curious clever cheerful".split()
_CHILD_PLACES = "park,garden,forest,field,meadow,backyard,town square".split(",")
_WILD_PLACES = "forest,meadow,field,woods,valley,garden".split(",")
_LIVED = (
    "in a small house",
    "near the sea",
    "in a quiet village",
    "at the edge of the forest",
    "on a farm",
    "in a big city",
    "by the river",
    "on a green hill",
)
_WILD_LIVED = (
    "in the forest",
    "near a river",
    "in a green meadow",
    "under an old oak tree",
    "by the lake",
    "on a hill",
    "in the woods",
)
_OPENINGS = (
    ("Once upon a time, there was", 10),
    ("Once upon a time, there lived", 2),
    ("Once there was", 3),
    ("There once was", 2),
    ("There was", 2),
    ("Long ago, there lived", 2),
    ("A long time ago, there was", 2),
    ("In a land far away, there was", 1),
    ("In a small village, there lived", 1),
)
_ENDS = (
    "The end.",
    "And they lived happily ever after.",
    "It was a very good day.",
    "{h} and {f} stayed friends for a long, long time.",
    "From that day on, {h} and {f} were the best of friends.",
    "And everyone was happy.",
    "{h} smiled all the way home.",
    "That night, {h} slept well and dreamed sweet dreams.",
    "It was a day that {h} would never forget.",
)


@dataclass(frozen=True)
class Character:
    """One figure of a story: what to call it and how to refer back to it."""

    name: str
    kind: str
    female: bool
    desc: str
    intro: str

    def form(self, key: str) -> str:
        """Return the form `key` names: he, him, his, intro, desc or kind."""
        pronouns = {"he": "she", "him": "her", "his": "her"}
        if key in pronouns:
            return pronouns[key] if self.female else key
        return {"intro": self.intro, "desc": self.desc, "kind": self.kind}[key]


@dataclass(frozen=True)
class Story:
    """A finished story, and what it is about."""

    text: str
    title: str
    hero: Character
    friend: Character


def load_plots() -> list[tuple[dict[str, list[str]], list[str]]]:
    """Read plots.txt: for each plot its drawn slots and its lines."""
    plots = []
    for block in Path(__file__).with_name("plots.txt").read_text("utf-8").split("\n\n"):
        lines = [line for line in block.strip().split("\n") if not line.startswith("#")]
        slots = {}
        for line in lines:
            if line.startswith("@"):
                name, values = line[1:].split(" = ", 1)
                slots[name] = [value.strip() for value in values.split("|")]
        if slots:
            plots.append((slots, [line for line in lines if not line.startswith("@")]))
    return plots


PLOTS = load_plots()


def expand(rng: Random, template: str) -> str:
    """Replace every `[a|b]`, innermost first, with one of its alternatives."""
    while (match := _CHOICE.search(template)) is not None:
        picked = rng.choice(match.group(1).split("|"))
        template = template[: match.start()] + picked + template[match.end() :]
    return template


def polish(text: str) -> str:
    """Capitalise sentence starts and opening quotes; turn `a apple` into `an apple`."""
    text = _ARTICLE.sub(r"\1n ", text).replace('!".', '!"')
    return _SENTENCE.sub(lambda m: m.group(1) + m.group(2).upper(), text)


def odd_name(rng: Random) -> str:
    """Invent a word: what is asked for must be copied, not recalled."""
    parts = (
        rng.choice(words.ONSETS) + rng.choice(words.VOWELS) + rng.choice(words.CODAS)
        for _ in range(rng.randrange(1, 4))
    )
    return "".join(parts).capitalize()


def character(rng: Random, taken: set[str], *, child: bool, odd: float = 0.0) -> Character:
    """Draw a person or an animal whose name is not in `taken` (which is extended); `odd` is the chance of inventions."""
    female = rng.random() < 0.5
    pool = (words.GIRLS if female else words.BOYS) if child else words.PETS
    name = rng.choice([n for n in pool if n not in taken])
    kind = ("girl" if female else "boy") if child else rng.choice([a for a in words.ANIMALS if a not in taken])
    if child and rng.random() < 0.2:
        kind = rng.choice(words.HEROINES if female else words.HEROES)
    if rng.random() < odd:
        name = odd_name(rng)
    if not child and rng.random() < odd:
        kind = odd_name(rng).lower()
    taken |= {name} if child else {name, kind}
    desc = f"a {rng.choice(_TRAITS)} {kind}"
    return Character(name, kind, female, desc, f"{desc} {rng.choice(('named', 'named', 'called'))} {name}")


def _elder(rng: Random, hero: Character, *, child: bool) -> dict[str, str]:
    who = rng.choice(("mom", "dad", "grandma", "grandpa") if child else ("mother", "father", "grandmother"))
    he = "she" if who in ("mom", "grandma", "mother", "grandmother") else "he"
    return {"the": f"{hero.form('his')} {who}", "The": f"{hero.form('his')} {who}", "he": he}


def _opening(rng: Random, line: str, hero: Character, *, child: bool) -> str:
    """Vary the first sentence, which the grammar writes as `{open} {h.intro}.`."""
    start = rng.choices([o for o, _ in _OPENINGS], [w for _, w in _OPENINGS])[0]
    lived = rng.choice(_LIVED if child else _WILD_LIVED)
    if start.endswith("lived"):
        return line.replace("{opens}", "Once upon a time, there were").replace("{open}", start)
    if line.startswith("{open} {h.intro}.") and rng.random() < 0.6:
        day = rng.choice(
            (
                "rainy day",
                "sunny day",
                "cold day",
                "warm day",
                "cold night",
                "dark night",
                "sunny morning",
                "quiet evening",
            )
        )
        far = rng.choice(
            (
                "in a forest",
                "far away",
                "in a small town",
                "on an island",
                "in a green valley",
                "in a village",
                "by the sea",
            )
        )
        named = rng.choice(("was named", "was called"))
        sentence = rng.choice(
            (
                f"{hero.name} was {hero.desc}.",
                f"{hero.name} was {hero.desc}.",
                f"{hero.name} was {hero.desc} who lived {lived}.",
                f"{hero.name} the {hero.kind} lived {lived}.",
                f"{hero.intro} lived {lived}.",
                f"{start} {hero.intro}. {hero.form('he')} lived {lived}.",
                f"{start} {hero.intro} who lived {lived}.",
                f"{start} {hero.desc} who lived {lived}. The {hero.kind} {named} {hero.name}.",
                f"{start} {hero.desc} who loved to play. {hero.form('his')} name was {hero.name}.",
                f"{start.split(',')[0].removesuffix(' there was')}, {far}, there [was|lived] {hero.intro}."
                if "," in start
                else f"{far}, there [was|lived] {hero.intro}.",
                f"{far}, there [was|lived] {hero.intro}.",
                f"It was a {day}. {hero.intro} [was at home|looked up at the sky|was awake].",
                f"This is the story of {hero.intro}.",
                f"The {hero.desc.removeprefix('a ')} {named} {hero.name}. {hero.form('he')} lived {lived}.",
                f"I know a story about {hero.intro}.",
            )
        )
        return sentence + line[len("{open} {h.intro}.") :]
    return line.replace("{opens}", "Once upon a time, there were").replace("{open}", start)


def _introduce(rng: Random, line: str, other: str) -> str:
    """Say that the friend is one, where the narrator first names it, and `other` after it; speech stays as it is."""
    before, found, after = line.partition("{f}")
    if (
        not found
        or "{f." in before
        or "{opens}" in line
        or "neighbors" in line
        or before.endswith("friend ")
        or before.count('"') % 2
        or rng.random() < 0.2
    ):
        return line
    return f"{before}{{h.his}} friend {{f}}{other}{after}"


def story(rng: Random, odd: float = 0.0) -> Story:
    """Write one story, paragraphs separated by an empty line; `odd` is the chance of an invented hero."""
    child = rng.random() < 0.5
    taken: set[str] = set()
    hero = character(rng, taken, child=child, odd=odd)
    usual = zlib.crc32((hero.name if child else hero.kind).encode())  # different heroes tend to different plots
    slots, lines = PLOTS[usual % len(PLOTS)] if rng.random() < 0.35 else rng.choice(PLOTS)
    friend = character(rng, taken, child=child if rng.random() < 0.85 else not child)
    third = character(rng, taken, child=child)
    elder = _elder(rng, hero, child=child)
    values = {
        "place": rng.choice(_CHILD_PLACES if child else _WILD_PLACES),
        "robot": rng.choice(words.ROBOTS),
        "end": rng.choice(_ENDS) if rng.random() < 0.7 else "",
    }
    for name, choices in slots.items():
        values[name] = rng.choice(
            [a for a in words.ANIMALS if a not in taken] if name in ("noisy", "proud", "baby") else choices
        )

    def fill(match: re.Match[str]) -> str:
        head, _, form = match.group(1).partition(".")
        if head in ("h", "f", "g"):
            who = {"h": hero, "f": friend, "g": third}[head]
            return who.form(form) if form else who.name
        return elder[form] if head == "e" else values[head]

    paragraphs: list[list[str]] = [[]]
    met = False
    for index, line in enumerate(lines):
        if line == "--":
            paragraphs.append([])
            continue
        optional = line.startswith("? ")
        if optional and rng.random() < 0.5:
            continue
        body = line[2:] if optional else line
        body = expand(rng, _opening(rng, body, hero, child=child) if index == 0 else body)
        if not met and "{f" in body:
            met, body = (
                True,
                _introduce(
                    rng,
                    body,
                    f" the {friend.kind}"
                    if friend.kind not in ("girl", "boy", hero.kind) and rng.random() < 0.7
                    else "",
                ),
            )
        while _SLOT.search(body):
            body = _SLOT.sub(fill, body)
        if body:
            paragraphs[-1].append(body)
    text = polish("\n\n".join(" ".join(p) for p in paragraphs))
    title = _SLOT.sub(fill, values["title"])
    return Story(text, title, hero, friend)


def request(rng: Random, tale: Story) -> str:
    """Ask for `tale`, naming something that is in it."""
    hero, friend = tale.hero, tale.friend
    about = rng.choice(
        (
            f"a {hero.kind}",
            f"a {hero.kind}",
            f"a {hero.kind} named {hero.name}",
            hero.name,
            f"a {hero.kind} and a {friend.kind}" if hero.kind != friend.kind else f"{hero.name} and {friend.name}",
            f"{hero.desc}",
            f"{hero.name} and {friend.name}",
            tale.title,
            "friends",
            "",
        )
    )
    form = rng.choice(
        (
            "Tell me a [short |little |nice |]story{}.",
            "Please tell me a [short |]story{}.",
            "[Can|Could] you tell me a [bedtime |short |]story{}?",
            "Write a [short |little |]story{}.",
            "I want [to hear |]a story{}.",
            "Tell a story{}.",
            "Make up a story{}.",
            "Story{}, please.",
        )
    )
    return polish(expand(rng, form).format(f" about {about}" if about else ""))
