"""A budget is kept: the peak of a process, interpreter and libraries included, stays below what `memory_bytes` allows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from mference_core import plugins
from mference_core.testing.synthetic import plan_synthetic, write_synthetic

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's figures of memory")
SIZES = {
    "hidden_size": 512,
    "ffn_intermediate": 512,
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "vocab_size": 4096,
}
SIZES |= {"num_heads": 8, "num_kv_heads": 2, "num_full_kv_heads": 1, "head_dim": 64, "full_head_dim": 64}
SIZES |= {"sliding_window": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of all layers, each small, whose results of one chunk would fill hundreds of MiB if they were kept."""
    family = plugins.load("gemma4")
    path = tmp_path_factory.mktemp("budget") / "wide.gturbo"
    write_synthetic(family, path, arch=evolve(plan_synthetic(family).arch, **SIZES))
    return path


@linux
@pytest.mark.parametrize(("memory", "chunk", "kv_dtype"), [("270MiB", 512, "float32"), ("190MiB", 128, "bfloat16")])
def test_the_peak_stays_below_the_budget(model: Path, memory: str, chunk: int, kv_dtype: str) -> None:
    """Prompts longer than a chunk, most experts asked for and few of them held, then tokens one by one."""
    options = ("--context", 1024, "--chunk", chunk, "--prompt", chunk + 40, "--new", 3, "--probe-bytes", 0)
    command = [sys.executable, "-m", "tests.benchmarks.full_size", "--model", model, "--slots", "auto"]
    command += [*options, "--memory", memory, "--kv-dtype", kv_dtype]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)["runs"][0]
    budget = int(memory.removesuffix("MiB")) << 20
    assert made["plan_bytes"] <= budget
    assert made["experts"] in range(4, 32), "a budget that holds all experts proves nothing"
    assert made["memory"]["VmHWM"] <= budget, (made["plan"], made["memory"]["VmHWM"] >> 20)
