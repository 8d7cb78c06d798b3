"""OpenAI's Responses: how an answer is written, whole or as numbered events."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import define, field

from mference_core.chat import ToolCall
from mference_core.sampling import LogProbs
from mference_core.server import openai_fields as shared
from mference_core.server import sse
from mference_core.server.answers import Piece, Said, Thought, Track, merged
from mference_core.server.errors import ApiError
from mference_core.tokens import Tokenizer

FRAGMENT_CHARACTERS = 1024
IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"
ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "temperature",
    "top_logprobs",
    "top_p",
    "user",
)


@define(kw_only=True, eq=False)
class Open:
    """The item that is being said."""

    kind: type[Piece]
    item: dict[str, Any]
    texts: list[str] = field(factory=list)
    tokens: list[LogProbs] = field(factory=list)


@define(kw_only=True, eq=False)
class ResponseWriter:
    """Writes one response; `seal` turns reasoning into what clients send back, `names` has what tools are called there."""

    track: Track
    given: dict[str, Any]
    model: str
    tokenizer: Tokenizer
    prompt_tokens: int
    seal: Callable[[str], str] | None
    with_logprobs: bool
    names: Mapping[str, dict[str, str]] = field(factory=dict)
    ping: bytes = sse.PING
    _id: str = field(init=False, factory=lambda: shared.new_id("resp_"))
    _created: int = field(init=False, factory=lambda: int(time.time()))
    _sequence: int = field(init=False, default=0)
    _items: list[dict[str, Any]] = field(init=False, factory=list)
    _open: Open | None = field(init=False, default=None)

    def _event(self, kind: str, **fields: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse.encode(numbered, kind)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        given = self.given
        usual: dict[str, Any] = {"description": None, "parameters": {}, "strict": False}
        tools = [usual | tool if tool["type"] == "function" else tool for tool in given.get("tools", ())]
        response: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": self._items,
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": given.get("reasoning", {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": False,
            "text": {"format": given.get("text", {}).get("format", {"type": "text"}), "verbosity": "medium"},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": tools,
            "truncation": "disabled",
            "usage": None,
        }
        return response | {name: given.get(name) for name in ECHOED} | more

    def opening(self) -> Iterator[bytes]:
        """Yield the empty response twice, as the protocol has it."""
        yield self._event("response.created", response=self._response(IN_PROGRESS))
        yield self._event("response.in_progress", response=self._response(IN_PROGRESS))

    def said(self, index: int, piece: Piece) -> Iterator[bytes]:  # noqa: ARG002  there is one answer
        """Yield a piece: what it adds to the open item, or an item of its own."""
        if isinstance(piece, ToolCall):
            yield from self._close()
            yield from self._call(piece)
            return
        if self._open is None or self._open.kind is not type(piece):
            yield from self._close()
            yield from self._begin(piece)
        assert self._open is not None
        self._open.texts.append(piece.text)
        if isinstance(piece, Thought):
            yield self._about("response.reasoning_text.delta", delta=piece.text)
        else:
            self._open.tokens += piece.tokens
            yield self._about("response.output_text.delta", delta=piece.text, logprobs=self._logprobs(piece.tokens))

    def _about(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the one part of the open item."""
        assert self._open is not None
        place = {"item_id": self._open.item["id"], "output_index": len(self._items), "content_index": 0}
        return self._event(kind, **place, **fields)

    def _logprobs(self, tokens: tuple[LogProbs, ...] | list[LogProbs]) -> list[dict[str, Any]]:
        return [shared.logprob_entry(self.tokenizer, entry) for entry in tokens] if self.with_logprobs else []

    def _begin(self, piece: Said | Thought) -> Iterator[bytes]:
        item = self._item(piece, IN_PROGRESS, empty=True)
        self._open = Open(kind=type(piece), item=item)
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)
        yield self._about("response.content_part.added", part=self._part(type(piece)(""), ()))

    def _part(self, piece: Said | Thought, tokens: tuple[LogProbs, ...] | list[LogProbs]) -> dict[str, Any]:
        if isinstance(piece, Thought):
            return {"type": "reasoning_text", "text": piece.text}
        return {"type": "output_text", "text": piece.text, "annotations": [], "logprobs": self._logprobs(tokens)}

    def _item(self, piece: Piece, status: str, *, empty: bool = False, identity: str | None = None) -> dict[str, Any]:
        if isinstance(piece, ToolCall):
            called = self.names.get(piece.name, {"name": piece.name})
            named = {"call_id": piece.id, **called, "arguments": "" if empty else piece.arguments}
            return {"id": identity or shared.new_id("fc_"), "type": "function_call", "status": status, **named}
        if isinstance(piece, Thought):
            sealed = self.seal(piece.text) if self.seal is not None and not empty else None
            head = {"id": identity or shared.new_id("rs_"), "type": "reasoning", "status": status, "summary": []}
            return head | {"content": [] if empty else [self._part(piece, ())], "encrypted_content": sealed}
        head = {"id": identity or shared.new_id("msg_"), "type": "message", "role": "assistant", "status": status}
        return head | {"content": [] if empty else [self._part(piece, piece.tokens)]}

    def _close(self, status: str = COMPLETED) -> Iterator[bytes]:
        if self._open is None:
            return
        held = self._open
        text, tokens = "".join(held.texts), tuple(held.tokens)
        piece: Said | Thought = Thought(text) if held.kind is Thought else Said(text, tokens)
        if held.kind is Thought:
            yield self._about("response.reasoning_text.done", text=text)
        else:
            yield self._about("response.output_text.done", text=text, logprobs=self._logprobs(tokens))
        yield self._about("response.content_part.done", part=self._part(piece, tokens))
        item = self._item(piece, status, identity=held.item["id"])
        yield self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        item, at = self._item(call, IN_PROGRESS, empty=True), len(self._items)
        yield self._event("response.output_item.added", output_index=at, item=item)
        place, text = {"item_id": item["id"], "output_index": at}, call.arguments
        for start in range(0, len(text), FRAGMENT_CHARACTERS):
            part = text[start : start + FRAGMENT_CHARACTERS]
            yield self._event("response.function_call_arguments.delta", **place, delta=part)
        yield self._event("response.function_call_arguments.done", **place, arguments=text, name=item["name"])
        done = self._item(call, COMPLETED, identity=item["id"])
        yield self._event("response.output_item.done", output_index=at, item=done)
        self._items.append(done)

    @property
    def _status(self) -> str:
        return INCOMPLETE if self.track.end is not None and self.track.end.finish == "length" else COMPLETED

    def _final(self) -> dict[str, Any]:
        status = self._status
        details = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        done = {"completed_at": int(time.time())} if status == COMPLETED else {}
        return self._response(status, incomplete_details=details, usage=self._usage(), **done)

    def _usage(self) -> dict[str, Any]:
        figures, reasoning = shared.total([self.track])
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": figures.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": figures.new_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": self.prompt_tokens + figures.new_tokens,
        }

    def ended(self, index: int, track: Track) -> Iterator[bytes]:  # noqa: ARG002  there is one answer
        """Yield the end of the open item."""
        yield from self._close(self._status)

    def closing(self) -> Iterator[bytes]:
        """Yield the whole response."""
        response = self._final()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Yield the failed response."""
        told = {"code": error.code if error.status < 500 else "server_error", "message": error.message}
        yield self._event("response.failed", response=self._response(FAILED, error=told))

    def whole(self) -> dict[str, Any]:
        """Return the response."""
        pieces = merged(self.track.pieces)
        cut = pieces[-1] if pieces and not isinstance(pieces[-1], ToolCall) else None  # calls are told when complete
        self._items = [self._item(piece, self._status if piece is cut else COMPLETED) for piece in pieces]
        return self._final()
