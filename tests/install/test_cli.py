"""`mference install` and `discard` as a user meets them: lines, events, plans, interruptions, and what is said then."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from mference_core import plugins, records
from mference_core.cli.install_progress import Meter, left_text, watcher
from mference_core.family import Pinned
from mference_core.install import InstallProgress
from mference_core.install.transaction import target_of
from mference_core.jsondata import hash_file
from mference_core.locate import find_model
from mference_core.plugins import LoadedFamily
from mference_core.safetensors_index import INDEX_NAME
from mference_core.testing.fake_hub import REPO, Answer, FakeHub, serving
from mference_core.testing.toy_installs import beside

DATA = 4096
"""Offsets from here on are weights in the shards used here."""


@pytest.fixture
def published(gemma4_reference: Path, tmp_path: Path) -> Path:
    """The first family's tiny quantised checkpoint, as a repository of one file."""
    folder = tmp_path / "published"
    folder.mkdir()
    for item in (gemma4_reference / "mlx").iterdir():
        (folder / item.name).write_bytes(item.read_bytes())
    (folder / "tokenizer.json").write_text("{}")
    header = (folder / "model.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    listed = {name: "model.safetensors" for name in names if name != "__metadata__"}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": listed}))
    return folder


@pytest.fixture
def fake(published: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """Serve it, pinned by its family, with a data directory of the test's own."""
    family = plugins.load("gemma4")
    with serving(FakeHub(published)) as hub:
        pinned = Pinned(
            repo=REPO,
            revision=hub.commit,
            index_sha256=hash_file(published / INDEX_NAME),
            model_id="toys/tiny",
            download_bytes=1,
            installed_bytes=1,
            licence="to be used kindly",
        )
        mine = evolve(family, family=evolve(family.family, pinned=(pinned,)))
        monkeypatch.setattr(plugins, "dispatch", lambda *_: mine)
        monkeypatch.setattr(plugins, "name_for", lambda *_, **__: "gemma4")
        monkeypatch.setattr("mference_core.cli.show.find_model", partial(find_model, load=lambda *_: mine))
        monkeypatch.setattr(records, "data_dir", lambda: tmp_path / "data")
        monkeypatch.setattr("mference_core.locate.data_dir", lambda: tmp_path / "data")
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    return tmp_path / "data" / "models" / "gemma4.gturbo"


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_family_alone_installs_its_pinned_checkpoint_where_run_looks(cli: Any, fake: FakeHub, installed: Path) -> None:
    code, out, err = cli("install", "--family", "gemma4")
    assert code == 0, err
    assert f"installing {REPO} at {fake.commit} from {fake.endpoint} to {installed}" in err
    assert "licence of the model: to be used kindly" in err
    assert out.startswith(f"installed {installed}: ")
    assert "downloaded" in out
    assert json.loads((installed / "manifest.json").read_text())["modelID"] == "toys/tiny"
    code, _, err = cli("show", "--family", "gemma4")
    assert f"using the installed checkpoint {installed}" in err
    code, _, err = cli("install", "--family", "gemma4")
    assert (code, "already there" in err.splitlines()[-1]) == (1, True)


@pytest.mark.usefixtures("fake")
def test_plain_lines_for_a_log(cli: Any) -> None:
    _, _, err = cli("install", "--family", "gemma4")
    lines = err.splitlines()[2:]
    assert lines[0] == "reading what the repository holds"
    assert lines[1].startswith("reserving: ")
    assert lines[2].startswith("copying: ")
    assert [line.split(":")[0] for line in lines[3:]] == [
        "checking the source's digests",
        "hashing the install",
        "finishing",
    ]
    assert "\x1b" not in err


def test_events_for_machines(cli: Any, fake: FakeHub, installed: Path) -> None:
    """Every line of stdout is an event; stages come in order and end complete, the report is last."""
    code, out, err = cli("install", "--family", "gemma4", "--json")
    assert (code, err) == (0, "")
    found = events(out)
    assert found[0] == {
        "event": "source",
        "repo": REPO,
        "revision": fake.commit,
        "endpoint": fake.endpoint,
        "licence": "to be used kindly",
        "output": str(installed),
    }
    progress = [event for event in found if event["event"] == "progress"]
    assert found == [found[0], *progress, found[-1]]
    keys = {"event", "stage", "file", "done_bytes", "total_bytes", "reused_bytes", "bytes_per_second", "eta_seconds"}
    assert {frozenset(event) for event in progress} == {frozenset(keys)}
    stages = list(dict.fromkeys(event["stage"] for event in progress))
    assert stages == ["metadata", "reserving", "copying", "checking", "hashing", "finishing"]
    copying = [event for event in progress if event["stage"] == "copying"][-1]
    assert copying["done_bytes"] == copying["total_bytes"]
    assert (found[-1]["event"], found[-1]["family"], found[-1]["commit"]) == ("installed", "gemma4", fake.commit)
    assert found[-1]["path"] == str(installed)


def test_another_repository_and_revision(cli: Any, fake: FakeHub, tmp_path: Path) -> None:
    fake.revision = "v1"
    code, out, err = cli("install", "--repo", REPO, "--revision", "v1", "--output", tmp_path / "x.gturbo")
    assert code == 0, err
    assert f"licence of the model: see {fake.endpoint}/{REPO}" in err
    assert (tmp_path / "x.gturbo" / "manifest.json").exists()
    code, _, err = cli("install", "--repo", REPO, "--output", tmp_path / "y.gturbo")
    assert (code, "404 RevisionNotFound" in err) == (1, True)
    assert out


def test_pinned_index_that_changed(cli: Any, fake: FakeHub, installed: Path) -> None:
    path = fake.folder / INDEX_NAME
    path.write_bytes(path.read_bytes() + b"\n")
    code, _, err = cli("install", "--family", "gemma4")
    assert code == 1
    assert f"{INDEX_NAME} sha256 is" in err.splitlines()[-1]
    assert not installed.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "no source named"),
        (("--repo", "a/b", "--source", "x", "-o", "y"), "--source and --repo is both given"),
        (("--revision", "main", "--family", "gemma4"), "--revision is without --repo"),
        (("--repo", "a/b"), "no output named"),
        (("--source", "x"), "no output named"),
        (("--repo", "nonsense", "-o", "y"), "--repo is 'nonsense'; expected owner/name"),
        (("--repo", "a/b", "--revision", "../x", "-o", "y"), "--revision is '../x'"),
        (("--repo", "a/b", "-o", "y", "--connections", "0"), "0 is not in the range"),
    ],
)
def test_options_that_cannot_be_meant(cli: Any, fake: FakeHub, arguments: tuple[str, ...], text: str) -> None:
    code, _, err = cli("install", *arguments)
    assert (code, text in err) == (2, True), err
    assert not fake.asked


