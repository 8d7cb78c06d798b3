"""A file without digests of its parts: how much of it is fetched, how often it is hashed, and what is wrong with it."""

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from threading import Event
from time import sleep
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_core.errors import ManifestError
from mference_core.install import big_file, original
from mference_core.install.big_file import LOOK_SHARE, _Looks
from mference_core.install.original import SAMPLE_BYTES, fetches, folder_original
from mference_core.install.remote import CONNECTIONS
from mference_core.install.repair import repair_install
from mference_core.testing.fake_hub import FakeHub
from mference_core.testing.toy_installs import READER, install_from

from .damaging import EXPERT, LAYER_1, STRIDE, flip, repair, sent_weights, tree

WHOLE = 4 * EXPERT
READ = 512
SAMPLES = 4 * SAMPLE_BYTES
"""Bytes of the two files that are intact, by which the source is known."""
LAST = EXPERT - 1
"""A byte of an expert that comes among the first of a source, whose names are sorted; byte 0 comes in the middle."""


@pytest.fixture
def install(hub: FakeHub, output: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An install without digests of its experts, to be compared in reads of 512 bytes."""
    monkeypatch.setattr(original, "FETCH_BYTES", READ)
    install_from(hub, output)
    hub.clear()
    return output


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests that were found while repairing."""
    found, real = list[str](), big_file.hash_file

    def counted(path: Path) -> str:
        found.append(real(path))
        return found[-1]

    monkeypatch.setattr(big_file, "hash_file", counted)
    return found


def needed(repo: Path, at: int) -> int:
    """Return the bytes of the reads of layer 1 up to the one that byte `at` of the file is in."""
    total = 0
    for fetch in fetches(folder_original(repo, READER).copies[LAYER_1], 0, 4 * STRIDE):
        total += fetch.size
        if any(into <= at < into + size for into, _, size in fetch.places):
            return total
    raise AssertionError(at)


@pytest.mark.parametrize(("at", "share"), [(LAST, 1 / 8), (0, 1 / 2)])
def test_it_stops_when_the_file_is_good(
    hub: FakeHub, repo: Path, install: Path, hashed: list[str], at: int, share: float
) -> None:
    """Reads are compared in order of the source; one changed byte is hashed for once, and nothing behind it fetched."""
    good = tree(install)
    flip(install / LAYER_1, at)
    report = repair(hub, install)
    assert tree(install) == good
    assert report.changed_bytes <= READ
    assert len(hashed) == 1
    under_way = (CONNECTIONS - 1) * READ
    assert report.fetched_bytes <= sent_weights(hub) <= needed(repo, at) + under_way + SAMPLES
    assert sent_weights(hub) < WHOLE * share


def test_nothing_is_asked_for_while_it_is_hashed(hub: FakeHub, install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is under way then."""
    flip(install / LAYER_1, 0)
    asked, real = list[int](), big_file.hash_file

    def slowly(path: Path) -> str:
        sleep(0.2)  # what is under way comes to its end
        before = len(hub.asked)
        sleep(0.2)
        asked.append(len(hub.asked) - before)
        return real(path)

    monkeypatch.setattr(big_file, "hash_file", slowly)
    repair(hub, install)
    assert asked == [0]


def test_what_is_under_way_at_the_end_is_stopped(repo: Path, install: Path) -> None:
    """A source that stalls behind the last damage holds nobody up."""
    flip(install / LAYER_1, LAST)
    right, stopped = folder_original(repo, READER), Event()
    reads = fetches(right.copies[LAYER_1], 0, 4 * STRIDE)
    last = next(fetch for fetch in reads if any(into <= LAST < into + size for into, _, size in fetch.places))

    def read(shard: str, offset: int, size: int) -> bytes:
        if shard == last.shard and offset > last.offset and size > SAMPLE_BYTES:
            stopped.wait(20)
        return right.read(shard, offset, size)

    stalling = evolve(right, read=read, workers=4, stop=stopped.set)
    assert repair_install(install, lambda _: nullcontext(stalling)).seconds < 10
    assert stopped.is_set()


@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_many_damaged_places(hub: FakeHub, install: Path, hashed: list[str], every: int) -> None:
    """Damage all over the file: it is hashed a few times, at growing distances."""
    good = tree(install)
    for expert in range(4):
        for at in range(0, EXPERT, every * READ):
            flip(install / LAYER_1, expert * STRIDE + at)
    repair(hub, install)
    assert tree(install) == good
    assert len(hashed) <= 8


@settings(deadline=None)
@given(st.integers(1, 800), st.data())
def test_looks(count: int, data: st.DataObject) -> None:
    """Never more than eight looks, and no more compared in vain than lies between the first change and the last."""
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    looks, number, taken = _Looks(size=count, changed=False), 0, 0
    for number in range(count):
        if looks.due(1, changed=number in bad):
            taken += 1
            if number >= max(bad):
                break
            looks.failed()
    else:
        assert looks.changed or max(bad) == count - 1
        taken += looks.changed
    assert taken <= 8
    assert number - max(bad) <= max(bad) - min(bad) + count // LOOK_SHARE + 2


def test_one_run_of_damage_takes_two_looks(hub: FakeHub, install: Path, hashed: list[str]) -> None:
    good = tree(install)
    with (install / LAYER_1).open("r+b") as file:
        file.write(Random(1).randbytes(2048))  # noqa: S311  one tensor of an expert, four reads
    repair(hub, install)
    assert tree(install) == good
    assert len(hashed) == 2


def damage_end(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("damage", [damage_end, lambda path: os.truncate(path, 4 * STRIDE - 100)])
def test_wrong_length_alone_needs_no_source_bytes(
    hub: FakeHub, install: Path, hashed: list[str], damage: Callable[[Path], None]
) -> None:
    """A file that is longer than it should be, or lacks zeros only."""
    good = tree(install)
    damage(install / LAYER_1)
    report = repair(hub, install)
    assert (tree(install), report.changed_bytes) == (good, 0)
    assert report.fetched_bytes <= SAMPLES
    assert len(hashed) == 1


def test_longer_and_damaged(hub: FakeHub, install: Path) -> None:
    good = tree(install)
    damage_end(install / LAYER_1)
    flip(install / LAYER_1, 0)
    repair(hub, install)
    assert tree(install) == good


@pytest.mark.parametrize("damaged", [True, False])
def test_lacking_and_damaged_in_front(hub: FakeHub, install: Path, hashed: list[str], *, damaged: bool) -> None:
    """The file is hashed first when it lacks nothing more."""
    good = tree(install)
    os.truncate(install / LAYER_1, 2 * STRIDE)
    if damaged:
        flip(install / LAYER_1, 0)
    repair(hub, install)
    assert tree(install) == good
    assert len(hashed) == 1 + damaged


def test_what_the_disk_cannot_read_is_written_over(
    hub: FakeHub, install: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bad sectors: the first is mended though the file cannot be hashed before the second is."""
    good = tree(install)
    bad = {LAST, 0, STRIDE - 1}  # the last one is in what no source has
    for at in bad:
        flip(install / LAYER_1, at)
    pread, pwrite, real = os.pread, os.pwrite, big_file.hash_file

    def reading(handle: int, size: int, offset: int) -> bytes:
        if any(offset <= at < offset + size for at in bad):
            raise OSError(errno.EIO, "Input/output error")
        return pread(handle, size, offset)

    def writing(handle: int, data: Any, offset: int) -> int:
        bad.difference_update(range(offset, offset + len(data)))
        return pwrite(handle, data, offset)

    def hashing(path: Path) -> str:
        if bad:
            raise ManifestError(what=str(path), got="unreadable (Input/output error)")
        return real(path)

    monkeypatch.setattr(big_file.os, "pread", reading)
    monkeypatch.setattr(big_file.os, "pwrite", writing)
    monkeypatch.setattr(big_file, "hash_file", hashing)
    repair(hub, install)
    assert tree(install) == good
    assert not bad
