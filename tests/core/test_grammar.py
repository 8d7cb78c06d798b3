"""Constraints: JSON answers, reasoning before them, and values a dialect writes its own way."""

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_core.chat import ChatFormat, TextDecoder
from mference_core.errors import RequestError
from mference_core.grammar.answers import Grammars
from mference_core.grammar.constraint import GrammarConstraint
from mference_core.grammar.notation import Rules, literal, token
from mference_core.grammar.values import ValueRules, inlined, length, pattern, resolve
from mference_core.tokens import Tokenizer

MARKS = ("<end>", "<hide>", "</hide>")
TOKENIZER = Tokenizer.of_bytes(MARKS)
END, HIDE, SHOW = map(TOKENIZER.id_of, MARKS)
CHAT = ChatFormat(
    stops={"<end>": "eos"},
    template="",
    control=MARKS,
    reasoning=("<hide>", "</hide>"),
    decoder=lambda tokenizer, _tools, prompt: TextDecoder(tokenizer, ("<hide>", "</hide>"), prompt),
)
GRAMMARS = Grammars(chat=CHAT, tokenizer=TOKENIZER, vocab_size=TOKENIZER.size + 7)


def takes(constraint: GrammarConstraint, ids: list[int]) -> bool:
    """Say whether the grammar lets these ids through, one by one, and may end after them; the mask must agree."""
    for number in ids:
        if not cast("list[bool]", constraint.allowed().tolist())[number]:
            return False
        constraint.accept(number)
    return cast("list[bool]", constraint.allowed().tolist())[END]


def takes_text(constraint: GrammarConstraint, text: str) -> bool:
    return takes(constraint, TOKENIZER.encode(text))


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0}, "s": {"enum": ["a", "b"]}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"n":1}', True),
        ('{ "n": 12,\n "s": "b" }', True),
        ('{"n":-1}', False),
        ('{"s":"a"}', False),
        ('{"n":1,"x":2}', False),
        ('{"n":1', False),
        ('{"n":1}!', False),
        ("Sure: {}", False),
    ],
)
def test_json_answers_follow_their_schema(text: str, fits: bool) -> None:  # noqa: FBT001
    assert takes_text(GRAMMARS.json_answer(SCHEMA, []), text) == fits


@pytest.mark.parametrize(("text", "fits"), [('{"any":[1,{"x":null}]}', True), ("[1]", False), ('"text"', False)])
def test_without_a_schema_any_object_is_json(text: str, fits: bool) -> None:  # noqa: FBT001
    assert takes_text(GRAMMARS.json_answer(None, []), text) == fits


def test_white_space_in_json_is_bounded() -> None:
    assert not takes_text(GRAMMARS.json_answer(SCHEMA, []), "{" + " " * 65)


def test_the_mask_covers_the_models_whole_vocabulary_and_allows_no_id_without_a_token() -> None:
    allowed = cast("list[bool]", GRAMMARS.json_answer(SCHEMA, []).allowed().tolist())
    assert len(allowed) == GRAMMARS.vocab_size
    assert not any(allowed[TOKENIZER.size :])


def test_an_answer_is_finished_when_only_a_stop_may_follow() -> None:
    constraint = GRAMMARS.json_answer(SCHEMA, [])
    assert takes_text(constraint, '{"n":1}')
    assert constraint.finished()


@pytest.mark.parametrize(
    ("prompt", "thinking", "ids", "fits"),
    [
        ([HIDE], False, [*TOKENIZER.encode("hm"), SHOW, *TOKENIZER.encode('\n\n{"n":1}')], True),
        ([HIDE], False, TOKENIZER.encode('{"n":1}'), False),  # the prompt ends inside reasoning: it must be closed
        ([HIDE, SHOW], False, TOKENIZER.encode('{"n":1}'), True),
        ([], True, [HIDE, *TOKENIZER.encode("hm"), SHOW, *TOKENIZER.encode('{"n":1}')], True),
        ([], True, TOKENIZER.encode('{"n":1}'), True),
        ([], False, [HIDE, SHOW, *TOKENIZER.encode('{"n":1}')], False),
    ],
)
def test_reasoning_comes_first_where_it_is_meant(prompt: list[int], thinking: bool, ids: list[int], fits: bool) -> None:  # noqa: FBT001
    assert takes(GRAMMARS.json_answer(SCHEMA, prompt, thinking=thinking), ids) == fits


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"x": {"type": "florb"}}},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "("},
    ],
)
def test_schemas_nobody_can_follow_are_refused_in_one_line(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="response_format is a schema that cannot be followed") as refused:
        GRAMMARS.json_answer(schema, [])
    assert "\n" not in str(refused.value)


def test_a_dialect_without_a_grammar_of_calls_cannot_be_forced() -> None:
    with pytest.raises(RequestError, match="tool_choice"):
        GRAMMARS.tool_calls([], [])


