"""Server-sent events: how one is written, and a reader for tests and tools."""

import json
from collections.abc import Iterator
from typing import Any

from attrs import define, field, frozen

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def encode(value: Any, event: str | None = None) -> bytes:
    """Return one event whose data is compact JSON, on one line whatever the text holds."""
    data = _compact(value)
    head = f"event: {event}\n" if event is not None else ""
    return f"{head}data: {data}\n\n".encode()


@frozen
class ServerEvent:
    """One event as read: its name (`message` if it has none) and its data."""

    event: str
    data: str


@define
class Reader:
    """Reads events from bytes that arrive in any pieces, as the HTML standard says."""

    _buffer: bytes = field(init=False, default=b"")
    _event: str = field(init=False, default="")
    _data: list[str] = field(init=False, factory=list)
    _begun: bool = field(init=False, default=False)

    def push(self, data: bytes) -> Iterator[ServerEvent]:
        """Yield the events that `data` completes."""
        self._buffer += data
        if not self._begun:
            if len(self._buffer) < 3 and b"\xef\xbb\xbf".startswith(self._buffer):
                return
            self._buffer, self._begun = self._buffer.removeprefix(b"\xef\xbb\xbf"), True
        while (line := self._line()) is not None:
            event = self._read(line.decode("utf-8", "replace"))
            if event is not None:
                yield event

    def _line(self) -> bytes | None:
        """Return the next line; one that ends in a carriage return waits for what follows it."""
        ends = [at for mark in (b"\r", b"\n") if (at := self._buffer.find(mark)) >= 0]
        if not ends:
            return None
        at = min(ends)
        if self._buffer[at : at + 1] == b"\r":
            if at + 1 == len(self._buffer):
                return None
            size = 2 if self._buffer[at + 1 : at + 2] == b"\n" else 1
        else:
            size = 1
        line, self._buffer = self._buffer[:at], self._buffer[at + size :]
        return line

    def _read(self, line: str) -> ServerEvent | None:
        if not line:
            data, name = self._data, self._event or "message"
            self._data, self._event = [], ""
            return ServerEvent(name, "\n".join(data)) if data else None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        return None
