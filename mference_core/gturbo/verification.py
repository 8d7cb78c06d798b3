"""Verifying experts while a model works: each when it is first read, or whole layer files ahead of their use."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Condition, Lock, Thread
from time import perf_counter

from attrs import define, field

from mference_core.errors import DigestMismatch
from mference_core.experts.plan import format_bytes

THREADS = min(4, os.cpu_count() or 1)
DAMAGED = "repair it with 'mference repair'"
# Lines about verifying are for what is felt: smaller models are verified without a word.
TOLD_BYTES = 256 << 20
LINE_SECONDS = 10.0

Notice = Callable[[str], None]


def _silent(_: str) -> None:
    """Tell nobody."""


@define
class Verification:
    """What one load has hashed: bytes, seconds over all threads, and seconds its callers waited for nothing else."""

    policy: str
    bytes: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    tell: Notice = _silent
    _lock: Lock = field(factory=Lock, init=False, repr=False)

    def count(self, size: int, seconds: float) -> None:
        """Add bytes hashed and the time it took; callable from any thread."""
        with self._lock:
            self.bytes += size
            self.seconds += seconds

    def count_wait(self, seconds: float) -> None:
        """Add seconds that a caller waited."""
        with self._lock:
            self.waited_seconds += seconds


class LayerProof:
    """The experts of one layer that no read has verified yet, with their digests. Callable from any thread."""

    def __init__(self, verification: Verification, path: Path, digests: Sequence[str]) -> None:
        self._verification = verification
        self._path = path
        self._left = dict(enumerate(digests))

    def pending(self, expert: int) -> bool:
        """Say whether an expert is still to be verified."""
        return expert in self._left

    def check(self, expert: int, pieces: Iterable[memoryview]) -> None:
        """Hold the bytes of an expert, in the order of its file, against its digest.

        Raises `DigestMismatch`, and then again at every read until the bytes are good.
        """
        wanted = self._left.get(expert)
        if wanted is None:
            return
        start, digest, size = perf_counter(), sha256(), 0
        for piece in pieces:
            digest.update(piece)
            size += piece.nbytes
        self._verification.count(size, perf_counter() - start)
        if (found := digest.hexdigest()) != wanted:
            raise DigestMismatch(
                what=f"{self._path} expert {expert} sha256", got=found, expected=wanted, remedy=DAMAGED
            )
        self._left.pop(expert, None)


class LayerFiles:
    """Whole layer files, hashed by a few threads in order of layers; a layer that is waited for comes first.

    `check(layer)` hashes one, and raises; `size_bytes` are those of all. Every layer is needed for the first token, so
    all of them are begun once one is: while the first layer works, the next ones are hashed.
    """

    def __init__(
        self, layers: Sequence[int], check: Callable[[int], None], verification: Verification, size_bytes: int
    ) -> None:
        self._layers = tuple(layers)
        self._todo = list[int]()
        self._check = check
        self._verification = verification
        self._size = size_bytes
        self._good = set[int]()
        self._bad = dict[int, Exception]()
        self._busy = set[int]()
        self._threads = 0
        self._said = self._began = perf_counter()
        self._state = Condition()

    def begin(self, first: int | None = None) -> None:
        """Start hashing what is not good yet, `first` before the rest."""
        with self._state:
            fresh = not (self._good or self._busy or self._bad)
            if fresh:
                self._began = self._said = perf_counter()
            known = {*self._good, *self._busy, *self._bad}
            self._todo = sorted((layer for layer in self._layers if layer not in known), key=lambda at: at != first)
            while self._threads < min(THREADS, len(self._todo) + len(self._busy)):
                self._threads += 1
                # Daemons: a process that ends waits for no hash.
                Thread(target=self._run, name="mference-verify", daemon=True).start()
        if fresh:
            self._tell(f"verifying {format_bytes(self._size)} in {len(self._layers)} expert files as they are needed")

    def touch(self, layer: int) -> None:
        """Return when a layer's file is known to be good; raise what is wrong with it, and look again next time."""
        if layer in self._good:
            return
        start = perf_counter()
        try:
            self._wait(layer)
        except BaseException:
            self.stop()
            raise
        finally:
            self._verification.count_wait(perf_counter() - start)

    def _wait(self, layer: int) -> None:
        with self._state:
            self.begin(layer)
            while layer not in self._good:
                if layer in self._bad:
                    raise self._bad.pop(layer)
                if layer not in self._busy and layer not in self._todo:
                    self.begin(layer)  # another caller took its error, or stopped everything
                self._state.wait()

    def stop(self) -> None:
        """Begin no further file; those under way end by themselves. A later `touch` goes on."""
        with self._state:
            self._todo.clear()

    def _run(self) -> None:
        while True:
            with self._state:
                if not self._todo:
                    self._threads -= 1
                    return
                layer = self._todo.pop(0)
                self._busy.add(layer)
            error: Exception | None = None
            try:
                self._check(layer)
            except Exception as found:  # noqa: BLE001  raised by who touches the layer
                error = found
            with self._state:
                self._busy.discard(layer)
                if error is None:
                    self._good.add(layer)
                else:
                    self._bad[layer] = error
                line = self._line()
                self._state.notify_all()
            if line:
                self._tell(line)

    def _line(self) -> str:
        """Return what is to be said now, if anything."""
        now, done = perf_counter(), len(self._good)
        if done == len(self._layers):
            size, seconds = format_bytes(self._size), now - self._began
            return f"verified {size} in {done} expert files in {seconds:.1f} s"
        if now - self._said < LINE_SECONDS:
            return ""
        self._said = now
        return f"verifying expert files: {done} of {len(self._layers)}"

    def _tell(self, line: str) -> None:
        if self._layers and self._size >= TOLD_BYTES:
            with suppress(Exception):  # a terminal that went away ends no verification
                self._verification.tell(line)
