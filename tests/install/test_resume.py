"""Going on after a stop: what is verified is kept, what is damaged is fetched again, other sources are not mixed in."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mference_core.errors import InstallError, InstallLocked, MferenceError, SourceError
from mference_core.install import InstallProgress, discard
from mference_core.install.transaction import locked
from mference_core.testing.fake_hub import FakeHub, commit_of
from mference_core.testing.toy_installs import (
    beside,
    install_from,
    install_toy,
    open_whole,
    planned_toy,
    shards_of,
)

from .pausing import idents, partial, pause, recorded, saved_path


@pytest.mark.parametrize("after", [1, 4, 9, 12])
def test_interrupted_install_goes_on(hub: FakeHub, output: Path, after: int) -> None:
    """Wherever it is interrupted; recorded ranges are not sent again, and progress counts them from the start."""
    pause(hub, output, after)
    kept = {r.ident: r for r in planned_toy(hub).requests.ranges if r.ident in idents(output)}
    hub.clear()
    events = list[InstallProgress]()
    report = install_from(hub, output, progress=events.append)
    assert report.reused_bytes == sum(request.size for request in kept.values())
    for request in kept.values():
        assert not any(hub.coverage(request.shard)[request.offset : request.offset + request.size])
    first = next(event for event in events if event.stage == "copying")
    assert first.done_bytes == first.reused_bytes == report.reused_bytes
    assert [e.done_bytes for e in events if e.stage == "resuming"][-1] == report.reused_bytes
    open_whole(output)


def test_damaged_range_alone_is_fetched_again(hub: FakeHub, output: Path) -> None:
    """One byte changed on disk between sessions; its file was found good before, and is checked again."""
    plan, checked = planned_toy(hub), partial(output) / ".remote-metadata/checked.json"
    first = shards_of(hub.folder)[0]
    pause(hub, output, after=sum(request.shard == first for request in plan.requests.ranges) + 1)

    def progress(event: InstallProgress) -> None:
        # The first file is whole. Its digest is taken beside the copying, so an interruption may come before its end:
        # here nothing is copied until it is there.
        deadline = time.monotonic() + 60
        while event.stage == "copying":
            if checked.exists():
                raise KeyboardInterrupt
            assert time.monotonic() < deadline
            time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        install_from(hub, output, progress=progress)
    assert json.loads(checked.read_text())["files"].keys() == {first}
    damaged = plan.requests.ranges[2]
    copy = damaged.copies[1]
    with (partial(output) / copy.dest_path).open("r+b") as file:
        file.seek(copy.dest_offset)
        byte = file.read(1)
        file.seek(copy.dest_offset)
        file.write(bytes([byte[0] ^ 1]))
    kept = set(idents(output)) - {damaged.ident}
    hub.clear()
    report = install_from(hub, output)
    assert report.reused_bytes == sum(r.size for r in plan.requests.ranges if r.ident in kept)
    assert report.checked_files == 2
    for request in plan.requests.ranges:
        counts = set(hub.coverage(request.shard)[request.offset : request.offset + request.size])
        assert counts == ({0} if request.ident in kept else {1})
    open_whole(output)


@pytest.mark.parametrize("damage", ["missing", "short", "index", "linked folder"])
def test_outputs_that_are_not_the_planned_ones_are_made_again(
    hub: FakeHub, output: Path, tmp_path: Path, damage: str
) -> None:
    pause(hub, output)
    weights = partial(output) / "model_weights.bin"
    if damage == "missing":
        weights.unlink()
    elif damage == "short":
        os.truncate(weights, 20_000)
    elif damage == "index":
        weights.write_bytes(b"\1" + weights.read_bytes()[1:])
    else:
        (partial(output) / "packed_experts").rename(tmp_path / "elsewhere")
        (partial(output) / "packed_experts").symlink_to(tmp_path / "elsewhere")
        before = {item: item.read_bytes() for item in (tmp_path / "elsewhere").iterdir()}
    report = install_from(hub, output)
    assert report.reused_bytes == 0
    open_whole(output)
    if damage == "linked folder":
        assert {item: item.read_bytes() for item in (tmp_path / "elsewhere").iterdir()} == before


def test_output_that_became_a_link_is_not_followed(hub: FakeHub, output: Path, tmp_path: Path) -> None:
    pause(hub, output)
    weights, elsewhere = partial(output) / "model_weights.bin", tmp_path / "elsewhere"
    weights.rename(elsewhere)
    weights.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    with pytest.raises(InstallError, match=r"model_weights\.bin is refused \(Too many levels of symbolic links\)"):
        install_from(hub, output)
    assert elsewhere.read_bytes() == before
    discard(output)
    assert elsewhere.read_bytes() == before
    assert beside(output) == []


def test_tokenizer_files_are_kept_where_they_are_good(hub: FakeHub, output: Path) -> None:
    def progress(event: InstallProgress) -> None:
        if event.stage == "finishing" and event.file == "chat_template.jinja":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install_from(hub, output, progress=progress)
    hub.clear()
    install_from(hub, output)
    assert not hub.sent("tokenizer.json")
    assert not hub.sent("chat_template.jinja")
    open_whole(output)


# --- not the same source


def refused(kind: type[MferenceError], text: str, hub: FakeHub, output: Path, **options: Any) -> None:
    """Nothing that was saved is touched by a refusal."""
    before = saved_path(output).read_bytes(), {p: p.read_bytes() for p in partial(output).rglob("*") if p.is_file()}
    with pytest.raises(kind, match=text):
        install_from(hub, output, **options)
    assert before == (saved_path(output).read_bytes(), {p: p.read_bytes() for p in before[1]})
    assert not output.exists()


def test_other_revision_is_refused_before_the_network(hub: FakeHub, output: Path) -> None:
    pause(hub, output)
    refused(
        InstallError,
        "half downloaded from owner/toy at main; expected owner/toy at v2; install that, or .*mference discard",
        hub,
        output,
        revision="v2",
    )
    assert not hub.asked


def change_tensor(folder: Path) -> None:
    """Publish another seed's weights: the same names and sizes, other bytes."""
    for name in shards_of(folder):
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(bytes(data))


