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

from mference_core.chat.format import Tools
from mference_core.chat.schema import branches_of, fit, inner_schema, types_of
from mference_core.chat.values import dump_json, load_json
from mference_core.grammar.notation import Mark, Rules, json_value, literal
from mference_core.grammar.values import length, pattern

MAX_DEPTH = 64
FUNCTION = re.compile(r"<function=([A-Za-z0-9_.-]{1,64})>[ \t]*\r?\n")
PARAMETER = re.compile(r"\s*<parameter=([^\n<>]+)>\n")
CALL, NO_CALL = "<tool_call>", "</tool_call>"
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


def call_grammar(rules: Rules, mark: Mark, tools: Tools, parallel: bool) -> str:  # noqa: FBT001  a contract's order
    """Write calls of `tools` as a grammar: parameters in the schema's order, the optional ones there or not."""
    bodies = [_call_rule(rules, tool["function"]["name"], tool["function"].get("parameters") or {}) for tool in tools]
    call = rules.rule(f"{mark(CALL)} ({' | '.join(bodies)}) {mark(NO_CALL)}")
    return f"{call} ({literal(chr(10))} {call})*" if parallel else call


def _call_rule(rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required") or ())
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts = [literal(f"\n<function={name}>\n")]
    for key, inner in (schema.get("properties") or {}).items():
        parameter = rules.rule(f"{literal(f'<parameter={key}>' + chr(10))} {_value_rule(rules, inner, definitions)}")
        parts.append(parameter if key in required else f"{parameter}?")
    return rules.rule(" ".join([*parts, literal(CALL_END + "\n")]))


def _value_rule(rules: Rules, schema: Any, definitions: Mapping[str, Any]) -> str:
    """Return the rule of a value and what ends it: text where the schema allows a string, else JSON."""
    types = types_of(schema)
    if "string" not in types:
        if not types:
            schema = {"type": ["object", "array", "number", "boolean", "null"]}  # a JSON string would be read as text
        return f"{json_value({**definitions, **schema})} {literal(VALUE_END)}"
    null = [literal("null" + VALUE_END)] if "null" in types else []
    if branches := branches_of(schema, "anyOf", "oneOf"):
        texts = [branch for branch in branches if "string" in types_of(branch)]  # what else is allowed is read as text
        return rules.rule(" | ".join([*(_value_rule(rules, branch, definitions) for branch in texts), *null]))
    words = [*branches_of(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    if words:
        return rules.rule(" | ".join([*(literal(word + VALUE_END) for word in words if isinstance(word, str)), *null]))
    return rules.rule(" | ".join([_text_rule(rules, schema), *null]))


def _text_rule(rules: Rules, schema: Mapping[str, Any]) -> str:
    sought = pattern(schema)
    if sought is None and length(schema) == "*":
        empty = EMPTY_END.strip().replace("/", r"\/")
        return rules.until(VALUE_END, rf"/(?s:.*)/ & ~/{empty}(?s:.*)/")
    line = rf"/[^\n]{length(schema)}/"
    return f"{rules.terminal(line if sought is None else f'{line} & /{sought}/')} {literal(VALUE_END)}"


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
