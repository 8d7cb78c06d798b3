"""The output files of a download: reserved at full size, filled piece by piece, read back for their digests."""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from threading import Event, local

from attrs import define, field

from mference_core.buffers import read_buffer
from mference_core.errors import InstallError
from mference_core.install.finish import write_all
from mference_core.install.hashing import Hashed, PartHashes, Spans
from mference_core.install.ranges import Copy, Piece, RangePlan, RangeRequest, range_digest
from mference_core.install.transaction import sync_directory
from mference_core.manifest import WEIGHTS_NAME

METADATA_DIR = ".remote-metadata"
TILE_BYTES = 1 << 20
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@define(kw_only=True)
class OutputFiles:
    """Output files below `root`. `write` belongs to one thread; reading, `digest` and `sync` are safe from any.

    Bytes that a request brings along between its copies go to a file of its own if `keep_gaps`: they are part of no
    output, but of the source's digest.
    """

    root: Path
    plan: RangePlan
    keep_gaps: bool = True
    stopped: Event = field(factory=Event)
    _handles: dict[str, int] = field(factory=dict, init=False)
    _gaps: dict[str, int] = field(factory=dict, init=False)
    _own: local = field(factory=local, init=False)

    def reserve(self, index_image: bytes) -> None:
        """Create every output at its final size, the resident index written, durable. Raises `OSError`."""
        for folder in self._folders():
            folder.mkdir(exist_ok=True)
        for name, size in self.plan.outputs.items():
            handle = self._handles[name] = os.open(self.root / name, _NEW, 0o644)
            if name == WEIGHTS_NAME:
                write_all(handle, memoryview(index_image))
            os.ftruncate(handle, size)
            os.fsync(handle)
        for folder in (*self._folders(), self.root):
            sync_directory(folder)

    def reopen(self, index_image: bytes) -> bool:
        """Open the outputs of an earlier session; False if they are not those of this plan. Raises `OSError`."""
        if any(folder.is_symlink() for folder in self._folders()):
            return False
        for name, size in self.plan.outputs.items():
            try:
                handle = os.open(self.root / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return False
            self._handles[name] = handle
            state = os.fstat(handle)
            if not stat.S_ISREG(state.st_mode) or state.st_size != size:
                return False
        (self.root / METADATA_DIR).mkdir(exist_ok=True)
        done = 0
        for tile in self.read(WEIGHTS_NAME, 0, len(index_image)):
            if tile != index_image[done : done + len(tile)]:
                return False
            done += len(tile)
        return True

    def open(self, *, writing: bool) -> None:
        """Open the outputs as they are, of a finished install for example. Raises `OSError`."""
        for name in self.plan.outputs:
            flags = (os.O_RDWR if writing else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
            self._handles[name] = os.open(self.root / name, flags)

    def close(self) -> None:
        """Close every file; harmless when none is open."""
        for handle in (*self._handles.values(), *self._gaps.values()):
            os.close(handle)
        self._handles.clear()
        self._gaps.clear()

    def _folders(self) -> list[Path]:
        inner = {Path(name).parent for name in self.plan.outputs} - {Path()}
        return [self.root / METADATA_DIR, *(self.root / folder for folder in sorted(inner))]

    # --- filling

    def writer(self, request: RangeRequest) -> "RangeWriter":
        """Return what puts the bytes of a request into their places."""
        handles: dict[str | None, int] = {}
        handles.update(self._handles)
        if request.gap_bytes and self.keep_gaps:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            handles[None] = os.open(self.gap_path(request.ident), flags, 0o600)
            if (before := self._gaps.pop(request.ident, None)) is not None:
                os.close(before)
            self._gaps[request.ident] = handles[None]
        return RangeWriter(pieces=request.pieces, handles=handles)

    def gap_path(self, ident: str) -> Path:
        """Return where the bytes between a request's copies are kept."""
        return self.root / METADATA_DIR / f"{ident}.gaps"

    def sync(self, requests: Iterable[RangeRequest]) -> None:
        """Make what was written for these requests durable. Raises `OSError`."""
        requests = list(requests)
        for name in sorted({copy.dest_path for request in requests for copy in request.copies}):
            os.fsync(self._handles[name])
        for request in requests:
            if (handle := self._gaps.pop(request.ident, None)) is not None:
                os.fsync(handle)
                os.close(handle)

    # --- reading back

    def digest(self, request: RangeRequest) -> str:
        """Return the digest of a request's bytes as they are in the files now. Raises `OSError`, `InstallError`."""
        return range_digest(request, (self._read_copy(copy) for copy in request.copies))

    def _read_copy(self, copy: Copy) -> Iterator[memoryview]:
        return self.read(copy.dest_path, copy.dest_offset, copy.dest_size)

    def hash(self, name: str, parts: Sequence[Spans] = ()) -> Hashed:
        """Return the SHA-256 of a whole output, and of parts of it, in one reading. Raises `OSError`, `InstallError`."""
        digest, inner, size = sha256(), PartHashes(parts), 0
        for tile in self.read(name, 0, self.plan.outputs[name]):
            digest.update(tile)
            if parts:
                inner.feed(size, tile)
            size += len(tile)
        return Hashed(size=size, sha256=digest.hexdigest(), parts=inner.digests())

    def read(self, name: str, offset: int, size: int) -> Iterator[memoryview]:
        """Yield bytes of an output in tiles, each valid until this thread reads again."""
        return self._tiles(self._handles[name], offset, size, name)

    def read_gap(self, request: RangeRequest, piece: Piece) -> Iterator[memoryview] | None:
        """Yield kept bytes between a request's copies; None if they were not kept."""
        path = self.gap_path(request.ident)
        try:
            if path.lstat().st_size != request.gap_bytes:
                return None
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        return self._tiles_once(handle, piece, str(path))

    def _tiles_once(self, handle: int, piece: Piece, what: str) -> Iterator[memoryview]:
        try:
            yield from self._tiles(handle, piece.offset, piece.size, what)
        finally:
            os.close(handle)

    def _tiles(self, handle: int, offset: int, size: int, what: str) -> Iterator[memoryview]:
        if (buffer := getattr(self._own, "tile", None)) is None:
            buffer = self._own.tile = read_buffer(TILE_BYTES)
        done = 0
        while done < size:
            if self.stopped.is_set():
                raise InstallError(what=what, got="no longer read", expected="an install under way")
            tile = buffer[: min(TILE_BYTES, size - done)]
            count = os.preadv(handle, [tile], offset + done)
            if count == 0:
                raise InstallError(what=what, got=f"cut short at {offset + done} bytes", expected="an unchanged file")
            yield tile[:count]
            done += count


@define(kw_only=True)
class RangeWriter:
    """Puts the bytes of one request into their places, in order."""

    pieces: tuple[Piece, ...]
    handles: dict[str | None, int]
    _at: int = field(default=0, init=False)
    _done: int = field(default=0, init=False)

    def write(self, data: memoryview) -> None:
        """Write the next bytes of the request. Raises `OSError`."""
        while data:
            piece = self.pieces[self._at]
            part = data[: piece.size - self._done]
            handle, offset = self.handles.get(piece.path), piece.offset + self._done
            written = len(part) if handle is None else 0
            while handle is not None and written < len(part):
                written += os.pwrite(handle, part[written:], offset + written)
            self._done += written
            if self._done == piece.size:
                self._at, self._done = self._at + 1, 0
            data = data[written:]

    @property
    def complete(self) -> bool:
        """Whether every byte of the request has come."""
        return self._at == len(self.pieces)