def test_branch_that_moved_is_not_followed(hub: FakeHub, output: Path) -> None:
    """The commit it began with is still there: the download goes on at that one."""
    pause(hub, output)
    began, hub.commit = hub.commit, "d" * 40
    hub.older.add(began)
    assert install_from(hub, output).commit == began
    open_whole(output)


def test_commit_that_is_gone(hub: FakeHub, output: Path) -> None:
    pause(hub, output)
    change_tensor(hub.folder)
    hub.commit = commit_of(hub.folder)
    refused(SourceError, "answered with status 404 RevisionNotFound", hub, output)


def test_index_that_changed_at_the_same_commit(hub: FakeHub, output: Path) -> None:
    pause(hub, output)
    path = hub.folder / "model.safetensors.index.json"
    path.write_bytes(path.read_bytes() + b"\n")
    hub.stated.clear()
    refused(InstallError, "index sha256 is .* as the source is now; remove it with 'mference discard'", hub, output)


def test_plan_that_changed_at_the_same_commit(hub: FakeHub, output: Path) -> None:
    pause(hub, output)
    refused(InstallError, "fingerprint is .*expected", hub, output, chunk_bytes=4096)


def test_weights_that_changed_at_the_same_commit(hub: FakeHub, output: Path) -> None:
    """Sizes and headers are the same: the digest that the hub states tells, and nothing mixed is promoted."""
    pause(hub, output)
    change_tensor(hub.folder)
    hub.stated.clear()
    other = shards_of(hub.folder)[0]
    install_from(hub, output)
    assert max(hub.coverage(other)) >= 1
    open_whole(output)
    install_from(hub, output.with_name("fresh.gturbo"))
    assert (output / "manifest.json").read_bytes() == (output.with_name("fresh.gturbo") / "manifest.json").read_bytes()


