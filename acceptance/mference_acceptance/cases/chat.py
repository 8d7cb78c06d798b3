"""The dialect: prompts are what they must be, and text stays text whoever wrote it."""

from collections.abc import Callable, Iterator
from typing import Any

from attrs import evolve

from mference_acceptance.case import CaseFailed, Figures, require
from mference_acceptance.context import Context
from mference_acceptance.speech import USER, Speech, golden_renders, speech
from mference_core.chat import render, render_text
from mference_core.errors import RequestError

REASONS = ("eos", "end_of_turn", "tool_calls")
PLAIN = "plain"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


def chat_renders(context: Context) -> Figures:
    """Stop tokens exist, and each conversation of chat.json renders as written there, ids too where they are given.

    With the template of the tokenizer's checkpoint, where it has one, and with the family's own.
    """
    spoken = speech(context)
    require(bool(spoken.stops), "the dialect has no stop token")
    odd = [reason for reason in spoken.stops.values() if reason not in REASONS]
    require(not odd, f"a stop token has the reason {odd[:1]}, not one of {', '.join(REASONS)}")
    for mark in (*((spoken.chat.bos,) if spoken.chat.bos else ()), *(spoken.chat.reasoning or ())):
        spoken.tokenizer.id_of(mark)
    with_ids = 0
    for number, entry in enumerate(golden_renders(context)):
        options = {"tools": entry.get("tools"), **entry.get("switches", {})}
        where = f"conversation {number} of chat.json"
        for tokenizer in (spoken.tokenizer, evolve(spoken.tokenizer, template=None)):
            text = render_text(tokenizer, spoken.chat, entry["messages"], **options)
            require(text == entry["text"], f"{where} {_difference(text, entry['text'])}")
        if "ids" in entry and spoken.own:
            ids = render(spoken.tokenizer, spoken.chat, entry["messages"], **options)
            require(ids == entry["ids"], f"{where} has other ids than chat.json says")
            with_ids += 1
    figures: Figures = {"tokenizer": spoken.source, "conversations": number + 1, "with_ids": with_ids}
    return figures | {"stops": len(spoken.stops)}


def _difference(got: str, want: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    return f"renders {got[at : at + 40]!r} at character {at}, expected {want[at : at + 40]!r}"


Place = tuple[str, Callable[[str], tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]]


def _places(*, tools: bool) -> Iterator[Place]:
    """Yield each place that text of others gets to, and the conversation with a text there."""
    answer = {"role": "assistant", "content": "Yes."}
    yield "user text", lambda text: ([{"role": "user", "content": text}], None)
    yield "guidance", lambda text: ([{"role": "system", "content": text}, USER], None)
    yield "an earlier answer", lambda text: ([USER, {"role": "assistant", "content": text}, USER], None)
    yield "an earlier question", lambda text: ([{"role": "user", "content": text}, answer, USER], None)
    if tools:
        yield "a tool result", lambda text: ([USER, _called("x"), {"role": "tool", "content": text}], [TOOL])
        yield "tool arguments", lambda text: ([USER, _called(text), {"role": "tool", "content": "x"}], [TOOL])
        yield "a tool description", lambda text: ([USER], [_described(text)])


def _called(text: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": text}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _described(text: str) -> dict[str, Any]:
    return {"type": "function", "function": {**TOOL["function"], "description": text}}


def control_text(context: Context) -> Figures:
    """Spelt control tokens in text of any origin stay text: never their ids, and not left out either."""
    spoken, tried, refused = speech(context), 0, 0
    tools = spoken.calls_tools([TOOL])
    for where, conversation in _places(tools=tools):
        wanted = _control(spoken, *conversation(f"a{PLAIN}b"))
        for spelling in spoken.tokenizer.control:
            text, what = f"a{spelling}b", f"{spelling} spelt in {where}"
            try:
                got = _control(spoken, *conversation(text))
            except RequestError:
                refused += 1
                continue
            require(got == wanted, f"{what} changes the prompt's control tokens: {_extra(spoken, got, wanted)}")
            tried += 1
            if where == "user text":
                kept = text in render_text(spoken.tokenizer, spoken.chat, conversation(text)[0])
                require(kept, f"{what} does not reach the model")
    figures: Figures = {"tokenizer": spoken.source, "spellings": len(spoken.tokenizer.control), "tried": tried}
    return figures | {"refused": refused, "tools": "called" if tools else "refused by the dialect"}


def _control(spoken: Speech, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
    ids = render(spoken.tokenizer, spoken.chat, messages, tools=tools)
    return [number for number in ids if number in spoken.tokenizer.control_ids]


def _extra(spoken: Speech, got: list[int], wanted: list[int]) -> str:
    if got == wanted:
        return "none"
    names = {number: spelling for spelling, number in spoken.tokenizer.control.items()}
    at = next((n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    return f"{names[got[at]]} appears" if at < len(got) else f"{names[wanted[at]]} is gone"


EMPTY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("null", {"content": None}),
    ("missing", {}),
    ("an empty list", {"content": []}),
    ("a list of empty parts", {"content": [{"type": "text", "text": ""}]}),
)


def empty_content(context: Context) -> Figures:
    """Null, missing and empty content are the empty text, and render as a text of nothing does."""
    spoken = speech(context)
    shapes: list[tuple[str, list[dict[str, Any]], dict[str, Any], list[dict[str, Any]], Any]] = [
        ("an answer", [USER], {"role": "assistant"}, [USER], None)
    ]
    if spoken.calls_tools([TOOL]):
        call = {key: value for key, value in _called("x").items() if key != "content"}
        shapes += [
            ("an answer that calls", [USER], call, [], [TOOL]),
            ("a tool result", [USER, _called("x")], {"role": "tool"}, [], [TOOL]),
        ]
    for what, before, message, after, tools in shapes:

        def text(content: dict[str, Any]) -> str:
            messages = [*before, {**message, **content}, *after]  # noqa: B023  called in this turn of the loop
            return render_text(spoken.tokenizer, spoken.chat, messages, tools=tools)  # noqa: B023

        want = _rendered(text, {"content": ""}, f"empty content of {what}")
        for name, content in EMPTY:
            got = _rendered(text, content, f"{name} content of {what}")
            require(got == want, f"{name} content of {what} {_difference(got, want)}")
        for word in ("None", "null", "undefined"):
            require(word not in want, f"empty content of {what} is written as {word}")
    full, empty = (
        _rendered(
            lambda content: render_text(spoken.tokenizer, spoken.chat, [{"role": "user", **content}]), given, what
        )
        for given, what in (({"content": PLAIN}, "user text"), ({"content": ""}, "empty user text"))
    )
    require(full.replace(PLAIN, "") == empty, f"an empty question {_difference(empty, full.replace(PLAIN, ''))}")
    return {"tokenizer": spoken.source, "renders": len(shapes) * (len(EMPTY) + 1) + 2}


def _rendered(text: Callable[[dict[str, Any]], str], content: dict[str, Any], what: str) -> str:
    try:
        return text(content)
    except RequestError as error:
        raise CaseFailed(f"{what} is refused: {error}") from error
