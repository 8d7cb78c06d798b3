"""What a session read of a repository is not read by the next, unless it is damaged; and a bad header costs no weights."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from attrs import evolve

from mference_core.errors import SourceError
from mference_core.install.answers import Digest, RemoteFile
from mference_core.install.files import METADATA_DIR
from mference_core.install.kept import Kept
from mference_core.safetensors_index import INDEX_NAME
from mference_core.testing.fake_hub import Answer, FakeHub, serving
from mference_core.testing.toy_installs import beside, install_from, open_whole, planned_toy, shards_of
from mference_core.testing.toys import toy_arch, write_toy

from .pausing import idents, interrupt, partial, pause

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NAMES = [INDEX_NAME, "config.json", FIRST, SECOND]
Parts = dict[str, tuple[RemoteFile, bytes]]


def kept_of(output: Path) -> Kept:
    return Kept(folder=partial(output) / METADATA_DIR)


def parts_of(hub: FakeHub) -> Parts:
    """Return what is read of each file before its weights."""
    parts = {file.name: (file, data) for file, data in planned_toy(hub).remote.parts}
    hub.clear()
    return parts


def read_again(hub: FakeHub, parts: Parts) -> set[str]:
    """Return the files of which one of these bytes was sent since the hub was cleared."""
    return {name for name, (_, data) in parts.items() if any(hub.coverage(name)[: len(data)])}


@pytest.mark.parametrize("digests", [True, False])
def test_nothing_is_read_twice(hub: FakeHub, output: Path, *, digests: bool) -> None:
    """Not by the second session, and not by the third; all of it is gone when the install is whole."""
    hub.digests = digests
    plan, parts = planned_toy(hub), parts_of(hub)
    assert sorted(parts) == sorted(NAMES)
    pause(hub, output, 3)
    for after in (5, 8):
        interrupt(hub, output, plan, after)
        assert read_again(hub, parts) == set()
        hub.clear()
    report = install_from(hub, output)
    assert read_again(hub, parts) == set()
    assert report.reused_bytes > 0
    open_whole(output)
    assert beside(output) == ["toy.gturbo"]
    assert not [item for item in output.iterdir() if item.name.startswith(".")]


def test_single_file_is_not_read_twice(tmp_path: Path, output: Path) -> None:
    with serving(FakeHub(write_toy(tmp_path / "single", toy_arch()))) as hub:
        parts = parts_of(hub)
        assert sorted(parts) == ["config.json", "model.safetensors"]
        pause(hub, output)
        install_from(hub, output)
        assert read_again(hub, parts) == set()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first byte": lambda data: bytes([data[64] ^ 1]) + data[1:],
    "last byte": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "seal": lambda data: b"0" * 64 + data[64:],
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b" ",
    "empty": lambda _: b"",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", [*DAMAGES.values(), None], ids=[*DAMAGES, "missing"])
def test_damaged_is_read_again_alone(
    hub: FakeHub, output: Path, name: str, damage: Callable[[bytes], bytes] | None
) -> None:
    """It costs nothing else: every range that was recorded is kept, and the file is good for the next session."""
    plan, parts = planned_toy(hub), parts_of(hub)
    pause(hub, output)
    before, path = idents(output), kept_of(output).path(parts[name][0])
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    interrupt(hub, output, plan, 7)
    assert read_again(hub, parts) == {name}
    assert set(idents(output)) >= set(before)
    assert all(kept_of(output).find(file) == data for file, data in parts.values())
    ranges = {request.ident: request.size for request in plan.requests.ranges}
    expected = sum(ranges[ident] for ident in idents(output))
    assert install_from(hub, output).reused_bytes == expected
    open_whole(output)


def test_files_that_changed_places_are_read_again(hub: FakeHub, output: Path) -> None:
    parts = parts_of(hub)
    pause(hub, output)
    first, second = (kept_of(output).path(parts[name][0]) for name in (FIRST, SECOND))
    data = first.read_bytes()
    second.rename(first)
    second.write_bytes(data)
    install_from(hub, output)
    assert read_again(hub, parts) == {FIRST, SECOND}
    open_whole(output)


def test_staging_directory_without_them_goes_on(hub: FakeHub, output: Path) -> None:
    """One of an older version has none; another program removes the whole folder."""
    plan, parts = planned_toy(hub), parts_of(hub)
    pause(hub, output)
    rmtree(partial(output) / METADATA_DIR)
    before = idents(output)
    interrupt(hub, output, plan, 7)
    assert read_again(hub, parts) == set(NAMES)
    assert set(idents(output)) >= set(before)
    install_from(hub, output)
    open_whole(output)


def test_outputs_that_are_made_again_keep_it_too(hub: FakeHub, output: Path) -> None:
    """The staging directory was not the planned one: it is emptied, what was read of the source is not lost."""
    plan, parts = planned_toy(hub), parts_of(hub)
    pause(hub, output)
    (partial(output) / "model_weights.bin").unlink()
    interrupt(hub, output, plan, 3)
    assert read_again(hub, parts) == set()
    assert all(kept_of(output).find(file) == data for file, data in parts.values())


FILE = RemoteFile(
    name="a.safetensors",
    commit="c" * 40,
    url="http://x",
    size=100,
    digest=Digest(kind="sha256", value="d" * 64, size=100),
)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "b.safetensors"},
        {"commit": "e" * 40},
        {"size": 101},
        {"digest": Digest(kind="sha256", value="e" * 64, size=100)},
        {"digest": None},
        {"xet_hash": "f" * 64},
    ],
    ids=str,
)
def test_what_is_of_another_file_is_not_found(tmp_path: Path, change: dict[str, Any]) -> None:
    """Whatever the hub says of it that is new; where it is asked for does not matter."""
    kept, other = Kept(folder=tmp_path), evolve(FILE, **change)
    kept.keep(FILE, b"head")
    assert kept.find(FILE) == kept.find(evolve(FILE, url="http://mirror")) == b"head"
    held = kept.path(FILE).read_bytes()
    kept.path(other).write_bytes(held)
    assert kept.find(other) is None


def test_whole_file_is_held_against_the_stated_digest(tmp_path: Path) -> None:
    kept, data = Kept(folder=tmp_path), b"x" * 100
    kept.keep(FILE, data)
    assert kept.find(FILE) is None


def test_header_changed_on_the_way_costs_no_range(hub: FakeHub, output: Path) -> None:
    """Its file has another digest than the hub states, for a header that reads the same: nothing but it was wrong."""
    flipped = list[str]()

    def fault(answer: Answer) -> None:
        if answer.name == SECOND and answer.method == "GET" and answer.first == 8:
            assert json.loads(answer.body)
            answer.body = answer.body.replace(b" ", b"\t", 1)
            flipped.append(answer.name)

    hub.faults.append(fault)
    pause(hub, output)
    hub.faults.clear()
    assert flipped
    with pytest.raises(
        SourceError, match=f"the header of owner/toy {SECOND} is unlike when it was first read; .*run it"
    ):
        install_from(hub, output)
    requests = planned_toy(hub).requests
    assert len(idents(output)) == len(requests.ranges)
    hub.clear()
    report = install_from(hub, output)
    assert (report.reused_bytes, report.checked_files) == (requests.source_bytes, 2)
    for request in requests.ranges:
        assert not any(hub.coverage(request.shard)[request.offset : request.offset + request.size])
    open_whole(output)


def test_shards_are_the_toys(hub: FakeHub) -> None:
    assert shards_of(hub.folder) == [FIRST, SECOND]
