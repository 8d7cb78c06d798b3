"""Bounded, parallel, positional reads of experts into memory the caller owns."""

import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from attrs import define, field

from mference_core.errors import StreamError
from mference_core.tensors import ExpertLayer, ExpertProof

WORKERS = 4
OPEN_FILES = 128  # half of the smallest usual limit per process (256)
# Reading over a gap this small is cheaper than a second call; blobs are padded by less than 16 KiB, or a few
# pages where layers of different widths share one stride.
GAP_BYTES = 64 * 1024
# Adjacent reads are joined up to this size whatever else waits, and beyond it only while every worker has a share.
JOINED_BYTES = 1024 * 1024
# Waking another thread costs about what this many bytes cost from the page cache.
TASK_BYTES = 128 * 1024
IOV_MAX = max(16, os.sysconf("SC_IOV_MAX"))

Views = Mapping[str, memoryview]


@define
class _Check:
    """An expert to be verified, once `left` runs have filled its `pieces`."""

    proof: ExpertProof
    expert: int
    pieces: list[memoryview]
    left: int
    lock: Lock = field(factory=Lock)

    def filled(self) -> None:
        """Take note that a run is read; verify after the last one. Raises: DigestMismatch."""
        with self.lock:
            self.left -= 1
            if self.left:
                return
        self.proof.check(self.expert, self.pieces)


@define
class _Run:
    """One read: `size` bytes of a file from `offset`, scattered into `views`; `payload` of them are wanted."""

    path: Path
    offset: int
    size: int
    payload: int
    views: list[memoryview]
    checks: list[_Check] = field(factory=list)

    @property
    def end(self) -> int:
        return self.offset + self.size


@define
class _OpenFile:
    descriptor: int
    users: int = 0


class _Files:
    """Descriptors opened once per file; beyond the limit the one unused for longest is closed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: OrderedDict[Path, _OpenFile] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def borrow(self, path: Path) -> Iterator[int]:
        """Lend the descriptor of `path`; it stays open at least as long."""
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                entry = _OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                self._open[path] = entry
            self._open.move_to_end(path)
            entry.users += 1
            self._trim(self._limit)
        try:
            yield entry.descriptor
        finally:
            with self._lock:
                entry.users -= 1

    def close(self) -> None:
        with self._lock:
            self._trim(0)

    def _trim(self, limit: int) -> None:
        idle = [path for path, entry in self._open.items() if not entry.users]
        for path in idle[: max(0, len(self._open) - limit)]:
            os.close(self._open.pop(path).descriptor)


class ExpertRead:
    """Reads under way; the memory they fill must not be touched before `wait` returned or raised."""

    def __init__(self, reader: "ExpertReader", futures: Sequence["Future[None]"], size: int) -> None:
        self._reader = reader
        self._futures = futures
        self.size = size
        self.stall_seconds = 0.0

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Block until every read ended, then raise the first error if one failed: `StreamError`, `DigestMismatch`."""
        if not self.done:
            start = time.perf_counter()
            wait(self._futures)
            elapsed = time.perf_counter() - start
            self.stall_seconds += elapsed
            self._reader.count(stall_seconds=elapsed)
        for future in self._futures:
            future.result()


