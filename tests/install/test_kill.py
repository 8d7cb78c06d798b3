"""SIGKILL before, or in the middle of, every step of an install that changes the file system."""

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mference_core.errors import InstallError
from mference_core.install import InstallReport
from mference_core.install.kept import Kept
from mference_core.install.planning import RemotePlan
from mference_core.install.saved import decode_saved
from mference_core.testing.fake_hub import Asked, FakeHub
from mference_core.testing.toy_installs import beside, install_from, open_whole, planned_toy, write_toy_repo
from mference_core.testing.toys import toy_arch

DRIVER = Path(__file__).with_name("killed.py")
ARCH = toy_arch(num_layers=2, num_experts=2, full_attention_layer_mask=(0, 1))


class Kill:
    """Installs to an output in a process that is killed at a step; returns the step's call, or `done` and the count."""

    def __init__(self, hub: FakeHub, driver: "subprocess.Popen[str]") -> None:
        self.hub, self.driver = hub, driver

    def __call__(self, step: int | str, output: Path, *, overwrite: bool = False) -> str:
        assert self.driver.stdin is not None
        assert self.driver.stdout is not None
        words = (step, output, self.hub.endpoint, self.hub.folder, int(overwrite))
        print(*words, sep="\t", file=self.driver.stdin, flush=True)
        said = self.driver.stdout.readline().strip()
        assert said
        assert not said.startswith("failed"), said
        return said


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """The smallest repository there is: every step of its install is killed."""
    return write_toy_repo(tmp_path / "repo", arch=ARCH)


@pytest.fixture
def kill(hub: FakeHub) -> Iterator[Kill]:
    command = [sys.executable, str(DRIVER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        yield Kill(hub, driver)
        assert driver.stdin is not None
        driver.stdin.close()


def recorded(output: Path) -> set[str]:
    """Return the ranges that the saved state says are done; the state is always whole."""
    path = Path(f"{output}.resume.json")
    return set(decode_saved(path.read_bytes(), path).ranges) if path.exists() else set()


def read(output: Path, plan: RemotePlan) -> set[str]:
    """Return the files of which what comes before the weights is kept."""
    kept = Kept(folder=Path(f"{output}.partial") / ".remote-metadata")
    return {file.name for file, data in plan.remote.parts if kept.find(file) == data}


def asked_since(hub: FakeHub) -> list[Asked]:
    """Return what was asked since the hub was cleared."""
    with hub.lock:  # what the killed process asked for may have been taken up late
        hub.asked[:] = [asked for asked in hub.asked if asked.authorization is None]
        return hub.asked.copy()


def assert_sent(hub: FakeHub, plan: RemotePlan, kept: set[str], read: set[str]) -> None:
    """Each range was sent once since the hub was cleared, those in `kept` not at all, nor what was `read`."""
    asked_since(hub)
    counts = {file.name: hub.coverage(file.name) for file, _ in plan.remote.parts}
    for request in plan.requests.ranges:
        found = set(counts[request.shard][request.offset : request.offset + request.size])
        assert found == ({0} if request.ident in kept else {1}), request.ident
    for file, data in plan.remote.parts:
        assert set(counts[file.name][: len(data)]) == ({0} if file.name in read else {1}), file.name


def assert_reported(report: InstallReport, output: Path, like: InstallReport) -> None:
    """It says of the install that is there what its own report would have said, and that nothing was downloaded."""
    size = sum(item.stat().st_size for item in output.rglob("*") if item.is_file())
    names = ("model_id", "files", "resident_tensors", "routed_layers", "commit")
    assert all(getattr(report, name) == getattr(like, name) for name in names)
    assert (report.path, report.size_bytes, report.downloaded_bytes, report.reused_bytes) == (output, size, 0, 0)


def test_killed_at_every_step(hub: FakeHub, output: Path, kill: Kill) -> None:
    """Nothing but a whole install ever has the final name; the next session keeps what was recorded, and succeeds.

    Also if it finds all but the cleaning up done; but after the very last change the install is one like any other.
    """
    plan, step, ended, seen, last = planned_toy(hub), 0, 0, Counter[str](), list[str]()
    whole = install_from(hub, output)
    while ended < 4:  # how many ranges share one sync varies, and with it the number of steps
        place = output.with_name(f"toy{step}.gturbo")
        call = kill(step, place)
        step += 1
        if call.startswith("done"):
            ended += 1
            continue
        seen[call] += 1
        kept, held, promoted = recorded(place), read(place, plan), place.exists()
        known = Path(f"{place}.resume.json").exists()
        hub.clear()
        if not promoted:
            install_from(hub, place)
            assert_sent(hub, plan, kept, held)
        elif known:
            open_whole(place)
            assert_reported(install_from(hub, place), place, whole)
            assert not asked_since(hub)
        else:
            open_whole(place)
            last.append(call)
            with pytest.raises(InstallError, match="is already there"):
                install_from(hub, place)
        open_whole(place)
        assert not [name for name in beside(place) if name.startswith(f"{place.name}.") and "lock" not in name]
        assert not (place / ".remote-metadata").exists()
    assert step > 100
    assert set(last) <= {"fsync"}
    assert seen.keys() >= {"open", "write", "pwrite", "ftruncate", "fsync", "rename", "unlink", "mkdir"}
    print(f"killed at each of {seen.total()} steps: {dict(seen)}")  # noqa: T201  seen with pytest -s


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_while_finishing(hub: FakeHub, output: Path, kill: Kill, *, overwrite: bool) -> None:
    """From the first small file to the end: at the final name is the old install or the new one, each whole.

    If it is the new one, the next session downloads nothing, and says that it is installed; but after the very last
    change to the file system it is an install like any other.
    """
    whole, calls, reported, last = install_from(hub, output), list[str](), 0, list[str]()
    while True:
        before = output.stat().st_ino
        if not overwrite:
            shutil.rmtree(output)
        call = kill(f"finish+{len(calls)}", output, overwrite=overwrite)
        if call.startswith("done"):
            break
        calls.append(call)
        promoted = output.exists() and not (overwrite and output.stat().st_ino == before)
        hub.clear()
        if promoted and Path(f"{output}.resume.json").exists():
            open_whole(output)
            assert_reported(install_from(hub, output, overwrite=overwrite), output, whole)
            assert not asked_since(hub)
            reported += 1
        elif promoted:
            last.append(call)
            with pytest.raises(InstallError, match="is already there"):
                install_from(hub, output)
        else:
            assert output.exists() == overwrite
            install_from(hub, output, overwrite=overwrite)
        open_whole(output)
        assert beside(output) == ["toy.gturbo"]
        assert not (output / ".remote-metadata").exists()
    after = calls[::-1].index("swap" if overwrite else "rename")
    assert calls[:2] == ["finish", "unlink"]
    assert reported == after - 1 > 10
    assert last == ["fsync"]


def test_killed_again_and_again(hub: FakeHub, output: Path, kill: Kill) -> None:
    """Sessions of forty steps each, one after the other: they come to an end, and no recorded range is sent again."""
    plan, sessions = planned_toy(hub), 0
    while not output.exists():
        kept, held = recorded(output), read(output, plan)
        hub.clear()
        kill(40, output)
        hub.settle()
        sessions += 1
        for request in plan.requests.ranges:
            sent = any(hub.coverage(request.shard)[request.offset : request.offset + request.size])
            assert not (sent and request.ident in kept)
        for file, data in plan.remote.parts:
            assert not (file.name in held and any(hub.coverage(file.name)[: len(data)]))
        assert sessions < 50
    assert sessions > 2
    open_whole(output)
