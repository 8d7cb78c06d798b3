r"""Reading a tool call of the XML dialect.

The text between the call marks, outer white space aside, is read by these rules:

    call      = <function=NAME> NL parameter* </function>      NAME is one of the request's tools
    parameter = <parameter=KEY> NL VALUE NL </parameter> NL    KEY has no newline, '<' or '>'

VALUE ends at the first newline that `</parameter>` and a newline follow, so it may hold anything else, outer spaces
included. White space may stand between parameters. A key given twice counts as given last.

What a value is, the tool's schema says: for a string it is the text as written, for another type its JSON (or a bare
`True`, `None`), and where that cannot be read the text again. `null` is null where the schema allows it. Where a
string is one of several types a value stays text; where the schema says nothing it is JSON that is no string, else
text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from mference_core.chat.schema import fit, inner_schema, types_of
from mference_core.chat.values import dump_json, load_json

MAX_DEPTH = 64
FUNCTION = re.compile(r"<function=([A-Za-z0-9_.-]{1,64})>[ \t]*\r?\n")
PARAMETER = re.compile(r"\s*<parameter=([^\n<>]+)>\n")
VALUE_END, EMPTY_END, CALL_END = "\n</parameter>\n", "</parameter>\n", "</function>"


class Unreadable(Exception):
    """Why a text is not a call; caught where calls are decoded."""


def parse_call(text: str, tools: Mapping[str, Any]) -> tuple[str, str]:
    """Return a call's tool name and its arguments as compact JSON with sorted keys. Raises `Unreadable`.

    `tools` maps the request's tools to the schemas of their parameters, None where there is none.
    """
    text = text.strip()
    found = FUNCTION.match(text)
    if not found:
        raise Unreadable("a call begins with '<function=NAME>' and a newline")
    name, at = found[1], found.end()
    if name not in tools:
        raise Unreadable(f"unknown tool {name!r}")
    arguments: dict[str, Any] = {}
    while parameter := PARAMETER.match(text, at):
        written, at = _written(text, parameter.end(), parameter[1])
        arguments[parameter[1]] = value_of(written, inner_schema(tools[name], parameter[1]))
    if text[at:].strip() != CALL_END:
        raise Unreadable(f"a call ends with its parameters and '{CALL_END}' (character {at})")
    return name, dump_json(arguments)


def _written(text: str, start: int, key: str) -> tuple[str, int]:
    """Return the text of a value, and where it ends."""
    if text.startswith(EMPTY_END, start):
        return "", start + len(EMPTY_END)
    end = text.find(VALUE_END, start)
    if end < 0:
        raise Unreadable(f"parameter {key!r} is not closed")
    return text[start:end], end + len(VALUE_END)


def can_be_written(value: str) -> bool:
    """Say whether a string reads back as itself."""
    return _written(value + VALUE_END, 0, "")[0] == value


def value_of(written: str, schema: Any) -> Any:
    """Return what a value written as text is, as its schema decides. Raises `Unreadable` for JSON nested too deeply."""
    types = types_of(schema)
    if "null" in types and written.strip() == "null":
        return None
    if "string" in types:
        return written
    value = _json(written)
    if not types:
        return written if isinstance(value, str) else value
    text = value if isinstance(value, str) else written
    return _typed_inside(fit(text, text, schema), schema)


def _json(written: str) -> Any:
    """Return the JSON value of a text, or the text itself. Raises `Unreadable` if it is nested too deeply."""
    try:
        value = load_json(written)
    except ValueError:
        if _opens_deeply(written):
            raise Unreadable(f"a value is nested more than {MAX_DEPTH} levels deep") from None
        return written
    _check_depth(value)
    return value


def _opens_deeply(written: str) -> bool:
    """Say whether a text that the reader gave up on is JSON all the same, only too deep."""
    try:
        json.loads(written)
    except RecursionError:
        return True
    except ValueError:
        return False
    return False


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise Unreadable(f"a value is nested more than {MAX_DEPTH} levels deep")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(inner, depth + 1)


def _typed_inside(value: Any, schema: Any) -> Any:
    """Fit what an object or an array holds to the schemas inside; JSON says there what is a string and what is not."""
    if isinstance(value, dict):
        value = {key: _typed_inside(inner, inner_schema(schema, key)) for key, inner in value.items()}
    elif isinstance(value, list):
        value = [_typed_inside(inner, inner_schema(schema)) for inner in value]
    return fit(value, value if isinstance(value, str) else dump_json(value), schema)
