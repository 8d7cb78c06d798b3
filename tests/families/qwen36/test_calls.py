"""Qwen 3.6 answers: the call grammar, types by schema, thoughts, and calls that come back as rendered."""

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from mference_core.chat import Event, Malformed, Reasoning, Text, ToolCall, render
from mference_core.chat.values import dump_json, load_json
from mference_core.errors import RequestError
from mference_core.generate import GenerateOptions, Generation
from mference_core.testing.dialects import answer_events, function
from mference_core.tokens import Tokenizer
from mference_qwen36.calls import Unreadable, can_be_written, parse_call, value_of
from mference_qwen36.chat import MAX_CALL_BYTES, chat_format

MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CHAT = chat_format()
OFF, ON = "<think>\n\n</think>\n\n", "<think>\n"
GET: dict[str, Any] = {"get": None}


MERGES = [
    ("\u010a", "\u010a"),
    (">", "\u010a"),
    ("\u010a", "<"),
    ("\u010a<", "/"),
    ("u", "n"),
    ("=", "n"),
    ("\u0120", "a"),
]
"""Pieces of the larger vocabulary; the first letters stand for a line end and a space."""


@cache
def byte_level() -> Tokenizer:
    """One token per byte beside the marks."""
    return made_of([])


@cache
def word_level() -> Tokenizer:
    """The same with pieces of several bytes."""
    return made_of(MERGES)


def made_of(merges: list[tuple[str, str]]) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*letters, *map("".join, merges)])}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    raw.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return Tokenizer.wrap(raw)


def typed(properties: dict[str, Any], name: str = "get") -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "Gets it.", "parameters": parameters}}


