"""HTTP connections with patience that ends: slow heads, stalled readers and idle ones are let go."""

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """The library's HTTP/1.1 with three more clocks.

    `head_seconds` is for a request's head, from the connection or the end of the answer before; `stall_seconds` for a
    client to take what waits for it. At most `connections_most` are held at once; one more is closed unheard.
    """

    head_seconds: ClassVar[float] = 10.0
    stall_seconds: ClassVar[float] = 30.0
    connections_most: ClassVar[int] = 256

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_clock: asyncio.TimerHandle | None = None
        self._stall_clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head, unless there are too many connections."""
        if len(self.connections) >= self.connections_most:
            self.transport = transport
            super().connection_made(transport)
            transport.abort()
            return
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks, the library's too: it forgets its own where a connection is reset."""
        super().connection_lost(exc)
        self._stop_clocks()
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the clock of a head runs until it is whole."""
        if self._idle and self._head_clock is None:
            self._wait_for_head()
        super().data_received(data)
        if not self._idle:
            self._stop_head_clock()

    def handle_events(self) -> None:
        """Take what is complete, a request that waited behind another included."""
        super().handle_events()
        if not self._idle:
            self._stop_head_clock()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        if self._stall_clock is None:
            self._stall_clock = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting: the client reads again."""
        self._stop_stall_clock()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; one whose client has not read its answer would never close by itself."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(self.stall_seconds, self.transport.abort)

    @property
    def _idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._head_clock = self.loop.call_later(self.head_seconds, self._late)

    def _late(self) -> None:
        self._head_clock = None
        if self._idle and not self.transport.is_closing():
            self.transport.abort()

    def _stop_head_clock(self) -> None:
        if self._head_clock is not None:
            self._head_clock.cancel()
            self._head_clock = None

    def _stop_stall_clock(self) -> None:
        if self._stall_clock is not None:
            self._stall_clock.cancel()
            self._stall_clock = None

    def _stop_clocks(self) -> None:
        self._stop_head_clock()
        self._stop_stall_clock()
