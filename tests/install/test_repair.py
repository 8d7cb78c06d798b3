"""Repairing an install: only what is damaged is fetched, and nothing in between passes for good."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mference_core.checkpoint import open_checkpoint, peek
from mference_core.errors import DigestMismatch, InstallError, InstallLocked, ManifestError, MferenceError
from mference_core.install import big_file, original
from mference_core.install.original import SAMPLE_BYTES, Original, folder_original
from mference_core.install.remote import CONNECTIONS
from mference_core.install.repair import Recorded, repair_install
from mference_core.install.transaction import locked
from mference_core.install.verify import verify_install
from mference_core.jsondata import encode_object, parse_object
from mference_core.testing.fake_hub import Answer, FakeHub
from mference_core.testing.toy_installs import READER, install_from, open_whole, write_toy_repo
from mference_core.testing.toys import toy_arch, toy_contract, toy_plan

from .damaging import (
    CONFIG,
    DIGESTS,
    EXPERT,
    LAYER_1,
    LAYER_2,
    LAYOUT,
    RECEIPT,
    STRIDE,
    WEIGHTS,
    flip,
    repair,
    sent_weights,
    state_of,
    tree,
)


@pytest.fixture
def install(hub: FakeHub, output: Path) -> Path:
    install_from(hub, output)
    hub.clear()
    return output


@pytest.fixture
def fine(install: Path) -> Path:
    """An install with digests of its experts."""
    verify_install(install, expert_digests=True)
    return install


def never(_: Recorded) -> AbstractContextManager[Original]:
    raise AssertionError("the source was opened")


def trusted(path: Path) -> None:
    open_checkpoint(peek(path), toy_contract(), toy_plan, "trusted-receipt")


def test_nothing_to_repair(install: Path) -> None:
    """The source is not even asked, and the receipt stays."""
    before = tree(install.parent)
    report = repair_install(install, never)
    assert (report.repaired, report.fetched_bytes, report.changed_bytes) == ((), 0, 0)
    assert (install / RECEIPT).exists()
    assert tree(install.parent) == before


@pytest.mark.parametrize("at", [0, 3000, EXPERT - 1])
def test_one_expert_is_fetched_and_no_more(hub: FakeHub, fine: Path, at: int) -> None:
    good = tree(fine)
    flip(fine / LAYER_2, 2 * STRIDE + at)
    report = repair(hub, fine)
    assert report.repaired == (LAYER_2,)
    assert report.fetched_bytes == sent_weights(hub) == report.changed_bytes == EXPERT
    assert tree(fine) == good
    assert not state_of(fine).exists()


def test_padding_and_index_need_no_source_bytes(hub: FakeHub, fine: Path) -> None:
    good = tree(fine)
    flip(fine / LAYER_1, STRIDE - 1)
    report = repair(hub, fine)
    assert (report.fetched_bytes, sent_weights(hub), tree(fine)) == (0, 0, good)


@pytest.mark.parametrize("with_digests", [True, False])
def test_everything_damaged_at_once(hub: FakeHub, install: Path, *, with_digests: bool) -> None:
    if with_digests:
        verify_install(install, expert_digests=True)
        (install / DIGESTS).write_bytes(b"{}")
    good = tree(install)
    good.pop(DIGESTS, None)
    (install / LAYER_1).unlink()
    (install / WEIGHTS).write_bytes(b"")
    flip(install / LAYOUT, 3)
    (install / LAYER_2).write_bytes(os.urandom(10 * STRIDE))
    (install / CONFIG).write_bytes(b"nonsense")
    (install / "tokenizer" / "tokenizer.json").unlink()
    report = repair(hub, install, write_receipt=True)
    assert len(report.repaired) == 6 + with_digests
    after = tree(install)
    assert after.pop(DIGESTS, None) is not None or not with_digests
    assert after == good
    open_whole(install)
    trusted(install)
    receipt = parse_object((install / RECEIPT).read_bytes(), "")
    assert (receipt["sourceRepoID"], receipt["sourceRevision"]) == ("owner/toy", hub.commit)


def test_digests_alone_need_no_source(fine: Path) -> None:
    good = tree(fine)
    flip(fine / DIGESTS, 100)
    assert repair_install(fine, never).repaired == (DIGESTS,)
    assert tree(fine) == good


def test_tail_that_is_missing_comes_first(hub: FakeHub, install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(original, "FETCH_BYTES", 1024)
    good = tree(install)
    os.truncate(install / LAYER_1, 3 * STRIDE + 100)
    report = repair(hub, install)
    assert tree(install) == good
    assert EXPERT - 100 <= report.changed_bytes <= EXPERT
    assert report.fetched_bytes <= EXPERT + 8 * 1024


def test_folder_as_source(repo: Path, install: Path) -> None:
    good = tree(install)
    flip(install / LAYER_1, 9)
    flip(install / CONFIG, 0)

    def opening(_: Recorded) -> AbstractContextManager[Original]:
        from contextlib import nullcontext  # noqa: PLC0415

        return nullcontext(folder_original(repo, READER))

    assert repair_install(install, opening, write_receipt=True).receipt
    assert tree(install) == good
    receipt = parse_object((install / RECEIPT).read_bytes(), "")
    assert receipt["sourceRepoID"] == "owner/toy"


def test_source_that_changed(hub: FakeHub, install: Path) -> None:
    """It is refused before anything is touched."""
    flip(install / LAYER_1, 9)
    before = tree(install.parent)
    path = hub.folder / "model.safetensors.index.json"
    path.write_bytes(path.read_bytes() + b"\n")
    hub.stated.clear()
    with pytest.raises(InstallError, match=r"with index sha256:.*; expected sha256:.*; give the repository and rev"):
        repair(hub, install)
    assert tree(install.parent) == before
    assert (install / RECEIPT).exists()


def test_source_of_another_shape(tmp_path: Path, install: Path) -> None:
    from contextlib import nullcontext  # noqa: PLC0415

    other = write_toy_repo(tmp_path / "other", arch=toy_arch(num_experts=8))
    manifest = parse_object((install / "manifest.json").read_bytes(), "")
    del manifest["sourceSnapshotHash"]
    (install / "manifest.json").write_bytes(encode_object(manifest))
    flip(install / LAYER_1, 9)
    before = tree(install.parent)
    with pytest.raises(InstallError, match=r"is of 42150 bytes in model_weights\.bin|bytes in "):
        repair_install(install, lambda _: nullcontext(folder_original(other, READER)))
    assert tree(install.parent) == before


@pytest.mark.parametrize("with_digests", [True, False])
def test_source_that_gives_other_bytes(hub: FakeHub, install: Path, *, with_digests: bool) -> None:
    """With digests nothing of them is written; either way the install does not pass, and a later repair succeeds."""
    if with_digests:
        verify_install(install, expert_digests=True)
    flip(install / LAYER_1, 9)
    before = tree(install)

    def corrupt(answer: Answer) -> None:
        weights = answer.storage and answer.method == "GET" and answer.first > 4096
        if weights and len(answer.body) > SAMPLE_BYTES:
            answer.body = bytes([answer.body[0] ^ 4]) + answer.body[1:]

    hub.faults.append(corrupt)
    with pytest.raises(DigestMismatch, match="the source gives other bytes: install it again"):
        repair(hub, install, write_receipt=True)
    assert (tree(install) == before) == with_digests
    with pytest.raises(MferenceError, match="receipt is missing"):
        trusted(install)
    with pytest.raises(DigestMismatch, match=r"layer_01\.bin"):
        read_all(install)
    hub.faults.clear()
    repair(hub, install)
    assert verify_install(install).damages == ()


def read_all(install: Path) -> None:
    """Read every expert as a load does."""
    from mference_core.experts.reader import ExpertReader  # noqa: PLC0415
    from mference_core.experts.residents import ResidentExperts  # noqa: PLC0415

    checkpoint = open_checkpoint(peek(install), toy_contract(), toy_plan)
    with ExpertReader() as reader:
        for layer in checkpoint.experts.values():
            ResidentExperts(layer, reader, before_first_read=checkpoint.touch)


def test_what_no_repair_can_do(hub: FakeHub, install: Path) -> None:
    (install / "stray").touch()
    flip(install / LAYER_1, 9)
    report = repair(hub, install, write_receipt=True)
    assert [damage.file for damage in report.left] == ["stray"]
    assert not report.receipt
    assert [damage.file for damage in verify_install(install).damages] == ["stray"]
    flip(install / "manifest.json", 0)
    with pytest.raises(ManifestError, match=r"manifest\.json is malformed"):
        repair(hub, install)


def test_full_disk_and_busy(hub: FakeHub, install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is touched."""
    (install / LAYER_1).unlink()
    before = tree(install.parent)
    with locked(install), pytest.raises(InstallLocked):
        repair(hub, install)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
        with pytest.raises(InstallError, match=r"free space at .* is 1000 bytes; expected at least"):
            repair(hub, install)
    assert tree(install.parent) == before
    assert (install / RECEIPT).exists()


