"""The local installer in a process of its own: bounded memory, and what a kill leaves."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mference_core.checkpoint import open_checkpoint, peek
from mference_core.errors import InstallLocked, PartialInstall
from mference_core.install import install_local
from mference_core.testing.toys import toy_arch, toy_contract, toy_plan, write_toy

MIB = 1 << 20

MEASURE = """
import re, resource, sys
from pathlib import Path
from mference_core.install import install_local
from mference_core.testing.toys import toy_contract, toy_plan

def peak():
    if sys.platform == "linux":  # ru_maxrss would count the parent's memory too, from before exec
        return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
report = install_local(Path(sys.argv[1]), Path(sys.argv[2]), toy_contract(), toy_plan)
print(report.size_bytes, peak() - before)
"""

STOP = """
import sys, time
from pathlib import Path
from mference_core.install import install_local, local
from mference_core.testing.toys import toy_contract, toy_plan

def stop():
    print("stopped", flush=True)
    time.sleep(60)

def progress(event):
    if event.file.endswith(sys.argv[3]):
        stop()

local.promote = lambda *_, **__: stop()
install_local(Path(sys.argv[1]), Path(sys.argv[2]), toy_contract(), toy_plan, progress=progress)
"""


def python(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", script, *map(str, arguments)]


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Installing more than 256 MiB raises the peak by less than 64 MiB over that of the imports."""
    arch = toy_arch(hidden_size=1024, moe_intermediate_size=512, vocab_size=1 << 17, num_experts=128)
    source = write_toy(tmp_path / "source", arch, seed=None)
    try:
        done = subprocess.run(  # output is two numbers
            python(MEASURE, source, tmp_path / "toy.gturbo"), check=True, capture_output=True, text=True
        )
        size, growth = map(int, done.stdout.split())
        assert size > 256 * MIB
        assert growth < 64 * MIB
    finally:
        shutil.rmtree(tmp_path)


@pytest.mark.parametrize("stage", ["model_weights.bin", "layer_02.bin", "layout.json", "just before promotion"])
def test_killed_install_is_never_promoted(tmp_path: Path, stage: str) -> None:
    """SIGKILL leaves a staging directory that no load accepts; the next install clears it and succeeds."""
    source, output = write_toy(tmp_path / "source", toy_arch()), tmp_path / "toy.gturbo"
    partial = Path(f"{output}.partial")
    with subprocess.Popen(python(STOP, source, output, stage), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "stopped\n"
        with pytest.raises(InstallLocked):
            install_local(source, output, toy_contract(), toy_plan)
        child.kill()
    assert not output.exists()
    assert partial.is_dir()
    with pytest.raises(PartialInstall):
        peek(partial)
    install_local(source, output, toy_contract(), toy_plan)
    assert not partial.exists()
    checkpoint = open_checkpoint(peek(output), toy_contract(), toy_plan)
    for layer in checkpoint.experts:
        checkpoint.touch(layer)


def test_interrupted_install_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C removes what was written."""
    source, output = write_toy(tmp_path / "source", toy_arch()), tmp_path / "toy.gturbo"
    command = python(STOP, source, output, "layer_02.bin")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "stopped\n"
        os.kill(child.pid, signal.SIGINT)
        child.communicate()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["source", "toy.gturbo.install.lock"]


def test_file_size_limit_stops_it_in_one_line(tmp_path: Path) -> None:
    """A limit of the system on file sizes is met like a full disk: one error, nothing left."""
    source, output = write_toy(tmp_path / "source", toy_arch()), tmp_path / "toy.gturbo"
    script = MEASURE.replace(
        "report = install_local(", "resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000))\nreport = install_local("
    )
    done = subprocess.run(python(script, source, output), check=False, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("is refused (File too large)")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["source", "toy.gturbo.install.lock"]
