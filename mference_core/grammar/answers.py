"""The constraints a request can ask for: an answer that is JSON, or tool calls and nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from mference_core.chat.format import ChatFormat, Tools, starts_hidden
from mference_core.errors import RequestError
from mference_core.grammar.constraint import GrammarConstraint
from mference_core.grammar.notation import ANY, Rules, json_value, literal, token, without
from mference_core.grammar.values import inlined
from mference_core.tokens import Tokenizer

GAP = r"/[ \t\r\n]{0,8}/"
"""White space between reasoning and the answer."""


@frozen(kw_only=True)
class Grammars:
    """Makes constraints for one model: its dialect, its tokenizer, and how many ids its logits have."""

    chat: ChatFormat
    tokenizer: Tokenizer
    vocab_size: int

    def json_answer(
        self, schema: Mapping[str, Any] | None, prompt: Sequence[int], *, thinking: bool = False
    ) -> GrammarConstraint:
        """Constrain the visible answer to a JSON value of `schema`, or to any JSON object.

        `thinking` allows reasoning first; it is required where `prompt` ends inside it. Raises `RequestError` for a
        schema that cannot be followed.
        """
        rules = Rules()
        value = json_value(schema if schema is not None else {"type": "object"})
        return self._constraint(
            rules.text(self._reasoning(rules, prompt, thinking=thinking) + value), "response_format"
        )

    def tool_calls(
        self, tools: Tools, prompt: Sequence[int], *, parallel: bool = True, thinking: bool = False
    ) -> GrammarConstraint:
        """Constrain the answer to one call of one of `tools`, or to several where `parallel`.

        Raises `RequestError` if the dialect has no tool calls or a tool's schema cannot be followed.
        """
        return self._constraint(self.call_rules(tools, prompt, parallel=parallel, thinking=thinking), "tools")

    def text_and_calls(
        self, tools: Tools, prompt: Sequence[int], *, parallel: bool = True, thinking: bool = False
    ) -> GrammarConstraint:
        """Leave the text free and constrain the calls that may follow it. Raises as `tool_calls`."""
        rules, opening = Rules(), self.chat.call_opening
        calls = self._calls(rules, tools, parallel=parallel)
        answer = f"{rules.terminal(ANY)} ({calls})?"
        if opening is not None:  # text that the calls' own opening ends, or without it
            answer = f"({rules.until(opening)} {calls} | {rules.terminal(without(opening))})"
        return self._constraint(rules.text(self._reasoning(rules, prompt, thinking=thinking) + answer), "tools")

    def json_or_calls(
        self,
        schema: Mapping[str, Any] | None,
        tools: Tools,
        prompt: Sequence[int],
        *,
        parallel: bool = True,
        thinking: bool = False,
    ) -> GrammarConstraint:
        """Constrain the answer to calls, or to what `json_answer` allows. Raises as these two."""
        rules = Rules()
        value = json_value(schema if schema is not None else {"type": "object"})
        answer = f"({value} | {self._opened(rules, tools, parallel=parallel)})"
        return self._constraint(
            rules.text(self._reasoning(rules, prompt, thinking=thinking) + answer), "response_format"
        )

    def call_rules(self, tools: Tools, prompt: Sequence[int], *, parallel: bool, thinking: bool = False) -> str:
        """Return the grammar of `tool_calls`. Raises `RequestError` likewise."""
        rules = Rules()
        calls = self._opened(rules, tools, parallel=parallel)
        return rules.text(self._reasoning(rules, prompt, thinking=thinking) + calls)

    def _opened(self, rules: Rules, tools: Tools, *, parallel: bool) -> str:
        opening, calls = self.chat.call_opening, self._calls(rules, tools, parallel=parallel)
        return calls if opening is None else f"{literal(opening)} {calls}"

    def _calls(self, rules: Rules, tools: Tools, *, parallel: bool) -> str:
        if self.chat.call_grammar is None:
            raise RequestError(what="tool_choice", got="a forced call", expected="auto or none for this family")
        return self.chat.call_grammar(rules, self._mark, _without_references(tools), parallel)

    def _mark(self, spelling: str) -> str:
        return token(self.tokenizer.id_of(spelling))

    def _constraint(self, grammar: str, what: str) -> GrammarConstraint:
        stops = self.chat.stop_ids(self.tokenizer)
        return GrammarConstraint.of(grammar, what, self.tokenizer, self.vocab_size, stops)

    def _reasoning(self, rules: Rules, prompt: Sequence[int], *, thinking: bool) -> str:
        """Return what may, or must, stand before the answer."""
        if self.chat.reasoning is None:
            return ""
        opening, closing = self.chat.reasoning
        rest = f"{rules.terminal(ANY)} {self._mark(closing)} {rules.terminal(GAP)}"
        if starts_hidden(prompt, self.tokenizer.id_of(opening), self.tokenizer.id_of(closing)):
            return f"{rest} "
        return f"({self._mark(opening)} {rest})? " if thinking else ""


def _without_references(tools: Tools) -> Tools:
    """Return the tools with their schemas' references put in place: dialects decide by a value's type."""
    plain = []
    for tool in tools:
        schema = tool["function"].get("parameters") or {}
        plain.append({**tool, "function": {**tool["function"], "parameters": inlined(schema, schema)}})
    return plain
