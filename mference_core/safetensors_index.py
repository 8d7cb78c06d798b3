"""Headers of safetensors files, read strictly: where each tensor's bytes lie, before any byte is mapped.

Stricter than the usual readers, which accept trailing bytes and shards no index lists: a file that lies about one
tensor is refused by name. Nothing of the payload is read.
"""

from collections.abc import Mapping
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from attrs import frozen

from mference_core.errors import ManifestError
from mference_core.jsondata import file_size, is_safe_relative, member, parse_object, read_capped, typed
from mference_core.tensors import DTYPE_BYTES, UNSUPPORTED, Span

HEADER_CAP_BYTES = 16 << 20
INDEX_CAP_BYTES = 16 << 20
INDEX_NAME = "model.safetensors.index.json"
PREFIX_BYTES = 8


@frozen(kw_only=True)
class SourceTensor:
    """A tensor as its file states it: stored shape, bytes `span.offset` absolute in the shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    span: Span


@frozen(kw_only=True)
class Shard:
    """One safetensors file: its tensors, and the SHA-256 of its header bytes (length prefix included)."""

    path: Path
    tensors: Mapping[str, SourceTensor]
    header_sha256: str


@frozen(kw_only=True)
class Source:
    """All shards of a directory. `snapshot_sha256` is the digest of the index file, else of the one header."""

    directory: Path
    shards: tuple[Shard, ...]
    tensors: Mapping[str, SourceTensor]
    snapshot_sha256: str


@frozen(kw_only=True)
class ShardIndex:
    """An index file: the shard of each tensor, and the shards in the order the format fixes."""

    path: Path
    listed: Mapping[str, str]
    names: tuple[str, ...]
    sha256: str


def read_shard(path: Path) -> Shard:
    """Read one file's header (at most 16 MiB) and hold it against the file; raises `ManifestError`."""
    size = file_size(path)
    try:
        with path.open("rb") as file:
            prefix = file.read(PREFIX_BYTES)
            head = prefix + file.read(header_bytes(prefix, path, size))
    except OSError as error:
        raise ManifestError(what=str(path), got=f"unreadable ({error.strerror})") from error
    return decode_shard(head, path, size)


def header_bytes(prefix: bytes, path: Path, file_bytes: int) -> int:
    """Return the length of the header after a file's first 8 bytes; raises `ManifestError` if it cannot be."""
    length = int.from_bytes(prefix, "little")
    limit = min(HEADER_CAP_BYTES, max(0, file_bytes - PREFIX_BYTES))
    if len(prefix) < PREFIX_BYTES or length > limit:
        got = f"{length} bytes long" if len(prefix) == PREFIX_BYTES else "cut short"
        raise ManifestError(what=f"{path} header", got=got, expected=f"at most {limit} in {file_bytes} bytes")
    return length


def decode_shard(head: bytes, path: Path, file_bytes: int) -> Shard:
    """Return the tensors of a file of `file_bytes` that begins with `head`, its length prefix and header.

    Raises `ManifestError` naming `path`, which need not be there.
    """
    values = parse_object(head[PREFIX_BYTES:], f"{path} header")
    _check_metadata(values.pop("__metadata__", {}), path)
    tensors = {name: _decode(name, value, path, len(head), file_bytes) for name, value in values.items()}
    _check_spans(tensors, path, len(head), file_bytes)
    return Shard(path=path, tensors=tensors, header_sha256=sha256(head).hexdigest())


def _check_metadata(values: Any, path: Path) -> None:
    what = f"{path} __metadata__"
    if values is None:  # what mlx writes when it has none to write
        return
    for key, value in typed(values, dict, what).items():
        typed(value, str, f"{what} {key}")


def _decode(name: str, value: Any, path: Path, start: int, file_bytes: int) -> SourceTensor:
    what = f"{path} tensor {name}"
    typed(value, dict, what)
    dtype = member(value, "dtype", str, what)
    if dtype not in DTYPE_BYTES:
        raise ManifestError(what=f"{what} dtype", got=dtype, expected=" or ".join(DTYPE_BYTES), remedy=UNSUPPORTED)
    shape = tuple(typed(n, int, f"{what} shape") for n in member(value, "shape", list, what))
    offsets = [typed(n, int, f"{what} data_offsets") for n in member(value, "data_offsets", list, what)]
    if min(shape, default=0) < 0:
        raise ManifestError(what=f"{what} shape", got=str(list(shape)), expected="axes of at least 0")
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise ManifestError(what=f"{what} data_offsets", got=str(offsets), expected="[begin, end] in order")
    begin, end = offsets
    if start + end > file_bytes:
        got = f"up to byte {start + end}"
        raise ManifestError(
            what=f"{what} data_offsets", got=got, expected=f"a span inside the file's {file_bytes} bytes"
        )
    need = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != need:
        raise ManifestError(what=f"{what} bytes", got=str(end - begin), expected=f"{need} for {dtype} {list(shape)}")
    return SourceTensor(name=name, dtype=dtype, shape=shape, span=Span(path=path, offset=start + begin, size=need))