def test_a_spelt_control_token_does_not_stand_for_it() -> None:
    """`</hide>` written in letters neither ends reasoning nor anything else."""
    ids = [*TOKENIZER.encode("</hide>"), *TOKENIZER.encode('{"n":1}')]
    assert not takes(GRAMMARS.json_answer(SCHEMA, [HIDE]), ids)


def bare(schema: dict[str, Any]) -> GrammarConstraint:
    """Return the grammar of a value whose strings stand between `<hide>` and `</hide>`, keys being bare."""
    rules = Rules()

    def string(part: Any) -> str:
        sought = pattern(part)
        body = f"/[^<]{length(part)}/" + (f" & /{sought}/" if sought is not None else "")
        return f"{token(HIDE)} {rules.terminal(body)} {token(SHOW)}"

    values = ValueRules(
        rules, string, lambda text: f"{token(HIDE)} {literal(text)} {token(SHOW)}", literal, "/[a-z]+/", root=schema
    )
    return GrammarConstraint.of(rules.text(values.value(schema)), "test", TOKENIZER, TOKENIZER.size, {END: "eos"})


def written(value: Any) -> list[int]:
    """Return the ids of a value in that dialect."""
    if isinstance(value, str):
        return [HIDE, *TOKENIZER.encode(value), SHOW]
    if isinstance(value, dict):
        pairs = [[*TOKENIZER.encode(key + ":"), *written(inner)] for key, inner in value.items()]
        return [*TOKENIZER.encode("{"), *joined(pairs), *TOKENIZER.encode("}")]
    if isinstance(value, list):
        return [*TOKENIZER.encode("["), *joined([written(inner) for inner in value]), *TOKENIZER.encode("]")]
    return TOKENIZER.encode(json.dumps(value))


def joined(parts: list[list[int]]) -> list[int]:
    return [number for at, part in enumerate(parts) for number in ([*TOKENIZER.encode(","), *part] if at else part)]


PAIR = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}, "c": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"type": "string"}, "any text, {[:]}", True),
        ({"type": "string", "maxLength": 2}, "abc", False),
        ({"type": "string", "minLength": 2}, "a", False),
        ({"type": "string", "pattern": "^[a-c]+$"}, "abc", True),
        ({"type": "string", "pattern": "^[a-c]+$"}, "abcd", False),
        ({"type": "string", "pattern": "[0-9]"}, "room 7b", True),
        ({"enum": ["a", 1, None, [True], {"k": "v"}]}, {"k": "v"}, True),
        ({"enum": ["a", 1, None, [True], {"k": "v"}]}, 2, False),
        ({"const": "x"}, "x", True),
        ({"type": "integer", "maximum": 10}, 11, False),
        ({"type": "integer"}, 1.5, False),
        ({"type": ["boolean", "null"]}, None, True),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 3, True),
        ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]}, {}, False),
        (PAIR, {"a": "x", "b": 1.5, "c": None}, True),
        (PAIR, {"b": 1}, True),
        (PAIR, {}, True),
        (PAIR, {"z": 1}, False),
        ({**PAIR, "required": ["b"]}, {"a": "x"}, False),
        ({**PAIR, "required": ["c"]}, {"a": "x", "c": None}, True),
        ({"type": "object"}, {"free": [1, "x"]}, True),
        ({"type": "object", "additionalProperties": False}, {"k": 1}, False),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"k": "text"}, False),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1], False),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, [1, 2, 3], True),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [1, 2, 3], False),
        ({"type": "array", "maxItems": 0}, [], True),
        ({}, {"x": 1}, True),
        ({"$ref": "#/$defs/t", "$defs": {"t": {"enum": ["a"]}}}, "a", True),
    ],
)
def test_values_follow_their_schema(schema: dict[str, Any], value: Any, fits: bool) -> None:  # noqa: FBT001
    assert takes(bare(schema), written(value)) == fits


def test_a_schema_may_name_itself() -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}
    schema = {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}
    assert takes(bare(schema), written({"next": {"next": {}}}))
    flat = inlined(schema, schema)
    assert flat["properties"]["next"]["$ref"] == "#/$defs/tree"


def test_what_no_rule_can_follow_is_refused() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(20):
        deep = {"type": "array", "items": deep}
    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: bare(deep), "nested more than"),
        (lambda: bare({"type": "florb"}), "florb"),
        (lambda: resolve("elsewhere.json", {}), "ref"),
    ]
    for make, reason in bad:
        with pytest.raises(RequestError, match=reason):
            make()


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.text("ab {}[]:,", max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        max_leaves=8,
    )
)
def test_a_constant_is_the_only_thing_its_schema_allows(value: Any) -> None:
    assert takes(bare({"const": value}), written(value))
    assert not takes(bare({"const": value}), written([value]))
