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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
LIBRARY = SOURCES / "libmference_cpu.so"
FLAGS = (
    "-std=c11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wno-psabi",
)
"""Contraction is off because one fused multiply-add would break the contract; warnings about vector ABIs do not apply.

No error number is wanted of square roots, which are then one instruction.
"""


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


def commands(output: Path, *extra: str, cc: list[str] | None = None) -> tuple[list[list[str]], list[str]]:
    """Return what compiles each source beside `output`, and what then links it; `extra` flags come last."""
    words = compiler() if cc is None else cc
    flags = [*FLAGS, f'-DMF_SOURCES="{digest()}"']
    sources = sorted(SOURCES.glob("*.c"))
    objects = [str(output.with_name(f"{path.stem}.o")) for path in sources]
    each = [
        [*words, *flags, "-c", "-o", target, str(path), *extra] for path, target in zip(sources, objects, strict=True)
    ]
    return each, [*words, *flags, "-shared", "-o", str(output), *objects, *extra]


def run(command: list[str]) -> str | None:
    """Run a compiler's command; return None, or the first line of what it says went wrong."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if not done.returncode:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
    return f"{command[0]} failed: {lines[0].strip()}"


def compile_all(output: Path, *extra: str) -> str | None:
    """Compile and link `output`, the sources side by side; return None, or one line saying why not."""
    each, link = commands(output, *extra)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        problem = next((said for said in pool.map(run, each) if said), None)
    return problem or run(link)


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
            problem = compile_all(made)
            if problem is None:
                made.replace(output)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the native library was not built: {error}"
    return problem


if __name__ == "__main__":
    problem = build()
    sys.stderr.write(f"{problem or f'built {LIBRARY}'}\n")
    sys.exit(1 if problem else 0)
