"""The index at the head of model_weights.bin: names, dtypes, shapes and places of the resident tensors."""

import struct
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

from attrs import frozen

from mference_core.errors import ManifestError
from mference_core.gturbo import page_up
from mference_core.jsondata import file_size
from mference_core.tensors import DTYPE_BYTES, Quant

HEADER_BYTES, ENTRY_BYTES = 24, 72
INDEX_CAP_BYTES = (1 << 20) - 1
MAX_RANK = 4
DTYPE_CODES = ("U32", "BF16", "F16", "F32", "I64", "I32")
BITS = (2, 4, 8)
GROUP_SIZES = (32, 64, 128)

_HEADER = struct.Struct("<3Q")
_ENTRY = struct.Struct("<IHBBQQ4I4Q")


@frozen(kw_only=True)
class Resident:
    """A tensor to be laid out: logical shape, and its quantisation or None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    quant: Quant | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of the weight, its scales and its biases."""
        if self.quant is None:
            return DTYPE_BYTES[self.dtype] * prod(self.shape), 0, 0
        groups = 2 * prod(self.shape) // self.quant.group_size
        return prod(self.shape) * self.quant.bits // 8, groups, groups


@frozen(kw_only=True)
class IndexEntry:
    """One resident tensor: offsets are absolute in model_weights.bin, sizes in bytes, `shape` logical."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    scales_offset: int = 0
    scales_size: int = 0
    biases_offset: int = 0
    biases_size: int = 0

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) of the weight and, when present, of scales and biases."""
        all_three = (
            (self.offset, self.size),
            (self.scales_offset, self.scales_size),
            (self.biases_offset, self.biases_size),
        )
        return tuple(span for span in all_three if span[1])

    @property
    def quant(self) -> Quant | None:
        """Bits and group derived from the sizes, as the format stores neither; None for a plain tensor."""
        if not self.scales_size:
            return None
        return Quant(bits=self.size * 8 // prod(self.shape), group_size=2 * prod(self.shape) // self.scales_size)


@frozen(kw_only=True)
class ResidentIndex:
    """The whole index: `index_size` bytes with padding, then `resident_size` bytes of payload."""

    entries: tuple[IndexEntry, ...]
    index_size: int
    resident_size: int

    @property
    def file_size(self) -> int:
        """Bytes of model_weights.bin."""
        return self.index_size + self.resident_size


def plan_index(tensors: Sequence[Resident]) -> ResidentIndex:
    """Lay tensors out in the order given, without gaps: weight, scales, biases of each in turn.

    Raises `ManifestError` when the index would pass 1 MiB or a tensor has more than four axes.
    """
    names = sum(len(tensor.name.encode()) for tensor in tensors)
    index_size = page_up(HEADER_BYTES + ENTRY_BYTES * len(tensors) + names)
    if index_size > INDEX_CAP_BYTES:
        raise ManifestError(what="resident index", got=f"{index_size} bytes", expected=f"at most {INDEX_CAP_BYTES}")
    offset, entries = index_size, []
    for tensor in tensors:
        size, scales, biases = tensor.sizes
        entry = IndexEntry(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            offset=offset,
            size=size,
            scales_offset=offset + size if scales else 0,
            scales_size=scales,
            biases_offset=offset + size + scales if biases else 0,
            biases_size=biases,
        )
        _check_entry(entry)
        entries.append(entry)
        offset += size + scales + biases
    _check_unique(entries)
    return ResidentIndex(entries=tuple(entries), index_size=index_size, resident_size=offset - index_size)


def encode_index(index: ResidentIndex) -> bytes:
    """Return the `index_size` bytes of the index region."""
    name_offset = HEADER_BYTES + ENTRY_BYTES * len(index.entries)
    rows, names = [_HEADER.pack(index.index_size, index.resident_size, len(index.entries))], []
    for entry in index.entries:
        name = entry.name.encode()
        shape = entry.shape + (0,) * (MAX_RANK - len(entry.shape))
        rows.append(
            _ENTRY.pack(
                *(name_offset, len(name), DTYPE_CODES.index(entry.dtype), 0, entry.offset, entry.size, *shape),
                *(entry.scales_offset, entry.scales_size, entry.biases_offset, entry.biases_size),
            )
        )
        names.append(name)
        name_offset += len(name)
    return b"".join(rows + names).ljust(index.index_size, b"\0")


def read_index(path: Path) -> ResidentIndex:
    """Read and check the index of a model_weights.bin; raises `ManifestError` naming the file and the tensor."""
    size = file_size(path)
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
            if len(head) < HEADER_BYTES:
                raise _bad("header", f"cut short at {len(head)} bytes", f"{HEADER_BYTES} bytes")
            index_size = _HEADER.unpack(head)[0]
            if not HEADER_BYTES <= index_size <= min(size, INDEX_CAP_BYTES):
                limit = f"{HEADER_BYTES} to {min(size, INDEX_CAP_BYTES)} bytes"
                raise _bad("indexSize", str(index_size), limit)
            image = head + file.read(index_size - HEADER_BYTES)
    except OSError as error:
        raise ManifestError(what=str(path), got=f"unreadable ({error.strerror})") from error
    return decode_index(image, size)


def decode_index(image: bytes, file_bytes: int) -> ResidentIndex:
    """Return the index in `image`, the index region of a file of `file_bytes`; raises `ManifestError`."""
    index_size, resident_size, count = _HEADER.unpack_from(image)
    if index_size != len(image):
        raise _bad("indexSize", str(index_size), f"the {len(image)} bytes that are there")
    if HEADER_BYTES + ENTRY_BYTES * count > index_size:
        raise _bad("entryCount", str(count), f"entries that fit indexSize {index_size}")
    if index_size + resident_size != file_bytes:
        raise _bad("size", f"{file_bytes} bytes", f"indexSize + residentSize = {index_size + resident_size}")
    entries = [_decode_entry(image, HEADER_BYTES + ENTRY_BYTES * i, i) for i in range(count)]
    _check_unique(entries)
    _check_spans(entries, index_size, file_bytes)
    return ResidentIndex(entries=tuple(entries), index_size=index_size, resident_size=resident_size)


def _decode_entry(image: bytes, at: int, ordinal: int) -> IndexEntry:
    name_at, name_length, code, _, offset, size, *rest = _ENTRY.unpack_from(image, at)
    if not (name_length and name_at >= HEADER_BYTES and name_at + name_length <= len(image)):
        raise _bad(f"entry {ordinal} name", f"at {name_at}, {name_length} bytes", "a name inside the index")
    try:
        name = image[name_at : name_at + name_length].decode()
    except UnicodeDecodeError as error:
        raise _bad(f"entry {ordinal} name", "not UTF-8", "a tensor name") from error
    if code >= len(DTYPE_CODES):
        raise _bad(f"{name} dtype", str(code), f"a code from 0 to {len(DTYPE_CODES) - 1}")
    shape = list(rest[:MAX_RANK])
    while shape and shape[-1] == 0:
        shape.pop()
    if 0 in shape:
        raise _bad(f"{name} shape", str(shape), "axes above 0")
    names = ("scales_offset", "scales_size", "biases_offset", "biases_size")
    companions = dict(zip(names, rest[MAX_RANK:], strict=True))
    entry = IndexEntry(name=name, dtype=DTYPE_CODES[code], shape=tuple(shape), offset=offset, size=size, **companions)
    _check_entry(entry)
    return entry


def _check_entry(entry: IndexEntry) -> None:
    """Hold dtype, shape, sizes and alignment of one entry together."""
    if len(entry.shape) > MAX_RANK:
        raise _bad(f"{entry.name} rank", str(len(entry.shape)), f"at most {MAX_RANK} axes")
    if any(offset % 2 for offset, _ in entry.spans):
        raise _bad(f"{entry.name} offset", "odd", "even offsets of weight, scales and biases")
    if entry.dtype == "U32" and entry.name.endswith(".weight"):
        _check_quantised(entry)
        return
    if entry.scales_size or entry.biases_size:
        raise _bad(f"{entry.name} scales and biases", "present", f"none on a {entry.dtype} tensor")
    need = DTYPE_BYTES[entry.dtype] * prod(entry.shape)
    if entry.size != need:
        raise _bad(f"{entry.name} size", f"{entry.size} bytes", f"{need} for {entry.dtype} {list(entry.shape)}")


def _check_quantised(entry: IndexEntry) -> None:
    count = prod(entry.shape)
    if not entry.shape or entry.size * 8 not in {count * bits for bits in BITS}:
        shape = f"{list(entry.shape)} at 2, 4 or 8 bits"
        raise _bad(f"{entry.name} size", f"{entry.size} bytes", f"the packed size of {shape}")
    if not entry.scales_size or entry.scales_size != entry.biases_size:
        got = f"{entry.scales_size} and {entry.biases_size} bytes"
        raise _bad(f"{entry.name} scales and biases", got, "both, of equal size")
    groups = {group for group in GROUP_SIZES if entry.shape[-1] % group == 0}
    if entry.scales_size not in {2 * count // group for group in groups}:
        expected = f"one BF16 per group of 32, 64 or 128 of {list(entry.shape)}"
        raise _bad(f"{entry.name} scales", f"{entry.scales_size} bytes", expected)


def _check_unique(entries: Iterable[IndexEntry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise _bad(f"{entry.name} entry", "listed twice", "unique names")
        seen.add(entry.name)


def _check_spans(entries: Iterable[IndexEntry], start: int, end: int) -> None:
    spans = sorted((offset, size, entry.name) for entry in entries for offset, size in entry.spans)
    reached, before = start, "the index"
    for offset, size, name in spans:
        if offset < start or offset + size > end:
            raise _bad(f"{name} bytes", f"{offset} to {offset + size}", f"a span inside the payload {start} to {end}")
        if offset < reached:
            raise _bad(f"{name} bytes", f"overlapping {before}", "spans of their own")
        reached, before = offset + size, name


def _bad(what: str, got: str, expected: str) -> ManifestError:
    return ManifestError(what=f"model_weights.bin {what}", got=got, expected=expected)
