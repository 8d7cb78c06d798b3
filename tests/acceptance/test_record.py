"""Accepting a family, its record, and what dispatch makes of it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import mference_acceptance
from mference_acceptance import GATE_VERSION, accept, render
from mference_acceptance import gate as gate_module
from mference_acceptance.case import Case, CaseFailed, case_of
from mference_acceptance.cases import CASES
from mference_acceptance.context import Context
from mference_acceptance.gate import judge, write_record
from mference_core import plugins, records
from mference_core.errors import MferenceError, NotAccepted, PluginError
from mference_core.records import AcceptanceRecord, CaseResult, Environment

QUICK = tuple(case for case in CASES if case.name in ("hooks-answer", "router-ties"))
OLD = Environment(mlx="0.0.1", backend="cpu", processor="abacus")


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory of each test's own."""
    folder = tmp_path / "data"
    monkeypatch.setenv("MFERENCE_DATA_DIR", str(folder))
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run two cases only."""
    monkeypatch.setattr(gate_module, "CASES", QUICK)


@pytest.fixture
def no_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "shipped_dir", lambda: None)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a third party's distribution, a copy of an in-tree family under another name; return its package."""
    site = tmp_path / "site"
    package = site / "mference_stranger"
    shutil.copytree(plugins.find("gemma4").folder, package, ignore=shutil.ignore_patterns("__pycache__", "demo"))
    for path in package.glob("*.py"):
        text = path.read_text("utf-8").replace("mference_gemma4", "mference_stranger")
        path.write_text(text.replace('name="gemma4"', 'name="stranger"'), "utf-8")
    info = site / "mference_stranger-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mference-stranger\nVersion: 2.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[mference.families]\nstranger = mference_stranger\n", "utf-8")
    monkeypatch.syspath_prepend(str(site))
    yield package
    for name in [name for name in sys.modules if name.startswith("mference_stranger")]:
        del sys.modules[name]


def record_of(environment: Environment, digest: str | None = None) -> AcceptanceRecord:
    return AcceptanceRecord(
        family="gemma4",
        digest=digest or records.family_digest(plugins.find("gemma4").folder),
        contract=1,
        gate=GATE_VERSION,
        environment=environment,
        spellings=(None, "gemma4"),
        model_types=("gemma4",),
        cases=(CaseResult(name="parity", passed=True, figures={"layers": 1e-6, "seconds": 1.25}),),
        written="2026-01-01T00:00:00+00:00",
    )


