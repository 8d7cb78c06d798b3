"""SIGKILL before, or in the middle of, every step of an install that changes the file system."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mference_core.errors import InstallError
from mference_core.install.planning import RemotePlan
from mference_core.install.saved import decode_saved
from mference_core.testing.fake_hub import FakeHub
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


def assert_sent(hub: FakeHub, plan: RemotePlan, kept: set[str]) -> None:
    """Each range was sent once since the hub was cleared, those in `kept` not at all."""
    with hub.lock:  # what the killed process asked for may have been taken up late
        hub.asked[:] = [asked for asked in hub.asked if asked.authorization is None]
    counts = {name: hub.coverage(name) for name in plan.remote.files}
    for request in plan.requests.ranges:
        found = set(counts[request.shard][request.offset : request.offset + request.size])
        assert found == ({0} if request.ident in kept else {1}), request.ident


def test_killed_at_every_step(hub: FakeHub, output: Path, kill: Kill) -> None:
    """Nothing but a whole install ever has the final name; the next session keeps what was recorded, and succeeds."""
    plan, step, ended, seen = planned_toy(hub), 0, 0, Counter[str]()
    while ended < 4:  # how many ranges share one sync varies, and with it the number of steps
        place = output.with_name(f"toy{step}.gturbo")
        call = kill(step, place)
        step += 1
        if call.startswith("done"):
            ended += 1
            continue
        seen[call] += 1
        kept, promoted = recorded(place), place.exists()
        hub.clear()
        if promoted:
            open_whole(place)
            with pytest.raises(InstallError, match="is already there"):
                install_from(hub, place)
        else:
            install_from(hub, place)
            assert_sent(hub, plan, kept)
        open_whole(place)
        assert not [name for name in beside(place) if name.startswith(f"{place.name}.") and "lock" not in name]
        assert not (place / ".remote-metadata").exists()
    assert step > 100
    assert seen.keys() >= {"open", "write", "pwrite", "ftruncate", "fsync", "rename", "unlink", "mkdir"}
    print(f"killed at each of {seen.total()} steps: {dict(seen)}")  # noqa: T201  seen with pytest -s


def test_killed_while_overwriting(hub: FakeHub, output: Path, kill: Kill) -> None:
    """From the manifest to the end: at the final name is the old install or the new one, each whole, never neither."""
    install_from(hub, output)
    _, steps = kill(1_000_000, output, overwrite=True).split()
    swapped, calls = 0, list[str]()
    for step in (*range(int(steps) - 90, int(steps) - 60), *(f"swap+{number}" for number in range(1000))):
        call = kill(step, output, overwrite=True)
        swapped += (output / ".remote-metadata").exists()
        open_whole(output)
        if call.startswith("done"):
            break
        calls.append(call)
        install_from(hub, output, overwrite=True)
        open_whole(output)
        assert beside(output) == ["toy.gturbo"]
    assert len(calls) > 60
    assert calls.index("fsync") < calls.index("swap")
    assert swapped > 3


def test_killed_again_and_again(hub: FakeHub, output: Path, kill: Kill) -> None:
    """Sessions of forty steps each, one after the other: they come to an end, and no recorded range is sent again."""
    plan, sessions = planned_toy(hub), 0
    while not output.exists():
        kept = recorded(output)
        hub.clear()
        kill(40, output)
        hub.settle()
        sessions += 1
        for request in plan.requests.ranges:
            sent = any(hub.coverage(request.shard)[request.offset : request.offset + request.size])
            assert not (sent and request.ident in kept)
        assert sessions < 50
    assert sessions > 2
    open_whole(output)