def test_saved_range_that_is_none_of_the_plan(hub: FakeHub, output: Path) -> None:
    pause(hub, output)
    values = recorded(output)
    values["completedRanges"][0]["destinationBytes"] += 1
    saved_path(output).write_text(json.dumps(values))
    refused(InstallError, "range-00000000 is not a range of this source", hub, output)


def test_saved_state_without_its_files(hub: FakeHub, output: Path) -> None:
    pause(hub, output)
    shutil.rmtree(partial(output))
    with pytest.raises(InstallError, match=r"toy\.gturbo\.partial is missing.*mference discard"):
        install_from(hub, output)
    discard(output)
    install_from(hub, output)


def test_local_install_does_not_touch_a_saved_download(hub: FakeHub, output: Path) -> None:
    pause(hub, output)
    with pytest.raises(InstallError, match="half downloaded; expected no saved download; resume or discard it"):
        install_toy(hub.folder, output)
    install_from(hub, output)


# --- the target


def test_two_installers_at_once(hub: FakeHub, output: Path) -> None:
    """The second is refused and asks for nothing; a discard is refused too; the first is not disturbed."""
    seen = list[str]()

    def progress(event: InstallProgress) -> None:
        if event.stage == "copying" and event.done_bytes and not seen:
            seen.append("once")
            count = len(hub.asked)
            with pytest.raises(InstallLocked, match="being installed by another process"):
                install_from(hub, output)
            with pytest.raises(InstallLocked):
                discard(output)
            seen.append(str(len(hub.asked) - count))

    install_from(hub, output, progress=progress, connections=1)
    assert seen[0] == "once"
    open_whole(output)


def test_lock_of_a_dead_holder_is_taken_over(hub: FakeHub, output: Path) -> None:
    script = "import sys,time\nfrom pathlib import Path\nfrom mference_core.install.transaction import locked\n"
    script += "with locked(Path(sys.argv[1])):\n print('held', flush=True)\n time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script, output], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InstallLocked):
            install_from(hub, output)
        holder.kill()
    install_from(hub, output)


@pytest.mark.parametrize("kind", ["output", "partial"])
def test_symlinked_target_is_refused_before_the_network(hub: FakeHub, output: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = output if kind == "output" else partial(output)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InstallError, match="is a symbolic link; expected a directory, or nothing"):
        install_from(hub, output)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not hub.asked


def test_read_only_target(hub: FakeHub, output: Path) -> None:
    for folder in (output.parent.parent, output.parent):
        folder.chmod(0o555)
    as_root = os.geteuid() == 0
    if as_root:
        os.seteuid(65534)  # the superuser may write anywhere
    try:
        with pytest.raises(InstallError, match=r"toy\.gturbo\.install\.lock is refused \(Permission denied\)"):
            install_from(hub, output)
    finally:
        if as_root:
            os.seteuid(0)
        output.parent.parent.chmod(0o755)
        output.parent.chmod(0o755)
    assert not hub.asked
    assert beside(output) == []


def test_existing_output_is_refused_before_the_network(hub: FakeHub, output: Path) -> None:
    install_from(hub, output)
    hub.clear()
    with pytest.raises(InstallError, match="is already there; expected a new path; or give --overwrite"):
        install_from(hub, output)
    assert not hub.asked


def test_overwrite_keeps_the_old_install_until_the_new_one_is_whole(hub: FakeHub, output: Path) -> None:
    install_from(hub, output)
    (output / "mark").write_bytes(b"")
    pause(hub, output, overwrite=True)
    assert (output / "mark").exists()
    install_from(hub, output, overwrite=True)
    assert not (output / "mark").exists()
    assert beside(output) == ["toy.gturbo"]
    open_whole(output)


# --- the disk


