"""Writing large files from pieces that exist already: digests on one thread while another writes, no copies."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from attrs import define, field

from mference_core.install.report import InstallProgress, Progress
from mference_core.manifest import FileEntry

BATCH_BYTES = 4 << 20
BATCH_PIECES = 512  # below every system's limit of buffers per call

Piece = bytes | memoryview


@define(kw_only=True)
class Writer:
    """Writes files below `root`; `files` gets their sizes and digests (digests only if `hashed`)."""

    root: Path
    total_bytes: int
    progress: Progress | None = None
    hashed: bool = True
    files: dict[str, FileEntry] = field(factory=dict, init=False)
    done_bytes: int = field(default=0, init=False)

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """Write one file, durable when this returns; pieces must stay unchanged."""
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        digest, size = sha256(), 0
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="mference-digest") as hasher:
                before: Future[None] | None = None
                for batch in _batches(pieces):
                    if before is not None:
                        before.result()
                    before = hasher.submit(_hash, digest.update, batch) if self.hashed else None
                    size += _write_all(handle, batch)
                    self._tell(name, size)
            os.fsync(handle)
        finally:
            os.close(handle)
        self.done_bytes += size
        self.files[name] = FileEntry(size=size, sha256=digest.hexdigest())

    def _tell(self, name: str, size: int) -> None:
        if self.progress is not None:
            self.progress(InstallProgress(file=name, done_bytes=self.done_bytes + size, total_bytes=self.total_bytes))


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, size = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= BATCH_BYTES or len(batch) >= BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _hash(update: Callable[[Piece], None], batch: list[Piece]) -> None:
    for piece in batch:
        update(piece)


def _write_all(handle: int, batch: list[Piece]) -> int:
    left = [memoryview(piece) for piece in batch if len(piece)]
    total = sum(len(piece) for piece in left)
    while left:
        count = os.writev(handle, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return total
