"""DeepSeek V4 answers: the call grammar, types, thoughts, blocks found however the text is cut."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from mference_core.chat import Event, Malformed, Reasoning, Text, ToolCall, render
from mference_core.chat.values import dump_json, load_json
from mference_core.errors import RequestError
from mference_core.grammar.answers import Grammars
from mference_core.testing.dialects import answer_events, call, function
from mference_core.tokens import Tokenizer
from mference_deepseekv4.calls import CLOSE, DSML, OPEN, Unreadable, parse_calls
from mference_deepseekv4.chat import MAX_BLOCK_BYTES, DsmlDecoder, chat_format

CHAT = chat_format()
GET: dict[str, Any] = {"get": None}
SHUT, OPENED = "<｜Assistant｜></think>", "<｜Assistant｜><think>"


def parameter(key: str, value: str, *, text: bool) -> str:
    return f'<{DSML}parameter name="{key}" string="{str(text).lower()}">{value}</{DSML}parameter>\n'


def invoke(*parameters: str, name: str = "get") -> str:
    return f'<{DSML}invoke name="{name}">\n{"".join(parameters)}</{DSML}invoke>\n'


def block(*invokes: str) -> str:
    return f"{OPEN}\n{''.join(invokes)}{CLOSE}"


ONE = block(invoke(parameter("a", "1", text=False)))


def made_of(vocabulary: int, *, marks: Sequence[str] = ()) -> Tokenizer:
    """Return a byte-level tokenizer with pieces learnt from calls, `marks` being control tokens besides."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([f"Well.\n\n{ONE}", ONE.replace("\n", "")] * 4, trainer)
    raw.add_special_tokens([*CHAT.control, *marks])
    return Tokenizer.wrap(raw)


@cache
def byte_level() -> Tokenizer:
    return made_of(256)


@cache
def word_level() -> Tokenizer:
    """The same with pieces of several bytes, some of which begin in a mark and end in what follows it."""
    return made_of(300)


@cache
def with_mark() -> Tokenizer:
    """The same with the dialect's mark as a control token, as some vocabularies may hold it."""
    return made_of(256, marks=[DSML])


def calls_of(text: str, tools: dict[str, Any] | None = None) -> list[tuple[str, Any]]:
    found = parse_calls(text.removeprefix(OPEN).removesuffix(CLOSE), tools or GET)
    assert all(arguments == dump_json(load_json(arguments)) for _, arguments in found)
    return [(name, json.loads(arguments)) for name, arguments in found]


def arguments_of(*parameters: str, schema: Any = None) -> Any:
    ((name, arguments),) = calls_of(block(invoke(*parameters)), {"get": schema})
    assert name == "get"
    return arguments


def test_types_are_what_the_attribute_says() -> None:
    values = {"a": "02134", "b": "true", "c": ' {"x": 1} ', "d": "", "e": "\n x \n"}
    assert arguments_of(*(parameter(key, value, text=True) for key, value in values.items())) == values
    json_values = {"a": "1", "b": "true", "c": ' {"x":[1.5,null]} ', "d": '"x"', "e": "1e2"}
    read = arguments_of(*(parameter(key, value, text=False) for key, value in json_values.items()))
    assert read == {"a": 1, "b": True, "c": {"x": [1.5, None]}, "d": "x", "e": 100.0}


@pytest.mark.parametrize(
    ("schema", "value", "text", "expected"),
    [
        ({"type": "string"}, "true", False, "true"),
        ({"type": "string"}, "12", False, "12"),
        ({"type": "integer"}, "7", True, 7),
        ({"type": "integer"}, "5.0", False, 5),
        ({"type": "integer"}, "2026-01-15", True, "2026-01-15"),
        ({"type": "boolean"}, "False", True, False),
        ({"type": ["integer", "string"]}, "7", True, "7"),
        ({"type": ["integer", "string"]}, "7", False, 7),
        ({"type": "object"}, '{"a": "b"}', True, {"a": "b"}),
        ({"type": "array", "items": {"type": "integer"}}, '[1.0, "2"]', False, [1, 2]),
        ({"type": "object", "properties": {"n": {"type": "string"}}}, '{"n": 5}', False, {"n": "5"}),
        ({}, "7", True, "7"),
    ],
)
def test_the_schema_decides_where_the_attribute_errs(schema: Any, value: str, text: bool, expected: Any) -> None:  # noqa: FBT001
    """Bug report B09."""
    whole = {"type": "object", "properties": {"k": schema}}
    got = arguments_of(parameter("k", value, text=text), schema=whole)["k"]
    assert got == expected
    assert type(got) is type(expected)


