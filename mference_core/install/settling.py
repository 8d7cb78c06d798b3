"""What follows a range's last byte: durable, read back, recorded; while one batch is synced, the one before is read."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

from attrs import define, field

from mference_core.install.files import OutputFiles
from mference_core.install.hashing import THREADS_BESIDE
from mference_core.install.ranges import RangeRequest

MOST_UNSETTLED = 16

Settled = Callable[[list[tuple[RangeRequest, str]]], None]


@define(kw_only=True)
class Settler:
    """Takes finished ranges; `settled` gets them with their digests once they are durable, from one thread at a time.

    All that finish while a sync is under way share the next one. After a failure nothing is settled any more: `failed`
    gets it at once, in the thread it happened in, and `finish` raises it.
    """

    outputs: OutputFiles
    settled: Settled
    failed: Callable[[BaseException], None]
    _waiting: list[RangeRequest] = field(factory=list, init=False)
    _unsettled: int = field(default=0, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _changed: Condition = field(factory=Condition, init=False)
    _syncing: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "mference-sync"), init=False)
    _recording: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "mference-settle"), init=False)
    _reading: ThreadPoolExecutor = field(
        factory=lambda: ThreadPoolExecutor(THREADS_BESIDE, "mference-read"), init=False
    )

    def add(self, request: RangeRequest) -> None:
        """Take a range whose bytes are written; waits while too many are on their way to the disk."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsettled < MOST_UNSETTLED or self._failure is not None)
            self._unsettled += 1
            self._waiting.append(request)
        self._syncing.submit(self._guarded, self._sync)

    def finish(self) -> None:
        """Return when all that was taken is settled. Raises `OSError` and what `settled` raises."""
        self.close()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Settle what was taken, as far as that is possible."""
        for pool in (self._syncing, self._recording, self._reading):
            pool.shutdown()

    def _sync(self) -> None:
        with self._changed:
            batch, self._waiting = self._waiting, []
        if batch:
            self.outputs.sync(batch)
            self._recording.submit(self._guarded, lambda: self._record(batch))

    def _record(self, batch: list[RangeRequest]) -> None:
        self.settled(list(zip(batch, self._reading.map(self.outputs.digest, batch), strict=True)))
        with self._changed:
            self._unsettled -= len(batch)
            self._changed.notify_all()

    def _guarded(self, step: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            step()
        except BaseException as error:  # noqa: BLE001  handed to the calling thread, which raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self.failed(error)