class ExpertReader:
    """Reads experts of any layer on one small pool of threads.

    Counters: `bytes_read` (bytes delivered, gaps not counted), `reads` (system calls), `stall_seconds` (time callers
    waited). Experts that a layer's proof still waits for are verified by the threads that read them. Raises:
    StreamError, naming the file, when it is missing, too short or unreadable; DigestMismatch for an expert's bytes.
    """

    def __init__(self, *, workers: int = WORKERS, open_files: int = OPEN_FILES) -> None:
        if workers < 1 or open_files < 1:
            raise ValueError(f"[reader] need at least 1 worker and open file but got {workers} and {open_files}")
        self.workers = workers
        self.bytes_read = 0
        self.reads = 0
        self.stall_seconds = 0.0
        self._files = _Files(open_files)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="mference-read")
        self._gap = memoryview(bytearray(GAP_BYTES))
        self._lock = Lock()
        self._closed = False

    def start(self, layer: ExpertLayer, requests: Sequence[tuple[int, Views]]) -> ExpertRead:
        """Begin reading each (expert, views) of `layer`; `views` maps every part's name to its writable bytes.

        The views of one call must not overlap. Adjacent experts are read by one call.
        """
        if self._closed:
            raise StreamError(what="the expert reader", got="closed", expected="an open model")
        pieces = [run for expert, views in requests for run in _checked_runs(layer, expert, views)]
        size = sum(run.size for run in pieces)
        share = max(JOINED_BYTES, size // self.workers)
        runs = _joined(pieces, share, self._gap)
        tasks = min(self.workers, len(runs), 1 + size // TASK_BYTES)
        queue = iter(runs)  # shared: each task takes the next run, so that they end together
        return ExpertRead(self, [self._threads.submit(self._drain, queue) for _ in range(tasks)], size)

    def read(self, layer: ExpertLayer, requests: Sequence[tuple[int, Views]]) -> None:
        """Read as `start` does and wait."""
        self.start(layer, requests).wait()

    def count(self, *, reads: int = 0, bytes_read: int = 0, stall_seconds: float = 0.0) -> None:
        """Add to the counters; callable from any thread."""
        with self._lock:
            self.reads += reads
            self.bytes_read += bytes_read
            self.stall_seconds += stall_seconds

    def close(self) -> None:
        """Finish the reads under way, then close every file; closing again does nothing."""
        self._closed = True
        self._threads.shutdown()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drain(self, queue: Iterator[_Run]) -> None:
        for run in queue:
            self._read(run)

    def _read(self, run: _Run) -> None:
        try:
            with self._files.borrow(run.path) as descriptor:
                reads = _fill(descriptor, run)
        except FileNotFoundError as error:
            raise StreamError(
                what=f"expert file {run.path}", got="missing", remedy="verify or reinstall the model"
            ) from error
        except OSError as error:
            raise StreamError(what=f"reading {run.path} at byte {run.offset} failed: {error.strerror}") from error
        self.count(reads=reads, bytes_read=run.payload)
        for check in run.checks:
            check.filled()


def _checked_runs(layer: ExpertLayer, expert: int, views: Views) -> list[_Run]:
    """Return the runs of an expert, with what verifies it if that has not been done."""
    runs, proof = list(_runs(layer, expert, views)), layer.proof
    if proof is not None and proof.pending(expert):
        check = _Check(proof, expert, [view for run in runs for view in run.views], len(runs))
        for run in runs:
            run.checks.append(check)
    return runs


def _runs(layer: ExpertLayer, expert: int, views: Views) -> Iterator[_Run]:
    """Yield one run per extent of `expert`, checked against its views."""
    left = dict(views)
    for extent in layer.extents(expert):
        span = extent.span
        parts = [left.pop(name, None) for name in extent.parts]
        known = [part for part in parts if part is not None]
        size = sum(part.nbytes for part in known)
        if len(known) != len(parts) or size != span.size:
            raise StreamError(
                what=f"extent of layer {layer.layer} expert {expert} in {span.path}",
                got=f"{span.size} bytes for {', '.join(extent.parts)}",
                expected=f"{size} bytes",
            )
        yield _Run(span.path, span.offset, span.size, span.size, known)
    if left:
        raise StreamError(
            what=f"layer {layer.layer} expert {expert}", got=f"without {', '.join(left)}", expected="all its parts"
        )


def _joined(runs: Sequence[_Run], share: int, gap: memoryview) -> list[_Run]:
    """Join runs that follow each other in a file, small gaps included, into runs of at most `share` wanted bytes."""
    joined: list[_Run] = []
    for run in sorted(runs, key=lambda run: (run.path, run.offset)):
        last = joined[-1] if joined else None
        between = run.offset - last.end if last and last.path == run.path else -1
        if last and 0 <= between <= gap.nbytes and last.payload + run.payload <= share:
            last.views += [gap[:between]] * (between > 0) + run.views
            last.size += between + run.size
            last.payload += run.payload
            last.checks += run.checks
        else:
            joined.append(run)
    return joined


def _fill(descriptor: int, run: _Run) -> int:
    """Fill the views of `run`, however little each call returns; return the number of calls."""
    views = [view for view in run.views if view.nbytes]
    got = calls = first = 0
    while first < len(views):
        count = os.preadv(descriptor, views[first : first + IOV_MAX], run.offset + got)
        calls += 1
        if count == 0:
            raise StreamError(
                what=f"read of {run.path} at byte {run.offset}",
                got=f"{got} bytes",
                expected=f"{run.size} bytes",
                remedy="the file is too short; verify or reinstall the model",
            )
        got += count
        while first < len(views) and count >= views[first].nbytes:
            count -= views[first].nbytes
            first += 1
        if count:
            views[first] = views[first][count:]
    return calls
