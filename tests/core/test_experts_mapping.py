"""Experts in a mapping: the addresses hold the file's bytes, what is missing is asked for, and failures are one line."""

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mference_core.checkpoint import Checkpoint, open_checkpoint, peek
from mference_core.errors import StreamError
from mference_core.experts.mapped_files import PAGE_BYTES, MappedFile, MappedFiles
from mference_core.experts.mapping import MappedExperts
from mference_core.experts.pool import ExpertPool
from mference_core.experts.reader import ExpertReader
from mference_core.gturbo.layout import PART_NAMES
from mference_core.install import install_local
from mference_core.tensors import ExpertLayer, Extent, Span
from mference_core.testing.toys import toy_arch, toy_contract, toy_plan, write_toy

ARCH = toy_arch(hidden_size=128, num_experts=6)
linux = pytest.mark.skipif(sys.platform != "linux", reason="what the kernel tells of pages is tested on Linux")


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(peek(path), toy_contract(), toy_plan)


@pytest.fixture(params=["gturbo", "mlx"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    """A toy as an install, one extent an expert, and as a directory of stacked tensors, nine extents an expert."""
    source = write_toy(tmp_path / "mlx", ARCH)
    if request.param == "mlx":
        return opened(source)
    install_local(source, tmp_path / "toy.gturbo", toy_contract(), toy_plan)
    return opened(tmp_path / "toy.gturbo")


@pytest.fixture
def files() -> Iterator[MappedFiles]:
    """Mappings that end with the test."""
    made = MappedFiles()
    yield made
    made.close()


def part_bytes(layer: ExpertLayer, expert: int) -> dict[str, bytes]:
    """Return each part's bytes, read from the file."""
    sizes, found = {part.name: part.size for part in layer.parts}, dict[str, bytes]()
    for extent in layer.extents(expert):
        handle = os.open(extent.span.path, os.O_RDONLY)
        data = os.pread(handle, extent.span.size, extent.span.offset)
        os.close(handle)
        for name in extent.parts:
            found[name], data = data[: sizes[name]], data[sizes[name] :]
    return found


def drop(path: Path) -> None:
    """Ask the kernel to forget a file's pages."""
    handle = os.open(path, os.O_RDWR)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def test_addresses_hold_what_is_read(checkpoint: Checkpoint, files: MappedFiles) -> None:
    for layer in checkpoint.experts.values():
        table = MappedExperts(layer, files).table
        sizes = {part.name: part.size for part in layer.parts}
        assert len(table) == 9 * layer.count
        for expert in range(layer.count):
            expected = part_bytes(layer, expert)
            for index, name in enumerate(PART_NAMES):
                address = table[9 * expert + index]
                assert address is not None
                assert ctypes.string_at(address, sizes[name]) == expected[name]


def test_copies_are_what_slots_hold(checkpoint: Checkpoint, files: MappedFiles) -> None:
    layer, wanted = checkpoint.experts[1], [4, 0, 3]
    copies = MappedExperts(layer, files).copied(wanted)
    with ExpertReader() as reader:
        pool = ExpertPool(layer, reader, slots=layer.count)
        lease = pool.acquire(wanted)
        assert lease is not None
        lease.wait()
        for name, array in copies.items():
            held = pool.slab[name][mx.array(lease.slots)]
            assert mx.array_equal(array.view(mx.uint8), held.view(mx.uint8))
            assert array.dtype == pool.slab[name].dtype


@linux
def test_what_is_not_in_memory_is_a_miss_once(tmp_path: Path, files: MappedFiles) -> None:
    layer = big_layer(tmp_path)
    drop(tmp_path / "big")
    source = MappedExperts(layer, files)
    if not source.non_resident(range(4)):
        pytest.skip("this file system keeps every page")
    assert source.non_resident([2, 0, 2]) == (2, 0)
    lease = source.acquire([2, 0])
    assert (lease.slots, lease.hits, lease.misses) == ((2, 0), (), (2, 0))
    lease.wait()
    assert source.non_resident([0, 2]) == ()
    assert source.stats.misses == 2
    assert source.stats.bytes_read == 2 * BIG
    again = source.acquire([2])
    assert (again.hits, again.misses) == ((2,), ())
    assert (source.stats.hits, source.stats.bytes_read) == (1, 2 * BIG)
    assert source.stats.stall_seconds > 0


def test_an_expert_used_lately_is_not_asked_about_again(
    checkpoint: Checkpoint, files: MappedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking costs a system call per extent; what was there thirty seconds ago counts as there, then it is asked again."""
    asked, clock, sizes = list[int](), [100.0], [0]

    def look(expert: int) -> int:
        asked.append(expert)
        return sizes[0]

    monkeypatch.setattr("mference_core.experts.mapping.time.monotonic", lambda: clock[0])
    source = MappedExperts(checkpoint.experts[1], files)
    monkeypatch.setattr(source, "_missing_bytes", look)
    for now, missing, misses in ((100, 7, (2,)), (101, 0, ()), (130, 7, ()), (131, 7, (2,)), (131, 7, (2,))):
        clock[0], sizes[0] = now, missing
        assert source.acquire([2]).misses == misses
    assert len(asked) == 4


@linux
def test_a_prefetch_reads_ahead_and_counts_no_use(tmp_path: Path, files: MappedFiles) -> None:
    layer = big_layer(tmp_path)
    drop(tmp_path / "big")
    source = MappedExperts(layer, files)
    if not source.non_resident(range(4)):
        pytest.skip("this file system keeps every page")
    assert source.prefetch([1, 3], keep_evictable=0) == 2
    lease = source.acquire([1, 3])
    lease.wait()
    assert source.non_resident([1, 3]) == ()
    assert source.prefetch([1, 3], keep_evictable=0) == 0
    assert source.stats.hits + source.stats.misses == 2


BIG = 64 * PAGE_BYTES


def big_layer(tmp_path: Path) -> ExpertLayer:
    """Return a layer whose experts are of many pages, as real ones are."""
    path, parts = tmp_path / "big", opened(write_toy(tmp_path / "source", ARCH)).experts[1].parts
    path.write_bytes(os.urandom(4 * BIG))
    first, rest = parts[0], sum(part.size for part in parts[1:])
    assert rest < BIG

    def extents(expert: int) -> tuple[Extent, ...]:
        return (Extent(span=Span(path=path, offset=expert * BIG, size=BIG), parts=(first.name,)),)

    return ExpertLayer(layer=1, count=4, parts=(first,), extents=extents)


@linux
def test_where_pages_are_not_told_everything_is_asked_for(
    checkpoint: Checkpoint, files: MappedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says of another user's file that all of it is in memory: that must not be believed."""
    source = MappedExperts(checkpoint.experts[1], files)
    asked = list[tuple[int, int]]()
    for extent in checkpoint.experts[1].extents(0):
        files.get(extent.span.path).tells = False
    monkeypatch.setattr(MappedFile, "will_need", lambda _, offset, size: asked.append((offset, size)))
    assert source.acquire([0]).misses == (0,)
    assert asked == [(extent.span.offset, extent.span.size) for extent in checkpoint.experts[1].extents(0)]


def test_the_layer_is_verified_before_it_is_touched(checkpoint: Checkpoint, files: MappedFiles) -> None:
    seen = list[int]()

    def touch(layer: int) -> None:
        seen.append(layer)
        if len(seen) == 1:
            raise StreamError(what="the layer", got="bad")

    source = MappedExperts(checkpoint.experts[2], files, before_first_read=touch)
    assert seen == []
    with pytest.raises(StreamError, match="the layer is bad"):
        source.acquire([0])
    assert source.stats.misses + source.stats.hits == 0
    source.acquire([0]).wait()
    source.acquire([1]).wait()
    assert seen == [2, 2]


def test_a_short_file_is_refused_when_mapped(checkpoint: Checkpoint, files: MappedFiles) -> None:
    layer = checkpoint.experts[2]
    last = max((extent.span for extent in layer.extents(layer.count - 1)), key=lambda span: span.offset)
    os.truncate(last.path, last.offset + last.size - 1)
    with pytest.raises(StreamError, match=rf"^expert file .* is {last.offset + last.size - 1} bytes long; expected at"):
        MappedExperts(layer, files)


@linux
def test_a_file_cut_short_afterwards_fails_and_does_not_kill(checkpoint: Checkpoint, files: MappedFiles) -> None:
    layer = checkpoint.experts[2]
    source = MappedExperts(layer, files)
    os.truncate(layer.extents(0)[0].span.path, 0)
    lease = source.acquire([layer.count - 1])
    for _ in range(2):
        with pytest.raises(StreamError, match=r"failed: Bad address; verify or reinstall"):
            lease.wait()


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match=r"^expert file .*nothing is missing; verify or reinstall the model$"):
        MappedFile(tmp_path / "nothing")


def test_after_close_nothing_is_touched(checkpoint: Checkpoint) -> None:
    files = MappedFiles()
    source = MappedExperts(checkpoint.experts[1], files)
    files.close()
    files.close()
    for use in (source.acquire, source.copied, source.non_resident):
        with pytest.raises(StreamError, match="is closed; expected an open model"):
            use([0])


def test_a_view_cannot_be_written(checkpoint: Checkpoint, files: MappedFiles) -> None:
    span = checkpoint.experts[1].extents(0)[0].span
    assert files.get(span.path).view(span.offset, 16).readonly
    assert files.get(span.path) is files.get(span.path)


def test_an_empty_file_maps(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    made = MappedFile(tmp_path / "empty")
    assert made.size == 0
    made.close()


def test_slots_in_memory_say_what_can_be_used_at_once(checkpoint: Checkpoint, files: MappedFiles) -> None:
    """Nothing before the layer was first asked for, then what was found, and after a look what is there of all."""
    source = MappedExperts(checkpoint.experts[1], files, before_first_read=lambda _: None)
    place = source.slots_in_memory
    assert place is not None
    source.look()
    assert set(place) == {-1}
    lease = source.acquire([2])
    lease.wait()
    assert source.at_hand([2]) is not None
    assert place[2] == 2
    source.look()
    assert list(place) == [-1 if source.non_resident([expert]) else expert for expert in range(source.experts)]
    source.check_open()
    files.close()
    with pytest.raises(StreamError):
        source.check_open()