def test_family_without_a_pinned_checkpoint(cli: Any, fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    bare: LoadedFamily = plugins.dispatch("gemma4")
    bare = evolve(bare, family=evolve(bare.family, pinned=()))
    monkeypatch.setattr(plugins, "dispatch", lambda *_: bare)
    code, _, err = cli("install", "--family", "gemma4")
    assert (code, "family gemma4 is without a pinned checkpoint; give --repo" in err) == (2, True)
    assert not fake.asked


# --- a plan


def test_plan_says_what_it_would_take_and_writes_nothing(cli: Any, fake: FakeHub, installed: Path) -> None:
    """Its sizes are those of the install that follows."""
    code, out, err = cli("install", "--family", "gemma4", "--plan", "--json")
    assert code == 0, err
    (plan,) = events(out)
    assert not installed.parent.exists()
    assert plan["event"] == "plan"
    assert plan["memory"][0]["total_bytes_by_slots"]
    code, said, _ = cli("install", "--family", "gemma4", "--plan")
    assert code == 0
    for words in ("licence           to be used kindly", f"({plan['download_bytes']} bytes) in", "memory in float32"):
        assert words in said
    fake.clear()
    _, out, _ = cli("install", "--family", "gemma4", "--json")
    done = events(out)[-1]
    files = json.loads((installed / "manifest.json").read_text())["files"]
    assert plan["output_bytes"] == sum(entry["size"] for entry in files.values())
    copying = [event for event in events(out) if event.get("stage") == "copying"][-1]
    assert plan["download_bytes"] == copying["total_bytes"]
    whole = (fake.folder / "model.safetensors").stat().st_size
    assert sum(size for _, size in fake.sent("model.safetensors")) == whole
    assert plan["disk_bytes"] > plan["output_bytes"]
    assert done["event"] == "installed"
    code, out, _ = cli("install", "--family", "gemma4", "--plan")
    assert "already there: it would take --overwrite" in out
    code, out, err = cli("show", "--family", "gemma4", "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert [row["total_bytes_by_slots"] for row in shown["memory"]] == [
        row["total_bytes_by_slots"] for row in plan["memory"]
    ]


def test_plan_of_a_folder(cli: Any, fake: FakeHub, tmp_path: Path) -> None:
    output = tmp_path / "x.gturbo"
    code, out, _ = cli("install", "--source", fake.folder, "--output", output, "--plan", "--json")
    assert code == 0
    (plan,) = events(out)
    code, out, _ = cli("install", "--source", fake.folder, "--output", output, "--json")
    assert code == 0
    files = json.loads((output / "manifest.json").read_text())["files"]
    assert plan["output_bytes"] == sum(entry["size"] for entry in files.values())
    assert events(out)[-1]["event"] == "installed"
    assert "download_bytes" not in plan


# --- stopped


def test_failure_says_what_is_kept_and_how_to_go_on(cli: Any, fake: FakeHub, installed: Path) -> None:
    def fault(answer: Answer) -> None:
        if answer.name == "tokenizer.json" and answer.method == "GET":
            answer.status = 400

    fake.faults.append(fault)
    code, _, err = cli("install", "--family", "gemma4")
    assert code == 1
    assert not installed.exists()
    assert err.splitlines()[-3].endswith("are kept")
    assert f"'mference discard --output {installed}' removes it" in err.splitlines()[-2]
    assert err.splitlines()[-1].startswith("error: ")
    assert "status 400" in err.splitlines()[-1]
    fake.faults.clear()
    code, out, err = cli("install", "--family", "gemma4", "--json")
    assert (code, events(out)[-1]["event"]) == (0, "installed")
    assert events(out)[-1]["reused_bytes"] > 0
    assert "resuming" in {event.get("stage") for event in events(out)}


@pytest.mark.parametrize("as_json", [False, True])
def test_stopped_between_its_name_and_its_end(cli: Any, fake: FakeHub, installed: Path, *, as_json: bool) -> None:
    """The same command says that it is installed, of this family, and downloads nothing; the one after that refuses."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mference_core.install.sidecars.forget", stop)
        assert cli("install", "--family", "gemma4")[0] == 130
    fake.clear()
    code, out, err = cli("install", "--family", "gemma4", *(["--json"] if as_json else []))
    assert code == 0, err
    assert not fake.asked
    files = [item for item in installed.rglob("*") if item.is_file()]
    count, size = len(files), sum(item.stat().st_size for item in files)
    if as_json:
        done = events(out)[-1]
        assert [event["event"] for event in events(out)] == ["source", "installed"]
        assert (done["files"], done["size_bytes"], done["downloaded_bytes"]) == (count, size, 0)
        assert (done["family"], done["commit"], done["model_id"]) == ("gemma4", fake.commit, "toys/tiny")
    else:
        assert out.startswith(f"installed {installed}: {count} files, ")
        assert f"({size} bytes)" in out
        assert "downloaded" not in out
    assert beside(installed) == ["gemma4.gturbo"]
    assert cli("install", "--family", "gemma4")[0] == 1


def test_failure_as_events(cli: Any, fake: FakeHub, tmp_path: Path) -> None:
    fake.token = "hf_secret"  # noqa: S105  nobody's
    code, out, err = cli("install", "--repo", REPO, "-o", tmp_path / "x.gturbo", "--json")
    last = events(out)[-1]
    assert (code, last["event"], last["kind"]) == (1, "error", "SourceError")
    assert err == f"error: {last['message']}\n"


INTERRUPTED = """
import sys
from pathlib import Path
from mference_core import plugins
family = plugins.load("gemma4")
plugins.dispatch = lambda *_: family
plugins.name_for = lambda *_, **__: "gemma4"
from mference_core.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_pauses_and_says_how_to_go_on(cli: Any, fake: FakeHub, tmp_path: Path, *, as_json: bool) -> None:
    """Within a second or so, though the source has stalled: exit code 130, and what was recorded is kept."""
    output = tmp_path / "with space.gturbo"

    def fault(answer: Answer) -> None:
        if answer.storage and answer.method == "GET" and answer.first > DATA:
            answer.stop_after, answer.stall_seconds = 10, 20.0

    fake.faults.append(fault)
    command = [sys.executable, "-c", INTERRUPTED, "install", "--repo", REPO, "--output", str(output)]
    with subprocess.Popen(
        [*command, *(["--json"] if as_json else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_ENDPOINT": fake.endpoint},
    ) as child:
        stream = child.stdout if as_json else child.stderr
        assert stream is not None
        said = ""
        while "copying" not in said:
            said = stream.readline()
            assert said
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=10)
    assert child.returncode == 130
    assert beside(output) == ["published", f"{output.name}.partial", f"{output.name}.resume.json"]
    discard = f"mference discard --output '{output}'"
    if as_json:
        paused = events(out)[-1]
        assert (paused["event"], paused["reason"], paused["discard"]) == ("paused", "interrupted", discard)
    else:
        assert "interrupted: 0B of " in err
        assert f"the same command goes on from there; '{discard}' removes it" in err
    assert "Traceback" not in err
    code, said, _ = cli("discard", "--output", output)
    assert (code, said) == (0, f"discarded what was left of {output}\n")
    assert beside(output) == ["published"]
    code, _, err = cli("discard", "--output", output)
    assert (code, "is without a partial install" in err) == (1, True)


@pytest.mark.usefixtures("fake")
def test_discard_of_a_family(cli: Any, installed: Path) -> None:
    target = target_of(installed)
    target.partial.mkdir()
    target.checkpoint.write_text("{}")
    code, _, err = cli("discard", "--family", "gemma4")
    assert code == 0, err
    assert beside(installed) == []
    assert cli("discard")[0] == cli("discard", "--family", "gemma4", "-o", "x")[0] == 2


# --- rates


def test_meter_waits_before_it_promises() -> None:
    """Ten seconds and 32 MiB of new bytes; what was there before counts for nothing."""
    clock = [100.0]
    meter = Meter(now=lambda: clock[0])

    def event(done_mib: int) -> InstallProgress:
        size = 1 << 20
        return InstallProgress(
            file="", done_bytes=done_mib * size, total_bytes=1000 * size, stage="copying", reused_bytes=500 * size
        )

    assert meter.see(event(500))
    assert meter.rate(event(500)) is None
    clock[0] += 5
    assert not meter.see(event(550))
    assert meter.rate(event(550)) == 10 << 20
    assert meter.left_seconds(event(550)) is None
    clock[0] += 5
    assert meter.left_seconds(event(600)) == 40
    assert meter.left_seconds(event(531)) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "estimating"),
        (59, "less than a minute left"),
        (90, "about 2 min left"),
        (7200, "about 2 h left"),
        (90_000, "more than a day left"),
    ],
)
def test_time_left_reads(seconds: float | None, text: str) -> None:
    assert left_text(seconds) == text


def test_bars_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bar at a time, named for its stage and file, with bytes and what is reused from the start."""
    monkeypatch.setenv("TERM", "xterm")
    said = StringIO()
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    watch = watcher(as_json=False)
    assert watch.bars is not None
    watch.bars.live.console.file = said
    size = 1 << 30
    with watch.context():
        for stage, done in (("metadata", 0), ("copying", 2), ("copying", 5), ("hashing", 0), ("hashing", 8)):
            total = 0 if stage == "metadata" else 8 * size
            watch(InstallProgress(file="f", done_bytes=done * size, total_bytes=total, stage=stage, reused_bytes=0))
            watch.bars.refresh()
            visible = [task for task in watch.bars.tasks if task.visible]
            assert len(visible) == 1
            assert visible[0].completed == done * size
    assert "copying f" in said.getvalue()
    assert "5.0/8.0 GiB" in said.getvalue()
    assert "hashing the install f" in said.getvalue()
