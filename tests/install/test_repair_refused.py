"""Repairs that cannot be done, or not from there: one line, nothing worse than before, and the next one knows enough."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
from attrs import evolve

from mference_core.errors import DigestMismatch, InstallError, SourceError
from mference_core.install import original, writable
from mference_core.install.original import SAMPLE_BYTES, Original, folder_original
from mference_core.install.repair import repair_install
from mference_core.install.repair_state import Origin
from mference_core.install.verify import verify_install
from mference_core.jsondata import parse_object
from mference_core.testing.fake_hub import FakeHub
from mference_core.testing.toy_installs import READER, install_from, shards_of

from .damaging import CONFIG, LAYER_1, LAYER_2, LAYOUT, RECEIPT, WEIGHTS, flip, repair, state_of, tree


@pytest.fixture
def install(hub: FakeHub, output: Path) -> Path:
    install_from(hub, output)
    hub.clear()
    return output


def receipt_source(install: Path) -> tuple[str | None, str | None]:
    receipt = parse_object((install / RECEIPT).read_bytes(), "")
    return receipt.get("sourceRepoID"), receipt.get("sourceRevision")


def refused(install: Path, hub: FakeHub, text: str) -> None:
    """Hold that a repair is refused in one line which says `text`, and that all is as it was, the receipt too."""
    before, receipt = tree(install.parent), (install / RECEIPT).exists()
    with pytest.raises(InstallError) as caught:
        repair(hub, install)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tree(install.parent), (install / RECEIPT).exists()) == (before, receipt)


# --- what is in the place of a file


@pytest.mark.parametrize("name", [LAYER_1, WEIGHTS, CONFIG, LAYOUT])
def test_directory_in_place_of_a_file(hub: FakeHub, install: Path, name: str) -> None:
    good = tree(install)
    (install / name).unlink()
    (install / name).mkdir()
    flip(install / LAYER_2, 0)
    refused(install, hub, f"{name} is a directory; expected a file of the install; remove it and run the repair again")
    (install / name).rmdir()
    repair(hub, install)
    assert tree(install) == good


@pytest.mark.parametrize("dangling", [True, False])
def test_link_in_place_of_a_file(hub: FakeHub, install: Path, tmp_path: Path, *, dangling: bool) -> None:
    """A good one may stay; what a bad one leads to is not written over."""
    good = tree(install)
    elsewhere = tmp_path / "elsewhere.bin"
    (install / LAYER_1).rename(elsewhere)
    (install / LAYER_1).symlink_to(elsewhere)
    assert repair(hub, install).repaired == ()
    elsewhere.unlink() if dangling else flip(elsewhere, 0)
    refused(install, hub, f"{LAYER_1} is a symbolic link; expected a file of the install; remove it")
    (install / LAYER_1).unlink()
    repair(hub, install)
    assert tree(install) == good


def test_file_in_place_of_a_directory(hub: FakeHub, install: Path) -> None:
    good = tree(install)
    rmtree(install / "packed_experts")
    (install / "packed_experts").touch()
    damages = verify_install(install, write_receipt=True).damages
    assert {damage.file for damage in damages if damage.file.startswith("packed")} >= {
        LAYER_1,
        LAYOUT,
        "packed_experts",
    }
    refused(install, hub, "packed_experts is a file; expected a directory of the install; remove it and run the repair")
    (install / "packed_experts").unlink()
    repair(hub, install)
    assert tree(install) == good


def test_neither_file_nor_directory(hub: FakeHub, install: Path) -> None:
    (install / LAYER_1).unlink()
    os.mkfifo(install / LAYER_1)
    with pytest.raises(InstallError, match=r"layer_01\.bin is of another kind; expected a file of the install"):
        repair(hub, install)


def test_directory_in_place_of_the_state(hub: FakeHub, install: Path) -> None:
    flip(install / LAYER_1, 0)
    state_of(install).mkdir()
    refused(install, hub, "toy.gturbo.repair.json is a directory; expected a file of the install; remove it")


@pytest.mark.parametrize("place", ["", "..", LAYER_1, "packed_experts"])
def test_what_may_not_be_written(hub: FakeHub, install: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    flip(install / LAYER_1, 0)
    closed = (install / place).resolve()
    access = os.access
    monkeypatch.setattr(writable.os, "access", lambda path, mode: Path(path) != closed and access(path, mode))
    refused(
        install, hub, f"{closed} is read-only; expected writable, to be repaired; run it as its owner, or change its"
    )
    assert not hub.asked


def test_full_disk_matters_only_to_what_grows(hub: FakeHub, install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mending bytes in place needs no space; the zeros between experts need none either."""
    good = tree(install)
    flip(install / LAYER_1, 0)
    data = (install / LAYER_2).read_bytes()
    (install / LAYER_2).unlink()
    with (install / LAYER_2).open("wb") as file:  # with a hole where the zeros are, as copying leaves one
        file.write(bytes([data[0] ^ 1]) + data[1:])
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 0})())
    repair(hub, install)
    assert tree(install) == good