def test_disk_that_fills_while_writing(hub: FakeHub, install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(install / LAYER_1, 9)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(big_file.os, "pwrite", full)
        with pytest.raises(InstallError, match="stopped by a full disk; free some space and run it again"):
            repair(hub, install)
    assert not (install / RECEIPT).exists()
    repair(hub, install)
    assert verify_install(install).damages == ()


def test_through_a_link(hub: FakeHub, install: Path) -> None:
    link = install.with_name("link.gturbo")
    link.symlink_to(install)
    flip(install / LAYER_1, 9)
    repair(hub, link, write_receipt=True)
    assert link.is_symlink()
    trusted(link)


# --- stopped in the middle

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
step = int(sys.argv[2])
from mference_core.testing.fake_hub import FakeHub
from mference_core.install import http
import damaging_alone as damaging
from mference_core.install.repair import repair_install
http._trust()
hub = FakeHub(Path(sys.argv[4]), commit="c" * 40, endpoint=sys.argv[3])
left = [step]
def wrap(name, call):
    def counted(*args, **options):
        if name == "open" and not args[1] & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            return call(*args, **options)
        left[0] -= 1
        if left[0] < 0:
            if name in ("write", "pwrite"):
                call(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)
    return counted
for name in ("write", "pwrite", "open", "ftruncate", "fsync", "fdatasync", "rename", "unlink", "mkdir"):
    setattr(os, name, wrap(name, getattr(os, name)))
repair_install(Path(sys.argv[1]), damaging.from_hub(hub), write_receipt=True)
"""


@pytest.mark.parametrize("with_digests", [True, False])
def test_killed_at_steps(hub: FakeHub, install: Path, tmp_path: Path, *, with_digests: bool) -> None:
    """SIGKILL before, or in the middle of, steps that change the disk: no state passes for good, the next one ends it.

    Every step of a session is tried in turn on the damage that the one before left behind, until none is left.
    """
    if with_digests:
        verify_install(install, expert_digests=True)
    good = tree(install)
    flip(install / LAYER_1, 9)
    os.truncate(install / LAYER_2, 2 * STRIDE)
    flip(install / WEIGHTS, 20_000)
    (install / CONFIG).unlink()
    damaged = {name: data for name, data in tree(install).items() if data != good.get(name)} | {CONFIG: b""}
    script = tmp_path / "killed.py"
    (tmp_path / "damaging_alone.py").write_text(Path(__file__).with_name("damaging.py").read_text())
    script.write_text(KILLED.format(tests=str(tmp_path)))
    random, killed = Random(5), 0  # noqa: S311  which steps are tried
    for step in [0, *sorted(random.sample(range(1, 40), 7)), 10_000]:
        for name, data in damaged.items():
            (install / name).write_bytes(data)
        (install / CONFIG).unlink(missing_ok=True)
        command = [sys.executable, str(script), str(install), str(step), hub.endpoint, str(hub.folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        if done.returncode == 0:
            assert tree(install) == good
            trusted(install)
            continue
        killed += 1
        if (install / RECEIPT).exists():  # then it has not begun, or it is done
            assert verify_install(install).damages == () or not state_changed(install, damaged)
        elif {name: data for name, data in tree(install).items() if "/." not in f"/{name}"} != good:
            assert verify_install(install).damages
        repair(hub, install, write_receipt=True)
        assert tree(install) == good
        assert not state_of(install).exists()
    assert killed > 3


def state_changed(install: Path, damaged: dict[str, bytes]) -> bool:
    """Say whether a file is neither as it was damaged nor missing."""
    held: Callable[[str], bytes] = lambda name: (install / name).read_bytes() if (install / name).exists() else b""  # noqa: E731
    return any(held(name) != data for name, data in damaged.items())


def test_interrupted_and_gone_on_with(hub: FakeHub, fine: Path) -> None:
    """What was repaired before is not fetched again, and the source is remembered though its receipt is gone."""
    good = tree(fine)
    for expert in range(4):
        flip(fine / LAYER_1, expert * STRIDE)
        flip(fine / LAYER_2, expert * STRIDE)

    def interrupt(event: Any) -> None:
        if event.stage == "repairing" and event.file == LAYER_2 and event.done_bytes > 4 * STRIDE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repair(hub, fine, progress=interrupt)
    assert not (fine / RECEIPT).exists()
    left = len(verify_install(fine).damages)
    assert 0 < left < 4
    report = repair(hub, fine, write_receipt=True)
    assert report.fetched_bytes == sent_weights(hub) == left * EXPERT
    assert tree(fine) == good
    trusted(fine)


# Bytes of a layer file that come early, in the middle and late in a source, whose names are sorted.
EARLY, MIDDLE, LATE = EXPERT - 1, 0, 3 * STRIDE + EXPERT // 3


def stopped_half_way(hub: FakeHub, install: Path) -> int:
    """Stop a repair of layer 1 when half of it was compared; return how much was."""
    compared = list[int]()

    def interrupt(event: Any) -> None:
        if event.stage == "repairing" and event.done_bytes > 2 * EXPERT:
            compared.append(event.done_bytes)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repair(hub, install, progress=interrupt)
    assert verify_install(install).damages
    return compared[0]


def test_gone_on_with_without_digests(hub: FakeHub, install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far the comparison came is kept."""
    monkeypatch.setattr(original, "FETCH_BYTES", 1024)
    good = tree(install)
    flip(install / LAYER_1, MIDDLE)
    flip(install / LAYER_1, LATE)
    compared = stopped_half_way(hub, install)
    report = repair(hub, install)
    assert report.repaired == (LAYER_1,)
    under_way = (CONNECTIONS - 1) * 1024  # when the file is good; behind the last reads the first ones come again
    assert 0 < report.fetched_bytes <= 4 * EXPERT - compared + under_way + 4 * SAMPLE_BYTES
    assert tree(install) == good


@pytest.mark.parametrize("late", [True, False])
def test_damage_behind_what_was_compared(
    hub: FakeHub, install: Path, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    """It is found after the rest, and nothing is fetched twice for it."""
    monkeypatch.setattr(original, "FETCH_BYTES", 1024)
    good = tree(install)
    flip(install / LAYER_1, LATE)
    stopped_half_way(hub, install)
    flip(install / LAYER_1, EARLY)
    if not late:
        flip(install / LAYER_1, LATE)
    report = repair(hub, install)
    assert report.fetched_bytes <= 4 * EXPERT + 4 * SAMPLE_BYTES
    assert tree(install) == good