def test_several_calls_of_one_block() -> None:
    text = block(invoke(parameter("a", "1", text=False)), invoke(), invoke(parameter("b", "x", text=True)))
    assert calls_of(text) == [("get", {"a": 1}), ("get", {}), ("get", {"b": "x"})]


@pytest.mark.parametrize(
    "text",
    [
        ONE.replace("\n", ""),
        ONE.replace("\n", "\r\n  \t"),
        ONE.replace("\n", "\n\n"),
    ],
)
def test_white_space_between_parts_does_not_matter(text: str) -> None:
    assert calls_of(text) == [("get", {"a": 1})]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (block(), "'<｜DSML｜invoke name=\"NAME\">' is expected (character 1)"),
        (block("x"), "is expected (character 1)"),
        (block(invoke(), "x"), "'<｜DSML｜invoke name=\"NAME\">' is expected"),
        (block(invoke(name="put")), "unknown tool 'put'"),
        (block(invoke(), invoke(name="put")), "unknown tool 'put'"),
        (block(invoke(name="g et")), "'<｜DSML｜invoke"),
        (block(invoke(name="x" * 65)), "'<｜DSML｜invoke"),
        (block(invoke("x")), "a parameter or '</｜DSML｜invoke>' is expected"),
        (block(invoke(parameter("a", "x", text=False))), "parameter 'a' is no JSON"),
        (block(invoke(parameter("a", "", text=False))), "parameter 'a' is no JSON"),
        (block(invoke(parameter("a", "NaN", text=False))), "parameter 'a' is no JSON"),
        (block(invoke(parameter("a", "{'a': 1}", text=False))), "parameter 'a' is no JSON"),
        (block(invoke(parameter("a", "1", text=False) * 2)), "parameter 'a' is given twice"),
        (block(invoke(parameter("", "1", text=False))), "a parameter or"),
        (block(invoke(parameter("a\nb", "1", text=False))), "a parameter or"),
        (block(invoke(parameter("a", "1", text=False).replace("false", "no"))), "a parameter or"),
        (block(invoke(parameter("a", "1", text=False).replace(' string="false"', ""))), "a parameter or"),
        (block(invoke(parameter("a", "1", text=False).replace(f"</{DSML}parameter>", ""))), "'a' is not closed"),
        (block(invoke(parameter("a", "[" * 65 + "]" * 65, text=False))), "'a' is nested more than 64 levels deep"),
        (block(invoke(parameter("a", "[" * 20000 + "]" * 20000, text=False))), "'a' is no JSON"),
        (block(invoke().replace(f"</{DSML}invoke>", "")), "a parameter or '</｜DSML｜invoke>' is expected"),
        (block(invoke().replace("DSML", "dsml")), "'<｜DSML｜invoke"),
    ],
)
def test_blocks_that_do_not_read_say_why(text: str, reason: str) -> None:
    with pytest.raises(Unreadable) as caught:
        calls_of(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def heard(answer: str | Sequence[int], tokenizer: Tokenizer | None = None, **options: Any) -> list[Event]:
    given = {"prompt": SHUT, "tools": [function()], **options}
    return answer_events(CHAT, tokenizer or byte_level(), answer, **given)


def shapes(events: Sequence[Event]) -> list[Any]:
    """Return events without the identities of calls."""
    return [(event.name, event.arguments) if isinstance(event, ToolCall) else event for event in events]


def test_text_around_a_block() -> None:
    """The blank line before a block belongs to it; other white space is shown."""
    read = ("get", '{"a":1}')
    assert shapes(heard(ONE)) == [read]
    assert shapes(heard(f"Well.\n\n{ONE}")) == [Text("Well."), read]
    assert shapes(heard(f"Well.\n\n\n{ONE}")) == [Text("Well.\n"), read]
    assert shapes(heard(f"Well.\n{ONE}")) == [Text("Well.\n"), read]
    assert shapes(heard(f"{ONE} Done.\n")) == [read, Text(" Done.\n")]
    assert shapes(heard(f"{ONE}\n\n{ONE}")) == [read, read]


def test_identities_of_calls_differ() -> None:
    calls = [event for event in heard(f"{ONE}{ONE}") if isinstance(event, ToolCall)]
    assert len({event.id for event in calls}) == 2
    assert all(len(event.id) == 29 and event.id.startswith("call_") for event in calls)


def test_without_tools_a_block_is_text() -> None:
    assert heard(f"So:\n\n{ONE}", tools=None) == [Text(f"So:\n\n{ONE}")]


def test_one_bad_call_spoils_its_block_and_no_other() -> None:
    bad = block(invoke(), invoke(name="put"))
    events = shapes(heard(f"A\n\n{bad}\n\n{ONE}"))
    assert events == [Text("A"), Malformed("unknown tool 'put'"), Text(f"\n\n{bad}"), ("get", '{"a":1}')]


def test_a_block_that_is_cut_off_is_text_with_a_reason() -> None:
    whole = f"A\n\n{ONE}"
    for length in range(len(whole)):
        events = heard(whole[:length], reason="max_tokens")
        assert "".join(event.text for event in events if isinstance(event, Text)) == whole[:length]
        reasons = [event.reason for event in events if isinstance(event, Malformed)]
        assert reasons == (["the block of calls is not closed"] if length >= len(f"A\n\n{OPEN}") else [])


def test_a_block_too_long_is_text_at_once() -> None:
    """What follows is text as well, up to the next block."""
    fits = invoke(parameter("a", "", text=True))
    value = "é" * ((MAX_BLOCK_BYTES - len(f"\n{fits}{CLOSE}".encode())) // 2)
    long = invoke(parameter("a", value, text=True))
    assert shapes(heard(block(long) + ONE)) == [("get", dump_json({"a": value})), ("get", '{"a":1}')]
    events = shapes(heard(block(f"  {long}") + ONE))
    assert events[0] == Malformed(f"the block of calls is longer than {MAX_BLOCK_BYTES} bytes")
    assert events[1:] == [Text(block(f"  {long}")), ("get", '{"a":1}')]


def test_thoughts_are_hidden_and_hold_no_calls() -> None:
    assert heard(f"Hm.\n\n{ONE}</think>Yes.", prompt=OPENED) == [Reasoning(f"Hm.\n\n{ONE}"), Text("Yes.")]
    assert heard("Yes.<think>Hm.</think> No.") == [Text("Yes."), Reasoning("Hm."), Text(" No.")]
    assert heard("</think>Yes.") == [Text("Yes.")]


def test_a_thought_releases_what_might_have_been_a_block() -> None:
    assert heard(f"A\n\n{OPEN[:-1]}<think>B") == [Text(f"A\n\n{OPEN[:-1]}"), Reasoning("B")]


def test_control_tokens_inside_a_block_are_part_of_its_text() -> None:
    spoilt = ONE.replace(f"</{DSML}invoke>", f"<think></{DSML}invoke>")
    events = heard(spoilt)
    assert isinstance(events[0], Malformed)
    assert events[1:] == [Text(spoilt)]
    value = ONE.replace('string="false">1', 'string="true"><｜User｜>x')
    assert shapes(heard(value)) == [("get", '{"a":"<｜User｜>x"}')]


@pytest.mark.parametrize("spoil", ["", "no tools"])
def test_a_mark_that_is_a_token_of_its_own(spoil: str) -> None:
    """Its text is text, wherever it stands."""
    ids = with_mark().encode(f"A\n\n{ONE}", control=True)
    assert ids.count(with_mark().control[DSML]) == 6
    events = heard(ids, with_mark(), tools=None if spoil else [function()])
    assert shapes(events) == ([Text(f"A\n\n{ONE}")] if spoil else [Text("A"), ("get", '{"a":1}')])
    hidden = heard(ids, with_mark(), prompt=OPENED)
    assert hidden == [Reasoning(f"A\n\n{ONE}")]


def cuts(text: str) -> list[list[int]]:
    """Return the ids of a text cut at each place and tokenised apart."""
    parts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    return [[number for part in pair for number in word_level().encode(part)] for pair in parts]


def test_every_cut_gives_the_same_events() -> None:
    whole = f"Well, é.\n\n{block(invoke(parameter('a', 'ü <｜DSML｜', text=True)), invoke())}\n\nDone <｜DS"
    expected = shapes(heard(whole))
    assert expected == [Text("Well, é."), ("get", '{"a":"ü <｜DSML｜"}'), ("get", "{}"), Text("\n\nDone <｜DS")]
    seen = {tuple(ids) for ids in cuts(whole)}
    assert len(seen) > 50
    for ids in seen:
        assert shapes(heard(ids, word_level())) == expected


PIECES = st.sampled_from(
    ["\n", "\n\n", "<", "</", "｜", DSML, OPEN, CLOSE, invoke(), ONE, f"</{DSML}invoke>", "x", " ", '"', "<think>", "é"]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=12), st.data())
def test_text_is_neither_lost_nor_depends_on_its_cuts(pieces: list[str], data: st.DataObject) -> None:
    """However text is handed over, what is shown and what is called together are what was written."""
    text = "".join(pieces)
    whole = shapes(heard(byte_level().encode(text)))
    decoder = DsmlDecoder(byte_level(), [function()], byte_level().encode(SHUT, control=True))
    events: list[Event] = []
    at = 0
    while at < len(text):
        size = data.draw(st.integers(1, 12))
        events += decoder._take(text[at : at + size])
        at += size
    events += decoder.finish("end_of_turn")
    joined: list[Any] = []
    for event in shapes(events):
        if isinstance(event, Text) and joined and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + event.text)
        else:
            joined.append(event)
    assert joined == whole
    if not any(isinstance(event, tuple) for event in whole):
        assert "".join(event.text for event in whole if isinstance(event, Text)) == text


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.dictionaries(st.text(min_size=1), JSON, max_size=4), min_size=1, max_size=3))
def test_rendered_calls_read_back(arguments: list[dict[str, Any]]) -> None:
    """Any arguments that can be written come back as they were, with no schema to help."""
    made = [call(values, identity=f"c{number}") for number, values in enumerate(arguments)]
    user = {"role": "user", "content": "x"}
    try:
        prompt = render(byte_level(), CHAT, [user], tools=[function()])
        whole = render(
            byte_level(),
            CHAT,
            [user, {"role": "assistant", "content": "", "tool_calls": made}],
            tools=[function()],
            add_generation_prompt=False,
        )
    except RequestError:
        reject()
    untyped = [{"type": "function", "function": {"name": "get", "description": ""}}]
    events = shapes(heard(whole[len(prompt) : -1], tools=untyped))
    assert events == [("get", dump_json(values)) for values in arguments]


