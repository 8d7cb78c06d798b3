"""Argument types: the tool's schema decides what a value is, not its spelling."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from mference_core.chat.values import exact_number, load_json

NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
MAX_DIGITS = 400
KINDS = {type(None): "null", bool: "boolean", int: "integer", str: "string", dict: "object", list: "array"}


def _kind(value: Any) -> str:
    return KINDS.get(type(value), "number")


def branches_of(schema: Mapping[str, Any], *keys: str) -> list[Any]:
    """Return the alternatives a schema lists under `keys`, in order."""
    return [branch for key in keys if isinstance(schema.get(key), list) for branch in schema[key]]


def types_of(schema: Any) -> frozenset[str]:
    """Return the types a schema allows; empty if it does not say (references are not followed)."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    found = {name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)}
    if not found:
        alternatives = [types_of(branch) for branch in branches_of(schema, "anyOf", "oneOf")]
        found = set().union(*alternatives) if all(alternatives) else set()
        found = found.union(*map(types_of, branches_of(schema, "allOf")))
    if not found:
        found = {
            _kind(value) for value in [*branches_of(schema, "enum"), *(schema[k] for k in ("const",) if k in schema)]
        }
    if not found and isinstance(schema.get("properties"), Mapping):
        found = {"object"}
    if found and schema.get("nullable") is True:
        found.add("null")
    return frozenset(name.lower() for name in found)


def inner_schema(schema: Any, key: str | None = None) -> Any:
    """Return the schema of property `key`, or of the items if there is no key; None if the schema does not say."""
    if not isinstance(schema, Mapping):
        return None
    if key is None:
        own = schema.get("items")
    else:
        properties = schema.get("properties")
        own = properties.get(key) if isinstance(properties, Mapping) else None
        own = schema.get("additionalProperties") if own is None else own
    if isinstance(own, Mapping):
        return own
    alternatives = (inner_schema(branch, key) for branch in branches_of(schema, "anyOf", "oneOf", "allOf"))
    return next((found for found in alternatives if found is not None), None)


def _whole(value: float | Decimal) -> bool:
    """Say whether a number is an integer of a size worth writing out."""
    if isinstance(value, Decimal):
        return value.adjusted() < MAX_DIGITS and value == value.to_integral_value()
    return value.is_integer()


def fit(value: Any, written: str, schema: Any) -> Any:
    """Return `value` as the type its schema asks for; `written` is its spelling, without quotes if it had any.

    A value that already has an allowed type, or that cannot be read as one, stays what it is.
    """
    types = types_of(schema)
    kind = _kind(value)
    if kind == "number" and "integer" in types and "number" not in types and _whole(value):
        return int(value)
    if not types or kind in types or (kind == "integer" and "number" in types):
        return value
    if kind != "string":
        return written if "string" in types else value
    return value if "string" in types else _read(value, types)


def _read(text: str, types: frozenset[str]) -> Any:
    """Read a string as one of `types`, none of them string; one that cannot be read stays."""
    word = text.strip()
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if "null" in types and word.lower() in ("null", "none"):
        return None
    numeric = types & {"integer", "number"} and NUMBER.fullmatch(word)
    if not numeric and not (types & {"object", "array"} and word[:1] in ("{", "[")):
        return text
    try:
        value = exact_number(word) if numeric else load_json(word)
    except ValueError:
        return text
    if numeric and "number" not in types and not isinstance(value, int):
        return int(value) if _whole(value) else text
    return value if numeric or _kind(value) in types else text
