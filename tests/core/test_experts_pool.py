"""Slots of one layer filled from disk: what is published, when, and what must never be overwritten."""

import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from mference_core.errors import StreamError
from mference_core.experts.pool import PENDING_LIMIT, ExpertPool, ExpertSource
from mference_core.experts.reader import ExpertReader
from mference_core.experts.slab import Staging
from mference_core.experts.stats import ExpertStats
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


def blob(expert: int) -> bytes:
    """Return the bytes of an expert: finite, distinct values in every dtype."""
    out = b""
    for number, part in enumerate(PARTS):
        values = mx.arange(part.size // 2, dtype=mx.float32) + 10 * expert + number
        array = values.astype(mx.bfloat16) if part.dtype in {"U32", "BF16"} else values.astype(mx.float16)
        out += bytes(memoryview(array.view(mx.uint16)))  # type: ignore[arg-type]
    return out


@pytest.fixture
def layer(file: Path) -> ExpertLayer:
    file.write_bytes(b"".join(blob(expert).ljust(STRIDE, b"\0") for expert in range(EXPERTS)))
    names = tuple(part.name for part in PARTS)
    return ExpertLayer(
        layer=3,
        count=EXPERTS,
        parts=PARTS,
        extents=lambda e: (Extent(span=Span(path=file, offset=e * STRIDE, size=BLOB), parts=names),),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "layer.bin"


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


def got(source: ExpertSource, wanted: Sequence[int], avoiding: Sequence[int] = ()) -> tuple[int, ...]:
    """Acquire, wait, and return the slots."""
    lease = source.acquire(wanted, avoiding)
    assert lease is not None
    lease.wait()
    return lease.slots


class Gate:
    """Holds every read back until it is opened; each waits for at most five seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        whole = os.preadv

        def gated(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            assert self.opened.wait(timeout=5)
            return whole(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", gated)

    def open(self) -> None:
        self.opened.set()


def test_reads_begin_at_once_and_publish_at_wait(
    layer: ExpertLayer, reader: ExpertReader, monkeypatch: pytest.MonkeyPatch, *, in_place: bool
) -> None:
    pool = ExpertPool(layer, reader, slots=4, in_place=in_place)
    gate = Gate(monkeypatch)
    lease = pool.acquire([6])
    assert lease is not None
    assert (lease.misses, lease.hits) == ((6,), ())
    assert pool.table.slot_of[6] == -1, "not published before it is read"
    assert pool.table.filling == {0}
    assert pool.slot_map[6].item() == -1
    gate.open()
    lease.wait()
    assert row(pool, lease.slots[0]) == blob(6)
    assert pool.table.slot_of[6] == pool.slot_map[6].item() == 0
    lease.wait()


def test_queued_work_sees_the_slots_it_was_built_on(
    layer: ExpertLayer, reader: ExpertReader, *, in_place: bool
) -> None:
    """An output not evaluated yet must not change because its slot is given to another expert."""
    pool = ExpertPool(layer, reader, slots=2, in_place=in_place)
    slots = got(pool, [0, 1])
    expected = mx.array(pool.slab["bias"][mx.array(slots)])
    mx.eval(expected)
    queued = mx.take(pool.slab["bias"], mx.array(slots), axis=0) * 1.0
    pool.reads_pending(queued)
    got(pool, [2, 3])
    assert mx.array_equal(queued, expected).item()


def test_queued_work_is_waited_for_only_before_a_refill(
    layer: ExpertLayer, reader: ExpertReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ExpertPool(layer, reader, slots=2, in_place=True)
    got(pool, [0, 1])
    evaluated: list[object] = []
    monkeypatch.setattr(mx, "eval", evaluated.append)
    pool.reads_pending(pool.slab["bias"] + 1)
    got(pool, [1, 0])
    assert evaluated == []
    got(pool, [2])
    got(pool, [3])
    assert len(evaluated) == 1


def test_queued_work_on_other_slots_is_not_waited_for(
    layer: ExpertLayer, reader: ExpertReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What overlaps a tile's work with the next tile's reads."""
    pool = ExpertPool(layer, reader, slots=4, in_place=True)
    first, second = got(pool, [0, 1]), got(pool, [2, 3])
    outputs = [mx.take(pool.slab["bias"], mx.array(slots), axis=0) * 1.0 for slots in (first, second)]
    for output, slots in zip(outputs, (first, second), strict=True):
        pool.reads_pending(output, slots)
    evaluated: list[list[mx.array]] = []
    monkeypatch.setattr(mx, "eval", evaluated.append)
    assert got(pool, [4], avoiding=first) == second[:1]
    assert [[id(array) for array in arrays] for arrays in evaluated] == [[id(outputs[1])]]
    got(pool, [5], avoiding=second)
    assert [[id(array) for array in arrays] for arrays in evaluated] == [[id(output)] for output in outputs[::-1]]


def test_queued_work_remembered_is_bounded(layer: ExpertLayer, reader: ExpertReader) -> None:
    """A run that never misses must not keep every output it ever made."""
    pool = ExpertPool(layer, reader, slots=2, in_place=True)
    got(pool, [0, 1])
    for _ in range(10 * PENDING_LIMIT):
        pool.reads_pending(pool.slab["bias"] + 1)
    assert len(pool._pending) <= PENDING_LIMIT


@pytest.mark.parametrize("seed", range(4))
def test_any_history_serves_the_right_bytes(
    layer: ExpertLayer, reader: ExpertReader, seed: int, *, in_place: bool
) -> None:
    """Requests, prefetches, refusals and outputs evaluated much later, in any order: each output is of its experts."""
    rng = random.Random(seed)  # noqa: S311  a reproducible order, no secret
    pool = ExpertPool(layer, reader, slots=5, in_place=in_place)
    truth = mx.stack([mx.array(list(blob(expert)), dtype=mx.uint8)[-8:] for expert in range(EXPERTS)])
    queued: list[tuple[list[int], mx.array]] = []
    avoiding: tuple[int, ...] = ()
    refused = 0
    for _ in range(150):
        if rng.random() < 0.3:
            pool.prefetch(rng.sample(range(EXPERTS), 2), keep_evictable=rng.randrange(5))
        wanted = rng.sample(range(EXPERTS), rng.randint(1, 4))
        lease = pool.acquire(wanted, avoiding)
        if lease is None:
            refused += 1
            avoiding = ()
            continue
        hit = {expert: slot for expert, slot in zip(wanted, lease.slots, strict=True) if expert in lease.hits}
        early = mx.take(pool.slab["bias"], mx.array(list(hit.values()) or [0]), axis=0).view(mx.uint8)
        if hit:
            pool.reads_pending(early, list(hit.values()))
            queued.append((list(hit), early))
        lease.wait()
        output = mx.take(pool.slab["bias"], mx.array(lease.slots), axis=0).view(mx.uint8)
        pool.reads_pending(output, rng.choice([None, lease.slots]))
        queued.append((wanted, output))
        avoiding = lease.slots if rng.random() < 0.5 else ()
    for experts, output in queued:
        assert mx.array_equal(output, truth[mx.array(experts)]).item()
    assert refused > 5
    assert pool.stats.hits > 50
    assert pool.stats.misses > 50


def test_a_failed_read_publishes_nothing_and_can_be_tried_again(
    layer: ExpertLayer, reader: ExpertReader, file: Path, *, in_place: bool
) -> None:
    """Of a request with one readable and one cut expert neither is published; a hit in it stays."""
    pool = ExpertPool(layer, reader, slots=4, in_place=in_place)
    whole = file.read_bytes()
    got(pool, [1])
    os.truncate(file, 7 * STRIDE + 5)
    lease = pool.acquire([1, 2, 7])
    assert lease is not None
    for _ in range(2):
        with pytest.raises(StreamError, match=r"layer\.bin at byte 256 is 645 bytes; expected 718 bytes"):
            lease.wait()
    assert [pool.table.slot_of[expert] for expert in (1, 2, 7)] == [0, -1, -1]
    assert not pool.table.filling
    assert pool.stats.bytes_read == BLOB
    file.write_bytes(whole)
    for expert, slot in zip([1, 2, 7], got(pool, [1, 2, 7]), strict=True):
        assert row(pool, slot) == blob(expert)


def test_a_request_that_does_not_fit_changes_nothing(layer: ExpertLayer, reader: ExpertReader) -> None:
    pool = ExpertPool(layer, reader, slots=3)
    slots = got(pool, [0, 1, 2])
    before, stats = list(pool.table.slot_expert), pool.stats
    assert pool.acquire([4, 5], avoiding=slots[:2]) is None
    assert (pool.table.slot_expert, pool.stats) == (before, stats)
    assert got(pool, [4], avoiding=slots[:2]) == (2,)
    with pytest.raises(ValueError, match=r"^\[slots\]"):
        pool.acquire([0, 1, 2, 3])


def test_an_expert_being_read_is_not_read_again(
    layer: ExpertLayer, reader: ExpertReader, monkeypatch: pytest.MonkeyPatch, *, in_place: bool
) -> None:
    pool = ExpertPool(layer, reader, slots=4, in_place=in_place)
    gate = Gate(monkeypatch)
    assert pool.prefetch([3, 5], keep_evictable=2) == 2
    first = pool.acquire([0])
    gate.open()
    second = pool.acquire([5, 0, 3])
    assert first is not None
    assert second is not None
    assert second.misses == ()
    assert [row(pool, slot) for slot in second.slots] == [blob(5), blob(0), blob(3)]
    first.wait()
    assert reader.bytes_read == pool.stats.bytes_read == 3 * BLOB


def test_a_prefetch_never_makes_a_request_fail(
    layer: ExpertLayer, reader: ExpertReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots taken by reads nobody asked for are waited for when a request needs them."""
    pool = ExpertPool(layer, reader, slots=4)
    gate = Gate(monkeypatch)
    assert pool.prefetch([3, 5], keep_evictable=0) == 2
    threading.Timer(0.02, gate.open).start()
    assert len(set(got(pool, [0, 1, 2, 4]))) == 4


def test_a_prefetch_keeps_the_slots_it_is_told_to(layer: ExpertLayer, reader: ExpertReader) -> None:
    pool = ExpertPool(layer, reader, slots=4)
    assert pool.prefetch([3, 5, 6], keep_evictable=3) == 1
    assert pool.prefetch([6], keep_evictable=4) == 0
    got(pool, [3])
    assert pool.prefetch([3], keep_evictable=0) == 0


def test_a_failed_prefetch_is_forgotten(layer: ExpertLayer, reader: ExpertReader, file: Path) -> None:
    pool = ExpertPool(layer, reader, slots=4)
    whole = file.read_bytes()
    os.truncate(file, 0)
    assert pool.prefetch([3], keep_evictable=1) == 1
    file.write_bytes(whole)
    assert row(pool, got(pool, [3])[0]) == blob(3)


def test_an_abandoned_lease_does_not_keep_its_slots(layer: ExpertLayer, reader: ExpertReader) -> None:
    """A caller that failed between `acquire` and `wait` must not cost the layer its slots."""
    pool = ExpertPool(layer, reader, slots=2)
    pool.acquire([0, 1])
    assert row(pool, got(pool, [4, 5])[1]) == blob(5)


def test_enough_slots_become_full(layer: ExpertLayer, reader: ExpertReader, *, in_place: bool) -> None:
    """Full says that the map is final: every expert, wherever it happened to land."""
    pool = ExpertPool(layer, reader, slots=100, in_place=in_place)
    assert pool.slots == EXPERTS
    got(pool, [5, 6, 7])
    assert not pool.full
    assert pool.slot_map.tolist() == [-1, -1, -1, -1, -1, 0, 1, 2]
    assert pool.non_resident([7, 4, 4, 0, 5]) == (4, 0)
    got(pool, [0, 1, 2, 3, 4])
    assert pool.full
    assert pool.slot_map.dtype == mx.int32
    for expert, slot in enumerate(pool.slot_map.tolist()):
        assert row(pool, slot) == blob(expert)
    pool.reads_pending(pool.slab["bias"] + 1)
    assert pool._pending == [], "nothing is refilled any more"


def test_noting_a_use_equals_acquiring(layer: ExpertLayer, reader: ExpertReader) -> None:
    pools = [ExpertPool(layer, reader, slots=3) for _ in range(2)]
    for pool in pools:
        got(pool, [0, 1, 2])
    got(pools[0], [2, 0])
    pools[1].note_all_hit_use([2, 0])
    assert pools[0].table.use_count == pools[1].table.use_count
    assert got(pools[0], [5]) == got(pools[1], [5]) == (1,)
    assert (pools[0].stats.hits, pools[0].stats.misses) == (pools[1].stats.hits, pools[1].stats.misses) == (2, 4)


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_hook_runs_once_before_the_first_read(layer: ExpertLayer, reader: ExpertReader, *, prefetch: bool) -> None:
    seen: list[tuple[int, int]] = []
    pool = ExpertPool(layer, reader, slots=2, before_first_read=lambda number: seen.append((number, reader.reads)))
    assert seen == []
    if prefetch:
        pool.prefetch([7], keep_evictable=0)
    got(pool, [0, 1])
    got(pool, [2, 3])
    assert seen == [(3, 0)]


def test_a_hook_that_fails_leaves_everything_and_runs_again(layer: ExpertLayer, reader: ExpertReader) -> None:
    failures = [StreamError(what="layer 3", got="damaged")]

    def hook(_: int) -> None:
        if failures:
            raise failures.pop()

    pool = ExpertPool(layer, reader, slots=2, before_first_read=hook)
    with pytest.raises(StreamError, match="damaged"):
        pool.acquire([0])
    assert (pool.table.clock, pool.table.filling, reader.reads) == (0, frozenset(), 0)
    assert row(pool, got(pool, [0])[0]) == blob(0)


def test_a_closed_reader_takes_no_slots(layer: ExpertLayer, reader: ExpertReader, *, in_place: bool) -> None:
    pool = ExpertPool(layer, reader, slots=2, in_place=in_place)
    reader.close()
    with pytest.raises(StreamError, match="closed"):
        pool.acquire([0])
    assert not pool.table.filling


def test_figures_add_up(layer: ExpertLayer, reader: ExpertReader) -> None:
    pool = ExpertPool(layer, reader, slots=4)
    for wanted in ([0, 1], [1, 2], [0, 2]):
        got(pool, wanted)
    stats = pool.stats
    assert (stats.hits, stats.misses, stats.bytes_read) == (3, 3, 3 * BLOB)
    assert stats.hit_rate == 0.5
    assert stats.stall_seconds == pytest.approx(reader.stall_seconds)
    both = ExpertStats.total([stats, ExpertStats(hits=1, misses=2, bytes_read=3, stall_seconds=0.5)])
    assert (both.hits, both.misses, both.bytes_read) == (4, 5, 3 * BLOB + 3)
    assert both.stall_seconds == stats.stall_seconds + 0.5
    assert ExpertStats.total([]) == ExpertStats()
    assert ExpertStats().hit_rate == 0


def test_host_buffers_are_used_again(layer: ExpertLayer, reader: ExpertReader) -> None:
    """One buffer serves layer after layer; two requests under way never share one."""
    staging = Staging()
    pools = [ExpertPool(layer, reader, slots=4, in_place=False, staging=staging) for _ in range(2)]
    for wanted in ([0, 1], [2, 3], [4]):
        for pool in pools:
            got(pool, wanted)
    assert [len(buffer) for buffer in staging._free] == [2 * BLOB]
    leases = [pool.acquire([5, 6]) for pool in pools]
    for lease, pool in zip(leases, pools, strict=True):
        assert lease is not None
        lease.wait()
        assert [row(pool, slot) for slot in lease.slots] == [blob(5), blob(6)]
    assert len(staging._free) == 2
