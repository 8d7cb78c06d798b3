"""The DeepSeek V4 chat dialect: stops, template, hidden thoughts and tool calls.

Unusual: nothing of a message is trimmed; there is no role for tool results, which become part of the user's turn; the
marks of tool calls are ordinary text, so calls are found by scanning what is shown (`calls`). The release brings a
program instead of a template, and the templates that conversions bring do not know tools: ours is always used. Its
head comment has the grammar of a conversation.
"""

import secrets
from collections.abc import Generator, Iterator, Sequence
from importlib.resources import files
from typing import Any

from mference_core.chat import ChatFormat, Event, Malformed, Message, Reasoning, Text, ToolCall, starts_hidden
from mference_core.chat.values import dump_json
from mference_core.tokens import Tokenizer
from mference_deepseekv4.call_grammar import write_calls
from mference_deepseekv4.calls import CLOSE, DSML, OPEN, Unreadable, parse_calls, written_parameters

MAX_BLOCK_BYTES = 256 << 10
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
STOPS = {EOS: "end_of_turn"}
THOUGHT = ("<think>", "</think>")
TURNS = ("<｜User｜>", "<｜Assistant｜>")
EFFORTS = {"none": False, "low": True, "medium": True, "high": True, "xhigh": True, "max": True}
GAP = "\n\n"
"""What stands between text and a block of calls; it belongs to the block."""


class DsmlDecoder:
    """The events of one answer: thoughts hidden, blocks of calls read when they close.

    Shown text that may be the beginning of a block is held back until it is one or is none.
    """

    def __init__(self, tokenizer: Tokenizer, tools: list[dict[str, Any]] | None, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.tools = {t["function"]["name"]: t["function"].get("parameters") for t in tools or ()}
        self._think, self._no_think = map(tokenizer.id_of, THOUGHT)
        self._mark = tokenizer.control.get(DSML)  # some vocabularies hold it as a token of its own
        self._text = tokenizer.detokenizer(first=False)
        self._hidden = starts_hidden(prompt, self._think, self._no_think)
        self._held = ""  # shown text that may begin a block
        self._block: list[str] | None = None  # pieces of a block so far, its opening first; None outside one
        self._end = ""  # the last characters of a block, where its closing mark may have begun
        self._size = 0

    def push(self, token: int) -> list[Event]:
        """Return what `token` completes."""
        if token not in self.tokenizer.control_ids:
            return self._take(self._text.push(token))
        events = self._take(self._text.flush())
        if self._block is None and token in (self._think, self._no_think):
            events += self._released()
            self._hidden = token == self._think
        elif self._block is not None or token == self._mark:
            events += self._take(self.tokenizer.spelling(token).decode())
        return events

    def finish(self, reason: str) -> list[Event]:  # noqa: ARG002
        """Return what is left: text held back, an unfinished character, or a block that was cut off, as text."""
        events = self._take(self._text.flush())
        if self._block is not None:
            events += self._unread("the block of calls is not closed")
        return events + self._released()

    def _take(self, text: str) -> list[Event]:
        """Return the events of further text, blocks of calls read out of it."""
        if not text:
            return []
        if self._hidden or not self.tools:
            return [Reasoning(text) if self._hidden else Text(text)]
        return list(self._scan(text))

    def _scan(self, text: str) -> Iterator[Event]:
        while text:
            if self._block is None:
                text = yield from self._before(text)
            else:
                text = yield from self._within(self._block, text)

    def _before(self, text: str) -> Generator[Event, None, str]:
        """Show text up to a block or to what may become one; return what is left to scan."""
        text, self._held = self._held + text, ""
        at = text.find(OPEN)
        if at < 0:
            kept = _kept(text)
            self._held = text[len(text) - kept :]
            yield from _shown(text[: len(text) - kept])
            return ""
        start = at - len(GAP) if text[:at].endswith(GAP) else at
        yield from _shown(text[:start])
        self._block, self._end, self._size = [text[start : at + len(OPEN)]], "", 0
        return text[at + len(OPEN) :]

    def _within(self, block: list[str], text: str) -> Generator[Event, None, str]:
        """Add text to a block and read it when it closes; return what is left to scan."""
        ahead = self._end + text
        at = ahead.find(CLOSE)
        taken = len(text) if at < 0 else at + len(CLOSE) - len(self._end)
        block.append(text[:taken])
        self._end, self._size = ahead[1 - len(CLOSE) :], self._size + len(text[:taken].encode())
        if self._size > MAX_BLOCK_BYTES:
            yield from self._unread(f"the block of calls is longer than {MAX_BLOCK_BYTES} bytes")
        elif at >= 0:
            yield from self._read("".join(block[1:]).removesuffix(CLOSE))
        return text[taken:]

    def _read(self, inside: str) -> Iterator[Event]:
        try:
            calls = parse_calls(inside, self.tools)
        except Unreadable as reason:
            yield from self._unread(str(reason))
            return
        self._block = None
        for name, arguments in calls:
            yield ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=arguments)

    def _unread(self, reason: str) -> list[Event]:
        block, self._block = self._block or [], None
        return [Malformed(reason), Text("".join(block))]

    def _released(self) -> list[Event]:
        held, self._held = self._held, ""
        return _shown(held)


