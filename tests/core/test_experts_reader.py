"""Reads of experts: exact bytes however the system delivers them, few calls, and errors that name the file."""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mference_core.errors import StreamError
from mference_core.experts import reader as module
from mference_core.experts.reader import ExpertReader
from mference_core.tensors import ExpertLayer, ExpertPart, Extent, Span

PARTS = (
    ExpertPart(name="gate", dtype="U32", shape=(10,), size=40),
    ExpertPart(name="up", dtype="BF16", shape=(3,), size=6),
    ExpertPart(name="down", dtype="F16", shape=(7,), size=14),
)
NAMES = tuple(part.name for part in PARTS)
BLOB = sum(part.size for part in PARTS)
STRIDE = 96
EXPERTS = 12


def content(expert: int) -> dict[str, bytes]:
    """Return what the parts of an expert hold: every byte depends on expert, part and place."""
    return {
        part.name: bytes((expert * 31 + number * 7 + i) % 256 for i in range(part.size))
        for number, part in enumerate(PARTS)
    }


def blobs(path: Path) -> ExpertLayer:
    """Write a layer whose experts are whole blobs at a stride."""
    raw = [b"".join(content(expert).values()).ljust(STRIDE, b"\xee") for expert in range(EXPERTS)]
    path.write_bytes(b"".join(raw))
    return ExpertLayer(
        layer=5,
        count=EXPERTS,
        parts=PARTS,
        extents=lambda e: (Extent(span=Span(path=path, offset=e * STRIDE, size=BLOB), parts=NAMES),),
    )


def stacks(path: Path) -> ExpertLayer:
    """Write a layer of one stack per part, as tensors of a checkpoint are, over two files."""
    spans: dict[str, tuple[Path, int, int]] = {}
    for part in PARTS:
        file = path.with_suffix(".b" if part.name == "down" else ".a")
        with file.open("ab") as out:
            spans[part.name] = (file, out.tell(), part.size)
            out.write(b"".join(content(expert)[part.name] for expert in range(EXPERTS)))

    def extents(expert: int) -> tuple[Extent, ...]:
        return tuple(
            Extent(span=Span(path=file, offset=start + expert * size, size=size), parts=(name,))
            for name, (file, start, size) in spans.items()
        )

    return ExpertLayer(layer=5, count=EXPERTS, parts=PARTS, extents=extents)


@pytest.fixture(params=[blobs, stacks])
def layer(request: pytest.FixtureRequest, tmp_path: Path) -> ExpertLayer:
    made: ExpertLayer = request.param(tmp_path / "layer")
    return made


@pytest.fixture
def reader() -> Iterator[ExpertReader]:
    with ExpertReader() as opened:
        yield opened


def views() -> dict[str, memoryview]:
    return {part.name: memoryview(bytearray(b"\x55" * part.size)) for part in PARTS}


def read(reader: ExpertReader, layer: ExpertLayer, experts: Sequence[int]) -> list[dict[str, bytes]]:
    targets = [views() for _ in experts]
    reader.read(layer, list(zip(experts, targets, strict=True)))
    return [{name: bytes(view) for name, view in target.items()} for target in targets]


@pytest.mark.parametrize("experts", [[], [0], [11], [3, 4, 5], [7, 2, 9, 3, 11], list(range(EXPERTS))])
def test_each_part_gets_its_bytes(reader: ExpertReader, layer: ExpertLayer, experts: list[int]) -> None:
    assert read(reader, layer, experts) == [content(expert) for expert in experts]
    assert reader.bytes_read == len(experts) * BLOB


