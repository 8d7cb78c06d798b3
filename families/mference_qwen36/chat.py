"""The Qwen 3.6 chat dialect: stops, template, hidden thoughts and tool calls.

Unusual: calls are XML whose values carry no type, so the tool's schema decides what each is (`calls`); a thought in
the prompt is already closed when the model is not to think; the white space around thoughts and calls belongs to the
marks and is not shown. The template's head comment has the grammar of a conversation. Past thoughts are left out of a
rendered history, so a later prompt does not always begin with an earlier one.
"""

import secrets
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from mference_core.chat import ChatFormat, Event, Malformed, Message, Reasoning, Text, ToolCall, starts_hidden
from mference_core.errors import RequestError
from mference_core.tokens import Tokenizer
from mference_qwen36.calls import CALL, NO_CALL, Unreadable, call_grammar, can_be_written, parse_call

MAX_CALL_BYTES = 256 << 10
STOPS = {"<|im_end|>": "end_of_turn", "<|endoftext|>": "eos"}
THOUGHT = ("<think>", "</think>")
OTHERS = ("<|im_start|>", "<tool_response>", "</tool_response>")
EFFORTS = {"none": False, "low": True, "medium": True, "high": True}  # thinking is on or off, not graded
GUIDANCE = ("system", "developer")


class QwenDecoder:
    """The events of one answer: thoughts hidden, calls read when they close."""

    def __init__(self, tokenizer: Tokenizer, tools: list[dict[str, Any]] | None, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.tools = {t["function"]["name"]: t["function"].get("parameters") for t in tools or ()}
        self._think, self._no_think, self._call, self._no_call = map(tokenizer.id_of, (*THOUGHT, CALL, NO_CALL))
        self._text = tokenizer.detokenizer(first=False)
        self._hidden = starts_hidden(prompt, self._think, self._no_think)
        self._space = ""  # white space that is shown only if text follows
        self._fresh = False  # a mark came last: white space goes with it
        self._body: list[int] | None = None  # ids of a call so far, None outside one
        self._size = 0

    def push(self, token: int) -> list[Event]:
        """Return what `token` completes."""
        if self._body is not None:
            return self._in_call(token, self._body)
        if token not in (self._think, self._no_think, self._call):
            return self._shown(self._text.push(token))
        left = self._shown(self._text.flush())
        if token == self._call:
            self._body, self._size = [], 0
        else:
            self._hidden, self._space, self._fresh = token == self._think, "", True
        return left

    def finish(self, reason: str) -> list[Event]:  # noqa: ARG002
        """Return what is left: white space, an unfinished character, or a call that was cut off, as text."""
        events = self._shown(self._text.flush())
        if self._body is not None:
            body, self._body = self._body, None
            return events + self._unread("the call is not closed", body, closed=False)
        return events + self._events(self._space)

    def _events(self, text: str) -> list[Event]:
        return [Reasoning(text) if self._hidden else Text(text)] if text else []

    def _shown(self, text: str) -> list[Event]:
        """Return text, white space at its end held back and after a mark dropped."""
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        body = text.rstrip()
        if not body:
            self._space += text
            return []
        shown, self._space = self._space + body, text[len(body) :]
        return self._events(shown)

    def _in_call(self, token: int, body: list[int]) -> list[Event]:
        if token != self._no_call:
            body.append(token)
            self._size += len(self.tokenizer.spelling(token))
            if self._size <= MAX_CALL_BYTES:
                return []
            self._body = None
            return self._unread(f"the call is longer than {MAX_CALL_BYTES} bytes", body, closed=False)
        self._body = None
        try:
            name, arguments = parse_call(self._spell(body), self.tools)
        except Unreadable as reason:
            return self._unread(str(reason), body, closed=True)
        self._space, self._fresh = "", True
        return [ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=arguments)]

    def _spell(self, ids: Sequence[int]) -> str:
        stream = self.tokenizer.detokenizer(spell_control=True, first=False)
        return "".join([stream.push(token) for token in ids] + [stream.flush()])

    def _unread(self, reason: str, body: list[int], *, closed: bool) -> list[Event]:
        space, self._space, self._fresh = self._space, "", False
        return [Malformed(reason), *self._events(space + CALL + self._spell(body) + (NO_CALL if closed else ""))]


def _check_call(name: str, arguments: dict[str, Any]) -> None:
    """Raise `RequestError` for a past call that would not read back as it was."""
    for key, value in arguments.items():
        if not key or any(letter in key for letter in "\r\n<>"):
            raise RequestError(
                what=f"a key of the arguments of {name}", got=repr(key), expected="a name without line ends, '<' or '>'"
            )
        if isinstance(value, str) and not can_be_written(value):
            raise RequestError(
                what=f"argument {key} of {name}", got="text with a line </parameter>", expected="no such line"
            )


def normalize(
    messages: list[Message], tools: list[dict[str, Any]] | None
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Join leading guidance in one system message, and check that past calls can be written in this dialect."""
    guidance = [message["content"].strip() for message in messages if message["role"] in GUIDANCE]
    rest = [message for message in messages if message["role"] not in GUIDANCE]
    for message in rest:
        for call in message.get("tool_calls", ()):
            _check_call(call["function"]["name"], call["function"]["arguments"])
    if guidance:
        rest.insert(0, {"role": "system", "content": "\n\n".join(filter(None, guidance))})
    return rest, tools


def chat_format() -> ChatFormat:
    """Return the dialect."""
    return ChatFormat(
        control=(*STOPS, *THOUGHT, CALL, NO_CALL, *OTHERS),
        stops=STOPS,
        template=files("mference_qwen36").joinpath("chat_template.jinja").read_text(encoding="utf-8"),
        normalize=normalize,
        decoder=QwenDecoder,
        reasoning=THOUGHT,
        efforts=EFFORTS,
        call_grammar=call_grammar,
    )
