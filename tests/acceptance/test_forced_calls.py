"""The case of forced calls fails when a dialect's grammar allows what its decoder does not read as a fitting call."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest

from mference_core import plugins
from mference_core.chat.format import Tools, WriteCalls
from mference_core.grammar.notation import Mark, Rules
from mference_core.plugins import LoadedFamily
from mference_gemma4.call_grammar import write_calls

Broken = Callable[..., LoadedFamily]


def with_grammar(broken: Broken, grammar: WriteCalls | None) -> LoadedFamily:
    return broken(mference_chat_format=lambda chat: attrs.evolve(chat, call_grammar=grammar))


@pytest.mark.parametrize("name", ["gemma4", "qwen36"])
def test_sound_grammars_pass(figures: Callable[..., Mapping[str, Any]], name: str) -> None:
    assert figures("forced-calls", plugins.load(name))["calls"] > 0


def test_a_dialect_without_one_says_so(figures: Callable[..., Mapping[str, Any]], broken: Broken) -> None:
    assert figures("forced-calls", with_grammar(broken, None))["grammar"] == "none"


def open_calls(rules: Rules, mark: Mark, _tools: Tools, _parallel: bool) -> str:  # noqa: FBT001
    """Leave calls unclosed."""
    return rules.rule(f'{mark("<|tool_call>")} "call:rest{{}}"')


def unknown_calls(rules: Rules, mark: Mark, _tools: Tools, _parallel: bool) -> str:  # noqa: FBT001
    """Call a tool nobody offered."""
    return rules.rule(f'{mark("<|tool_call>")} "call:other{{}}" {mark("<tool_call|>")}')


def loose_calls(rules: Rules, mark: Mark, _tools: Tools, _parallel: bool) -> str:  # noqa: FBT001
    """Leave out what the schema requires."""
    return rules.rule(f'{mark("<|tool_call>")} "call:paint{{area:7}}" {mark("<tool_call|>")}')


def talking_calls(rules: Rules, mark: Mark, tools: Tools, parallel: bool) -> str:  # noqa: FBT001
    """Say something first."""
    return f'"Well. " {write_calls(rules, mark, tools, parallel)}'


def many_calls(rules: Rules, mark: Mark, tools: Tools, _parallel: bool) -> str:  # noqa: FBT001
    """Call twice where one call was asked for."""
    call = write_calls(rules, mark, tools, False)  # noqa: FBT003
    return f"{call} {call}"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (open_calls, "cannot be read"),
        (unknown_calls, "cannot be read"),
        (loose_calls, "breaks its schema"),
        (talking_calls, "leaves text"),
        (many_calls, "one call was asked for, 2 came"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said(
    refused: Callable[[str, LoadedFamily], str], broken: Broken, grammar: WriteCalls, reason: str
) -> None:
    assert reason in refused("forced-calls", with_grammar(broken, grammar))
