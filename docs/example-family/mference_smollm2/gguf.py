"""The head of a GGUF file, versions 2 and 3: its metadata, and where each tensor's bytes lie.

Read strictly: every length is held against the file before anything is made of it. Source: the ggml project's
docs/gguf.md. Axes are listed here in the usual order, slowest first; the file has them the other way round.
"""

import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from attrs import define, field, frozen

from mference_core import MferenceError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ITEMS = 1 << 20
MAX_RANK = 4
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


class GgufError(MferenceError):
    """A GGUF file that cannot be read or converted."""


@frozen(kw_only=True)
class Kind:
    """A tensor type: values per block, and bytes of a block."""

    name: str
    block: int
    size: int


KINDS = {
    0: Kind(name="F32", block=1, size=4),
    1: Kind(name="F16", block=1, size=2),
    3: Kind(name="Q4_1", block=32, size=20),
    8: Kind(name="Q8_0", block=32, size=34),
    14: Kind(name="Q6_K", block=256, size=210),
    30: Kind(name="BF16", block=1, size=2),
}
"""The types this program converts, by their number in the file."""


@frozen(kw_only=True)
class GgufTensor:
    """A tensor: `shape` in values, slowest axis first, `offset` absolute in the file, `size` in bytes."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the last axis."""
        return self.shape[-1] // self.kind.block * self.kind.size


@frozen(kw_only=True)
class Gguf:
    """A file's metadata by key and tensors by name."""

    path: Path
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, GgufTensor] = field(repr=False)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a metadata value of the given type; raises `GgufError` when it is missing without a default."""
        value = self.metadata.get(key, default)
        if value is None or not isinstance(value, kind):
            got = "missing" if value is None else type(value).__name__
            raise GgufError(what=f"{self.path} metadata {key}", got=got, expected="as llama files have it")
        return value


@define
class _Head:
    """Reads values from a file and never past its end."""

    path: Path
    file: BinaryIO
    size: int

    def bad(self, what: str, got: str, expected: str) -> GgufError:
        return GgufError(what=f"{self.path} {what}", got=got, expected=expected)

    def take(self, count: int) -> bytes:
        at = self.file.tell()
        if count > self.size - at:
            raise self.bad(f"at byte {at}", f"cut short ({count} bytes wanted)", f"a file longer than {self.size}")
        return self.file.read(count)

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """Read a 64-bit count of things that take at least so many bytes each."""
        count = int(self.number("<Q"))
        if count * least_bytes > self.size or count > MAX_ITEMS:
            raise self.bad(what, str(count), "a count the file can hold")
        return count

    def text(self) -> str:
        at, length = self.file.tell(), int(self.number("<Q"))
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.bad(f"text at byte {at}", "not UTF-8", "UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise self.bad(f"value at byte {self.file.tell()}", f"of type {kind}", "a type of the format")
        inner = self.number("<I")
        if inner == ARRAY:
            raise self.bad(f"value at byte {self.file.tell()}", "an array of arrays", "numbers or strings")
        return [self.value(inner) for _ in range(self.count("array", 1))]

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Read one entry: name, type number, shape, offset in the data part."""
        name, rank = self.text(), self.number("<I")
        if not 1 <= rank <= MAX_RANK:
            raise self.bad(f"tensor {name}", f"of {rank} axes", f"1 to {MAX_RANK}")
        shape = tuple(int(self.number("<Q")) for _ in range(rank))[::-1]
        return name, self.number("<I"), shape, self.number("<Q")


def read_gguf(path: Path) -> Gguf:
    """Read a file's head; raises `GgufError` naming the first thing that cannot be meant."""
    try:
        with path.open("rb") as file:
            head = _Head(path, file, path.stat().st_size)
            return _read(head)
    except OSError as error:
        raise GgufError(what=str(path), got=f"unreadable ({error.strerror})", expected="a GGUF file") from error


def _read(head: _Head) -> Gguf:
    if head.size < len(MAGIC) or head.take(len(MAGIC)) != MAGIC:
        raise head.bad("magic", "another", "GGUF")
    version = head.number("<I")
    if version not in VERSIONS:
        raise head.bad("version", str(version), " or ".join(map(str, VERSIONS)))
    tensors, pairs = head.count("tensor count", 24), head.count("metadata count", 12)
    metadata = {}
    for _ in range(pairs):
        key = head.text()
        metadata[key] = head.value(head.number("<I"))
    entries = [head.tensor() for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise head.bad("metadata general.alignment", repr(alignment), "a positive number")
    start = -(-head.file.tell() // alignment) * alignment
    placed: dict[str, GgufTensor] = {}
    for name, number, shape, offset in entries:
        if name in placed:
            raise head.bad(f"tensor {name}", "there twice", "one copy")
        placed[name] = _place(head, name, number, shape, start + offset)
    return Gguf(path=head.path, metadata=metadata, tensors=placed)


def _place(head: _Head, name: str, number: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
    kind = KINDS.get(number)
    if kind is None:
        known = ", ".join(kind.name for kind in KINDS.values())
        raise head.bad(f"tensor {name}", f"of type {number}", known)
    if min(shape) < 1 or shape[-1] % kind.block:
        raise head.bad(f"tensor {name}", f"of shape {list(shape)}", f"rows of whole blocks of {kind.block}")
    size = prod(shape) // kind.block * kind.size
    if offset + size > head.size:
        raise head.bad(f"tensor {name}", f"up to byte {offset + size}", f"a span inside the file's {head.size} bytes")
    return GgufTensor(name=name, kind=kind, shape=shape, offset=offset, size=size)