STRICT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "s": {"enum": ["x", 1]}, "t": {"type": "string", "maxLength": 3}},
            "required": ["n"],
        },
    },
}
N, S, T = parameter("n", "1", text=False), parameter("s", "x", text=True), parameter("t", "abc", text=True)


def follows(text: str, *, free: bool) -> tuple[bool, bool]:
    """Say whether a grammar takes a text, calls alone or after `free` text, and whether it may end there."""
    tokenizer = byte_level()
    grammars = Grammars(chat=CHAT, tokenizer=tokenizer, vocab_size=tokenizer.size)
    constraint = grammars.text_and_calls([STRICT], []) if free else grammars.tool_calls([STRICT], [])
    ids = tokenizer.encode(text)
    taken = constraint.matcher.validate_tokens(ids) == len(ids) and constraint.matcher.consume_tokens(ids)
    return taken, taken and constraint.matcher.is_accepting()


@pytest.mark.parametrize("inside", [N, N + S, N + T, N + S + T, N + parameter("s", "1", text=False)])
def test_calls_that_a_grammar_allows(inside: str) -> None:
    text = block(invoke(inside))
    assert follows(text, free=False) == (True, True)
    assert follows(text, free=True) == (True, True)
    assert follows(f"Well, <｜DSML｜ is text.\n\n{text}", free=True) == (True, True)
    assert follows(block(invoke(N), invoke(inside)), free=False) == (True, True)


@pytest.mark.parametrize(
    "text",
    [
        block(),
        block(invoke()),
        block(invoke(S)),
        block(invoke(N + N)),
        block(invoke(T + N)),
        block(invoke(N, name="put")),
        block(invoke(N.replace("1", "x"))),
        block(invoke(N + parameter("s", "y", text=True))),
        block(invoke(N + parameter("t", "abcd", text=True))),
        block(invoke(N)) + " Done.",
    ],
)
def test_calls_that_no_grammar_allows(text: str) -> None:
    """Not even after text: once a block is opened it is one that can be read."""
    assert not follows(text, free=False)[0]
    assert not follows(f"Well. {text}", free=True)[0]


def test_free_text_needs_no_call() -> None:
    for text in ("", "Well.", "<", "<｜DSML｜", OPEN[:-1]):
        assert follows(text, free=True) == (True, True)
    assert follows(f"Well.{OPEN}", free=True) == (True, False)
