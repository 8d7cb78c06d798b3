"""Typed arguments and exact numbers: the tool's schema decides, what cannot be decided stays as written."""

from decimal import Decimal
from typing import Any

import pytest

from mference_core.chat.schema import fit, inner_schema, types_of
from mference_core.chat.values import check_value, dump_json, load_json
from mference_core.errors import MferenceError


@pytest.mark.parametrize(
    ("schema", "value", "written", "expected"),
    [
        ({"type": "string"}, "02134", "02134", "02134"),
        ({"type": "string"}, True, "true", "true"),
        ({"type": "string"}, 1e5, "1e5", "1e5"),
        ({"type": "string"}, {"a": 1}, '{"a":1}', '{"a":1}'),
        ({"type": "string"}, "  hi ", "  hi ", "  hi "),
        ({"type": "integer"}, 5.0, "5.0", 5),
        ({"type": "integer"}, "7", "7", 7),
        ({"type": "integer"}, "5.0", "5.0", 5),
        ({"type": "integer"}, "2026-01-15", "2026-01-15", "2026-01-15"),
        ({"type": "integer"}, 2.5, "2.5", 2.5),
        ({"type": "integer"}, "2.5", "2.5", "2.5"),
        ({"type": "integer"}, "1e999999999", "1e999999999", "1e999999999"),
        ({"type": "integer"}, "9" * 5000, "", "9" * 5000),
        ({"type": "number"}, "02134", "02134", "02134"),
        ({"type": "number"}, 3, "3", 3),
        ({"type": "number"}, "1.5", "1.5", 1.5),
        ({"type": "boolean"}, "False", "False", False),
        ({"type": "boolean"}, "yes", "yes", "yes"),
        ({"type": ["integer", "string"]}, "7", "7", "7"),
        ({"type": ["integer", "string"]}, 7, "7", 7),
        ({"type": ["integer", "null"]}, "null", "null", None),
        ({"type": "object"}, '{"a": 1.10}', "", {"a": 1.1}),
        ({"type": "array"}, '{"a":1}', "", '{"a":1}'),
        ({"type": "array"}, "[1", "", "[1"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", "3", 3),
        ({"enum": ["a", "7"]}, 7, "7", "7"),
        ({"const": "1"}, 1, "1", "1"),
        ({"$ref": "#/x"}, "7", "7", "7"),
        (None, "7", "7", "7"),
        ({"type": "integer", "nullable": True}, "none", "none", None),
    ],
)
def test_the_schema_decides_the_type(schema: Any, value: Any, written: str, expected: Any) -> None:
    result = fit(value, written, schema)
    assert result == expected
    assert type(result) is type(expected)


def test_schemas_that_make_no_sense_say_nothing() -> None:
    schema: Any
    for schema in ({"type": 5}, {"anyOf": 5}, {"anyOf": [5]}, {"enum": 3}, {"properties": 4}, 7, [], {"allOf": [{}]}):
        assert types_of(schema) <= {"object"}
        assert inner_schema(schema, "a") is None
        assert inner_schema(schema) is None
    nested = {"anyOf": [{"type": "null"}, {"properties": {"a": {"type": "integer"}}}]}
    assert inner_schema(nested, "a") == {"type": "integer"}
    assert inner_schema({"additionalProperties": {"type": "string"}}, "b") == {"type": "string"}
    assert inner_schema({"items": {"type": "null"}}) == {"type": "null"}


def test_numbers_are_exact() -> None:
    text = '{"a":1.5,"b":18446744073709551615,"c":3.14159265358979323846,"d":1E+400,"e":-0.0}'
    value = load_json(text)
    assert dump_json(value) == text
    assert isinstance(value["c"], Decimal)
    for bad in ("1" * 5000, "NaN", "1e" + "9" * 30):
        with pytest.raises(ValueError, match=r"limit|NaN|range"):
            load_json(bad)
    assert dump_json({"b": ["/é<", None], "a": True}) == '{"a":true,"b":["/é<",null]}'


def test_values_that_are_not_json_are_refused() -> None:
    for value in (float("inf"), Decimal("NaN"), {1: 2}, {"a": b"x"}, ["\udc00"], {"\udc00": 1}):
        with pytest.raises(MferenceError):
            check_value("x", value)
    check_value("x", {"a": [1, 1.5, None, True, Decimal("1.5")]})
