"""The other commands: families, show, doctor, install, accept, and what the command line costs to start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_help_needs_no_array_library() -> None:
    """`--help` and `families` must start fast: nothing imports mlx before a command needs it."""
    code = "import sys; from mference_core.cli import run_cli; run_cli(['{}']); assert 'mlx' not in sys.modules"
    for word in ("--help", "families"):
        done = subprocess.run([sys.executable, "-c", code.format(word)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_families_lists_the_first_one(cli: Any) -> None:
    code, out, _ = cli("families", "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["gemma4"]["distribution"].startswith("mference ")
    assert rows["gemma4"]["state"] == "accepted"


def test_doctor_says_what_runs(cli: Any) -> None:
    code, out, _ = cli("doctor", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["backend"]["usable"] is True
    assert facts["memory_available_bytes"] > 0
    code, out, _ = cli("doctor")
    assert (code, "backend" in out, "gemma4" in out) == (0, True, True)


def test_install_then_show_then_run(cli: Any, gemma4_reference: Path, tmp_path: Path) -> None:
    """An install made from a quantised directory runs to the same tokens, and is not overwritten unasked."""
    out = tmp_path / "tiny.gturbo"
    code, said, err = cli("install", "--source", gemma4_reference / "mlx", "--output", out)
    assert code == 0, err
    assert f"installed {out}" in said
    code, said, _ = cli("show", "--model", out, "--json")
    facts = json.loads(said)
    assert (facts["kind"], facts["family"], facts["pinned"]) == ("gturbo", "gemma4", False)
    assert facts["experts_per_layer"] == 8
    ids = tmp_path / "ids.json"
    ids.write_text("[2, 9, 8, 7]")
    answers = [
        json.loads(cli("run", "--model", model, "--tokens", ids, "--temperature", 0, "--json", "--max-new", 8)[1])
        for model in (gemma4_reference / "mlx", out)
    ]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    code, _, err = cli("install", "--source", gemma4_reference / "mlx", "--output", out)
    assert (code, err.count("\n")) == (1, 1)
    code, _, err = cli("install", "--source", gemma4_reference, "--output", tmp_path / "float.gturbo")
    assert (code, "in float; expected quantised weights" in err) == (1, True)
    assert not (tmp_path / "float.gturbo").exists()


def test_show_prints_a_table_of_memory(cli: Any, gemma4_reference: Path) -> None:
    code, out, _ = cli("show", "--model", gemma4_reference / "mlx")
    assert code == 0
    assert "resident:" in out
    assert "4096 tokens" in out


def test_accepting_an_unknown_family(cli: Any) -> None:
    code, _, err = cli("accept", "nobody")
    assert (code, "no family 'nobody'" in err) == (2, True)


@pytest.mark.skipif(sys.platform != "linux", reason="uses a folder that Linux lets nobody write to")
def test_a_read_only_folder_is_one_line(cli: Any, gemma4_reference: Path) -> None:
    """Even root cannot write in /proc: nothing is left there, and the one line names the place."""
    code, _, err = cli("install", "--source", gemma4_reference / "mlx", "--output", "/proc/x.gturbo")
    assert (code, err.count("\n")) == (1, 1)
    assert "/proc" in err


def test_a_closed_pipe_is_quiet() -> None:
    """`mference families | head -0` must not show a traceback."""
    code = "from mference_core.cli import main; main(['families'])"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("switch", "code", "text"),
    [
        ("off", 0, "warning: MFERENCE_CPU_KERNELS is off"),
        ("fast", 2, "MFERENCE_CPU_KERNELS must be off, auto or one of"),
    ],
)
def test_slow_or_unknown_kernels_are_said_in_one_line(
    gemma4_reference: Path, tmp_path: Path, shared_data_dir: Path, switch: str, code: int, text: str
) -> None:
    """Without native kernels a CPU run warns once; a switch that cannot be meant is a usage error."""
    (tmp_path / "ids.json").write_text("[2, 3]")
    where = ["run", "--model", str(gemma4_reference), "--tokens", str(tmp_path / "ids.json"), "--max-new", "2"]
    program = f"from mference_core.cli import main; main({where!r})"
    here = {**os.environ, "MFERENCE_CPU_KERNELS": switch, "MFERENCE_DATA_DIR": str(shared_data_dir)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=here)
    assert (done.returncode, done.stderr.count(text)) == (code, 1)
    assert "Traceback" not in done.stderr
