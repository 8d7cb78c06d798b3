"""Building the native library from its C sources: at install where a compiler is found, or `python -m mference_kernels.compile`.

Standard library only: the build hook loads this file before anything is installed.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
LIBRARY = SOURCES / "libmference_cpu.so"
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wno-psabi")
"""Contraction is off because one fused multiply-add would break the contract; warnings about vector ABIs do not apply."""


def digest() -> str:
    """Return what identifies the sources and how they are built."""
    state = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()[:16]


def compiler() -> list[str]:
    """Return the C compiler's command: `CC`, else the one Python names, else the first found; empty if there is none."""
    named = os.environ.get("CC") or ""
    for command in (named, sysconfig.get_config_var("CC") or "", "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return [words[0]] if command != named else words
    return []


def command(output: Path, *extra: str, cc: list[str] | None = None) -> list[str]:
    """Return the command that builds `output`; `extra` flags come last."""
    words = compiler() if cc is None else cc
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    return [*words, *FLAGS, f'-DMF_SOURCES="{digest()}"', "-shared", "-o", str(output), *sources, *extra]


def build(output: Path = LIBRARY) -> str | None:
    """Build the library at `output` unless these sources' is there; return None, or one line saying why there is none.

    Nothing half-written stays.
    """
    if output.exists() and digest().encode() in output.read_bytes():
        return None
    if not compiler():
        return "no C compiler was found; set CC or install gcc or clang"
    try:
        with tempfile.TemporaryDirectory(dir=output.parent) as folder:
            made = Path(folder) / output.name
            done = subprocess.run(command(made), capture_output=True, text=True, check=False, timeout=600)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
                return f"{compiler()[0]} failed: {lines[0].strip()}"
            made.replace(output)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the native library was not built: {error}"
    return None


if __name__ == "__main__":
    problem = build()
    sys.stderr.write(f"{problem or f'built {LIBRARY}'}\n")
    sys.exit(1 if problem else 0)
