"""One big file of an install, made good in place: parts that are known to be bad, or all of it as far as needed."""

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Self, TypeVar

from attrs import define, field

from mference_core.errors import DigestMismatch, ManifestError
from mference_core.install.original import Fetch, fetches, gaps
from mference_core.install.ranges import Copy
from mference_core.install.repair_state import Compared
from mference_core.install.verify import Damage
from mference_core.jsondata import hash_file

# Hashing a file is taken to last as long as fetching this part of it. See `_Looks`.
LOOK_SHARE = 64
PLAIN_BYTES = 1 << 20
T = TypeVar("T")
R = TypeVar("R")


@define(kw_only=True)
class _Looks:
    """When a file of `size` bytes is hashed to see whether it is good, while it is compared with its source.

    At the first change, which is the only one in most files; after that only where what follows a change is right, and
    twice as far on each time. So there are at most nine looks, and what is compared behind the last change is no more
    than what lies between it and the first, and a part `1 / LOOK_SHARE` of the file.
    """

    size: int
    changed: bool
    _since: int = field(default=0, init=False)
    _wait: int = field(default=0, init=False)

    def due(self, size: int, *, changed: bool) -> bool:
        """Take note of `size` bytes compared; say whether to look now."""
        self.changed |= changed
        self._since += size
        return self.changed and self._since >= self._wait and (not self._wait or not changed)

    def failed(self) -> None:
        """Take note of a look that found the file bad."""
        self.changed, self._since = False, 0
        self._wait = max(1, 2 * self._wait, self.size // LOOK_SHARE)


@define(kw_only=True)
class BigFile:
    """A file of `size` bytes that is bad and should have the digest `wanted`. Memory is bounded by a few reads.

    `copies` say where its bytes come from, `image` is what it begins with, the rest is zeros; `read` fetches. Nothing
    is written that the source does not say, and no byte that is right already.
    """

    path: Path
    size: int
    wanted: str
    copies: Sequence[Copy]
    image: bytes
    read: Callable[[str, int, int], bytes]
    pool: ThreadPoolExecutor
    workers: int
    told: Callable[[int], None]
    changed_bytes: int = field(default=0, init=False)
    _handle: int = field(default=-1, init=False)
    _before: int = field(default=0, init=False)

    def __enter__(self) -> Self:
        """Open the file."""
        self.path.parent.mkdir(exist_ok=True)
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self._before = os.fstat(self._handle).st_size
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)

    # --- with digests of parts

    def fill(self, bad: Iterable[Damage]) -> bool:
        """Fetch bad parts, hold each against its digest, and put it where it belongs; then what no source has.

        `bad` is gone through once the file has its size. Says whether the file is good then.
        """
        self._resize()
        done = 0
        for part, data in self._ahead(self._part, tuple(bad)):
            if (found := sha256(data).hexdigest()) != part.expected:
                what = f"{self.path} {part.part} from the source, sha256"
                remedy = "the source gives other bytes: install it again"
                raise DigestMismatch(what=what, got=found, expected=part.expected, remedy=remedy)
            self._write(part.offset, memoryview(data))
            done += part.size
            self.told(min(done, self.size))
        self._plain()
        return self._good()

    def _part(self, part: Damage) -> bytearray:
        data = bytearray(part.size)
        known = self.image[part.offset : part.offset + part.size]
        data[: len(known)] = known
        for fetch in fetches(self.copies, part.offset, part.offset + part.size):
            got = memoryview(self._fetched(fetch))
            for into, at, size in fetch.places:
                data[into - part.offset : into - part.offset + size] = got[at : at + size]
        return data

    # --- without

    def compare(self, held: dict[str, Compared], name: str, save: Callable[[], None]) -> bool:
        """Compare the file with its source, read by read, until it has its digest; say whether it has.

        What a short file lacks comes first. `held[name]` is how far an earlier session came; `save` keeps it.
        """
        if self._before < self.size or name not in held:
            held[name] = Compared(first=self._before if self._before < self.size else 0)
        place = held[name]
        save()
        reads = list(fetches(self.copies, 0, self.size))
        reads.sort(key=lambda fetch: all(into + size <= place.first for into, _, size in fetch.places))
        lacking = sum(any(into + size > place.first for into, _, size in f.places) for f in reads) if place.first else 0
        lacking = max(0, lacking - place.done)
        looks = _Looks(size=self.size, changed=self._resize() | self._plain())
        if looks.changed and not lacking and self._good():
            return True
        # What an earlier session compared comes last: it may be damaged since.
        order = (*reads[place.done :], *reads[: place.done])
        try:
            if self._walk(order, place, lacking, looks, save):
                return True
            place.done = 0
        finally:
            save()
        return False

    def _walk(
        self, order: Sequence[Fetch], place: Compared, lacking: int, looks: _Looks, save: Callable[[], None]
    ) -> bool:
        done = sum(fetch.size for fetch in order[len(order) - place.done :])
        # While the file is hashed nothing new is asked for: `_ahead` goes on only where this loop does.
        for number, (fetch, data) in enumerate(self._ahead(self._fetched, order), start=1):
            changed = self._mend(fetch, data)
            place.done = (place.done + 1) % len(order)
            if changed:
                os.fdatasync(self._handle)
                save()
            done += fetch.size
            self.told(min(done, self.size))
            if looks.due(fetch.size, changed=changed) and number >= lacking:
                if self._good():
                    return True
                looks.failed()
        return looks.changed and self._good()

    def _mend(self, fetch: Fetch, data: bytes) -> bool:
        changed = False
        for into, at, size in fetch.places:
            there = memoryview(data)[at : at + size]
            if self._there(size, into) != there:
                self._write(into, there)
                changed = True
        return changed

    def _good(self) -> bool:
        try:
            return hash_file(self.path) == self.wanted
        except ManifestError:  # a bad sector further on, to be written over in its turn
            return False

    # --- both

    def _resize(self) -> bool:
        """Give the file its size, what it lacked being zeros; say whether it had another."""
        if self._before == self.size:
            return False
        os.ftruncate(self._handle, self.size)
        return True

    def _plain(self) -> bool:
        """Put right what no source has, the index and zeros between experts; say whether anything was wrong."""
        before = self.changed_bytes
        for start, size in gaps(self.copies, self.size):
            for offset in range(start, start + size, PLAIN_BYTES):
                count = min(PLAIN_BYTES, start + size - offset)
                known = self.image[offset : offset + count].ljust(count, b"\0")
                if self._there(count, offset) != known:
                    self._write(offset, memoryview(known))
        return self.changed_bytes > before

    def _there(self, size: int, offset: int) -> bytes:
        """Return what the file holds, nothing for what the disk cannot read: writing over it may mend it."""
        try:
            return os.pread(self._handle, size, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return b""

    def _fetched(self, fetch: Fetch) -> bytes:
        return self.read(fetch.shard, fetch.offset, fetch.size)

    def _ahead(self, call: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[T, R]]:
        """Yield items with what `call` makes of them, in order; `workers` are being made at a time, this one included."""
        waiting = deque[tuple[T, Future[R]]]()
        try:
            for item in items:
                waiting.append((item, self.pool.submit(call, item)))
                if len(waiting) >= self.workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()

    def _write(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._handle, data[done:], offset + done)
        self.changed_bytes += len(data)
