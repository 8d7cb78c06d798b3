"""Gemma 4 answers: the call grammar, types by schema, channels, and calls that come back as rendered."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mference_core.chat import Event, Malformed, Reasoning, Text, ToolCall, render
from mference_core.chat.values import dump_json, load_json
from mference_core.errors import RequestError
from mference_core.testing.dialects import answer_events, call, function
from mference_core.tokens import Tokenizer
from mference_gemma4.chat import MAX_CALL_BYTES, Unreadable, chat_format, parse_call

CONTROL = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
}
GENERATION = "<|turn>model\n<|channel>thought\n<channel|>"
CHAT = chat_format()


@cache
def byte_level() -> Tokenizer:
    """One token per byte beside the control tokens."""
    letters = {letter: 300 + number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = tokenizers.Tokenizer(models.BPE(vocab=CONTROL | letters, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(CONTROL))
    return Tokenizer.wrap(raw)


@cache
def byte_fallback() -> Tokenizer:
    """One byte token per byte beside the control tokens."""
    bytes_ = {f"<0x{byte:02X}>": 300 + byte for byte in range(256)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=CONTROL | bytes_ | {"▁": 556}, merges=[], byte_fallback=True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens(list(CONTROL))
    return Tokenizer.wrap(raw)


USER = {"role": "user", "content": "Hi"}
GET: dict[str, Any] = {"get": None}


def test_published_rows_of_the_call_grammar() -> None:
    assert parse_call('call:get{city:<|"|>Rome<|"|>,n:3,f:1.50}', GET) == ("get", '{"city":"Rome","f":1.5,"n":3}')
    for text, reason in (
        ("call:get{n:01}", "'01' is no value"),
        ("call:get{} x", "text follows"),
        ("call:other{}", "unknown tool"),
    ):
        with pytest.raises(Unreadable, match=reason):
            parse_call(text, GET)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("{}", "{}"),
        (" \n{ a : [ ] , b : { } } \t", '{"a":[],"b":{}}'),
        ("{a-b.c$1_:-0.5e-3}", '{"a-b.c$1_":-0.0005}'),
        ("{n:18446744073709551615,m:-9223372036854775808}", '{"m":-9223372036854775808,"n":18446744073709551615}'),
        ("{n:3.14159265358979323846}", '{"n":3.14159265358979323846}'),
        ('{s:"a\\n\\"\\u00e9\\ud83c\\udf89/"}', '{"s":"a\\n\\"é🎉/"}'),
        ('{s:<|"|>a"b\\n\\\\c\\ud83c\\udf89\\u0041\\d+ <|"|>}', '{"s":"a\\"b\\n\\\\c🎉A\\\\d+ "}'),
        ('{s:<|"|><|"|>,t:""}', '{"s":"","t":""}'),
        ("{a:[true,false,null,[1,{b:2}]]}", '{"a":[true,false,null,[1,{"b":2}]]}'),
    ],
)
def test_calls_that_read(text: str, arguments: str) -> None:
    assert parse_call("call:get" + text, GET) == ("get", arguments)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "call:",
        "call:get",
        "call:get{",
        "call:get{a}",
        "call:get{a:}",
        "call:get{a:1",
        "call:get{a:1,}",
        "call:get{,}",
        "call:get{a:[1,]}",
        "call:get{a:1 b:2}",
        "call:get{a:1,a:2}",
        'call:get{"a":1}',
        "call:get{a:False}",
        "call:get{a:+1}",
        "call:get{a:.5}",
        "call:get{a:1.}",
        "call:get{a:NaN}",
        'call:get{a:<|"|>open}',
        'call:get{a:"open}',
        'call:get{a:"\\x"}',
        'call:get{a:"\\ud800"}',
        'call:get{a:<|"|>\\ud800<|"|>}',
        'call:get{a:<|"|>\\u12<|"|>}',
        'call:get{a:<|"|>\\udc00\\ud800<|"|>}',
        "call:get{a:" + "9" * 5000 + "}",
        "call:get{a:" + "[" * 65 + "]" * 65 + "}",
        "call:get{a:" + "[" * 100000,
        '{"name":"get","arguments":{}}',
        "call:get({})",
    ],
)
def test_calls_that_do_not_read_say_why(text: str) -> None:
    with pytest.raises(Unreadable, match=r"\w+ \w+"):
        parse_call(text, GET)


def test_the_schema_decides_ambiguous_values() -> None:
    types = {
        "s": {"type": "string"},
        "t": {"type": "string"},
        "i": {"type": "integer"},
        "j": {"type": "integer"},
        "b": {"type": "boolean"},
        "u": {"type": ["integer", "string"]},
        "l": {"type": "array", "items": {"type": "string"}},
        "o": {"type": "object"},
    }
    text = 'call:get{s:02134,t:true,i:5.0,j:<|"|>7<|"|>,b:False,u:<|"|>7<|"|>,l:[1e5,{a:1}, 3],o:<|"|>{"k":1.50}<|"|>}'
    _, arguments = parse_call(text, {"get": {"type": "object", "properties": types}})
    assert json.loads(arguments) == {
        "s": "02134",
        "t": "true",
        "i": 5,
        "j": 7,
        "b": False,
        "u": "7",
        "l": ["1e5", '{"a":1}', "3"],
        "o": {"k": 1.5},
    }
    assert '"i":5,' in arguments


def decode(
    text: str | Sequence[int],
    *,
    tools: list[dict[str, Any]] | None = None,
    prompt: str = GENERATION,
    reason: str = "end_of_turn",
    tokenizer: Tokenizer | None = None,
) -> list[Event]:
    """Return the events of an answer, neighbouring texts joined."""
    held = tokenizer or byte_level()
    return answer_events(CHAT, held, text, tools=tools, prompt=prompt, reason=reason)


def test_channels_show_and_hide() -> None:
    assert decode("Hi é 🎉") == [Text("Hi é 🎉")]
    assert decode("<|channel>thought\nWhy?\nSo.<channel|>Hi") == [Reasoning("Why?\nSo."), Text("Hi")]
    assert decode("<|channel>thought\n<channel|>Hi") == [Text("Hi")]
    assert decode("<|channel>thought<channel|>Hi") == [Text("Hi")]
    assert decode("<|channel>final\nHi<channel|>!<|channel>answer\n.") == [Text("Hi!.")]
    assert decode("<|channel>" + "x" * 80 + "<channel|>Hi") == [Reasoning("x" * 80), Text("Hi")]
    assert decode("why<channel|>Hi", prompt="<|turn>model\n<|channel>thought\nhm ") == [Reasoning("why"), Text("Hi")]
    assert decode("ought\nwhy<channel|>Hi", prompt="<|turn>model\n<|channel>th") == [Reasoning("why"), Text("Hi")]
    assert decode("Hi", prompt="<|channel>thought\nhm<turn|>\n<|turn>model\n") == [Text("Hi")]


def test_unfinished_characters_are_flushed_where_they_stand() -> None:
    half = byte_level().encode("🎉")[:2]
    close = byte_level().control["<channel|>"]
    opened = byte_level().encode("<|channel>thought\n", control=True)
    assert decode([*opened, *half, close, *half]) == [Reasoning("\ufffd"), Text("\ufffd")]


def test_a_call_between_texts() -> None:
    events = decode("Hm.<|tool_call>call:get{n:1}<tool_call|> ok", tools=[function()])
    assert [type(event) for event in events] == [Text, ToolCall, Text]
    found = events[1]
    assert isinstance(found, ToolCall)
    assert (found.name, found.arguments) == ("get", '{"n":1}')
    assert len(found.id) == len("call_") + 24
    assert int(found.id.removeprefix("call_"), 16) >= 0


@pytest.mark.parametrize(
    ("text", "reason", "note"),
    [
        ("<|tool_call>call:get{n:01}<tool_call|>", "end_of_turn", "'01' is no value (character 11)"),
        ("<|tool_call>call:put{}<tool_call|>", "tool_calls", "unknown tool 'put'"),
        ("<|tool_call>call:get{n:1", "max_tokens", "the call is not closed"),
        ("<|tool_call>", "max_tokens", "the call is not closed"),
        ('<|tool_call>call:get{s:<|"|>é<tool_call|>', "end_of_turn", "a string is not closed"),
        ("<|tool_call>call:get<|turn>{}<tool_call|>", "end_of_turn", "an object begins with '{' (character 8)"),
    ],
)
def test_a_call_that_cannot_be_read_is_text_with_a_reason(text: str, reason: str, note: str) -> None:
    events = decode("Hm." + text, tools=[function()], reason=reason)
    assert events == [Text("Hm."), Malformed(note), Text(text)]


def test_text_after_a_bad_call_goes_on() -> None:
    events = decode("<|tool_call>x<tool_call|>ok<|tool_call>call:get{}<tool_call|>", tools=[function()])
    assert events[:2] == [Malformed("a call begins with 'call:' (character 0)"), Text("<|tool_call>x<tool_call|>ok")]
    assert isinstance(events[2], ToolCall)


def test_without_tools_no_call_is_made() -> None:
    assert decode("<|tool_call>call:get{}<tool_call|>") == [
        Malformed("unknown tool 'get'"),
        Text("<|tool_call>call:get{}<tool_call|>"),
    ]


def test_an_endless_call_becomes_text_at_the_limit() -> None:
    body = "x" * (MAX_CALL_BYTES + 5)
    assert decode(f"<|tool_call>{body}<tool_call|>!", tools=[function()]) == [
        Malformed(f"the call is longer than {MAX_CALL_BYTES} bytes"),
        Text(f"<|tool_call>{body}!"),
    ]


def test_waiting_for_a_result_without_a_call_is_noted() -> None:
    assert decode("Hi", reason="tool_calls") == [
        Text("Hi"),
        Malformed("the model waits for a tool result without a call"),
    ]


STRINGS = st.one_of(
    st.text(), st.sampled_from(['<|"|>', "\\", "\\n", '"', "\\u0041", "<tool_call|>", "\ue000", "\x00"])
)
KEYS = st.text("abzAZ09_-.$", min_size=1, max_size=6)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), STRINGS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=120, deadline=None)
@given(
    arguments=st.lists(st.dictionaries(KEYS, VALUES, max_size=4), min_size=1, max_size=2),
    lead=st.sampled_from(["", "Hm. é"]),
    make=st.sampled_from([byte_level, byte_fallback]),
)
def test_a_rendered_call_decodes_to_itself(
    arguments: list[dict[str, Any]], lead: str, make: Callable[[], Tokenizer]
) -> None:
    """Call, render, decode: the same name and arguments, whatever the strings hold, the ids fed one by one."""
    assume(make is byte_level or "▁" not in dump_json(arguments))  # that vocabulary cannot say this character
    calls = [call(dump_json(given_arguments), identity=f"c{n}") for n, given_arguments in enumerate(arguments)]
    messages = [USER, {"role": "assistant", "content": lead, "tool_calls": calls}]
    ids = render(make(), CHAT, messages, add_generation_prompt=False)
    opening = render(make(), CHAT, [USER], enable_thinking=False, add_generation_prompt=False)
    header = make().encode("<|turn>model\n", control=True)
    assert ids[: len(opening) + len(header)] == opening + header
    answer = ids[len(opening) + len(header) : -2]
    events = decode(answer, tools=[function()], reason="tool_calls", tokenizer=make())
    assert [event for event in events if isinstance(event, Text)] == ([Text(lead)] if lead else [])
    assert [load_json(e.arguments) for e in events if isinstance(e, ToolCall)] == [
        load_json(dump_json(given_arguments)) for given_arguments in arguments
    ]
    assert not any(isinstance(event, Malformed) for event in events)


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
@given(schema=JSON, text=st.sampled_from(["{a:1}", '{a:<|"|>1<|"|>,b:[{a:true}]}', "{items:{a:x}}"]))
def test_no_schema_breaks_rendering_or_reading(schema: Any, text: str) -> None:
    """A schema that makes no sense is refused or carried along; reading a call with it never raises."""
    tool = {"type": "function", "function": {"name": "get", "parameters": schema}}
    with suppress(RequestError):
        render(byte_level(), CHAT, [USER], tools=[tool])
    decode(f"<|tool_call>call:get{text}<tool_call|>", tools=[tool])


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.one_of(st.sampled_from(sorted(CONTROL.values())), st.integers(300, 555)), max_size=40))
def test_no_answer_breaks_the_decoder(ids: list[int]) -> None:
    """Any ids at all give events and never an exception, and no text holds a private-use stand-in."""
    for event in decode(ids, tools=[function()], reason="max_tokens"):
        if isinstance(event, Text | Reasoning):
            assert event.text
            assert "\ue000" not in event.text
