"""The gate as tests: one per case, nothing loaded unless asked for, verdicts shown as verdicts."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from mference_acceptance.cases import CASES

FAILING = '''
import mference_acceptance.cases
from mference_acceptance.case import CaseFailed, case_of

def nothing_holds(context):
    """Whatever must hold does."""
    raise CaseFailed("one plain reason")

def goes_wrong(context):
    """It ends."""
    return {"share": 1 / 0}

def goes_well(context):
    """It is well."""
    return {"share": 0.5}

mference_acceptance.cases.CASES = tuple(case_of(run) for run in (nothing_holds, goes_wrong, goes_well))
'''


def run_pytest(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_nothing_is_loaded_until_a_family_is_named() -> None:
    script = "import sys, mference_acceptance.pytest_plugin; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "'mference_acceptance'" in done.stdout
    assert not {name for name in ("'mlx'", "'mference_core'", "'mference_kernels'") if name in done.stdout}


def test_each_case_is_a_test(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--mference-family=gemma4", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line for line in done.stdout.splitlines() if line.startswith("mference:")]
    assert names == [f"mference:gemma4::{case.name}" for case in CASES]


def test_cases_run_beside_other_tests_and_are_selected_like_them(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_router_of_mine():\n    pass\n")
    done = run_pytest(tmp_path, "--mference-family=gemma4", "-k", "router", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mference:gemma4::router-ties PASSED" in done.stdout
    assert "test_router_of_mine PASSED" in done.stdout
    assert "2 passed" in done.stdout
    assert run_pytest(tmp_path, "-q").stdout.count("passed") == 1


def test_a_verdict_is_a_reason_and_a_crash_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(FAILING)
    done = run_pytest(tmp_path, "--mference-family=gemma4", "--junit-xml=report.xml")
    assert done.returncode == 1
    assert "must hold: Whatever must hold does.\nreason: one plain reason" in done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert "2 failed, 1 passed" in done.stdout
    report = ET.parse(tmp_path / "report.xml").getroot()  # noqa: S314  our own
    figures = {p.get("name"): p.get("value") for p in report.iter("property")}
    assert figures == {"share": "0.5"}


def test_an_unknown_family_is_one_line(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--mference-family=gema4")
    assert done.returncode == 4
    assert "ERROR: --mference-family: no family 'gema4'; installed:" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