# --- the source


def test_source_with_other_weights(hub: FakeHub, repo: Path, install: Path) -> None:
    """A model tuned further has the same shapes and the same index: it is known by the files that are intact."""
    flip(install / LAYER_1, 0)
    for name in shards_of(repo):
        data = bytearray((repo / name).read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start:] = bytes(byte ^ 1 for byte in data[start:])
        (repo / name).write_bytes(data)
    refused(install, hub, "is unlike model_weights.bin at byte ")


def test_source_that_goes_away(repo: Path, install: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that names it; what was compared is not compared again."""
    monkeypatch.setattr(original, "FETCH_BYTES", 512)
    good = tree(install)
    source = copytree(repo, tmp_path / "source")
    flip(install / LAYER_1, 0)

    def gone(event: Any) -> None:
        if event.stage == "repairing" and event.done_bytes > 2048 and source.exists():
            rmtree(source)

    with pytest.raises(SourceError) as caught:
        repair_install(install, lambda _: nullcontext(folder_original(source, READER)), progress=gone)
    assert "safetensors of " in str(caught.value)
    assert "is unreadable (No such file or directory); expected the file it was installed from" in str(caught.value)
    assert not (install / RECEIPT).exists()
    done = parse_object(state_of(install).read_bytes(), "")["files"][LAYER_1][1]
    assert done >= 4
    copytree(repo, source)
    again = repair_install(install, lambda _: nullcontext(folder_original(source, READER)))
    assert tree(install) == good
    assert again.fetched_bytes < 4 * 6912 - 512 * done


def lying(repo: Path, **changes: Any) -> Original:
    """Return a source that passes for the right one until all of it was fetched."""
    right = folder_original(repo, READER)

    def read(shard: str, offset: int, size: int) -> bytes:
        data = right.read(shard, offset, size)
        return data if size <= SAMPLE_BYTES else bytes([data[0] ^ 4]) + data[1:]

    return evolve(right, read=read, **changes)


def test_source_that_lied_is_not_remembered(hub: FakeHub, repo: Path, install: Path) -> None:
    """The next repair goes to where the receipt said; its receipt says so again."""
    good, known = tree(install), receipt_source(install)
    flip(install / LAYER_1, 0)
    liar = lying(repo, origin=Origin(repo="other/one", commit="d" * 40))
    with pytest.raises(DigestMismatch):
        repair_install(install, lambda _: nullcontext(liar))
    assert not (install / RECEIPT).exists()
    repair(hub, install)
    assert (tree(install), receipt_source(install)) == (good, known)


def test_another_source_that_was_stopped_is_not_remembered(repo: Path, install: Path) -> None:
    """Nobody knows yet whether it is the right one."""
    known = receipt_source(install)
    flip(install / LAYER_1, 0)
    other = evolve(folder_original(repo, READER), origin=Origin(repo="other/one", commit="d" * 40))
    with pytest.raises(KeyboardInterrupt):
        repair_install(install, lambda _: nullcontext(other), progress=interrupted)
    state = parse_object(state_of(install).read_bytes(), "")
    assert (state["repo"], state["commit"]) == known


def test_source_that_lied_is_not_recorded(repo: Path, install: Path) -> None:
    (install / RECEIPT).unlink()
    flip(install / LAYER_1, 0)
    liar = lying(repo, origin=Origin(repo="other/one", commit="d" * 40))
    with pytest.raises(DigestMismatch):
        repair_install(install, lambda _: nullcontext(liar))
    assert "repo" not in parse_object(state_of(install).read_bytes(), "")


# --- receipt and state


def test_receipt_comes_back(hub: FakeHub, install: Path) -> None:
    """Of an install that had one, also where the repair was stopped; it names the same source."""
    known = receipt_source(install)
    flip(install / LAYER_1, 0)
    flip(install / LAYER_2, 0)

    def interrupt(event: Any) -> None:
        if event.stage == "repairing" and event.file == LAYER_2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repair(hub, install, progress=interrupt)
    assert not (install / RECEIPT).exists()
    assert repair(hub, install).receipt
    assert receipt_source(install) == known == ("owner/toy", hub.commit)


def test_receipt_that_verifying_takes_away(hub: FakeHub, install: Path) -> None:
    """The repair after it still knows the source, and brings it back."""
    good, known = tree(install), receipt_source(install)
    flip(install / LAYER_1, 0)
    assert verify_install(install, write_receipt=True).damages
    assert not (install / RECEIPT).exists()
    assert repair(hub, install).receipt
    assert (tree(install), receipt_source(install)) == (good, known)


def test_verifying_what_was_mended_by_hand(hub: FakeHub, install: Path) -> None:
    """A receipt that it writes names the source all the same, and nothing is left of the repair."""
    known = receipt_source(install)
    flip(install / LAYER_1, 0)
    flip(install / LAYER_2, 0)
    with pytest.raises(KeyboardInterrupt):
        repair(hub, install, progress=interrupted)
    flip(install / LAYER_2, 0)
    assert verify_install(install, write_receipt=True).receipt
    assert receipt_source(install) == known
    assert not state_of(install).exists()


def test_no_receipt_where_there_was_none(repo: Path, install: Path) -> None:
    (install / RECEIPT).unlink()
    flip(install / LAYER_1, 0)
    assert not repair_install(install, lambda _: nullcontext(folder_original(repo, READER))).receipt
    assert not (install / RECEIPT).exists()


def test_receipt_waits_until_nothing_is_left(hub: FakeHub, install: Path) -> None:
    """An install with a file too many gets none; once that is removed, the next repair still knows the source."""
    known = receipt_source(install)
    (install / "stray").touch()
    flip(install / LAYER_1, 0)
    assert not repair(hub, install).receipt
    assert not (install / RECEIPT).exists()
    (install / "stray").unlink()
    assert repair(hub, install).receipt
    assert receipt_source(install) == known
    assert not state_of(install).exists()


@pytest.mark.parametrize("compared", [[-5, -7], [1 << 40, 1 << 40], [3, 2], ["a", 1], [True, False]])
def test_state_that_says_nonsense(hub: FakeHub, install: Path, compared: list[Any]) -> None:
    """What it says of the source is good all the same."""
    good = tree(install)
    flip(install / LAYER_1, 0)
    with pytest.raises(KeyboardInterrupt):
        repair(hub, install, progress=interrupted)
    flip(install / LAYER_1, 0)
    flip(install / LAYER_2, 0)
    state = parse_object(state_of(install).read_bytes(), "")
    state["files"] = {LAYER_1: compared}
    state_of(install).write_text(json.dumps(state))
    repair(hub, install)
    assert tree(install) == good
    assert receipt_source(install) == ("owner/toy", hub.commit)
    assert not state_of(install).exists()


def interrupted(event: Any) -> None:
    if event.stage == "repairing":
        raise KeyboardInterrupt


def test_what_a_kill_left_of_a_state(hub: FakeHub, install: Path) -> None:
    before = sorted(item.name for item in install.parent.iterdir())
    state_of(install).with_name(f"{state_of(install).name}.tmp").touch()
    repair(hub, install)
    assert sorted(item.name for item in install.parent.iterdir()) == before
