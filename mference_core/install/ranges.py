"""The range plan of an install: which source bytes go where, in requests of bounded size (gturbo-format 16).

Identifiers, order and both digests are part of the format: a download begun by another program resumes only if
they agree bit for bit.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import pairwise

from attrs import evolve, field, frozen

from mference_core.errors import InstallError
from mference_core.jsondata import is_safe_relative
from mference_core.manifest import VERSION_MAJOR

CHUNK_BYTES = 64 << 20
IDENTITY = "identity"


@frozen(kw_only=True)
class Copy:
    """`size` source bytes from `offset` of a shard, written to `dest_offset` of an output file.

    `transform` names a change of the bytes on the way: it maps units of `unit_bytes` to `growth` times as many.
    """

    shard: str
    offset: int
    size: int
    dest_path: str
    dest_offset: int
    transform: str = IDENTITY
    unit_bytes: int = 1
    growth: int = 1

    @property
    def dest_size(self) -> int:
        """Bytes written."""
        return self.size * self.growth


@frozen(kw_only=True)
class RangeRequest:
    """One request: `size` bytes from `offset` of a shard, and the copies it serves, in digest order."""

    ident: str
    shard: str
    offset: int
    size: int
    copies: tuple[Copy, ...]

    @property
    def dest_size(self) -> int:
        """Bytes written to the output files."""
        return sum(copy.dest_size for copy in self.copies)

    @property
    def gap_bytes(self) -> int:
        """Bytes between the copies: downloaded with them, part of no output."""
        return self.size - sum(copy.size for copy in self.copies)

    @property
    def pieces(self) -> "tuple[Piece, ...]":
        """The whole range in source order: what of it goes where."""
        pieces, at, gaps = list[Piece](), self.offset, 0
        for copy in sorted(self.copies, key=lambda c: c.offset):
            if copy.offset < at or copy.transform != IDENTITY:
                got = copy.transform if copy.offset >= at else "overlapping another"
                raise InstallError(what=f"{self.ident} copy at {copy.offset}", got=got, expected="plain bytes")
            if copy.offset > at:
                pieces.append(Piece(start=at - self.offset, size=copy.offset - at, path=None, offset=gaps))
                gaps += copy.offset - at
            start = copy.offset - self.offset
            pieces.append(Piece(start=start, size=copy.size, path=copy.dest_path, offset=copy.dest_offset))
            at = copy.offset + copy.size
        return tuple(pieces)


@frozen(kw_only=True)
class Piece:
    """Bytes of a range from `start`, and where they go: `offset` in an output, or among the range's gap bytes."""

    start: int
    size: int
    path: str | None
    offset: int


@frozen(kw_only=True)
class RangePlan:
    """All requests of an install, and the sizes of the files they fill."""

    ranges: tuple[RangeRequest, ...]
    outputs: Mapping[str, int]
    index_sha256: str
    chunk_bytes: int = CHUNK_BYTES
    order_sha256: str = ""
    version_minor: int = field(default=0)

    @property
    def source_bytes(self) -> int:
        """Bytes to be downloaded, gaps between copies included."""
        return sum(request.size for request in self.ranges)


def plan_ranges(
    copies: Iterable[Copy], outputs: Mapping[str, int], index_sha256: str, chunk_bytes: int = CHUNK_BYTES
) -> RangePlan:
    """Split, sort and coalesce copies into requests; raises `InstallError` when two would write one byte."""
    pieces = sorted((p for copy in copies for p in _split(copy, chunk_bytes)), key=lambda c: (c.shard, c.offset))
    _check_destinations(pieces, outputs)
    groups = list[list[Copy]]()
    end = 0
    for piece in pieces:
        joined = groups and groups[-1][0].shard == piece.shard
        if joined and max(end, piece.offset + piece.size) - groups[-1][0].offset <= chunk_bytes:
            groups[-1].append(piece)
            end = max(end, piece.offset + piece.size)
        else:
            groups.append([piece])
            end = piece.offset + piece.size
    requests = (
        RangeRequest(
            ident=f"range-{number:08d}",
            shard=group[0].shard,
            offset=group[0].offset,
            size=max(c.offset + c.size for c in group) - group[0].offset,
            copies=tuple(sorted(group, key=lambda c: (c.dest_path, c.dest_offset, c.offset))),
        )
        for number, group in enumerate(groups)
    )
    return RangePlan(ranges=tuple(requests), outputs=outputs, index_sha256=index_sha256, chunk_bytes=chunk_bytes)


