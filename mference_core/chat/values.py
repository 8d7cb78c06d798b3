"""JSON values with exact numbers: what a model or a client wrote is what comes out again."""

import json
import math
from decimal import Decimal, InvalidOperation
from typing import Any

from mference_core.errors import RequestError

MAX_DEPTH = 64
LEAVES = (str, bool, int, float, Decimal, type(None))


def exact_number(text: str) -> int | float | Decimal:
    """Return the number of a JSON literal: an int, a float if that is exact, else a Decimal.

    Raises `ValueError` if it has more digits or a larger exponent than can be held.
    """
    if not any(mark in text for mark in ".eE"):
        return int(text)
    try:
        value = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"number {text[:40]} is out of range") from error
    near = float(value)
    return near if math.isfinite(near) and Decimal(repr(near)) == value else value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def load_json(text: str) -> Any:
    """Return the value of JSON `text` with exact numbers. Raises `ValueError` for anything else, too deep included."""
    try:
        return json.loads(text, parse_float=exact_number, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def dump_json(value: Any) -> str:
    """Return `value` as compact JSON: keys sorted, slashes and letters as they are, numbers exact."""
    match value:
        case dict():
            return "{" + ",".join(f"{dump_json(key)}:{dump_json(value[key])}" for key in sorted(value)) + "}"
        case list() | tuple():
            return "[" + ",".join(map(dump_json, value)) + "]"
        case Decimal():
            return str(value)
        case _:
            return json.dumps(value, ensure_ascii=False)


def check_value(what: str, value: Any, depth: int = 0) -> None:
    """Raise `RequestError` unless `value` is JSON: finite, whole characters, at most 64 levels deep."""
    if depth > MAX_DEPTH:
        raise RequestError(what=what, got=f"nested more than {MAX_DEPTH} levels deep", remedy="flatten it")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise RequestError(what=f"a key of {what}", got=repr(key), expected="a string")
            check_value(what, key)
            check_value(what, inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_value(what, inner, depth + 1)
    elif not isinstance(value, LEAVES):
        raise RequestError(what=what, got=type(value).__name__, expected="a JSON value")
    elif isinstance(value, float | Decimal) and not math.isfinite(value):
        raise RequestError(what=what, got=repr(value), expected="finite numbers")
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise RequestError(what=what, got="not valid Unicode", expected="no half surrogate pairs")