def usage(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    values = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr("mference_core.install.transaction.shutil.disk_usage", lambda _: values)


def test_too_little_space_is_refused_with_both_numbers(
    hub: FakeHub, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written; a resumed download needs less, by what it has."""
    needed = planned_toy(hub).disk_bytes
    usage(monkeypatch, needed - 1)
    with pytest.raises(InstallError, match=f"is {needed - 1} bytes; expected at least {needed}; free some space"):
        install_from(hub, output)
    assert beside(output) == []
    usage(monkeypatch, needed)
    pause(hub, output)
    plan = planned_toy(hub)
    done = [request for request in plan.requests.ranges if request.ident in idents(output)]
    less = needed - sum(request.size for request in done)
    usage(monkeypatch, less - 1)
    refused(InstallError, f"expected at least {less}", hub, output)
    usage(monkeypatch, less)
    install_from(hub, output)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "write", "ftruncate"])
@pytest.mark.parametrize("after", [0, 2, 9, 30])
def test_disk_that_fills_pauses(
    hub: FakeHub, output: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    """Whatever fails first; state is kept from the first record on, and the rest comes once there is room."""
    real, calls = getattr(os, call), list[int]()

    def full(*arguments: Any) -> Any:
        calls.append(0)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        try:
            install_from(hub, output)
        except InstallError as error:
            assert str(error).endswith("is stopped by a full disk; free some space and run it again")  # noqa: PT017
            assert not output.exists()
        else:
            assert len(calls) <= after
            return
    kept = idents(output) if saved_path(output).exists() else []
    assert partial(output).exists() == saved_path(output).exists()
    hub.clear()
    install_from(hub, output)
    for request in planned_toy(hub).requests.ranges:
        if request.ident in kept:
            assert not any(hub.coverage(request.shard)[request.offset : request.offset + request.size])
    open_whole(output)


MOUNT = """
set -e
mount -t tmpfs -o size=100k tmpfs "$1"
exec "$2" -c '
import sys
from pathlib import Path
from mference_core.install import download
from mference_core.testing.fake_hub import FakeHub
from mference_core.testing.toy_installs import install_from
download.check_disk = lambda *_: None
fake = FakeHub(Path(sys.argv[1]))
fake.endpoint = sys.argv[2]
out = Path(sys.argv[3]) / "toy.gturbo"
for attempt in range(2):
    try:
        install_from(fake, out)
    except Exception as error:
        print(type(error).__name__, error)
print(sorted(item.name for item in out.parent.iterdir()))
' "$3" "$4" "$1"
"""


def test_small_file_system_that_fills(hub: FakeHub, tmp_path: Path) -> None:
    """A real one: two sessions, each stopped by it, in one line, with the state kept."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    words = (mounted, sys.executable, hub.folder, hub.endpoint)
    command = ["unshare", "-m", "sh", "-c", MOUNT, "sh", *map(str, words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("may not mount")
    first, second, left = done.stdout.splitlines()
    for line in (first, second):
        assert line.startswith("InstallError")
        assert line.endswith("is stopped by a full disk; free some space and run it again")
    assert "toy.gturbo.partial" in left
    assert "toy.gturbo.resume.json" in left
    assert "'toy.gturbo'" not in left


def test_lock_is_held_until_the_end(hub: FakeHub, output: Path) -> None:
    """During the last step too."""
    seen = list[bool]()

    def progress(event: InstallProgress) -> None:
        if event.stage == "finishing":
            with pytest.raises(InstallLocked), locked(output):
                pass
            seen.append(True)

    install_from(hub, output, progress=progress)
    assert seen


def test_stopped_by_a_bug_keeps_the_state(hub: FakeHub, output: Path) -> None:
    pause(hub, output)
    before = idents(output)

    def progress(event: InstallProgress) -> None:
        if event.stage == "copying" and event.done_bytes > event.reused_bytes:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        install_from(hub, output, progress=progress)
    assert set(idents(output)) >= set(before)
    install_from(hub, output)