def _shown(text: str) -> list[Event]:
    return [Text(text)] if text else []


def _kept(text: str) -> int:
    """Return the length of the longest end of `text` that a block may begin with, the gap before it included."""
    return next((n for n in range(len(GAP + OPEN), 0, -1) if text.endswith((OPEN[:n], (GAP + OPEN)[:n]))), 0)


def normalize(
    messages: list[Message], tools: list[dict[str, Any]] | None
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Return turns and declarations as the template writes them.

    System texts are joined, and there is one, perhaps empty, to declare tools in. Where tools are in play, their
    results and the user's texts between two answers become one turn. Raises `RequestError` for what cannot be written.
    """
    system = [message["content"] for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    calls = any(message.get("tool_calls") for message in rest)
    turns = _merged(rest) if tools or calls else rest
    head: list[Message] = [{"role": "system", "content": GAP.join(system)}] if system or tools else []
    declared = [{"line": _declaration(**tool["function"])} for tool in tools] if tools else None
    return [*head, *map(_with_calls, turns)], declared


def _declaration(name: str, description: str, parameters: dict[str, Any] | None = None) -> str:
    """Return a tool as one line of compact JSON."""
    members = [("name", name), ("description", description), *([("parameters", parameters)] if parameters else [])]
    return "{" + ",".join(f"{dump_json(key)}:{dump_json(value)}" for key, value in members) + "}"


def _with_calls(message: Message) -> Message:
    calls = [
        {"name": call["function"]["name"], "parameters": written_parameters(**call["function"])}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "calls": calls}


def _merged(messages: list[Message]) -> Iterator[Message]:
    """Yield turns: results in the order of their calls, and the user's texts after them, as one."""
    order: dict[str, int] = {}
    results = dict[int, str]()
    texts = list[str]()
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool":
            results[order[message["tool_call_id"]]] = f"<tool_result>{message['content']}</tool_result>"
        elif message is not None and message["role"] == "user":
            texts.append(message["content"])
        else:
            parts = [text for _, text in sorted(results.items())] + texts
            if parts:
                yield {"role": "user", "content": GAP.join(parts)}
            results, texts = {}, []
            if message is not None:
                yield message
                order = {call["id"]: number for number, call in enumerate(message.get("tool_calls", ()))}


def chat_format() -> ChatFormat:
    """Return the dialect."""
    return ChatFormat(
        control=(BOS, *STOPS, *TURNS, *THOUGHT),
        stops=STOPS,
        bos=BOS,
        template=files("mference_deepseekv4").joinpath("chat_template.jinja").read_text(encoding="utf-8"),
        template_always=True,
        normalize=normalize,
        decoder=DsmlDecoder,
        reasoning=THOUGHT,
        efforts=EFFORTS,
        call_grammar=write_calls,
        call_opening=OPEN,
    )
