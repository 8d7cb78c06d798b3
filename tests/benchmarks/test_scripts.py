"""The benchmarks run: one tiny model each, no figure judged."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the scripts read Linux' process and control group files")


def run(script: str, *arguments: object) -> dict[str, Any]:
    """Run a script from the root of the sources and return what it prints."""
    command = [sys.executable, "-m", f"tests.benchmarks.{script}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@linux
def test_full_size_compares_runs_bit_for_bit(gemma4_reference: Path) -> None:
    options = ("--context", 64, "--chunk", 4, "--prompt", 8, "--new", 3, "--probe-bytes", 0)
    report = run("full_size", "--model", gemma4_reference / "mlx", "--slots", 3, "resident", *options)
    assert report["identical"]
    few, every = report["runs"]
    assert (few["experts"], every["experts"]) == (3, "resident")
    assert few["decode"]["tokens"] == 3
    assert 0 <= few["decode"]["hit_rate"] < every["decode"]["hit_rate"] == 1
    assert few["decode"]["bytes_read_per_token"] > every["decode"]["bytes_read_per_token"] == 0
    assert few["token_ids"] == every["token_ids"]
    assert few["memory"]["VmHWM"] > 10_000_000


@linux
def test_full_size_says_what_could_not_be_run(gemma4_reference: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.full_size", "--model", str(gemma4_reference), "--slots", "0"]
    command.append("--probe-bytes=0")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert "positive number" in json.loads(done.stdout)["runs"][0]["error"]


@linux
def test_reading_measures_every_way(gemma4_reference: Path) -> None:
    report = run("reading", "--model", gemma4_reference / "mlx", "--rounds", 2, "--at-once", 3)
    ways = {"pread_1_threads", "pread_2_threads", "pread_4_threads", "slots", "mapping"}
    assert set(report["gb_per_second"]) == ways
    assert all(len(way["all"]) == 2 and min(way["all"]) > 0 for way in report["gb_per_second"].values())


def test_the_gguf_file_says_where_its_tensors_are(tmp_path: Path) -> None:
    """Each tensor's offset is aligned and after the one before; the last ends where the file does."""
    script = (
        "from pathlib import Path; import sys; from attrs import evolve; from mference_core import plugins;"
        "from tests.benchmarks.gemma4_gguf import write_gguf;"
        "arch = plugins.load('gemma4').contract.pinned[0];"
        "arch = evolve(arch, num_layers=6, full_attention_layer_mask=arch.full_attention_layer_mask[:6], num_experts=8,"
        " hidden_size=64, ffn_intermediate=64, moe_intermediate_size=32, vocab_size=96);"
        "write_gguf(Path(sys.argv[1]), arch, context=64)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.gguf")], check=True, cwd=ROOT)
    data = (tmp_path / "a.gguf").read_bytes()
    magic, version, tensors, keys = struct.unpack_from("<4sIQQ", data)
    assert (magic, version, keys) == (b"GGUF", 3, 26)
    at = data.index(struct.pack("<Q", len("token_embd.weight")) + b"token_embd.weight")
    ends = [0]
    for _ in range(tensors):
        (length,) = struct.unpack_from("<Q", data, at)
        at += 8 + length
        (axes,) = struct.unpack_from("<I", data, at)
        *shape, kind, offset = struct.unpack_from(f"<{axes}QIQ", data, at + 4)
        at += 4 + 8 * axes + 12
        count = 1
        for size in shape:
            count *= size
        assert offset == -(-ends[-1] // 32) * 32
        ends.append(offset + (count // 32 * 18 if kind == 2 else 4 * count))
    assert -(-at // 32) * 32 + -(-ends[-1] // 32) * 32 == len(data)


def test_serving_compares_steps_and_first_tokens(gemma4_reference: Path) -> None:
    options = ("--clients", 1, 3, "--new", 5, "--rounds", 1, "--prompt", 200)
    report = run("serving", "--model", gemma4_reference / "mlx", *options)
    assert [row["clients"] for row in report["steps"]] == [1, 3]
    assert all(row["tokens_per_second"] > 0 for row in report["steps"])
    assert report["prefix"]["cached_tokens"] == {"cold": 0, "memory": 199, "disk": 192}


@linux
def test_first_token_under_every_way_of_verifying(tmp_path: Path) -> None:
    """The token is the same; what is hashed is everything, less with digests of experts, least with a receipt."""
    write = "from mference_core import plugins; from pathlib import Path; import sys, shutil;"
    write += "shutil.copytree(plugins.load('gemma4').family.demo, sys.argv[1])"
    for name in ("plain", "digests"):
        subprocess.run([sys.executable, "-c", write, str(tmp_path / name)], check=True)
    for options in ((tmp_path / "plain", "--write-receipt"), (tmp_path / "digests", "--expert-digests")):
        command = [sys.executable, "-c", "from mference_core.cli import main; main()", "verify", *map(str, options)]
        subprocess.run(command, check=True, capture_output=True)
    report = run("first_token", "--model", tmp_path / "plain", "--digests", tmp_path / "digests", "--slots", 4)
    assert report["identical"]
    turn, ahead, digests, receipt = report["first_token"]
    assert turn["verified_bytes"] >= ahead["verified_bytes"] > digests["verified_bytes"] > receipt["verified_bytes"]
    assert [entry["cold"] for entry in report["verify"]] == [True, False]