@pytest.mark.parametrize("most", [1, 7, 45, 61])
def test_partial_reads_are_continued(
    reader: ExpertReader, layer: ExpertLayer, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The system may return fewer bytes than asked, in the middle of a part or at its border."""
    whole = os.preadv

    def partial(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        left, cut = most, []
        for buffer in buffers:
            cut.append(buffer[:left])
            left -= cut[-1].nbytes
        return whole(descriptor, [view for view in cut if view.nbytes], offset)

    monkeypatch.setattr(os, "preadv", partial)
    experts = [3, 4, 8, 6]
    assert read(reader, layer, experts) == [content(expert) for expert in experts]
    assert reader.reads > 4


def test_no_call_scatters_over_more_places_than_the_system_takes(
    reader: ExpertReader, layer: ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IOV_MAX", 5)
    whole, lengths = os.preadv, []

    def watched(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        lengths.append(len(buffers))
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    assert read(reader, layer, range(EXPERTS)) == [content(expert) for expert in range(EXPERTS)]
    assert max(lengths) == 5


def test_adjacent_experts_are_one_read(reader: ExpertReader, tmp_path: Path) -> None:
    """Padding between blobs is read over; experts further apart than the gap allowed are read on their own."""
    layer = blobs(tmp_path / "layer")
    read(reader, layer, [6, 4, 5])
    assert reader.reads == 1
    assert reader.bytes_read == 3 * BLOB, "padding is not counted"


def test_far_experts_are_separate_reads(reader: ExpertReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_gap", memoryview(bytearray(STRIDE - BLOB)))
    layer = blobs(tmp_path / "layer")
    assert read(reader, layer, [1, 2, 4, 9]) == [content(expert) for expert in (1, 2, 4, 9)]
    assert reader.reads == 3


def test_large_adjacent_experts_keep_every_worker_busy(
    reader: ExpertReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joining stops where it would leave workers idle: eight experts are four reads of two."""
    monkeypatch.setattr(module, "JOINED_BYTES", BLOB)
    layer = blobs(tmp_path / "layer")
    assert read(reader, layer, range(2, 10)) == [content(expert) for expert in range(2, 10)]
    assert reader.reads == reader.workers == 4


def test_distinct_experts_are_read_at_the_same_time(
    reader: ExpertReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four reads meet at a barrier, which none could pass if they followed each other."""
    monkeypatch.setattr(module, "JOINED_BYTES", BLOB)
    monkeypatch.setattr(module, "TASK_BYTES", BLOB)
    barrier, whole = threading.Barrier(4), os.preadv

    def meeting(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        barrier.wait(timeout=5)
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", meeting)
    assert read(reader, blobs(tmp_path / "layer"), [0, 3, 6, 9]) == [content(expert) for expert in (0, 3, 6, 9)]


def test_no_more_reads_at_a_time_than_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOINED_BYTES", BLOB)
    lock, now, most, whole = threading.Lock(), [0], [0], os.preadv

    def counted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        threading.Event().wait(0.01)
        with lock:
            now[0] -= 1
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    layer = blobs(tmp_path / "layer")
    with ExpertReader(workers=2) as reader:
        reads = [reader.start(layer, [(expert, views())]) for expert in range(6)]
        for under_way in reads:
            under_way.wait()
    assert most[0] == 2


@pytest.mark.parametrize("left", [9 * STRIDE, 9 * STRIDE + 1, 9 * STRIDE + 45])
def test_a_file_that_ends_early_is_named_with_both_sizes(reader: ExpertReader, tmp_path: Path, left: int) -> None:
    path = tmp_path / "layer"
    layer = blobs(path)
    os.truncate(path, left)
    with pytest.raises(StreamError) as caught:
        read(reader, layer, [9])
    line = str(caught.value)
    assert str(path) in line
    assert f"byte {9 * STRIDE} is {left - 9 * STRIDE} bytes; expected {BLOB} bytes" in line
    assert "\n" not in line


def test_a_file_cut_during_the_read_is_an_error(
    reader: ExpertReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "layer", os.preadv
    layer = blobs(path)

    def cutting(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = whole(descriptor, buffers[:1], offset)
        os.truncate(path, 10)
        return count

    monkeypatch.setattr(os, "preadv", cutting)
    with pytest.raises(StreamError, match="is 40 bytes; expected 60 bytes"):
        read(reader, layer, [2])


def test_a_missing_file_is_named(reader: ExpertReader, tmp_path: Path) -> None:
    layer = blobs(tmp_path / "layer")
    (tmp_path / "layer").unlink()
    with pytest.raises(StreamError, match=r"layer is missing; verify or reinstall"):
        read(reader, layer, [0])


def test_a_failing_device_is_named(reader: ExpertReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    layer = blobs(tmp_path / "layer")
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StreamError, match=r"layer at byte 96 failed: Input/output error"):
        read(reader, layer, [1])


def test_small_reads_wake_one_worker(reader: ExpertReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOINED_BYTES", BLOB)
    under_way = reader.start(blobs(tmp_path / "layer"), [(expert, views()) for expert in range(0, EXPERTS, 2)])
    under_way.wait()
    assert reader.reads == EXPERTS // 2
    assert len(under_way._futures) == 1


def test_every_read_has_ended_before_an_error_is_raised(
    reader: ExpertReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is the caller's again after `wait`, so no other read of the call may still write to it."""
    monkeypatch.setattr(module, "JOINED_BYTES", BLOB)
    monkeypatch.setattr(module, "TASK_BYTES", BLOB)
    whole, slow_ended = os.preadv, threading.Event()

    def mixed(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 0:
            raise OSError(5, "Input/output error")
        threading.Event().wait(0.05)
        slow_ended.set()
        return whole(descriptor, buffers, offset)

    layer = blobs(tmp_path / "layer")
    monkeypatch.setattr(os, "preadv", mixed)
    with pytest.raises(StreamError):
        read(reader, layer, [0, 5])
    assert slow_ended.is_set()


def test_extents_that_do_not_fit_the_parts_are_refused(reader: ExpertReader, tmp_path: Path) -> None:
    path = tmp_path / "layer"
    blobs(path)

    def layer(size: int, names: tuple[str, ...]) -> ExpertLayer:
        extent = Extent(span=Span(path=path, offset=0, size=size), parts=names)
        return ExpertLayer(layer=1, count=1, parts=PARTS, extents=lambda _: (extent,))

    for bad in (layer(BLOB - 1, NAMES), layer(BLOB, (*NAMES[:2], "other")), layer(46, NAMES[:2])):
        with pytest.raises(StreamError, match="layer 1 expert 0"):
            read(reader, bad, [0])
    assert reader.reads == 0


def open_files() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208  descriptors, not paths


def test_each_file_is_opened_once_and_closed(tmp_path: Path) -> None:
    layers = [blobs(tmp_path / f"layer{n}") for n in range(6)]
    before = open_files()
    with ExpertReader(open_files=4) as reader:
        for layer in layers[:3] * 3:
            read(reader, layer, [1, 2])
        assert open_files() == before + 3
        for layer in layers:
            assert read(reader, layer, [4]) == [content(4)]
        assert open_files() == before + 4, "bounded"
        assert read(reader, layers[0], [5]) == [content(5)], "a closed one is opened again"
    assert open_files() == before
    with pytest.raises(StreamError, match="closed"):
        read(reader, layers[0], [0])
    reader.close()


def test_descriptors_are_not_inherited(reader: ExpertReader, tmp_path: Path) -> None:
    read(reader, blobs(tmp_path / "layer"), [0])
    (entry,) = reader._files._open.values()
    assert not os.get_inheritable(entry.descriptor)


def test_waiting_is_counted_once(reader: ExpertReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def slow(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        threading.Event().wait(0.02)
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    under_way = reader.start(blobs(tmp_path / "layer"), [(0, views())])
    under_way.wait()
    stalled = reader.stall_seconds
    assert 0.005 < stalled < 5
    assert under_way.stall_seconds == stalled
    under_way.wait()
    assert reader.stall_seconds == stalled


def test_many_threads_share_one_reader(reader: ExpertReader, layer: ExpertLayer) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(20):
            experts = [(seed + step * 5) % EXPERTS, (seed + step * 5 + 1) % EXPERTS]
            if read(reader, layer, experts) != [content(expert) for expert in experts]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert reader.bytes_read == 6 * 20 * 2 * BLOB


@pytest.mark.parametrize(("workers", "files"), [(0, 1), (1, 0)])
def test_a_reader_needs_a_worker_and_a_file(workers: int, files: int) -> None:
    with pytest.raises(ValueError, match=r"^\[reader\]"):
        ExpertReader(workers=workers, open_files=files)
