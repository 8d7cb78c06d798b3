"""One big file of an install, made good in place: parts that are known to be bad, or all of it as far as needed."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Self, TypeVar

from attrs import define, field

from mference_core.errors import DigestMismatch
from mference_core.install.original import Fetch, fetches, gaps
from mference_core.install.ranges import Copy
from mference_core.install.repair_state import Compared
from mference_core.install.verify import Damage
from mference_core.jsondata import hash_file

# A file of which this many runs of damage were mended is hashed at the end only.
MOST_LOOKS = 16
PLAIN_BYTES = 1 << 20
T = TypeVar("T")
R = TypeVar("R")


@define(kw_only=True)
class BigFile:
    """A file of `size` bytes that should have the digest `wanted`. Memory is bounded by a few reads.

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
    fetched_bytes: int = field(default=0, init=False)
    changed_bytes: int = field(default=0, init=False)
    _handle: int = field(default=-1, init=False)
    _before: int = field(default=0, init=False)

    def __enter__(self) -> Self:
        """Open the file at its full size; what it lacked is zeros."""
        self.path.parent.mkdir(exist_ok=True)
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self._before = os.fstat(self._handle).st_size
        if self._before != self.size:
            os.ftruncate(self._handle, self.size)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)

    # --- with digests of parts

    def fill(self, parts: Sequence[Damage]) -> None:
        """Fetch bad parts, hold each against its digest, and put it where it belongs; then what no source has."""
        done = 0
        for part, data in self._ahead(self._part, parts):
            if (found := sha256(data).hexdigest()) != part.expected:
                what = f"{self.path} {part.part} from the source, sha256"
                remedy = "the source gives other bytes: install it again"
                raise DigestMismatch(what=what, got=found, expected=part.expected, remedy=remedy)
            self._write(part.offset, memoryview(data))
            done += part.size
            self.told(min(done, self.size))
        self._plain()

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

    def compare(self, held: dict[str, Compared], name: str, save: Callable[[], None]) -> None:
        """Compare the file with its source, read by read, until it has its digest.

        What a short file lacks comes first. `held[name]` is how far an earlier session came; `save` keeps it.
        """
        place = held.setdefault(name, Compared(first=self._before if self._before < self.size else 0))
        save()
        self._plain()
        if self._good():
            return
        reads = list(fetches(self.copies, 0, self.size))
        reads.sort(key=lambda fetch: all(into + size <= place.first for into, _, size in fetch.places))
        lacking = sum(any(into + size > place.first for into, _, size in f.places) for f in reads) if place.first else 0
        begun = place.done
        for start in (begun, 0) if begun else (0,):  # what an earlier session compared may be damaged since
            place.done = start
            try:
                if self._walk(reads, place, lacking, save):
                    return
            finally:
                save()
        place.done = 0
        save()

    def _walk(self, reads: Sequence[Fetch], place: Compared, lacking: int, save: Callable[[], None]) -> bool:
        begun, dirty, looks = place.done, 0, 0
        for number, (fetch, data) in enumerate(self._ahead(self._fetched, reads[begun:]), start=begun):
            changed = self._mend(fetch, data)
            place.done = number + 1
            if changed:
                os.fdatasync(self._handle)
                save()
            first_of_run, last_of_run = changed and not dirty, dirty and not changed
            dirty = dirty + 1 if changed else 0
            self.told(sum(f.size for f in reads[: number + 1]))
            due = number + 1 == lacking or (number >= lacking and (first_of_run or last_of_run) and looks < MOST_LOOKS)
            if due:
                looks += 1
                if self._good():
                    return True
        return self._good()

    def _mend(self, fetch: Fetch, data: bytes) -> bool:
        changed = False
        for into, at, size in fetch.places:
            there = memoryview(data)[at : at + size]
            if os.pread(self._handle, size, into) != there:
                self._write(into, there)
                changed = True
        return changed

    def _plain(self) -> None:
        """Put right what no source has: the index, and zeros between experts."""
        for start, size in gaps(self.copies, self.size):
            for offset in range(start, start + size, PLAIN_BYTES):
                count = min(PLAIN_BYTES, start + size - offset)
                known = self.image[offset : offset + count].ljust(count, b"\0")
                if os.pread(self._handle, count, offset) != known:
                    self._write(offset, memoryview(known))

    def _good(self) -> bool:
        return hash_file(self.path) == self.wanted

    # --- both

    def _fetched(self, fetch: Fetch) -> bytes:
        data = self.read(fetch.shard, fetch.offset, fetch.size)
        self.fetched_bytes += len(data)
        return data

    def _ahead(self, call: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[T, R]]:
        """Yield items with what `call` makes of them, in order, a few being made at a time."""
        waiting = deque[tuple[T, Future[R]]]()
        for item in items:
            waiting.append((item, self.pool.submit(call, item)))
            if len(waiting) >= self.workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()

    def _write(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._handle, data[done:], offset + done)
        self.changed_bytes += len(data)
