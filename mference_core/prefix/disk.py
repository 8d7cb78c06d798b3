"""Pieces on disk: a safetensors file each, written whole or not at all, believed only when its digest fits."""

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from math import prod
from pathlib import Path
from queue import Queue
from threading import Lock, Thread
from typing import Any, cast

import mlx.core as mx
from attrs import frozen

from mference_core.jsondata import is_hex
from mference_core.prefix.pieces import POINT, RING, ROWS, Piece

FORMAT = "mference prefix 1"
PENDING_BYTES = 512 << 20
"""What may wait to be written; more is not kept on disk."""

HEADER_CAP_BYTES = 1 << 20
DTYPES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint32: "U32", mx.int32: "I32", mx.uint8: "U8"}
MX_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

Name = tuple[bytes, str]
"""A stretch's name, and the kind of piece."""


@frozen(kw_only=True)
class Raw:
    """A piece as it was read: each array's dtype, shape and bytes."""

    arrays: Mapping[str, tuple[str, tuple[int, ...], memoryview]]
    written: Mapping[int, int]

    def piece(self) -> Piece:
        """Return it as arrays; on the thread that will use them."""
        made = {}
        for name, (dtype, shape, data) in self.arrays.items():
            made[name] = mx.zeros(shape, MX_DTYPES[dtype])
            mx.eval(made[name])
            bytes_view(made[name])[:] = data
        return Piece(arrays=made, written=dict(self.written))


def bytes_view(array: mx.array) -> memoryview:
    """Return the bytes of a computed array, in place."""
    return memoryview(cast("Any", array)).cast("B") if array.size else memoryview(bytearray())


class Unreadable(Exception):
    """A file is not what it should be."""


