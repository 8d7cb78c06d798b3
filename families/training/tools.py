"""Conversations with tools: declarations, the calls they lead to, results in several shapes, and the final answer."""

import json
from random import Random

import chats
import facts
import words
from stories import expand, odd_name, polish

Schema = dict[str, object]


class Use:
    """One use of a tool: its declaration, the question, the call's arguments, the result and the answer."""

    def __init__(
        self, name: str, about: str, arguments: dict[str, object], ask: str, result: object, answer: str
    ) -> None:
        self.name = name
        self.about = about
        self.arguments = arguments
        self.ask = ask
        self.result = result
        self.answer = answer

    def schema(self, rng: Random) -> Schema:
        """Declare the tool as an OpenAI style schema."""
        properties: dict[str, object] = {}
        for key, value in self.arguments.items():
            kind = "string" if isinstance(value, str) else rng.choice(("number", "integer"))
            properties[key] = {"type": kind}
            if rng.random() < 0.6:
                properties[key] = {
                    "type": kind,
                    "description": expand(
                        rng,
                        f"[The {key}[.|]|Name of the {key}|The {key}, e.g. {value}|A {key} name|The {key} and state, e.g. San Francisco, CA]",
                    ),
                }
        parameters: dict[str, object] = {"type": "object", "properties": properties}
        if rng.random() < 0.8:
            parameters["required"] = list(self.arguments)
        if "city" in self.arguments and rng.random() < 0.15:
            properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": parameters},
        }


def _city(rng: Random) -> str:
    return rng.choice(words.CITIES) if rng.random() < 0.65 else odd_name(rng)


def weather(rng: Random) -> Use:
    """The weather of a city; results with a temperature, a condition, both, or a plain sentence."""
    city, degrees = _city(rng), rng.randrange(-15, 42)
    sky = rng.choice("sunny cloudy rainy windy snowy foggy stormy clear warm cold".split())
    name = rng.choice(("get_weather", "get_weather", "weather", "get_current_weather", "weather_now", "fetch_weather"))
    about = expand(
        rng,
        "[Get|Returns|Look up|Gets] the [current |]weather [of|for|in] a [city|place|given city|given location][.|]",
    )
    key = rng.choice(("city", "city", "location", "place"))
    ask = f"[What is|What's|How is|Tell me|Check|Get] the weather [like |]in {city}[ today| now| right now|]?|Is it [raining|sunny|cold|warm] in {city}?|How [warm|cold|hot] is it in {city}?|weather in {city}|What is the temperature in {city}?"
    temp = rng.choice(("temperature", "temperature", "temp", "temperature_c", "degrees"))
    cond = rng.choice(("condition", "conditions", "weather", "sky", "description"))
    both = f"It is {sky} in {city}, and the temperature is {degrees} degrees."
    result, answer = rng.choice(
        (
            ({temp: degrees, cond: sky}, both),
            ({cond: sky, temp: degrees}, both),
            ({"city": city, temp: degrees, cond: sky}, both),
            (f"{degrees} degrees and {sky}", both),
            (expand(rng, f"[{sky.capitalize()}|{sky}], {degrees}[ C| degrees|°C|]"), both),
            ({temp: degrees}, f"The temperature in {city} is {degrees} degrees."),
            (
                f"{degrees}[ C| degrees|]".replace("[ C| degrees|]", rng.choice((" C", " degrees", ""))),
                f"The temperature in {city} is {degrees} degrees.",
            ),
            ({cond: sky}, f"It is {sky} in {city}."),
            (sky, f"It is {sky} in {city}."),
        )
    )
    return Use(name, about, {key: city}, f"[{ask}]", result, answer)


def clock(rng: Random) -> Use:
    """The local time of a city."""
    city, time = _city(rng), f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    name = rng.choice(("get_time", "get_time", "current_time", "time_in", "get_local_time"))
    about = expand(rng, "[Get|Returns|Tells] the [current|local] time [in|of] a city[.|]")
    ask = f"[What time is it|What's the time|What is the time|Tell me the time] in {city}[ now|]?|How late is it in {city}?|time in {city}"
    result = rng.choice(({"time": time}, time, {"local_time": time, "city": city}))
    return Use(
        name,
        about,
        {rng.choice(("city", "city", "timezone", "place")): city},
        f"[{ask}]",
        result,
        f"It is {time} in {city}.",
    )


