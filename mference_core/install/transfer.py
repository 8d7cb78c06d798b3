"""Several requests under way, one writer, and records only of what is durable (gturbo-format 17, 18)."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Queue
from threading import Lock, Semaphore, Thread

from attrs import define, field, frozen

from mference_core.install.answers import RemoteFile
from mference_core.install.files import OutputFiles, RangeWriter
from mference_core.install.http import HubClient, Stopped
from mference_core.install.ranges import RangeRequest
from mference_core.install.settling import Settled, Settler

BLOCK_BYTES = 256 << 10
_WAKE_SECONDS = 0.2
_JOIN_SECONDS = 5.0


@frozen(kw_only=True)
class _Block:
    """Pieces of a request in the order they came, together about as large as is worth handing over."""

    request: RangeRequest
    pieces: list[bytes]
    size: int


@define(kw_only=True)
class Transfer:
    """Fetches requests into output files.

    `connections` threads receive, the calling thread alone writes, and others make finished requests durable, read
    them back for their digests and hand them to `settled`. Memory is bounded by the blocks on their way from one to
    the other: two per connection and two, each at most a piece larger than `BLOCK_BYTES`.
    """

    client: HubClient
    files: Mapping[str, RemoteFile]
    outputs: OutputFiles
    settled: Settled
    received: Callable[[str, int], None] = lambda _, __: None
    _todo: deque[RangeRequest] = field(factory=deque, init=False)
    _inbox: "Queue[_Block | RangeRequest | BaseException]" = field(factory=Queue, init=False)
    _room: Semaphore = field(factory=Semaphore, init=False)
    _lock: Lock = field(factory=Lock, init=False)

    def run(self, requests: Sequence[RangeRequest]) -> None:
        """Fetch all of `requests`; what was complete when it failed or was interrupted is settled all the same.

        Raises `SourceError`, `OSError` and what `settled` raises.
        """
        self._todo.extend(requests)
        count = min(self.client.connections, len(requests))
        self._room = Semaphore(2 * count + 2)
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
            self._inbox = Queue()

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
        pieces, size = list[bytes](), 0
        for piece in self.client.read_range(self.files[request.shard], request.offset, request.size):
            pieces.append(piece)
            size += len(piece)
            if size >= BLOCK_BYTES:
                self._hand_over(_Block(request=request, pieces=pieces, size=size))
                pieces, size = [], 0
        if pieces:
            self._hand_over(_Block(request=request, pieces=pieces, size=size))

    def _hand_over(self, block: _Block) -> None:
        while not self._room.acquire(timeout=_WAKE_SECONDS):
            if self.client.stopped.is_set():
                raise Stopped
        self._inbox.put(block)

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
                    for piece in item.pieces:
                        writers[ident].write(memoryview(piece))
                    self._room.release()
                    self.received(item.request.shard, item.size)
                case RangeRequest():
                    assert writers.pop(item.ident).complete
                    settler.add(item)
                    count -= 1
                case BaseException():
                    raise item
