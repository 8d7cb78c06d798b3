"""Several requests under way, one writer, and records only of what is durable (gturbo-format 17, 18)."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, Queue
from threading import Lock, Thread

from attrs import define, field, frozen

from mference_core.install.answers import RemoteFile
from mference_core.install.files import OutputFiles, RangeWriter
from mference_core.install.http import HubClient, Stopped
from mference_core.install.ranges import RangeRequest
from mference_core.install.settling import Settled, Settler

BUFFER_BYTES = 1 << 20
_WAKE_SECONDS = 0.2
_JOIN_SECONDS = 5.0


@frozen(kw_only=True)
class _Block:
    """Bytes of a request in the order they came; `buffer` goes back to the pool once they are written."""

    request: RangeRequest
    buffer: bytearray
    size: int


@define(kw_only=True)
class Transfer:
    """Fetches requests into output files.

    `connections` threads receive, the calling thread alone writes, and others make finished requests durable, read
    them back for their digests and hand them to `settled`. Memory is bounded by the buffers: two MiB and a
    half per connection.
    """

    client: HubClient
    files: Mapping[str, RemoteFile]
    outputs: OutputFiles
    settled: Settled
    received: Callable[[str, int], None] = lambda _, __: None
    _todo: deque[RangeRequest] = field(factory=deque, init=False)
    _inbox: "Queue[_Block | RangeRequest | BaseException]" = field(factory=Queue, init=False)
    _free: "Queue[bytearray]" = field(factory=Queue, init=False)
    _lock: Lock = field(factory=Lock, init=False)

    def run(self, requests: Sequence[RangeRequest]) -> None:
        """Fetch all of `requests`; what was complete when it failed or was interrupted is settled all the same.

        Raises `SourceError`, `OSError` and what `settled` raises.
        """
        self._todo.extend(requests)
        count = min(self.client.connections, len(requests))
        for _ in range(2 * count + 2):
            self._free.put(bytearray(BUFFER_BYTES))
        threads = [Thread(target=self._fetch, name=f"mference-fetch-{i}", daemon=True) for i in range(count)]
        settler = Settler(outputs=self.outputs, settled=self.settled, failed=self._inbox.put)
        try:
            for thread in threads:
                thread.start()
            self._write(len(requests), settler)
            settler.finish()
        except BaseException:
            self._todo.clear()
            self.client.stop()
            settler.close()
            raise
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join(_JOIN_SECONDS)
            self._inbox, self._free = Queue(), Queue()

    # --- receiving

    def _fetch(self) -> None:
        inbox = self._inbox
        try:
            while (request := self._next()) is not None:
                self._fetch_one(request)
                inbox.put(request)
        except Stopped:
            return
        except BaseException as error:  # noqa: BLE001  handed to the calling thread, which raises it
            inbox.put(error)

    def _next(self) -> RangeRequest | None:
        with self._lock:
            return self._todo.popleft() if self._todo else None

    def _fetch_one(self, request: RangeRequest) -> None:
        buffer, filled = self._buffer(), 0
        for data in self.client.read_range(self.files[request.shard], request.offset, request.size):
            view = memoryview(data)
            while view:
                count = min(len(view), BUFFER_BYTES - filled)
                buffer[filled : filled + count] = view[:count]
                filled, view = filled + count, view[count:]
                if filled == BUFFER_BYTES:
                    self._inbox.put(_Block(request=request, buffer=buffer, size=filled))
                    buffer, filled = self._buffer(), 0
        self._inbox.put(_Block(request=request, buffer=buffer, size=filled))

    def _buffer(self) -> bytearray:
        while True:
            if self.client.stopped.is_set():
                raise Stopped
            with suppress(Empty):
                return self._free.get(timeout=_WAKE_SECONDS)

    # --- writing

    def _write(self, count: int, settler: Settler) -> None:
        writers = dict[str, RangeWriter]()
        while count:
            item = self._inbox.get()
            match item:
                case _Block():
                    ident = item.request.ident
                    if ident not in writers:
                        writers[ident] = self.outputs.writer(item.request)
                    writers[ident].write(memoryview(item.buffer)[: item.size])
                    self._free.put(item.buffer)
                    self.received(item.request.shard, item.size)
                case RangeRequest():
                    assert writers.pop(item.ident).complete
                    settler.add(item)
                    count -= 1
                case BaseException():
                    raise item