def calculate(rng: Random) -> Use:
    """Arithmetic on numbers too big to do alone: separate operands or one expression."""
    top = rng.choice((20, 100, 1000, 1000))
    a, b = rng.randrange(1, top), rng.randrange(1, top)
    name, word, sign, value = rng.choice(
        (
            ("add", "plus", "+", a + b),
            ("add", "plus", "+", a + b),
            ("multiply", "times", "*", a * b),
            ("subtract", "minus", "-", a - b),
        )
    )
    ask = f"[What is|Calculate|Compute|How much is] {rng.choice((f'{a} {word} {b}', f'{a} {sign} {b}', f'{a}{sign}{b}'))}?"
    result = rng.choice(({"result": value}, str(value), {"value": value}, {"answer": value}))
    answer = f"{a} {'x' if sign == '*' else sign} {b} = {value}."
    if rng.random() < 0.5:
        keys = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second")))
        about = expand(rng, f"[{name.capitalize()}|{name.capitalize()}s] two numbers[.|]")
        return Use(
            rng.choice((name, f"{name}_numbers")), about, dict(zip(keys, (a, b), strict=True)), ask, result, answer
        )
    tool = rng.choice(("calculator", "calculator", "calculate", "evaluate", "calc"))
    about = expand(rng, "[Evaluate|Evaluates|Calculates] [an arithmetic|a math|an] expression[.|]")
    return Use(tool, about, {rng.choice(("expression", "expression", "input")): f"{a} {sign} {b}"}, ask, result, answer)


def lookup(rng: Random) -> Use:
    """Search for a topic; the answer quotes what came back."""
    known, meaning = rng.choice(list(words.DEFINITIONS.items()))
    bare = known.removeprefix("a ").removeprefix("the ").removeprefix("an ")
    kind = expand(rng, "[the [river|village|singer|book|city|game|painter|mountain|company] |]")
    topic = rng.choice((bare, kind + odd_name(rng), kind + odd_name(rng), rng.choice(words.UNKNOWN)))
    if rng.random() < 0.8:
        meaning = expand(
            rng,
            f"a [small|big|famous|new|old|quiet|{odd_name(rng).lower()}] [village|river|book|song|game|idea|tool|city|machine|plant|animal] [from|in|near|of] {_city(rng)}",
        )
    if rng.random() < 0.3:
        meaning = " ".join(meaning.split()[: rng.randrange(2, 8)])
    name = rng.choice(("lookup", "lookup", "search", "web_search", "find", "search_wiki"))
    about = expand(rng, "[Look up|Search for|Find] [information about |]a [topic|word|query][.|]")
    ask = f"[Look up|Search for|Find|Please look up|Can you look up|Search the web for] {topic}[.|]|What does the search say about {topic}?"
    text = polish(f"{topic} is {meaning}.")
    result = rng.choice((text, {"result": text}, {"text": text}))
    return Use(
        name, about, {rng.choice(("query", "query", "topic", "q")): topic}, f"[{ask}]", result, f"I found this: {text}"
    )


def errand(rng: Random) -> Use:
    """Small actions: timers, messages, prices, dice, lists."""
    kind = rng.randrange(5)
    if kind == 0:
        n = rng.randrange(1, 60)
        return Use(
            rng.choice(("set_timer", "start_timer")),
            "Set a timer.",
            {"minutes": n},
            f"[Set|Start] a timer for {n} minutes[.|]",
            rng.choice(("ok", {"status": "ok"}, "done")),
            f"I set a timer for {n} minutes.",
        )
    if kind == 1:
        who = rng.choice((*words.GIRLS, *words.BOYS, odd_name(rng)))
        said = rng.choice(
            ("I will be late", "Hello", "See you soon", "Dinner is ready", "Call me", "Happy birthday", "Good luck")
        )
        return Use(
            rng.choice(("send_message", "send_text")),
            "Send a message to a person.",
            {"text": said, "to": who},
            f"[Send|Write] a message to {who}: {said}",
            rng.choice(("sent", {"status": "sent"})),
            f"I sent your message to {who}.",
        )
    if kind == 2:
        item = rng.choice((*words.GROUPS["fruit"].split(), "bread", "milk", "tea", "rice", "a ticket", "a book"))
        price = rng.randrange(1, 60)
        return Use(
            rng.choice(("get_price", "price_of")),
            "Get the price of an item.",
            {"item": item},
            f"[How much does {item} cost|What is the price of {item}]?",
            rng.choice(({"price": price}, str(price), {"item": item, "price": price})),
            f"The price of {item} is {price}.",
        )
    if kind == 3:
        n, rolled = rng.choice((6, 6, 10, 20)), 0
        rolled = rng.randrange(1, n + 1)
        return Use(
            "roll_dice",
            "Roll a die.",
            {"sides": n},
            f"Roll a die with {n} sides[.|]|[Roll|Throw] a {n} sided die[.|]".join("[]"),
            rng.choice((str(rolled), {"result": rolled})),
            f"The die shows {rolled}.",
        )
    day = rng.choice(words.DAYS)
    return Use(
        rng.choice(("get_day", "today")),
        "Get the day of the week.",
        {},
        "[What day is it[ today|]|Which day is today]?",
        rng.choice((day, {"day": day})),
        f"Today is {day}.",
    )


