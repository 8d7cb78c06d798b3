"""Anthropic's Messages: how an answer is written, whole or as events."""

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from attrs import define, field

from mference_core.chat import ToolCall
from mference_core.server import sse
from mference_core.server.answers import Piece, Said, Thought, Track, merged
from mference_core.server.errors import ANTHROPIC, ApiError
from mference_core.server.openai_fields import new_id

FRAGMENT_CHARACTERS = 1024
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def signature(thought: str) -> str:
    """Return what stands for a signature: a digest, since the text is no secret and nothing here is signed."""
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()


def event(name: str, **fields: Any) -> bytes:
    """Return one event, its type in the name and in the data."""
    return sse.encode({"type": name, **fields}, name)


@define(kw_only=True, eq=False)
class MessageWriter:
    """Writes one message. A block is open from its first piece until one of another kind; `omit` empties thoughts."""

    track: Track
    model: str
    prompt_tokens: int
    omit: bool = False
    ping: bytes = field(init=False, factory=lambda: event("ping"))
    _id: str = field(init=False, factory=lambda: new_id("msg_"))
    _open: type[Piece] | None = field(init=False, default=None)
    _index: int = field(init=False, default=-1)
    _thought: list[str] = field(init=False, factory=list)

    def _message(self, **more: Any) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self.model, **more}

    def _usage(self) -> dict[str, int]:
        """Return the usage; input tokens are those that were not read from the cache."""
        end, cached = self.track.end, 0
        if end is not None:
            cached = end.figures.cached_tokens
        return {
            "input_tokens": self.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 0 if end is None else end.figures.new_tokens,
        }

    def _stop(self) -> dict[str, Any]:
        end = self.track.end
        assert end is not None
        if end.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
        return {"stop_reason": STOPS[end.finish], "stop_sequence": None}

    def opening(self) -> Iterator[bytes]:
        """Yield the empty message."""
        message = self._message(content=[], stop_reason=None, stop_sequence=None, usage=self._usage())
        yield event("message_start", message=message)

    def said(self, index: int, piece: Piece) -> Iterator[bytes]:  # noqa: ARG002  there is one answer
        """Yield a piece: what it adds to the open block, or a block of its own."""
        if type(piece) is not self._open or isinstance(piece, ToolCall):
            yield from self._close()
            self._open, self._index = type(piece), self._index + 1
            yield event("content_block_start", index=self._index, content_block=self._empty(piece))
        match piece:
            case Said(text):
                yield self._delta(type="text_delta", text=text)
            case Thought(text):
                self._thought.append(text)
                if not self.omit:
                    yield self._delta(type="thinking_delta", thinking=text)
            case ToolCall(arguments=arguments):
                for at in range(0, len(arguments), FRAGMENT_CHARACTERS):
                    part = arguments[at : at + FRAGMENT_CHARACTERS]
                    yield self._delta(type="input_json_delta", partial_json=part)

    def _empty(self, piece: Piece) -> dict[str, Any]:
        match piece:
            case Said():
                return {"type": "text", "text": ""}
            case Thought():
                return {"type": "thinking", "thinking": "", "signature": ""}
            case ToolCall(identity, name):
                return {"type": "tool_use", "id": identity, "name": name, "input": {}}

    def _delta(self, **delta: Any) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open is Thought:
            thought, self._thought = "".join(self._thought), []
            yield self._delta(type="signature_delta", signature=signature(thought))
        yield event("content_block_stop", index=self._index)
        self._open = None

    def ended(self, index: int, track: Track) -> Iterator[bytes]:  # noqa: ARG002  there is one answer
        """Yield the end of the open block, why the message ended, and the usage."""
        yield from self._close()
        yield event("message_delta", delta=self._stop(), usage=self._usage())

    def closing(self) -> Iterator[bytes]:
        """Yield the end of the message."""
        yield event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Yield the error as an event."""
        yield sse.encode(error.body(ANTHROPIC, ""), "error")

    def whole(self) -> dict[str, Any]:
        """Return the message."""
        content = [self._block(piece) for piece in merged(self.track.pieces)]
        return self._message(content=content, **self._stop(), usage=self._usage())

    def _block(self, piece: Piece) -> dict[str, Any]:
        match piece:
            case Said(text):
                return {"type": "text", "text": text}
            case Thought(text):
                return {"type": "thinking", "thinking": "" if self.omit else text, "signature": signature(text)}
            case ToolCall(identity, name, arguments):
                return {"type": "tool_use", "id": identity, "name": name, "input": json.loads(arguments)}
