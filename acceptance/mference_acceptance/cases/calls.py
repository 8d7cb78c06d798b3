"""Tool calls: read back as they were written however they are split, or shown as text with the reason."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from mference_acceptance.case import Figures, require
from mference_acceptance.context import Context
from mference_acceptance.speech import Answer, Speech, speech
from mference_core.chat import dump_json, load_json
from mference_core.errors import RequestError

NO_TOOLS = "refused by the dialect"
SEED, RANDOM_CALLS, FUZZED, RANDOM_ANSWERS, ANSWER_TOKENS = 1, 12, 300, 200, 40
CONTROL_SHARE = 0.3
WORDS = (
    "",
    "x",
    " two  spaces ",
    "line\nline\n",
    'say "hi"',
    "back\\slash \\n",
    "{[(,:;)]}",
    "a: b, c",
    "</parameter>",
    "null",
    "12",
    "true",
    "é ∑ 日本 🙂",
    "<b>&amp;</b>",
    "'single'",
)
KINDS: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "sure": {"type": "boolean"},
    "maybe": {"type": ["integer", "null"]},
    "list": {"type": "array", "items": {"type": "string"}},
    "numbers": {"type": "array", "items": {"type": "number"}},
    "inner": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {}}}},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": KINDS},
        },
    }
    for name in ("do_it", "look")
]


def call_round_trips(context: Context) -> Figures:
    """Past calls, decoded from their own tokens split at any place, are the same calls, and text beside them the same."""
    spoken = speech(context)
    if not spoken.calls_tools(TOOLS):
        return {"tokenizer": spoken.source, "tools": NO_TOOLS}
    tried = splits = refused = 0
    for content, calls in _messages(spoken):
        try:
            answer = spoken.answer(_message(content, calls), TOOLS)
        except RequestError:
            refused += 1
            continue
        for ids in (answer.ids, *_splits(spoken, answer.ids)):
            _same(spoken, answer, ids, content, calls)
            splits += 1
        tried += 1
    require(tried > refused, f"the dialect refuses {refused} of {tried + refused} calls")
    return {"tokenizer": spoken.source, "calls": tried, "splits": splits, "refused": refused}


def _messages(spoken: Speech) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Yield texts and calls: one of each kind, then random ones, the last two at once."""
    yield "", [("do_it", {})]
    yield "Let me look.", [("look", {"text": "x"})]
    for word in (*WORDS, *(f"a{spelling}b" for spelling in spoken.tokenizer.control)):
        yield "", [("do_it", {"text": word})]
    random = Random(SEED)  # noqa: S311  not a secret
    for number in range(RANDOM_CALLS):
        calls = [(random.choice(("do_it", "look")), _arguments(random)) for _ in range(1 + number % 2)]
        yield random.choice(("", "Well. ")), calls


def _arguments(random: Random) -> dict[str, Any]:
    values: dict[str, Any] = {
        "text": random.choice(WORDS),
        "count": random.choice((0, -1, 7, 2**53 + 1)),
        "share": random.choice((0.5, -2.75, 1e30, 3)),
        "sure": random.random() < 0.5,
        "maybe": random.choice((None, 4)),
        "list": [random.choice(WORDS) for _ in range(random.randrange(3))],
        "numbers": [random.choice((0, 1.5, -3)) for _ in range(random.randrange(3))],
        "inner": {"a": random.choice(WORDS), "b": [None, True, 2, {"c": random.choice(WORDS)}]},
    }
    return {key: values[key] for key in sorted(values, key=lambda _: random.random())[: random.randrange(1, 6)]}


