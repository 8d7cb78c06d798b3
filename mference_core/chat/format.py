"""What a family says about its chat dialect, and the events its decoder turns tokens into."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from mference_core.chat.messages import Message
from mference_core.errors import RequestError
from mference_core.grammar.notation import Mark, Rules
from mference_core.tokens import Tokenizer

Tools = list[dict[str, Any]]


@frozen
class Text:
    """Visible text."""

    text: str


@frozen
class Reasoning:
    """Text the model thinks, not part of the answer."""

    text: str


@frozen
class ToolCall:
    """A finished call: `arguments` is a JSON object as compact text, keys sorted."""

    id: str
    name: str
    arguments: str


@frozen
class Malformed:
    """Why the text that follows is text and not a call."""

    reason: str


Event = Text | Reasoning | ToolCall | Malformed


class StreamDecoder(Protocol):
    """Turns the ids of one answer into events; stop ids are not pushed. Never raises for what a model wrote."""

    def push(self, token: int) -> list[Event]:
        """Return what `token` completes."""
        ...

    def finish(self, reason: str) -> list[Event]:
        """Return what is left when generation ends: `reason` is that of the stop id, or `max_tokens`, `stop_string`."""
        ...


Normalizer = Callable[[list[Message], Tools | None], tuple[list[Message], Tools | None]]
MakeDecoder = Callable[[Tokenizer, Tools | None, Sequence[int]], StreamDecoder]

WriteCalls = Callable[[Rules, Mark, Tools, bool], str]
"""Adds rules for calls of the checked tools, control tokens written by the mark; returns what stands for exactly one
call or, where the flag says so, for one or several. What it allows, the decoder must read as those calls."""


def as_it_is(messages: list[Message], tools: Tools | None) -> tuple[list[Message], Tools | None]:
    """Leave a conversation as it is."""
    return messages, tools


@frozen(kw_only=True)
class ChatFormat:
    """A family's chat dialect.

    `control` spells the control tokens of the dialect: the tokenizer is loaded with them. `stops` maps those that end an answer to the reason (`eos`, `end_of_turn`, `tool_calls`). `bos` is put
    before raw prompts. `template` is the family's own, used only if the checkpoint has none, or always with
    `template_always`: for dialects that the templates of checkpoints do not cover. `normalize` adapts
    checked messages and tools before rendering, raising `RequestError` for what the dialect cannot say. `decoder`
    makes the decoder of an answer from the tokenizer, the checked tools and the ids of the prompt. `reasoning` names
    the control tokens around hidden text. `efforts` maps each accepted `reasoning_effort` to whether it thinks.
    `call_grammar` writes the dialect's tool calls as a grammar, so that a forced call is valid by construction; where
    calls begin with `call_opening`, ordinary text and no control token, it writes what follows that.
    """

    stops: Mapping[str, str]
    template: str
    decoder: MakeDecoder
    control: tuple[str, ...] = ()
    bos: str | None = None
    template_always: bool = False
    normalize: Normalizer = as_it_is
    reasoning: tuple[str, str] | None = None
    efforts: Mapping[str, bool] = field(factory=dict)
    call_grammar: WriteCalls | None = None
    call_opening: str | None = None

    def stop_ids(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Return the reason of each stop id. Raises `ManifestError` if the vocabulary lacks a stop token."""
        return {tokenizer.id_of(spelling): reason for spelling, reason in self.stops.items()}

    def raw_prompt(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Return the ids of a prompt without a template. Raises `RequestError` if it is empty."""
        if not text:
            raise RequestError(what="the prompt", got="empty", expected="at least one character")
        return [tokenizer.id_of(mark) for mark in (self.bos,) if mark is not None] + tokenizer.encode(text)

    def thinking(self, *, effort: str | None = None, enable_thinking: bool | None = None) -> bool:
        """Settle whether the model thinks. Raises `RequestError` for an effort the family cannot map."""
        if effort is not None and effort not in self.efforts:
            accepted = ", ".join(self.efforts) or "no value: this family does not think"
            raise RequestError(what="reasoning_effort", got=repr(effort), expected=accepted)
        wish = self.efforts[effort] if effort is not None else bool(enable_thinking)
        if effort is not None and enable_thinking is not None and wish != enable_thinking:
            raise RequestError(
                what="enable_thinking",
                got=str(enable_thinking).lower(),
                expected=f"what reasoning_effort {effort} means",
            )
        if wish and True not in self.efforts.values():
            raise RequestError(what="enable_thinking", got="true", expected="false: this family does not think")
        return wish


class TextDecoder:
    """The decoder of a dialect without tool calls: what lies between the reasoning marks is reasoning, the rest text."""

    def __init__(self, tokenizer: Tokenizer, reasoning: tuple[str, str] | None, prompt: Sequence[int] = ()) -> None:
        marks = [tokenizer.id_of(mark) for mark in reasoning or ()]
        self.hidden = starts_hidden(prompt, *marks) if marks else False
        self._marks = {mark: mark == marks[0] for mark in marks}
        self._text = tokenizer.detokenizer(first=False)

    def push(self, token: int) -> list[Event]:
        """Return the text that `token` completes."""
        if token not in self._marks:
            return self._shown(self._text.push(token))
        left = self._shown(self._text.flush())
        self.hidden = self._marks[token]
        return left

    def finish(self, reason: str) -> list[Event]:  # noqa: ARG002
        """Return what an unfinished character leaves."""
        return self._shown(self._text.flush())

    def _shown(self, text: str) -> list[Event]:
        return [Reasoning(text) if self.hidden else Text(text)] if text else []


def starts_hidden(prompt: Sequence[int], opening: int, closing: int) -> bool:
    """Say whether a rendered prompt ends inside reasoning: its last reasoning mark is an opening one."""
    return next((token == opening for token in reversed(prompt) if token in (opening, closing)), False)