class DiskPieces:
    """Files below `root`, at most `limit_bytes` of them, those used least recently removed first; own threads work.

    Files of this model are in a folder named after `key`; those of others count, and grow old like all. Where the disk
    cannot be written `notice` is told once and nothing is kept any more; what cannot be read is removed.
    """

    def __init__(self, root: Path, key: str, limit_bytes: int, notice: Callable[[str], None] = lambda _: None) -> None:
        self.folder = root / key[:32]
        self.key, self.limit_bytes = key, limit_bytes
        self._root, self._notice, self._lock = root, notice, Lock()
        self._files = OrderedDict[Path, int]()
        self._pending, self._pending_names = 0, set[Name]()
        self._failed = False
        self._queue: Queue[tuple[Name, Piece, list[tuple[str, mx.array, memoryview]]] | None] = Queue()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            self._give_up(error)
        self._writer = Thread(target=self._write_all, name="mference-prefix-writer", daemon=True)
        self._writer.start()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mference-prefix-reader")

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(self._files.values())

    def has(self, name: bytes, kind: str) -> bool:
        """Say whether there is a file of this piece, as far as is known."""
        with self._lock:
            return self._path(name, kind) in self._files

    def size(self, name: bytes, kind: str) -> int:
        """Return the bytes of a file; 0 where there is none."""
        with self._lock:
            return self._files.get(self._path(name, kind), 0)

    def write(self, name: bytes, kind: str, piece: Piece) -> None:
        """Keep a computed piece in the time to come, unless too much waits already."""
        with self._lock:
            known = self._path(name, kind) in self._files or (name, kind) in self._pending_names
            if self._failed or known or self._pending + piece.nbytes > PENDING_BYTES:
                return
            self._pending += piece.nbytes
            self._pending_names.add((name, kind))
        views = [(label, array, bytes_view(array)) for label, array in piece.arrays.items()]
        self._queue.put(((name, kind), piece, views))

    def read(self, names: Sequence[Name]) -> "Future[dict[Name, Raw]]":
        """Begin to read pieces; those that are not there or damaged are left out."""
        return self._reader.submit(self._read_all, list(names))

    def flush(self) -> None:
        """Wait until everything that was given is written."""
        self._queue.join()

    def close(self) -> None:
        """Write what waits, and stop."""
        self._queue.put(None)
        self._writer.join()
        self._reader.shutdown()

    def _path(self, name: bytes, kind: str) -> Path:
        return self.folder / f"{name.hex()}.{kind}.safetensors"

    def _scan(self) -> None:
        found = []
        for path in self._root.glob("*/*"):
            with suppress(OSError):
                if is_part(path):
                    path.unlink()
                elif is_piece(path):
                    status = path.stat()
                    found.append((status.st_mtime_ns, path, status.st_size))
        self._files = OrderedDict((path, size) for _, path, size in sorted(found))
        self._trim()

    def _trim(self) -> None:
        total = sum(self._files.values())
        while total > self.limit_bytes and self._files:
            path, size = self._files.popitem(last=False)
            total -= size
            with suppress(OSError):
                path.unlink()
                path.parent.rmdir()  # only if it was the last one

    def _give_up(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            self._notice(f"warning: prompts are not kept in {self._root}: {error.strerror or error}")

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            (name, kind), piece, views = item
            path = self._path(name, kind)
            try:
                if not self._failed:
                    size = write_piece(path, {"key": self.key, "name": name.hex(), "kind": kind}, piece, views)
                    with self._lock:
                        self._files[path] = size
                        self._trim()
            except OSError as error:
                with self._lock:
                    self._give_up(error)
            finally:
                with self._lock:
                    self._pending -= piece.nbytes
                    self._pending_names.discard((name, kind))
                del item, piece, views
                self._queue.task_done()
        self._queue.task_done()

    def _read_all(self, names: Sequence[Name]) -> dict[Name, Raw]:
        found: dict[Name, Raw] = {}
        for name, kind in names:
            path = self._path(name, kind)
            try:
                found[name, kind] = read_piece(path, {"key": self.key, "name": name.hex(), "kind": kind})
                os.utime(path)
            except (OSError, Unreadable):
                with suppress(OSError):
                    path.unlink()
                with self._lock:
                    self._files.pop(path, None)
                continue
            with self._lock:
                if path in self._files:
                    self._files.move_to_end(path)
        return found


def is_piece(path: Path) -> bool:
    """Say whether a path is spelt as a file of ours is, in a folder of ours."""
    name, *rest = path.name.split(".")
    kind = rest[0] if len(rest) == 2 and rest[1] == "safetensors" else ""
    return is_hex(path.parent.name, 32) and is_hex(name, 64) and kind in (ROWS, RING, POINT)


def is_part(path: Path) -> bool:
    """Say whether a path is what an interrupted write of ours left."""
    head, _, number = path.name.rpartition(".part")
    return number.isdigit() and is_piece(path.with_name(head))


def write_piece(
    path: Path, facts: Mapping[str, str], piece: Piece, views: Sequence[tuple[str, mx.array, memoryview]]
) -> int:
    """Write a piece, whole or not at all; return the file's bytes."""
    written = json.dumps({str(layer): count for layer, count in piece.written.items()})
    said: dict[str, str] = {"format": FORMAT, **facts, "written": written}
    header: dict[str, Any] = {"__metadata__": said}
    end = 0
    for label, array, view in views:
        start, end = end, end + view.nbytes
        header[label] = {"dtype": DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    said["sha256"] = _seal(header, [view for _, _, view in views])
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    staged = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        path.parent.mkdir(exist_ok=True)
        with staged.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for _, _, view in views:
                file.write(view)
        staged.replace(path)
    except BaseException:
        with suppress(OSError):
            staged.unlink()
        raise
    return 8 + len(head) + end


def _seal(header: Mapping[str, Any], parts: Sequence[memoryview]) -> str:
    """Return the digest of all that a file says."""
    digest = sha256(json.dumps(header, sort_keys=True).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def read_piece(path: Path, facts: Mapping[str, str]) -> Raw:
    """Read a piece that says of itself what it should. Raises OSError or `Unreadable`."""
    data = memoryview(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(HEADER_CAP_BYTES, len(data) - 8):
        raise Unreadable
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
        said, body = header["__metadata__"], data[8 + size :]
        good = said["format"] == FORMAT and all(said[key] == value for key, value in facts.items())
        if not good or said.pop("sha256") != _seal(header, [body]):
            raise Unreadable
        del header["__metadata__"]
        written = {int(layer): int(count) for layer, count in json.loads(said["written"]).items()}
        return Raw(arrays=dict(_arrays(header, body)), written=written)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreadable from error


def _arrays(
    header: Mapping[str, Any], body: memoryview
) -> Iterator[tuple[str, tuple[str, tuple[int, ...], memoryview]]]:
    for label, one in header.items():
        start, end = one["data_offsets"]
        shape = tuple(one["shape"])
        count = MX_DTYPES[one["dtype"]].size * prod(shape)
        if not 0 <= start <= end <= len(body) or end - start != count:
            raise Unreadable
        yield label, (one["dtype"], shape, body[start:end])