def _check_spans(tensors: Mapping[str, SourceTensor], path: Path, start: int, file_bytes: int) -> None:
    reached, before = start, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: (t.span.offset, t.span.size)):
        if tensor.span.offset < reached:
            raise ManifestError(
                what=f"{path} tensor {tensor.name} bytes", got=f"overlapping {before}", expected="a span of its own"
            )
        if tensor.span.offset > reached:
            gap = f"a gap of {tensor.span.offset - reached} bytes"
            raise ManifestError(what=f"{path} before tensor {tensor.name}", got=gap, expected="no unused bytes")
        reached, before = tensor.span.offset + tensor.span.size, f"tensor {tensor.name}"
    if reached != file_bytes:
        got = f"{file_bytes - reached} bytes after {before}"
        raise ManifestError(what=f"{path} end", got=got, expected=f"a file of {reached} bytes")


def read_source(directory: Path) -> Source:
    """Read the headers of every shard of a directory and hold them against its index, if it has one.

    Raises `ManifestError` for a missing, unlisted or lying shard, and for a tensor that is missing or there twice.
    """
    index_path = directory / INDEX_NAME
    names = sorted(p.name for p in directory.glob("*.safetensors"))
    if index_path.exists():
        return _read_indexed(directory, index_path, [name for name in names if name.startswith("model")])
    if not names:
        raise ManifestError(what=str(directory), got="without .safetensors files", expected="a model directory")
    if len(names) > 1:
        got = f"missing beside {len(names)} shards"
        raise ManifestError(what=str(index_path), got=got, expected="the list of their tensors")
    if "-of-" in names[0] and not names[0].endswith("-00001-of-00001.safetensors"):
        raise ManifestError(what=str(directory / names[0]), got="one shard of several", expected="all, and an index")
    return join_shards(directory, (read_shard(directory / names[0]),), None)


def _read_indexed(directory: Path, index_path: Path, found: list[str]) -> Source:
    index = decode_index(read_capped(index_path, INDEX_CAP_BYTES, "index"), index_path)
    _check_listing(directory, index, found)
    return join_shards(directory, tuple(read_shard(directory / name) for name in index.names), index)


def decode_index(data: bytes, path: Path) -> ShardIndex:
    """Return what an index file lists; raises `ManifestError` naming `path`."""
    listed = member(parse_object(data, str(path)), "weight_map", dict, str(path))
    for tensor, name in listed.items():
        typed(name, str, f"{path} {tensor}")
        if "/" in name or not is_safe_relative(name):
            raise ManifestError(what=f"{path} {tensor}", got=repr(name), expected="a bare file name")
    # Shards in order of first appearance among the sorted tensor names: the order the format fixes.
    names = tuple(dict.fromkeys(listed[tensor] for tensor in sorted(listed)))
    return ShardIndex(path=path, listed=listed, names=names, sha256=sha256(data).hexdigest())


def join_shards(directory: Path, shards: tuple[Shard, ...], index: ShardIndex | None) -> Source:
    """Return a source of all its shards, held against its index; without one it is a single file."""
    if index is None:
        (shard,) = shards
        return Source(directory=directory, shards=shards, tensors=shard.tensors, snapshot_sha256=shard.header_sha256)
    tensors = _join(shards, index.listed)
    for name, file in index.listed.items():
        if name not in tensors:
            raise ManifestError(what=f"{directory / file} tensor {name}", got="missing", expected="as the index lists")
    return Source(directory=directory, shards=shards, tensors=tensors, snapshot_sha256=index.sha256)


def _check_listing(directory: Path, index: ShardIndex, found: list[str]) -> None:
    for name in found:
        if name not in index.names:
            raise ManifestError(what=str(directory / name), got="not in the index", expected="listed shards only")
    for name in index.names:
        if not (directory / name).exists():
            first = next(tensor for tensor in sorted(index.listed) if index.listed[tensor] == name)
            raise ManifestError(what=str(directory / name), got="missing", expected=f"the shard of tensor {first}")


def _join(shards: tuple[Shard, ...], listed: Mapping[str, str]) -> dict[str, SourceTensor]:
    tensors = dict[str, SourceTensor]()
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if name in tensors:
                other = tensors[name].span.path.name
                raise ManifestError(what=f"{shard.path} tensor {name}", got=f"also in {other}", expected="one copy")
            tensors[name] = tensor
    for name, tensor in tensors.items():
        if listed.get(name) != tensor.span.path.name:
            got = f"listed in {listed[name]}" if name in listed else "not in the index"
            raise ManifestError(what=f"{tensor.span.path} tensor {name}", got=got, expected="the index to list it here")
    return tensors
