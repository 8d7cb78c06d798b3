"""Experts that are all in memory from the start, through the same interface as slots."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mference_core.errors import StreamError
from mference_core.experts import residents as module
from mference_core.experts.pool import ExpertSource
from mference_core.experts.reader import ExpertReader
from mference_core.experts.residents import ResidentExperts
from mference_core.experts.slab import Staging
from mference_core.tensors import ExpertLayer, ExpertPart, Extent, Span

EXPERTS = 8
PART = ExpertPart(name="gate", dtype="U32", shape=(3,), size=12)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "layer.bin"


@pytest.fixture
def layer(file: Path) -> ExpertLayer:
    """Return a layer whose expert e is three words of value e + 1."""
    file.write_bytes(b"".join((expert + 1).to_bytes(4, "little") * 3 for expert in range(EXPERTS)))
    return ExpertLayer(
        layer=3,
        count=EXPERTS,
        parts=(PART,),
        extents=lambda e: (Extent(span=Span(path=file, offset=e * PART.size, size=PART.size), parts=("gate",)),),
    )


@pytest.fixture
def reader() -> Iterator[ExpertReader]:
    with ExpertReader() as opened:
        yield opened


@pytest.fixture(params=[True, False], ids=["in place", "staged"])
def in_place(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_residents_are_all_there_from_the_start(layer: ExpertLayer, reader: ExpertReader, *, in_place: bool) -> None:
    hooked: list[tuple[int, int]] = []
    source: ExpertSource = ResidentExperts(
        layer, reader, in_place=in_place, before_first_read=lambda number: hooked.append((number, reader.reads))
    )
    assert hooked == [(3, 0)]
    assert source.full
    assert source.slots == source.experts == EXPERTS
    assert source.nbytes == EXPERTS * PART.size
    assert source.slot_map.tolist() == list(range(EXPERTS))
    assert source.slab["gate"].tolist() == [[expert + 1] * 3 for expert in range(EXPERTS)]
    lease = source.acquire([6, 0, 3])
    assert lease is not None
    lease.wait()
    assert (lease.slots, lease.hits, lease.misses) == ((6, 0, 3), (6, 0, 3), ())
    assert source.prefetch([1], keep_evictable=0) == 0
    assert source.non_resident(range(EXPERTS)) == ()
    source.reads_pending(source.slab["gate"], lease.slots)
    source.note_all_hit_use([1])
    stats = source.stats
    assert (stats.hits, stats.misses, stats.bytes_read) == (4, 0, EXPERTS * PART.size)


def test_residents_load_in_steps(
    layer: ExpertLayer, reader: ExpertReader, monkeypatch: pytest.MonkeyPatch, *, in_place: bool
) -> None:
    """A host buffer, where one is needed, holds a few experts and not the layer."""
    monkeypatch.setattr(module, "LOAD_BYTES", 3 * PART.size)
    staging = Staging()
    source = ResidentExperts(layer, reader, in_place=in_place, staging=staging)
    assert source.slab["gate"].tolist() == [[expert + 1] * 3 for expert in range(EXPERTS)]
    assert [len(buffer) for buffer in staging._free] == ([] if in_place else [3 * PART.size])


def test_a_layer_that_cannot_be_read_is_not_made_resident(layer: ExpertLayer, reader: ExpertReader, file: Path) -> None:
    os.truncate(file, PART.size)
    with pytest.raises(StreamError, match=r"layer\.bin"):
        ResidentExperts(layer, reader)
