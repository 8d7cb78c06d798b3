"""Slots of one layer filled from disk: what is published, when, and what must never be overwritten."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mference_core.errors import StreamError
from mference_core.experts.pool import ExpertPool, ExpertSource, ExpertStats, ResidentExperts
from mference_core.experts.reader import ExpertReader
from mference_core.experts.slab import Slab, Staging
from mference_core.tensors import ExpertLayer, ExpertPart, Extent, Span

EXPERTS = 8
PARTS = (
    ExpertPart(name="gate", dtype="U32", shape=(3, 4), size=48),
    ExpertPart(name="gate_scales", dtype="BF16", shape=(3, 2), size=12),
    ExpertPart(name="down", dtype="F16", shape=(5,), size=10),
    ExpertPart(name="bias", dtype="F32", shape=(2,), size=8),
)
STRIDE = 128
BLOB = sum(part.size for part in PARTS)
NUMBERS = {"U32": mx.uint32, "BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


def blob(expert: int) -> bytes:
    """Return the bytes of an expert: finite, distinct values in every dtype."""
    out = b""
    for number, part in enumerate(PARTS):
        values = mx.arange(part.size // 2, dtype=mx.float32) + 10 * expert + number
        array = values.astype(mx.bfloat16) if part.dtype in {"U32", "BF16"} else values.astype(mx.float16)
        out += bytes(memoryview(array.view(mx.uint16)))  # type: ignore[arg-type]
    return out


@pytest.fixture
def layer(tmp_path: Path) -> ExpertLayer:
    path = tmp_path / "layer.bin"
    path.write_bytes(b"".join(blob(expert).ljust(STRIDE, b"\0") for expert in range(EXPERTS)))
    names = tuple(part.name for part in PARTS)
    return ExpertLayer(
        layer=3,
        count=EXPERTS,
        parts=PARTS,
        extents=lambda e: (Extent(span=Span(path=path, offset=e * STRIDE, size=BLOB), parts=names),),
    )


@pytest.fixture
def reader() -> Iterator[ExpertReader]:
    with ExpertReader() as opened:
        yield opened


@pytest.fixture(params=[True, False], ids=["in place", "staged"])
def in_place(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def row(source: ExpertSource, slot: int) -> bytes:
    """Return the bytes a slot holds now, part after part."""
    rows = [source.slab[part.name][slot] for part in PARTS]
    return b"".join(bytes(memoryview(mx.contiguous(r).view(mx.uint8))) for r in rows)  # type: ignore[arg-type]


def test_every_slot_holds_the_bytes_of_its_expert(layer: ExpertLayer, reader: ExpertReader, *, in_place: bool) -> None:
    pool = ExpertPool(layer, reader, slots=4, in_place=in_place)
    for wanted in ([5, 2], [2, 7, 0], [1, 3, 4, 6], [7, 6, 5, 0]):
        lease = pool.acquire(wanted)
        assert lease is not None
        lease.wait()
        assert sorted(lease.hits + lease.misses) == sorted(wanted)
        for expert, slot in zip(wanted, lease.slots, strict=True):
            assert row(pool, slot) == blob(expert)
            assert pool.table.slot_of[expert] == slot
            assert pool.slot_map[expert].item() == slot


def test_arrays_have_the_declared_dtypes_shapes_and_bytes(
    layer: ExpertLayer, reader: ExpertReader, *, in_place: bool
) -> None:
    pool = ExpertPool(layer, reader, slots=4, in_place=in_place)
    assert {name: (a.dtype, a.shape) for name, a in pool.slab.items()} == {
        part.name: (NUMBERS[part.dtype], (4, *part.shape)) for part in PARTS
    }
    assert pool.nbytes == 4 * layer.expert_bytes == 4 * BLOB