def xml(name: str = "get", **values: str) -> str:
    """Return the text of a call."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={name}>\n{parameters}</function>"


def arguments_of(text: str, tools: dict[str, Any] | None = None) -> Any:
    name, arguments = parse_call(text, tools or GET)
    assert name == "get"
    assert arguments == dump_json(load_json(arguments))
    return json.loads(arguments)


def test_published_rows_of_the_call_grammar() -> None:
    """Runtime behaviour 18, where no schema says what a value is."""
    assert arguments_of(xml(n="3", s='"3"')) == {"n": 3, "s": '"3"'}
    assert arguments_of(xml(a="true", b="nullx", c="[1,2]", d=" hi ")) == {
        "a": True,
        "b": "nullx",
        "c": [1, 2],
        "d": " hi ",
    }


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (xml(), {}),
        (f" \n{xml(a='1')}\n ", {"a": 1}),
        (xml(a="1").replace("</parameter>\n", "</parameter>\n\n  "), {"a": 1}),
        ("<function=get>\n<parameter=a>\n</parameter>\n</function>", {"a": ""}),
        (xml(a=""), {"a": ""}),
        (xml(a="\n\n x \n"), {"a": "\n\n x \n"}),
        (xml(a="</parameter> <b> </function>"), {"a": "</parameter> <b> </function>"}),
        (xml(a="x\n</parameter>y"), {"a": "x\n</parameter>y"}),
        (xml(**{"a b.c-d$": "null"}), {"a b.c-d$": None}),
        (xml(a="1") + "", {"a": 1}),
        (xml(a="1").replace("</function>", "<parameter=a>\n2\n</parameter>\n</function>"), {"a": 2}),
        (xml(a='{"b": [1.50, "x"]}'), {"a": {"b": [1.5, "x"]}}),
        (xml(a="18446744073709551615"), {"a": 18446744073709551615}),
        (xml(a="[1,"), {"a": "[1,"}),
        (xml(a="[" * 100), {"a": "[" * 100}),
        (xml(a="NaN", b="1_000", c="0x10"), {"a": "NaN", "b": "1_000", "c": "0x10"}),
    ],
)
def test_calls_that_read(text: str, arguments: dict[str, Any]) -> None:
    assert arguments_of(text) == arguments


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a call begins with '<function=NAME>' and a newline"),
        ("<function=get>", "a call begins with"),
        ("<function=get></function>", "a call begins with"),
        ("<function=g et>\n</function>", "a call begins with"),
        (f"<function={'x' * 65}>\n</function>", "a call begins with"),
        ('{"name":"get","arguments":{}}', "a call begins with"),
        ("<function=put>\n</function>", "unknown tool 'put'"),
        ("<function=get>\n<", "a call ends with its parameters and '</function>' (character 15)"),
        ("<function=get>\n<parameter=a>1</parameter>\n</function>", "a call ends with"),
        ("<function=get>\n<parameter=a>\n1\n</function>", "parameter 'a' is not closed"),
        ("<function=get>\n<parameter=a>\n1\n</parameter></function>", "parameter 'a' is not closed"),
        ("<function=get>\n<parameter=>\n1\n</parameter>\n</function>", "a call ends with"),
        ("<function=get>\n<parameter=a<b>\n1\n</parameter>\n</function>", "a call ends with"),
        (xml(a="1") + "x", "a call ends with"),
        (xml(a="1") + "\n" + xml(a="1"), "a call ends with"),
        (xml(a="[" * 66 + "]" * 66), "a value is nested more than 64 levels deep"),
        (xml(a="[" * 20000 + "]" * 20000), "a value is nested more than 64 levels deep"),
        (xml(a='{"a":' * 65 + "1" + "}" * 65), "a value is nested more than 64 levels deep"),
    ],
)
def test_calls_that_do_not_read_say_why(text: str, reason: str) -> None:
    with pytest.raises(Unreadable) as caught:
        parse_call(text, GET)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "02134", "02134"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, "1e5", "1e5"),
        ({"type": "string"}, '{"a":1}', '{"a":1}'),
        ({"type": "string"}, "  x ", "  x "),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, '"7"', 7),
        ({"type": "integer"}, " 7 ", 7),
        ({"type": "integer"}, "2026-01-15", "2026-01-15"),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "1e5", 100000.0),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": ["integer", "string"]}, "7", "7"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": "integer", "nullable": True}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"type": "array", "items": {"type": "string"}}, '[1, "2", true]', ["1", "2", "true"]),
        ({"type": "array", "items": {"type": "integer"}}, "['a']", "['a']"),
        ({"type": "object"}, "{'a': 'b'}", "{'a': 'b'}"),
        ({"type": "object"}, '"{\\"k\\":1.50}"', {"k": 1.5}),
        ({"type": "object", "properties": {"d": {"type": "integer"}}}, '{"d": 2.0, "e": 2.0}', {"d": 2, "e": 2.0}),
        ({"enum": ["a", "1"]}, "1", "1"),
        ({"enum": [1, 2]}, "2", 2),
        ({}, "02134", "02134"),
        (None, "5.0", 5.0),
    ],
)
def test_the_schema_decides_what_a_value_is(schema: Any, written: str, value: Any) -> None:
    """Bug reports B08 and B09: never by spelling alone, and never an exception."""
    got = value_of(written, schema)
    assert got == value
    assert type(got) is type(value)
    assert arguments_of(xml(v=written), {"get": {"properties": {"v": schema}}}) == {"v": value}


def decode(
    text: str | Sequence[int],
    *,
    tools: list[dict[str, Any]] | None = None,
    prompt: str = OFF,
    reason: str = "end_of_turn",
    tokenizer: Tokenizer | None = None,
) -> list[Event]:
    """Return the events of an answer, neighbouring texts joined."""
    held = tokenizer or byte_level()
    return answer_events(CHAT, held, text, tools=tools, prompt=prompt, reason=reason)


def test_thoughts_are_hidden_and_their_white_space_is_not_shown() -> None:
    assert decode("Hi é 🎉") == [Text("Hi é 🎉")]
    assert decode("Why?\n\nSo.\n</think>\n\nHi", prompt=ON) == [Reasoning("Why?\n\nSo."), Text("Hi")]
    assert decode("<think>\nWhy?\n</think>\n\nHi\n") == [Reasoning("Why?"), Text("Hi\n")]
    assert decode("<think>\n\n</think>\n\nHi") == [Text("Hi")]
    assert decode("a\n\n<think>b</think> c") == [Text("a"), Reasoning("b"), Text("c")]
    assert decode("why", prompt=ON, reason="max_tokens") == [Reasoning("why")]
    assert decode(" \n ") == [Text(" \n ")]
    assert decode(" a \n b ") == [Text(" a \n b ")]


def test_unfinished_characters_are_flushed_where_they_stand() -> None:
    half, close = byte_level().encode("🎉")[:2], byte_level().control["</think>"]
    assert decode([*half, close, *half], prompt=ON) == [Reasoning("\ufffd"), Text("\ufffd")]


def test_calls_between_texts() -> None:
    one, two = xml(n="1"), xml(n="2")
    events = decode(f"Hm.\n\n<tool_call>\n{one}\n</tool_call>\n<tool_call>\n{two}\n</tool_call>", tools=[function()])
    assert [type(event) for event in events] == [Text, ToolCall, ToolCall]
    assert events[0] == Text("Hm.")
    calls = [event for event in events if isinstance(event, ToolCall)]
    assert [(found.name, found.arguments) for found in calls] == [("get", '{"n":1}'), ("get", '{"n":2}')]
    assert len({found.id for found in calls}) == 2
    assert all(len(found.id) == 29 and int(found.id.removeprefix("call_"), 16) >= 0 for found in calls)


@pytest.mark.parametrize(
    ("text", "reason", "note"),
    [
        ("<tool_call>\nnope\n</tool_call>", "end_of_turn", "a call begins with '<function=NAME>' and a newline"),
        (f"<tool_call>\n{xml('put')}\n</tool_call>", "end_of_turn", "unknown tool 'put'"),
        ("<tool_call>\n<function=get>\n<parameter=n>\n1", "max_tokens", "the call is not closed"),
        ("<tool_call>", "max_tokens", "the call is not closed"),
        ("<tool_call>\n<function=get>\n<parameter=s>\n</think>é</tool_call>", "eos", "parameter 's' is not closed"),
        ("<tool_call>\n<tool_call></tool_call>", "eos", "a call begins with '<function=NAME>' and a newline"),
    ],
)
def test_a_call_that_cannot_be_read_is_text_with_a_reason(text: str, reason: str, note: str) -> None:
    """Fail-closed: every character comes back, the white space before it too, and there is no call."""
    events = decode("Hm.\n" + text, tools=[function()], reason=reason)
    assert events == [Text("Hm."), Malformed(note), Text("\n" + text)]


def test_text_after_a_bad_call_goes_on() -> None:
    events = decode(f"<tool_call>x</tool_call> ok\n<tool_call>\n{xml()}\n</tool_call>", tools=[function()])
    assert events[:2] == [
        Malformed("a call begins with '<function=NAME>' and a newline"),
        Text("<tool_call>x</tool_call> ok"),
    ]
    assert isinstance(events[2], ToolCall)
    assert len(events) == 3


def test_without_tools_no_call_is_made() -> None:
    text = f"<tool_call>\n{xml()}\n</tool_call>"
    assert decode(text) == [Malformed("unknown tool 'get'"), Text(text)]


def test_an_endless_call_becomes_text_at_the_limit() -> None:
    body = "x" * (MAX_CALL_BYTES + 5)
    assert decode(f"<tool_call>{body}</tool_call>!", tools=[function()]) == [
        Malformed(f"the call is longer than {MAX_CALL_BYTES} bytes"),
        Text(f"<tool_call>{body}!"),
    ]


@pytest.mark.parametrize(
    ("reason", "calls", "finish"),
    [
        ("end_of_turn", 1, "tool_calls"),
        ("end_of_turn", 0, "stop"),
        ("eos", 1, "tool_calls"),
        ("max_tokens", 1, "length"),
        ("stop_string", 1, "stop"),
    ],
)
def test_calls_decide_the_finish_reason_of_a_finished_turn(reason: str, calls: int, finish: str) -> None:
    """This dialect has no stop token of its own for calls."""
    generation = Generation(session=None, prompt=[1], options=GenerateOptions())  # type: ignore[arg-type]
    generation.reason = reason
    generation.calls = [ToolCall(id="c", name="get", arguments="{}")] * calls
    assert generation.finish_reason == finish


STRINGS = st.one_of(
    st.text(), st.sampled_from(["</parameter>", "\n", " \n</parameter>x", '"', "<tool_call>", "</think>", "5", "null"])
)
KEYS = st.text("abzAZ09_-.$ é", min_size=1, max_size=6)
INNER = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), STRINGS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def render_calls(arguments: Sequence[dict[str, Any]], lead: str) -> list[int]:
    """Return the ids of an answer that makes calls, from behind its opening to its stop token."""
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "get", "arguments": dump_json(given_arguments)}}
        for n, given_arguments in enumerate(arguments)
    ]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": lead, "tool_calls": calls}]
    ids = render(byte_level(), CHAT, messages, add_generation_prompt=False)
    opening = render(byte_level(), CHAT, messages[:1])
    assert ids[: len(opening)] == opening
    return ids[len(opening) : -2]


@settings(max_examples=150, deadline=None)
@given(
    arguments=st.lists(st.dictionaries(KEYS, INNER, max_size=4), min_size=1, max_size=2),
    lead=st.sampled_from(["", "Hm. é"]),
)
def test_a_rendered_call_decodes_to_itself(arguments: list[dict[str, Any]], lead: str) -> None:
    """Call, render, decode: the same name and arguments, whatever the strings hold, the ids fed one by one.

    The schema names each value's type; a dialect without types needs it.
    """
    texts = [value for given_arguments in arguments for value in given_arguments.values() if isinstance(value, str)]
    assume(all(can_be_written(text) for text in texts))
    types: dict[str, list[str]] = {}
    for given_arguments in arguments:
        for key, value in given_arguments.items():
            types.setdefault(key, []).append("null" if value is None else TYPES[type(value)])
    assume(all(len(set(kinds)) == 1 for kinds in types.values()))
    tools = [typed({key: {"type": kinds[0]} for key, kinds in types.items()})]
    events = decode(render_calls(arguments, lead), tools=tools)
    assert [event for event in events if isinstance(event, Text)] == ([Text(lead)] if lead else [])
    assert [load_json(e.arguments) for e in events if isinstance(e, ToolCall)] == [
        load_json(dump_json(given_arguments)) for given_arguments in arguments
    ]
    assert not any(isinstance(event, Malformed) for event in events)


@settings(max_examples=100, deadline=None)
@given(value=STRINGS)
def test_a_string_is_refused_or_reads_back(value: str) -> None:
    try:
        ids = render_calls([{"s": value}], "")
    except RequestError:
        assert not can_be_written(value)
        return
    events = decode(ids, tools=[function(s={"type": "string"})])
    assert [load_json(e.arguments) for e in events if isinstance(e, ToolCall)] == [{"s": value}]


PIECES = st.sampled_from(
    [
        *MARKS,
        "<|im_start|>",
        "\n",
        "\n\n",
        " ",
        "a",
        "é",
        "🎉",
        "<function=get>\n",
        "<parameter=n>\n1\n</parameter>\n",
        "</function>",
        f"<tool_call>\n{xml(n='1')}\n</tool_call>",
    ]
)


def without_ids(events: list[Event]) -> list[Event]:
    return [ToolCall("", event.name, event.arguments) if isinstance(event, ToolCall) else event for event in events]


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(PIECES, max_size=12), prompt=st.sampled_from([ON, OFF]))
def test_events_do_not_depend_on_how_text_is_cut_into_tokens(pieces: list[str], prompt: str) -> None:
    """Bytes one by one or larger pieces, some over the edges of tags: the same text, thoughts and calls."""
    assert len(word_level().encode("\n</un>\n")) == 3
    by_byte, by_word = (
        decode("".join(pieces), tools=[function()], prompt=prompt, tokenizer=make())
        for make in (byte_level, word_level)
    )
    assert without_ids(by_byte) == without_ids(by_word)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.sampled_from(["string", "object"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "properties", "items", "anyOf", "allOf", "enum", "a"]), inner, max_size=3
        ),
    ),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(schema=JSON, written=st.sampled_from(["1", '{"a": [true, {"b": "x"}]}', "None", '"x"', ""]))
def test_no_schema_breaks_rendering_or_reading(schema: Any, written: str) -> None:
    """A schema that makes no sense is refused or carried along; reading a call with it never raises."""
    tool = {"type": "function", "function": {"name": "get", "parameters": schema}}
    with suppress(RequestError):
        render(byte_level(), CHAT, [{"role": "user", "content": "Hi"}], tools=[tool])
    decode(f"<tool_call>\n{xml(a=written, items=written)}\n</tool_call>", tools=[tool])


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 270), max_size=40), prompt=st.sampled_from([ON, OFF]))
def test_no_answer_breaks_the_decoder(ids: list[int], prompt: str) -> None:
    """Any ids at all give events and never an exception."""
    for event in decode(ids, tools=[function()], prompt=prompt, reason="max_tokens"):
        assert not isinstance(event, Text | Reasoning) or event.text