def generic(rng: Random) -> Use:
    """Any noun of any thing: the names exist only in the declaration."""
    nouns = "price score status population height age news address rating level speed weight owner color phone_number translation"
    noun = rng.choice((*nouns.split(), odd_name(rng).lower()))
    verb = rng.choice(("get", "get", "find", "check", "show", "fetch"))
    key = rng.choice(("name", "item", "id", "country", "topic", "symbol", "person", "word", "product", "team"))
    value = rng.choice(
        (odd_name(rng), odd_name(rng).upper()[:4], rng.choice(words.CITIES), rng.choice(list(words.CAPITALS)))
    )
    said = noun.replace("_", " ")
    ask = f"[{verb}|Tell me|Please {verb}] the {said} of {value}[.|]|What is the {said} of {value}?"
    shown = rng.choice(
        (rng.randrange(1, 2000), odd_name(rng), rng.choice(words.GROUPS["color"].split()), rng.randrange(1, 100))
    )
    result = rng.choice(({noun: shown}, str(shown), {"result": shown}, {key: value, noun: shown}))
    about = expand(rng, f"[{verb.capitalize()}|{verb.capitalize()}s] the {said} of a {key}[.|]")
    return Use(f"{verb}_{noun}", about, {key: value}, f"[{ask}]", result, f"The {said} of {value} is {shown}.")


def _chatter(rng: Random) -> facts.Pair:
    """Small talk that does not deny having tools."""
    while "tool" in (pair := chats.talk(rng))[1]:
        pass
    return pair


_PLAIN = (facts.capital, facts.opposite, facts.animal, facts.color, facts.language, facts.unknown, _chatter)
MAKERS = (weather, weather, weather, clock, clock, calculate, calculate, lookup, errand, generic, generic)


def _result(rng: Random, result: object) -> object:
    """Show a result as clients do: JSON text mostly, a mapping or plain text otherwise."""
    if isinstance(result, dict) and rng.random() < 0.7:
        return json.dumps(result) if rng.random() < 0.8 else json.dumps(result, separators=(",", ":"))
    return result


def _call(use: Use) -> dict[str, object]:
    return {"type": "function", "function": {"name": use.name, "arguments": use.arguments}}


def conversation(rng: Random) -> tuple[list[chats.Message], list[Schema]]:
    """Draw messages and the tools they declare; about one in six needs no tool."""
    makers = dict.fromkeys(rng.choices(MAKERS, k=rng.choice((1, 1, 2, 2, 3))))
    uses = [make(rng) for make in makers]
    if calculate in makers and rng.random() < 0.5:
        uses += [u for u in (calculate(rng), calculate(rng)) if len(u.arguments) == 2]
        uses = [u for u in uses if "expression" not in u.about] if len(uses) > len(makers) else uses
    uses = list({u.about.split()[0] + u.name.split("_")[0]: u for u in uses}.values())
    uses = list({u.name: u for u in uses}.values())
    use = rng.choice(uses)
    schemas = [u.schema(rng) for u in uses]
    messages = chats.opening(rng)
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        question, answer = rng.choice(_PLAIN)(rng)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if rng.random() < 0.16:
        question, answer = rng.choice(_PLAIN)(rng)
        return [
            *messages,
            {"role": "user", "content": chats.loosen(rng, question)},
            {"role": "assistant", "content": answer},
        ], schemas
    for repeat in range(rng.choice((1, 1, 1, 2))):
        now = use if repeat == 0 else rng.choice(uses)
        calls = [now]
        ask = chats.loosen(rng, polish(expand(rng, now.ask)))
        if now.name.endswith("weather") and rng.random() < 0.2:
            again = weather(rng)
            key = next(iter(now.arguments))
            again.name, again.arguments = now.name, {key: next(iter(again.arguments.values()))}
            ask = f"What is the weather in {now.arguments[key]} and {again.arguments[key]}?"
            calls.append(again)
        failed = rng.random() < 0.05
        answer = "I am sorry, that did not work." if failed else " ".join(c.answer for c in calls)
        messages += [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": "", "tool_calls": [_call(c) for c in calls]},
        ]
        for c in calls:
            content = (
                rng.choice(({"error": "not found"}, "error", '{"error": "failed"}'))
                if failed
                else _result(rng, c.result)
            )
            messages.append({"role": "tool", "name": c.name, "content": content})
        messages.append({"role": "assistant", "content": answer})
    return messages, schemas