def _split(copy: Copy, chunk_bytes: int) -> Iterator[Copy]:
    step = chunk_bytes - chunk_bytes % copy.unit_bytes
    for done in range(0, copy.size, step):
        size = min(step, copy.size - done)
        yield evolve(copy, offset=copy.offset + done, size=size, dest_offset=copy.dest_offset + done * copy.growth)


def _check_destinations(copies: Iterable[Copy], outputs: Mapping[str, int]) -> None:
    ordered = sorted(copies, key=lambda c: (c.dest_path, c.dest_offset))
    for copy in ordered:
        what = f"range plan {copy.dest_path} at {copy.dest_offset}"
        if not is_safe_relative(copy.dest_path) or copy.dest_path not in outputs:
            raise InstallError(what=what, got="not a planned output", expected="a file of the install")
        if copy.dest_offset + copy.dest_size > outputs[copy.dest_path]:
            raise InstallError(what=what, got=f"{copy.dest_size} bytes", expected="a span inside the file")
    for before, copy in pairwise(ordered):
        if before.dest_path == copy.dest_path and before.dest_offset + before.dest_size > copy.dest_offset:
            raise InstallError(what=f"range plan {copy.dest_path} at {copy.dest_offset}", got="written twice")


class _Stream:
    """SHA-256 over length-prefixed strings and 64-bit little-endian integers."""

    def __init__(self) -> None:
        self._digest = sha256()

    def add(self, *values: str | int) -> None:
        for value in values:
            if isinstance(value, int):
                self._digest.update(value.to_bytes(8, "little"))
            else:
                data = value.encode()
                self._digest.update(len(data).to_bytes(8, "little") + data)

    def raw(self, data: bytes | memoryview) -> None:
        self._digest.update(data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _transforms(copies: Iterable[Copy]) -> bool:
    return any(copy.transform != IDENTITY for copy in copies)


def plan_fingerprint(plan: RangePlan) -> str:
    """Return the SHA-256 that names a plan: a saved download continues only under the same one."""
    second = any(_transforms(request.copies) for request in plan.ranges)
    stream = _Stream()
    stream.add(f"Mference.RemoteInstallPlan.{'v2' if second else 'v1'}")
    stream.add(VERSION_MAJOR, plan.version_minor, plan.chunk_bytes, IDENTITY, plan.order_sha256, plan.index_sha256)
    stream.add(len(plan.outputs))
    for path, size in sorted(plan.outputs.items()):
        stream.add(path, size)
    stream.add(len(plan.ranges))
    for request in plan.ranges:
        stream.add(request.ident, unicodedata.normalize("NFC", request.shard), request.offset, request.size)
        stream.add(len(request.copies))
        for copy in request.copies:
            _add_copy(stream, copy, request.offset, second=second)
    return stream.hexdigest()


def range_digest(request: RangeRequest, pieces: Iterable[Iterable[bytes | memoryview]]) -> str:
    """Return the SHA-256 that records a finished request.

    `pieces` gives, per copy of `request` in order, the bytes read back from the output file, in any pieces.
    """
    second = _transforms(request.copies)
    stream = _Stream()
    stream.add(f"Mference.RemoteRangeDestination.{'v2' if second else 'v1'}", request.ident, len(request.copies))
    for copy, data in zip(request.copies, pieces, strict=True):
        _add_copy(stream, copy, request.offset, second=second)
        for piece in data:
            stream.raw(piece)
    return stream.hexdigest()


def _add_copy(stream: _Stream, copy: Copy, start: int, *, second: bool) -> None:
    stream.add(copy.dest_path, copy.dest_offset, copy.offset - start, copy.size)
    if second:
        stream.add(copy.dest_size, copy.transform)
