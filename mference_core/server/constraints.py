"""What an answer is held to while it is made: a grammar, a budget of reasoning, or both."""

from collections.abc import Sequence

import mlx.core as mx
from attrs import define, field

from mference_core.chat import ChatFormat, check_tools, starts_hidden
from mference_core.errors import RequestError
from mference_core.grammar.answers import Grammars
from mference_core.scheduler.request import Constraint
from mference_core.server.errors import api_error
from mference_core.server.requests import AUTO, NAMED, REQUIRED, Ask
from mference_core.tokens import Tokenizer


@define(kw_only=True, eq=False)
class ThinkingBudget:
    """Lets an answer reason for `budget` tokens, then only the mark that ends the reasoning may follow."""

    opening: int
    closing: int
    budget: int
    vocab_size: int
    hidden: bool = False
    _used: int = field(init=False, default=0)

    def allowed(self) -> mx.array | None:
        """Return which ids may come next, (V,) bool, or None where all may."""
        if not self.hidden or self._used < self.budget:
            return None
        return mx.arange(self.vocab_size) == self.closing

    def accept(self, token: int) -> None:
        """Count a token of reasoning."""
        if token in (self.opening, self.closing):
            self.hidden = token == self.opening
        elif self.hidden:
            self._used += 1

    def finished(self) -> bool:
        """Never: a budget does not say when an answer is complete."""
        return False


@define(eq=False)
class Both:
    """Two constraints at once."""

    first: Constraint
    second: Constraint

    def allowed(self) -> mx.array | None:
        """Return which ids both allow, (V,) bool."""
        one, other = self.first.allowed(), self.second.allowed()
        if one is None or other is None:
            return one if other is None else other
        return one & other

    def accept(self, token: int) -> None:
        """Tell both."""
        self.first.accept(token)
        self.second.accept(token)

    def finished(self) -> bool:
        """Say whether either is complete."""
        return self.first.finished() or self.second.finished()


def constraint_of(
    ask: Ask, tokenizer: Tokenizer, chat: ChatFormat, vocab_size: int, prompt: Sequence[int], *, thinking: bool
) -> Constraint | None:
    """Return what this answer must follow. Raises `ApiError` for what cannot be had."""
    budget: Constraint | None = None
    if thinking and ask.thinking_budget is not None and chat.reasoning is not None:
        opening, closing = map(tokenizer.id_of, chat.reasoning)
        budget = ThinkingBudget(
            opening=opening,
            closing=closing,
            budget=ask.thinking_budget,
            vocab_size=vocab_size,
            hidden=starts_hidden(prompt, opening, closing),
        )
    grammars = Grammars(chat=chat, tokenizer=tokenizer, vocab_size=vocab_size)
    try:
        grammar = _grammar(ask, grammars, prompt, thinking=thinking)
    except RequestError as error:
        path = ask.output.path if ask.output is not None else ask.path(error.what)
        raise api_error(error, path) from error
    if grammar is None or budget is None:
        return grammar or budget
    return Both(grammar, budget)


def _grammar(ask: Ask, grammars: Grammars, prompt: Sequence[int], *, thinking: bool) -> Constraint | None:
    tools = [tool for tool in check_tools(ask.tools) or () if ask.named in (None, tool["function"]["name"])]
    parallel = ask.parallel and ask.named is None
    if ask.choice in (REQUIRED, NAMED):
        return grammars.tool_calls(tools, prompt, parallel=parallel, thinking=thinking)
    if ask.output is not None:
        schema = ask.output.schema
        if tools and ask.choice == AUTO:
            return grammars.json_or_calls(schema, tools, prompt, parallel=parallel, thinking=thinking)
        return grammars.json_answer(schema, prompt, thinking=thinking)
    if ask.strict and ask.choice == AUTO:
        return grammars.text_and_calls(tools, prompt, parallel=parallel, thinking=thinking)
    return None
