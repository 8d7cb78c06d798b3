"""Whole files hashed side by side, at the speed of the disk, and digests of their parts in the same reading."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

from attrs import define, field

from mference_core.buffers import read_buffer
from mference_core.jsondata import read_in_order

TILE_BYTES = 1 << 20
# Beside each thread that hashes, one may wait for the disk.
THREADS = min(16, 2 * (os.cpu_count() or 1))
THREADS_BESIDE = max(2, min(4, os.cpu_count() or 1))
"""Threads that hash beside a download."""
_LOOK_SECONDS = 0.2

Spans = Sequence[tuple[int, int]]
"""Offset and size of bytes of a file, in order and apart."""


@define
class Hashed:
    """What was found of a file: size read in bytes, SHA-256, digests of its parts; `error` if it could not be read."""

    size: int = 0
    sha256: str = ""
    parts: tuple[str, ...] = ()
    error: str = ""


@define
class PartHashes:
    """Digests of parts of a file, fed with the whole of it from first to last byte."""

    parts: Sequence[Spans]
    _flat: list[tuple[int, int, int]] = field(init=False)
    _hashes: list[Any] = field(init=False)
    _at: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._flat = sorted((offset, size, n) for n, spans in enumerate(self.parts) for offset, size in spans)
        self._hashes = [sha256() for _ in self.parts]

    def feed(self, start: int, data: memoryview) -> None:
        """Take the bytes from `start` on."""
        end = start + len(data)
        while self._at < len(self._flat):
            offset, size, part = self._flat[self._at]
            if offset >= end:
                return
            self._hashes[part].update(data[max(0, offset - start) : min(end, offset + size) - start])
            if offset + size > end:
                return
            self._at += 1

    def digests(self) -> tuple[str, ...]:
        """Return the digests of all parts."""
        return tuple(made.hexdigest() for made in self._hashes)


def hash_files(
    root: Path,
    sizes: Mapping[str, int],
    told: Callable[[str, int], None],
    parts: Mapping[str, Sequence[Spans]] | None = None,
) -> dict[str, Hashed]:
    """Hash files below `root`, the biggest first; `sizes` are those expected, at most which is read of each.

    `told(file, bytes)` is called from this thread, some times a second, with what has been read of all. An interrupt
    ends the threads within a moment.
    """
    stopped, done, found = Event(), dict.fromkeys(sizes, 0), {name: Hashed() for name in sizes}

    def work(name: str) -> None:
        try:
            _hash(root / name, sizes[name], (parts or {}).get(name, ()), found[name], stopped, done, name)
        except OSError as error:
            found[name].error = error.strerror or str(error)

    with ThreadPoolExecutor(min(THREADS, max(1, len(sizes))), thread_name_prefix="mference-hash") as pool:
        try:
            left = {pool.submit(work, name): name for name in sorted(sizes, key=lambda name: -sizes[name])}
            running = set(left)
            while running:
                ended, running = wait(running, timeout=_LOOK_SECONDS)
                for future in ended:
                    future.result()
                current = next((name for future, name in left.items() if future in running), "")
                told(current, sum(done.values()))
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    return found


def _hash(
    path: Path, most: int, parts: Sequence[Spans], found: Hashed, stopped: Event, done: dict[str, int], name: str
) -> None:
    digest, inner, buffer = sha256(), PartHashes(parts), read_buffer(TILE_BYTES)
    with path.open("rb", buffering=0) as file:
        read_in_order(file.fileno())
        while found.size < most and not stopped.is_set():
            count = file.readinto(buffer[: min(TILE_BYTES, most - found.size)])
            if not count:
                break
            digest.update(buffer[:count])
            if parts:
                inner.feed(found.size, buffer[:count])
            found.size += count
            done[name] = found.size
    found.sha256, found.parts = digest.hexdigest(), inner.digests()