def test_the_first_use_on_new_ground_runs_the_whole_gate_once(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files as shipped, but no record for this environment: one notice, every case, a record of the user's own."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    write_record(record_of(OLD), shipped)
    monkeypatch.setattr(records, "shipped_dir", lambda: shipped)
    notices: list[str] = []
    family = plugins.dispatch("gemma4", notices.append)
    assert family.family.name == "gemma4"
    assert len(notices) == 1
    assert "running the gate once" in notices[0]
    (record,) = records.read_records(data_dir / "acceptance")
    assert [case.name for case in record.cases] == [case.name for case in CASES]
    assert all(case.passed for case in record.cases)
    assert record.environment == Environment.here()
    plugins.dispatch("gemma4", notices.append)
    assert len(notices) == 1


@pytest.mark.usefixtures("quick", "no_shipped", "data_dir")
def test_an_accepted_stranger_is_dispatched_until_a_byte_changes(stranger: Path) -> None:
    with pytest.raises(NotAccepted, match=r"mference-stranger is never accepted; run 'mference accept stranger'"):
        plugins.dispatch("stranger")
    assert accept("stranger").family == "stranger"
    assert plugins.dispatch("stranger").family.name == "stranger"
    config = stranger / "reference" / "config.json"
    data = config.read_bytes()
    config.write_bytes(data.replace(b"1e-06", b"1e-05"))
    with pytest.raises(NotAccepted, match="changed since it was accepted") as caught:
        plugins.dispatch("stranger")
    assert caught.value.exit_code == 3
    config.write_bytes(data)
    assert plugins.dispatch("stranger").family.name == "stranger"


@pytest.mark.parametrize("change", ["byte", "name", "new", "gone"])
def test_any_change_of_files_changes_the_digest(stranger: Path, change: str) -> None:
    before = records.family_digest(stranger)
    victim = stranger / "reference" / "goldens" / "meta.json"
    if change == "byte":
        data = bytearray(victim.read_bytes())
        data[-2] ^= 1
        victim.write_bytes(data)
    elif change == "name":
        victim.rename(victim.with_name("META.json"))
    elif change == "new":
        (stranger / "helper.py").write_bytes(b"")
    else:
        victim.unlink()
    assert records.family_digest(stranger) != before


def test_caches_do_not_change_the_digest(stranger: Path) -> None:
    before = records.family_digest(stranger)
    (stranger / "__pycache__").mkdir()
    (stranger / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"x")
    assert records.family_digest(stranger) == before


@pytest.mark.usefixtures("data_dir", "no_shipped", "quick")
def test_a_record_of_elsewhere_or_of_an_older_gate_does_not_fit(data_dir: Path) -> None:
    accept("gemma4")
    (path,) = (data_dir / "acceptance").iterdir()
    good = records.decode_record(path.read_text("utf-8"), str(path))
    here, judge_version = Environment.here(), GATE_VERSION
    assert records.fits(good, good.digest, judge_version, here)
    for other in (
        attrs.evolve(good, environment=OLD),
        attrs.evolve(good, gate=judge_version + 1),
        attrs.evolve(good, contract=99),
        attrs.evolve(good, digest="0" * 64),
        attrs.evolve(good, cases=(CaseResult(name="x", passed=False),)),
    ):
        assert not records.fits(other, good.digest, judge_version, here)
        path.write_text(other.encode(), "utf-8")
        with pytest.raises(NotAccepted):
            plugins.dispatch("gemma4")


def never_holds(context: Context) -> dict[str, object]:
    """Fail."""
    raise CaseFailed(f"no good\nat all in {len(str(context.folder)) > 0}")


def crashes(context: Context) -> dict[str, object]:
    """Crash."""
    del context
    raise ZeroDivisionError("by zero")


def test_a_failed_case_writes_nothing(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "CASES", (*QUICK, case_of(never_holds), case_of(crashes)))
    seen: list[CaseResult] = []
    with pytest.raises(NotAccepted) as caught:
        accept("gemma4", seen.append)
    assert caught.value.exit_code == 3
    assert "in 2 of 4 cases: never-holds, crashes" in str(caught.value)
    assert "no good at all in True" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((data_dir / "acceptance").iterdir()) == []
    assert [case.passed for case in seen] == [True, True, False, False]
    assert seen[3].figures["reason"] == "stopped by ZeroDivisionError: by zero"


def test_an_interrupt_is_not_a_verdict(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(context: Context) -> dict[str, object]:
        del context
        raise KeyboardInterrupt

    monkeypatch.setattr(gate_module, "CASES", (Case(name="slow", run=interrupted),))
    with pytest.raises(KeyboardInterrupt):
        accept("gemma4")
    assert list((data_dir / "acceptance").iterdir()) == []


def test_files_that_change_while_the_gate_runs_are_not_accepted(
    stranger: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddles(context: Context) -> dict[str, object]:
        del context
        (stranger / "late.py").write_bytes(b"")
        return {}

    monkeypatch.setattr(gate_module, "CASES", (Case(name="meddles", run=meddles),))
    with pytest.raises(NotAccepted, match="changed while the gate ran"):
        accept("stranger")
    assert list((data_dir / "acceptance").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_before_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_bytes(b"a file, not a folder")
    monkeypatch.setenv("MFERENCE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(gate_module, "CASES", (case_of(crashes),))
    with pytest.raises(PluginError, match=r"is not writable .*; set MFERENCE_DATA_DIR to one") as caught:
        accept("gemma4")
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = record_of(OLD)
    path = write_record(old, tmp_path)

    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(PluginError, match="No space left"):
        write_record(attrs.evolve(old, written="later"), tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    assert records.read_records(tmp_path) == [old]


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = record_of(OLD)
    path = write_record(record, tmp_path)
    assert path.name == "gemma4-cpu-abacus-mlx0.0.1.json"
    assert path.stat().st_mode & 0o777 == 0o644
    assert records.read_records(tmp_path) == [record]
    assert json.loads(path.read_text("utf-8"))["spellings"] == [None, "gemma4"]


def test_records_go_where_they_are_told(data_dir: Path, tmp_path: Path, quick: None) -> None:
    del quick
    accept("gemma4", records_dir=tmp_path / "here")
    assert len(list((tmp_path / "here").iterdir())) == 1
    assert not data_dir.exists()


def test_an_unknown_family_is_no_crash(data_dir: Path) -> None:
    with pytest.raises(MferenceError, match=r"no family 'gema4'; installed: .*gemma4"):
        accept("gema4")
    assert list((data_dir / "acceptance").iterdir()) == []


def test_the_table_has_a_line_per_case() -> None:
    record = attrs.evolve(
        record_of(OLD), cases=(*record_of(OLD).cases, CaseResult(name="x", passed=False, figures={"reason": "why"}))
    )
    lines = render(record).splitlines()
    assert lines[0].startswith("family gemma4 accepted on cpu abacus, mlx 0.0.1")
    assert "(none), gemma4" in lines[2]
    assert lines[-2] == "parity  pass    1.25 s  layers 1e-06"
    assert lines[-1] == "x       FAIL    0.00 s  reason why"


def test_the_gate_is_found_and_light() -> None:
    """Importing the gate, as listing records does, loads no array library."""
    gate = plugins.gate()
    assert gate is not None
    assert gate.version == GATE_VERSION
    assert gate.accept is accept
    code = "import sys, mference_acceptance; sys.exit('mlx' in sys.modules or 'pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert Path(mference_acceptance.__file__).parent / "records" == records.shipped_dir()


def test_the_temporary_folder_is_gone() -> None:
    kept: list[Path] = []

    def look(context: Context) -> dict[str, object]:
        (context.fresh_folder() / "file").write_bytes(b"x")
        kept.append(context.folder)
        return {}

    judge(plugins.load("gemma4"), (Case(name="look", run=look),))
    assert not kept[0].exists()
