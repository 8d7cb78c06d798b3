"""Building the library: whole or not at all, quiet about nothing, and an install goes on without it."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mference_kernels import compile as build

HOOK = Path(__file__).parents[2] / "kernels" / "hatch_build.py"
EXERCISE = ("-std=c11", "-O1", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-Wno-psabi")
RESULTS = "debe7e8140d72f82"
"""Digest of all results of exercise.c, on any machine with any variant."""

needs_compiler = pytest.mark.skipif(not build.compiler(), reason="no C compiler was found")


def test_no_compiler_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", list)
    problem = build.build(tmp_path / "lib.so")
    assert problem == "no C compiler was found; set CC or install gcc or clang"
    assert not list(tmp_path.iterdir())


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{sys.executable} -c 'import sys; sys.exit(\"error: it broke\")'")
    problem = build.build(tmp_path / "lib.so")
    assert problem is not None
    assert "it broke" in problem
    assert "\n" not in problem
    assert not list(tmp_path.iterdir())


def test_a_library_of_these_sources_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib.so").write_bytes(b"\x7fELF" + build.digest().encode())
    monkeypatch.setattr(build, "compiler", list)
    assert build.build(tmp_path / "lib.so") is None
    (tmp_path / "lib.so").write_bytes(b"\x7fELF older")
    assert build.build(tmp_path / "lib.so") is not None


@needs_compiler
def test_sources_compile_without_a_warning(tmp_path: Path) -> None:
    flags = ("-O0", "-Wall", "-Wextra", "-Werror", "-pedantic", "-Wno-overlength-strings")
    assert build.compile_all(tmp_path / "lib.so", *flags) is None


def exercise(program: Path, cc: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    """Build exercise.c with the library's sources into `program`."""
    sources = sorted(str(path) for path in build.SOURCES.glob("*.c"))
    main = str(Path(__file__).with_name("exercise.c"))
    command = [*cc, *EXERCISE, *flags, f"-I{build.SOURCES}", "-o", str(program), main, *sources]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_compiler
def test_portable_code_touches_no_byte_it_should_not(tmp_path: Path) -> None:
    """Every product, routed block and attention, under the address and undefined sanitizers; the results are known."""
    flags = ("-g", "-DMF_PORTABLE_ONLY", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    built = exercise(tmp_path / "run", build.compiler(), *flags)
    if built.returncode and "sanitize" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([tmp_path / "run"], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"portable {RESULTS}\n"


@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-gcc") or not shutil.which("qemu-aarch64"),
    reason="needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, qemu-user)",
)
def test_arm_gives_the_same_bits(tmp_path: Path) -> None:
    """Emulated, with and without the dot-product instructions."""
    built = exercise(tmp_path / "run", ["aarch64-linux-gnu-gcc"], "-static", "-Wall", "-Wextra", "-Werror")
    assert built.returncode == 0, built.stderr
    for cpu, expected in (("max", ["neon", "portable"]), ("cortex-a53", ["portable"])):
        command = ["qemu-aarch64", "-cpu", cpu, str(tmp_path / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"{variant} {RESULTS}" for variant in expected]


class App:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def hook() -> Any:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("problem", [None, "cc failed: error: it broke"])
def test_an_install_goes_on_without_the_library(problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module, app = hook(), App()

    class Compiling:
        LIBRARY = HOOK.parents[1] / "kernels" / "mference_kernels" / "native" / "none.so"

        @staticmethod
        def build() -> str | None:
            return problem

    monkeypatch.setattr(module, "load_compile", Compiling)
    data: dict[str, Any] = {"artifacts": [], "pure_python": True}
    target = module.NativeLibrary.__new__(module.NativeLibrary)
    monkeypatch.setattr(module.NativeLibrary, "app", app, raising=False)
    monkeypatch.setattr(module.NativeLibrary, "root", str(HOOK.parents[1]), raising=False)
    target.initialize("standard", data)
    if problem is None:
        assert data["artifacts"] == ["/kernels/mference_kernels/native/none.so"]
        assert data["tag"].startswith("py3-none-")
        assert not data["pure_python"]
        assert app.warnings == []
    else:
        assert data == {"artifacts": [], "pure_python": True}
        assert len(app.warnings) == 1
        assert "it broke" in app.warnings[0]