def _message(content: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    made = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def _splits(spoken: Speech, ids: Sequence[int]) -> Iterator[list[int]]:
    """Yield the same answer in other tokens: its text cut once at each place, and into single characters."""
    runs, tokenizer = _runs(spoken, ids), spoken.tokenizer
    seen = {tuple(ids)}
    for number, run in enumerate(runs):
        text = "" if run[0] in tokenizer.control_ids else _text(spoken, run)
        cuts = [[text[:at], text[at:]] for at in range(1, len(text))] + [list(text)]
        for parts in cuts if text else ():
            other = [token for part in parts for token in tokenizer.encode(part)]
            made = [token for piece in (*runs[:number], other, *runs[number + 1 :]) for token in piece]
            if tuple(made) not in seen and _bytes(spoken, other) == _bytes(spoken, run):
                seen.add(tuple(made))
                yield made


def _runs(spoken: Speech, ids: Sequence[int]) -> list[list[int]]:
    """Return ids in runs: each control token alone, the text between together."""
    runs: list[list[int]] = []
    for token in ids:
        if runs and not {token, runs[-1][0]} & spoken.tokenizer.control_ids:
            runs[-1].append(token)
        else:
            runs.append([token])
    return runs


def _bytes(spoken: Speech, ids: Sequence[int]) -> bytes:
    return b"".join(map(spoken.tokenizer.spelling, ids))


def _text(spoken: Speech, ids: Sequence[int]) -> str:
    return _bytes(spoken, ids).decode("utf-8", "replace")


def _same(
    spoken: Speech, answer: Answer, ids: Sequence[int], content: str, calls: Sequence[tuple[str, dict[str, Any]]]
) -> None:
    heard = spoken.decode(ids, TOOLS, prompt=answer.prompt, reason=answer.reason)
    shown = _text(spoken, ids)
    require(not heard.reasons, f"{shown!r} is a call that cannot be read: {(*heard.reasons, '')[0]}")
    wanted = [(name, load_json(dump_json(arguments))) for name, arguments in calls]
    require(heard.named == wanted, f"{shown!r} is read as {heard.named}, not as {wanted}")
    require(heard.text.strip() == content.strip(), f"{shown!r} shows {heard.text!r} beside its calls, not {content!r}")
    require(not heard.thoughts, f"{shown!r} is read as {heard.thoughts} in thought")
    identities = [call.id for call in heard.calls]
    require(len(set(identities)) == len(identities), f"two calls have the id {identities[0]}")


def malformed_calls(context: Context) -> Figures:
    """Broken calls, cut off, garbled or of a tool nobody offered, come back as text with the reason, never as half a call."""
    spoken = speech(context)
    if not spoken.calls_tools(TOOLS):
        return {"tokenizer": spoken.source, "tools": NO_TOOLS}
    arguments = {"text": 'say "hi"', "list": ["a", "b"], "inner": {"a": "é"}, "count": 7}
    answer = spoken.answer(_message("", [("do_it", arguments)]), TOOLS)
    whole = spoken.decode(answer.ids, TOOLS, prompt=answer.prompt, reason=answer.reason)
    require(len(whole.named) == 1, "a call is not read as one")
    for length in range(len(answer.ids)):
        _cut_off(spoken, answer, length, whole.named)
    unknown = spoken.decode(answer.ids, TOOLS[1:], prompt=answer.prompt, reason=answer.reason)
    require(not unknown.calls and bool(unknown.reasons), "a call of a tool that was not offered is read as a call")
    require("do_it" in unknown.text, "a call of a tool that was not offered is not shown as text")
    readable = _garble(spoken, answer)
    return {"tokenizer": spoken.source, "cuts": len(answer.ids), "garbled": FUZZED, "still_calls": readable}


def _cut_off(spoken: Speech, answer: Answer, length: int, whole: list[tuple[str, Any]]) -> None:
    ids = answer.ids[:length]
    shown = f"a call cut off after {length} of {len(answer.ids)} tokens"
    heard = spoken.decode(ids, TOOLS, prompt=answer.prompt, reason="max_tokens")
    if heard.calls:
        require(heard.named == whole, f"{shown} is read as {heard.named}, which is half a call")
        return
    written = "".join(_text(spoken, ids).split())
    said = "".join(heard.text.split())
    require(said == written, f"{shown} is shown as {heard.text!r}, not as what was written")
    last = length == len(answer.ids) - 1
    require(bool(heard.reasons) or not last, f"{shown} is shown without a reason")


def _garble(spoken: Speech, answer: Answer) -> int:
    """Spoil the tail of a call in many ways; return how often a call was read all the same."""
    random = Random(SEED)  # noqa: S311  not a secret
    readable = 0
    for _ in range(FUZZED):
        ids = list(answer.ids)
        at = random.randrange(1, len(ids))
        kind = random.randrange(4)
        if kind == 0:
            ids[at:] = [_any_token(spoken, random) for _ in range(random.randrange(1, 12))]
        elif kind == 1:
            del ids[at : at + random.randrange(1, 4)]
        elif kind == 2:
            ids.insert(at, _any_token(spoken, random))
        else:
            ids[at:at] = ids[at : at + random.randrange(1, 9)]
        heard = spoken.decode(ids, TOOLS, prompt=answer.prompt, reason=random.choice(("max_tokens", *_reasons(spoken))))
        odd = [name for name, _ in heard.named if name not in ("do_it", "look")]
        require(not odd, f"{_text(spoken, ids)!r} is read as a call of {odd[:1]}, which was not offered")
        require(bool(heard.calls or heard.text or heard.thoughts), f"{_text(spoken, ids)!r} vanishes")
        readable += bool(heard.calls)
    return readable


def _reasons(spoken: Speech) -> list[str]:
    return sorted(set(spoken.stops.values()))


def _any_token(spoken: Speech, random: Random) -> int:
    """Return an id that a model may write and that ends nothing, control tokens among them, and ids without a token."""
    control = [number for number in sorted(spoken.tokenizer.control_ids) if number not in spoken.stops]
    if control and random.random() < CONTROL_SHARE:
        return random.choice(control)
    while True:
        token = random.randrange(spoken.tokenizer.size + 8)
        if token not in spoken.stops:
            return token


def random_answers(context: Context) -> Figures:
    """Whatever ids a model writes, with tools and without, the decoder gives events and raises nothing."""
    spoken, calls, reasons = speech(context), 0, 0
    offered = (None, TOOLS) if spoken.calls_tools(TOOLS) else (None,)
    random = Random(SEED)  # noqa: S311  not a secret
    for number in range(RANDOM_ANSWERS):
        ids = [_any_token(spoken, random) for _ in range(random.randrange(ANSWER_TOKENS))]
        prompt = [_any_token(spoken, random) for _ in range(random.randrange(6))]
        reason = random.choice(("max_tokens", "stop_string", *_reasons(spoken)))
        heard = spoken.decode(ids, offered[number % len(offered)], prompt=prompt, reason=reason)
        calls, reasons = calls + len(heard.calls), reasons + len(heard.reasons)
    return {"tokenizer": spoken.source, "answers": RANDOM_ANSWERS, "calls": calls, "malformed": reasons}
