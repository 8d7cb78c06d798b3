"""The benchmark of installs runs: one tiny repository, no figure judged."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux" or which("curl") is None, reason="compares with curl, reads /proc")
def test_install_speed(gemma4_reference: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.install_speed", "--family", "gemma4", "--pace", "50"]
    places = ["--source", str(gemma4_reference / "mlx"), "--work", str(tmp_path / "work")]
    done = subprocess.run([*command, *places], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(done.stdout)["rounds"]
    assert figures["checked_files"] == 1
    assert figures["downloaded_bytes"] > 100_000
    assert 10 < figures["peak_mib"] < 500
    assert figures["of_curl"] > 0
    assert not list((tmp_path / "work").glob("*.gturbo"))
