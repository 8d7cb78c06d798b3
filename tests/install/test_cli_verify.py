"""`mference verify` and `repair` as a user meets them: lines, events, exit codes, interruptions."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mference_core import plugins
from mference_core.install.transaction import locked
from mference_core.locate import Found
from mference_core.testing.fake_hub import REPO, Answer, FakeHub, serving

from .damaging import flip, tree

LAYER = "packed_experts/layer_01.bin"


@pytest.fixture
def fake(gemma4_reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The first family's tiny quantised checkpoint, as a repository; the gate is not asked."""
    folder = tmp_path / "published"
    folder.mkdir()
    for item in (gemma4_reference / "mlx").iterdir():
        (folder / item.name).write_bytes(item.read_bytes())
    (folder / "tokenizer.json").write_text("{}")
    family = plugins.load("gemma4")
    monkeypatch.setattr(plugins, "dispatch", lambda *_: family)
    monkeypatch.setattr(plugins, "name_for", lambda *_, **__: "gemma4")
    with serving(FakeHub(folder)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


@pytest.fixture
def install(cli: Any, fake: FakeHub, output: Path) -> Path:
    code, _, err = cli("install", "--repo", REPO, "-o", output, "--expert-digests")
    assert code == 0, err
    fake.clear()
    return output


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_good(cli: Any, install: Path) -> None:
    code, out, err = cli("verify", install)
    assert (code, out.startswith(f"verified {install}: ")) == (0, True), err
    assert "wrote" not in out
    code, out, _ = cli("verify", install, "--write-receipt", "--json")
    last = events(out)[-1]
    assert (code, last["event"], last["damages"], last["receipt"]) == (0, "verified", 0, True)
    assert {event["event"] for event in events(out)[:-1]} == {"progress"}
    code, out, _ = cli("repair", install)
    assert (code, out.startswith(f"nothing to repair in {install}: 0B fetched, 0B changed")) == (0, True)


def test_damaged_and_repaired(cli: Any, install: Path) -> None:
    """A line for each place, exit code 1, the remedy; then the remedy."""
    good = tree(install)
    flip(install / LAYER, 0)
    flip(install / "model_weights.bin", 20_000)
    code, out, err = cli("verify", install)
    lines = err.splitlines()
    assert (code, out) == (1, "")
    assert [line.split(" (bytes")[0] for line in lines if line.startswith("damaged: ")] == [
        f"damaged: {install}/model_weights.bin block 0",
        f"damaged: {install}/{LAYER} expert 0",
    ]
    assert lines[-2].startswith("its receipt says otherwise")
    remedy = f"run 'mference repair {install}'"
    assert lines[-1] == f"error: {install} is damaged in 2 places; expected what its manifest says; {remedy}"
    code, out, err = cli("verify", install, "--json")
    found = events(out)
    assert (code, found[-1]["event"], found[-1]["damages"]) == (1, "damaged", 2)
    damage = [event for event in found if event["event"] == "damage"][1]
    assert (damage["file"], damage["part"], damage["offset"]) == (LAYER, "expert 0", 0)
    code, out, err = cli("repair", install)
    assert (code, out.startswith(f"repaired model_weights.bin, {LAYER} of {install}: ")) == (0, True), err
    assert f"repairing {install} from {REPO} at " in err
    assert tree(install) == good


def test_repair_from_a_folder_and_events(cli: Any, fake: FakeHub, install: Path) -> None:
    flip(install / LAYER, 0)
    code, out, err = cli("repair", install, "--source", fake.folder, "--write-receipt", "--json")
    assert code == 0, err
    last = events(out)[-1]
    assert (last["event"], last["repaired"], last["receipt"], last["left"]) == ("repaired", [LAYER], True, [])
    assert not fake.asked


def test_a_file_too_many(cli: Any, install: Path) -> None:
    (install / "stray").touch()
    code, _, err = cli("repair", install)
    remedy = "remove it and run the same command"
    assert code == 1
    assert err.splitlines()[-2:] == [
        f"left: {install}/stray is not in the manifest; expected listed files only; remove it",
        f"error: {install} is still with 1 file too many; expected files of its manifest only; {remedy}",
    ]
    (install / "stray").unlink()
    code, out, _ = cli("repair", install)
    assert (code, "receipt" in out) == (0, False)
    (install / "verified-install.json").unlink()
    code, out, _ = cli("repair", install)
    assert out.endswith(f"; for a receipt run 'mference verify --write-receipt {install}'\n")


def test_directory_in_place_of_a_file(cli: Any, fake: FakeHub, install: Path) -> None:
    (install / LAYER).unlink()
    (install / LAYER).mkdir()
    code, out, err = cli("repair", install, "--source", fake.folder)
    assert (code, out) == (1, "")
    remedy = "remove it and run the repair again"
    assert err.splitlines()[-1] == f"error: {install}/{LAYER} is a directory; expected a file of the install; {remedy}"


def test_source_that_is_not_recorded(cli: Any, fake: FakeHub, install: Path) -> None:
    (install / "verified-install.json").unlink()
    flip(install / LAYER, 0)
    code, _, err = cli("repair", install)
    assert (code, fake.asked) == (1, [])
    assert err.splitlines()[-1] == (
        f"error: the source of {install} is not recorded; give --source DIR, or --repo OWNER/NAME --revision COMMIT"
    )
    assert cli("repair", install, "--repo", REPO)[0] == 0
    assert cli("verify", install)[0] == 0


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_what_is_no_install(cli: Any, fake: FakeHub, tmp_path: Path, command: str) -> None:
    """One line, exit code 1, nothing written: not even a lock."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "half.gturbo.partial").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    for name, text in {
        "missing": "is missing; expected a model directory",
        "dangling": "is missing",
        "empty": "is empty",
        "file": "is a file",
        "half.gturbo": "is half installed; expected a finished install; run the install again",
        "half.gturbo.partial": "is a partial install",
        "other": "is no install; expected one, with a manifest; see 'mference install'",
        fake.folder.name: "is no install",
    }.items():
        code, out, err = cli(command, tmp_path / name)
        assert (code, out, len(err.splitlines())) == (1, "", 1), err
        assert text in err
    assert sorted(tmp_path.iterdir()) == before


def test_options_that_cannot_be_meant(cli: Any, tmp_path: Path) -> None:
    for arguments in (
        ("verify",),
        ("verify", tmp_path, "--family", "gemma4"),
        ("repair",),
        ("repair", tmp_path, "--source", "x", "--repo", "a/b"),
        ("repair", tmp_path, "--revision", "x"),
    ):
        code, _, err = cli(*arguments)
        assert (code, len(err.splitlines())) == (2, 1), err


def test_two_at_once(cli: Any, install: Path) -> None:
    with locked(install):
        for command in ("verify", "repair"):
            code, _, err = cli(command, install)
            assert (code, "by another process; wait for it" in err) == (1, True)


def test_discard_of_nothing_leaves_nothing(cli: Any, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    code, _, err = cli("discard", "--output", tmp_path / "nothing.gturbo")
    assert (code, "without a partial install" in err) == (1, True)
    assert sorted(tmp_path.iterdir()) == before


INTERRUPTED = """
import sys
from mference_core import plugins
family = plugins.load("gemma4")
plugins.dispatch = lambda *_: family
plugins.name_for = lambda *_, **__: "gemma4"
from mference_core.cli import main
main(sys.argv[1:])
"""


def test_ctrl_c_during_a_repair(cli: Any, fake: FakeHub, install: Path) -> None:
    """Within a moment, though the source has stalled; the same command goes on."""
    flip(install / LAYER, 0)

    def fault(answer: Answer) -> None:
        if answer.storage and answer.method == "GET" and answer.first > 4096:
            answer.stop_after, answer.stall_seconds = 10, 20.0

    fake.faults.append(fault)
    command = [sys.executable, "-c", INTERRUPTED, "repair", str(install)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_ENDPOINT": fake.endpoint},
    ) as child:
        while not any(asked.name.endswith("safetensors") and (asked.first or 0) > 4096 for asked in fake.asked):
            assert child.poll() is None, child.communicate()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=15)
    assert child.returncode == 130
    assert "interrupted: what was repaired is kept, the same command goes on from there" in err
    assert "Traceback" not in err
    assert cli("verify", install)[0] == 1
    fake.faults.clear()
    assert cli("repair", install)[0] == 0
    assert cli("verify", install)[0] == 0


@pytest.mark.parametrize("command", ["show", "run", "chat", "score", "serve"])
def test_policies_of_every_command_that_loads(
    cli: Any, install: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    """A receipt that does not hold is one line, whatever asks for it; digests of experts do not change that."""
    family = plugins.load("gemma4")
    for module in ("run", "show", "serve", "chat", "score"):
        monkeypatch.setattr(
            f"mference_core.cli.{module}.find_model", lambda *_, **__: Found(family=family, path=install), raising=False
        )
    monkeypatch.setattr("mference_core.locate.find_model", lambda *_, **__: Found(family=family, path=install))
    (tmp_path / "ids.json").write_text("[5, 6, 7]")
    more = {
        "run": ("--tokens", tmp_path / "ids.json"),
        "score": ("--tokens", tmp_path / "ids.json", "--output", tmp_path / "x.safetensors"),
    }
    arguments = (command, "--model", install, *more.get(command, ()), "--verify")
    (install / "verified-install.json").unlink()
    code, out, err = cli(*arguments, "trusted-receipt")
    assert (code, out) == (1, "")
    assert "error: receipt is missing; expected verified-install.json; use full-sha256, or run 'mference verify" in err
    assert "Traceback" not in err
    code, _, err = cli(*arguments, "half")
    assert (code, "'half' is not one of 'full-sha256', 'trusted-receipt'" in err) == (2, True)
    flip(install / "tokenizer" / "config.json", 0)
    code, _, err = cli(*arguments, "full-sha256")
    assert code == 1, err
    assert err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("slots", ["2", "resident"])
def test_a_run_finds_what_is_damaged_and_says_what_it_verified(
    cli: Any, install: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slots: str, *, digests: bool
) -> None:
    """The same tokens either way; one damaged expert ends the run with its name, or with that of its file."""
    family = plugins.load("gemma4")
    monkeypatch.setattr("mference_core.locate.find_model", lambda *_, **__: Found(family=family, path=install))
    path = install / "manifest.json"
    manifest = json.loads(path.read_text())
    (install / "tokenizer" / "tokenizer.json").unlink()  # it is no tokenizer
    for name in ("tokenizer/tokenizer.json", *([] if digests else ["packed_experts/digests.json"])):
        del manifest["files"][name]
    path.write_text(json.dumps(manifest))
    (tmp_path / "ids.json").write_text(json.dumps(list(range(5, 60))))
    run = ("run", "--model", install, "--tokens", tmp_path / "ids.json", "--max-new", 2, "--temperature", 0)
    run = (*run, "--expert-slots", slots, "--json")
    code, out, err = cli(*run)
    assert code == 0, err
    figures = json.loads(out)
    verified = figures["verification"]
    sizes = {
        name: entry["size"] for name, entry in json.loads((install / "manifest.json").read_text())["files"].items()
    }
    big = sum(size for name, size in sizes.items() if name.endswith(".bin") and name != "model_weights.bin")
    whole = sum(sizes.values())
    assert verified["policy"] == "full-sha256"
    assert verified["seconds"] > 0
    assert whole - big < verified["bytes"] <= whole
    assert (verified["bytes"] < whole) == digests  # padding is not read
    code, out, _ = cli("verify", install, "--write-receipt")
    code, out, err = cli(*run, "--verify", "trusted-receipt")
    trusted = json.loads(out)
    assert trusted["token_ids"] == figures["token_ids"]
    assert trusted["verification"]["bytes"] == whole - big
    for at in range(0, sizes[LAYER], 16384):
        flip(install / LAYER, at)
    code, out, err = cli(*run)
    assert code == 1
    where = r"expert \d+ sha256" if digests else "sha256"
    assert re.search(
        rf"^error: {re.escape(str(install / LAYER))} {where} is \w+; expected \w+; repair it", err, re.MULTILINE
    )
