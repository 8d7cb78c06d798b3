"""The dialect's tool calls as a grammar, for calls that must be valid."""

from collections.abc import Mapping
from typing import Any

from mference_core.chat.format import Tools
from mference_core.chat.schema import branches_of, types_of
from mference_core.chat.values import dump_json
from mference_core.grammar.notation import Mark, Rules, json_value, literal, without
from mference_core.grammar.values import length, pattern
from mference_deepseekv4.calls import CLOSE, DSML, INVOKE_END, PARAMETER_END

TEXT, JSON = ' string="true">', ' string="false">'
NO_MARK = without(DSML)
"""Text that holds no mark: what ends a value, or a block, is never part of it."""
END = f"{PARAMETER_END}\n"


def write_calls(rules: Rules, mark: Mark, tools: Tools, parallel: bool) -> str:  # noqa: ARG001, FBT001  a contract's
    """Write what follows the opening of a block: parameters in the schema's order, the optional ones there or not."""
    calls = [_invoke(rules, tool["function"]["name"], tool["function"].get("parameters") or {}) for tool in tools]
    call = rules.rule(" | ".join(calls))
    return f"{literal(chr(10))} {call}{'+' if parallel else ''} {literal(CLOSE)}"


def _invoke(rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required") or ())
    parts = [literal(f'<{DSML}invoke name="{name}">\n')]
    for key, inner in (schema.get("properties") or {}).items():
        opening = literal(f'<{DSML}parameter name="{key}"')
        parameter = rules.rule(f"{opening} {_value(rules, inner)}")
        parts.append(parameter if key in required else f"{parameter}?")
    return rules.rule(" ".join([*parts, literal(f"{INVOKE_END}\n")]))


def _value(rules: Rules, schema: Any) -> str:
    """Return the rule of a value with how it is written and what ends it."""
    schema = schema if isinstance(schema, Mapping) else {}
    if "const" in schema or "enum" in schema:
        allowed = [schema["const"]] if "const" in schema else schema["enum"]
        return rules.rule(" | ".join(_fixed(value) for value in allowed))
    if branches := branches_of(schema, "anyOf", "oneOf"):
        rest = {key: part for key, part in schema.items() if key not in ("anyOf", "oneOf")}
        return rules.rule(" | ".join(_value(rules, {**rest, **branch}) for branch in branches))
    types = types_of(schema)
    ways = [f"{literal(TEXT)} {_text(rules, schema)}"] if "string" in types else []
    if types != {"string"}:
        others = {"type": sorted(types - {"string"})} if types else {}
        ways.append(f"{literal(JSON)} {json_value({**schema, **others})} {literal(END)}")
    return rules.rule(" | ".join(ways))


def _fixed(value: Any) -> str:
    return literal(f"{TEXT}{value}{END}" if isinstance(value, str) else f"{JSON}{dump_json(value)}{END}")


def _text(rules: Rules, schema: Mapping[str, Any]) -> str:
    """Return the rule of a text and its end; one of bounded length or of a pattern has no '<', so that it is seen to end."""
    sought = pattern(schema)
    if sought is None and length(schema) == "*":
        return rules.until(END, NO_MARK)
    body = f"/[^<]{length(schema)}/" + (f" & /{sought}/" if sought is not None else "")
    return f"{rules.terminal(body)} {literal(END)}"
