"""Several requests under way, one writer, and records only of what is durable (gturbo-format 17, 18)."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, Queue
from threading import Lock, Thread

from attrs import define, field, frozen

from mference_core.errors import InstallError
from mference_core.install.answers import RemoteFile
from mference_core.install.files import OutputFiles, RangeWriter
from mference_core.install.http import HubClient, Stopped
from mference_core.install.ranges import RangeRequest

BUFFER_BYTES = 1 << 20
_WAKE_SECONDS = 0.2
_JOIN_SECONDS = 5.0

Settled = Callable[[list[tuple[RangeRequest, str]]], None]


@frozen(kw_only=True)
class _Block:
    """Bytes of a request in the order they came; `buffer` goes back to the pool once they are written."""

    request: RangeRequest
    buffer: bytearray
    size: int


@define(kw_only=True)
class Transfer:
    """Fetches requests into output files.

    `connections` threads receive, the calling thread alone writes, and one thread makes finished requests durable,
    reads them back for their digests and hands them to `settled`. Memory is bounded by the buffers: two MiB and a
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
        with ThreadPoolExecutor(1, thread_name_prefix="mference-settle") as settler:
            finished = list[RangeRequest]()
            try:
                for thread in threads:
                    thread.start()
                self._write(len(requests), finished, settler)
            except BaseException:
                self._todo.clear()
                self.client.stop()
                settler.shutdown()
                with suppress(OSError, InstallError):  # the first failure is the one to tell
                    self._settle(finished)
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

    # --- writing and settling

    def _write(self, count: int, finished: list[RangeRequest], settler: ThreadPoolExecutor) -> None:
        writers = dict[str, RangeWriter]()
        settling: Future[None] | None = None
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
                    finished.append(item)
                    count -= 1
                case BaseException():
                    if settling is not None:
                        settling.result()
                    raise item
            if settling is not None and settling.done():
                settling.result()
                settling = None
            if finished and settling is None:
                # Whatever was finished while the last batch was being settled shares one sync.
                settling = settler.submit(self._settle, finished.copy())
                finished.clear()
        if settling is not None:
            settling.result()
        self._settle(finished)

    def _settle(self, requests: list[RangeRequest]) -> None:
        if requests:
            self.outputs.sync(requests)
            self.settled([(request, self.outputs.digest(request)) for request in requests])
            requests.clear()
