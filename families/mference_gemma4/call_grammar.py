"""The dialect's tool calls as a grammar, for calls that must be valid."""

from collections.abc import Mapping
from typing import Any

from mference_core.chat.format import Tools
from mference_core.grammar.notation import Mark, Rules, literal
from mference_core.grammar.values import ValueRules, length, pattern

LETTER = r'(?:[^\\]|\\["\\\/bfnrt])'
"""A character between string marks: JSON's short escapes mean what they do there, other backslashes invite errors."""


def write_calls(rules: Rules, mark: Mark, tools: Tools, parallel: bool) -> str:  # noqa: FBT001  a contract's order
    """Write calls of `tools` as a grammar: keys in the schema's order, the optional ones there or not."""
    around = mark('<|"|>')

    def string(schema: Mapping[str, Any]) -> str:
        sought = pattern(schema)
        body = f"/{LETTER}{length(schema)}/" if sought is None else rf"/[^\\]{length(schema)}/ & /{sought}/"
        return f"{around} {rules.terminal(body)} {around}"

    def constant(text: str) -> str:
        return f"{around} {literal(text.replace(chr(92), chr(92) * 2))} {around}" if text else f"{around} {around}"

    bodies = []
    for tool in tools:
        schema = tool["function"].get("parameters") or {}
        values = ValueRules(rules, string, constant, literal, rules.terminal("/[A-Za-z0-9_.$-]{1,64}/"), root=schema)
        bodies.append(f"{literal('call:' + tool['function']['name'])} {values.object(schema)}")
    call = rules.rule(f"{mark('<|tool_call>')} ({' | '.join(bodies)}) {mark('<tool_call|>')}")
    return f"{call}+" if parallel else call
