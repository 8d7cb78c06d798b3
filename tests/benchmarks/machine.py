"""What benchmarks need of a machine: capped groups, a cold page cache, company on the cores, read bandwidth."""

import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attrs import frozen

ROOT = Path("/sys/fs/cgroup")


@frozen(kw_only=True)
class Group:
    """A control group with a limit on memory, page cache included."""

    path: Path
    peak_file: str

    def join(self) -> None:
        """Move the calling process into the group."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak_bytes(self) -> int:
        """Most memory charged to the group so far."""
        return int((self.path / self.peak_file).read_text())


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Group | None]:
    """Give a group of version 1 or 2 limited to `limit_bytes`, removed afterwards; None where none can be made."""
    first = (ROOT / "memory").is_dir()
    path = (ROOT / "memory" if first else ROOT) / f"mference-benchmark-{os.getpid()}"
    limit, peak = ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if first else ("memory.max", "memory.peak")
    try:
        path.mkdir()
        (path / limit).write_text(str(limit_bytes))
    except OSError:
        with suppress(OSError):
            path.rmdir()
        yield None
        return
    try:
        yield Group(path=path, peak_file=peak)
    finally:
        for _ in range(50):  # the group empties a moment after its last process ended
            with suppress(OSError):
                path.rmdir()
                break
            time.sleep(0.1)


def memory_bytes() -> dict[str, int]:
    """Return this process's memory now and at its peak; files mapped and anonymous memory apart, where told."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = dict(re.findall(r"^(VmHWM|VmRSS|RssAnon|RssFile):\s+(\d+) kB$", text, re.MULTILINE))
    return {name: int(size) * 1024 for name, size in found.items()}


def drop_cache(paths: Iterable[Path]) -> None:
    """Ask the kernel to forget the pages of files, written back first."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


@contextmanager
def company(count: int) -> Iterator[None]:
    """Keep `count` other processes computing while the block runs."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def read_bandwidth(size_bytes: int = 1 << 30, rounds: int = 3) -> float | None:
    """Return the best GB/s at which all threads read memory, or None without the native library or any bytes."""
    if not size_bytes:
        return None
    import mlx.core as mx  # noqa: PLC0415

    from mference_kernels import native  # noqa: PLC0415

    try:
        read = native.library().mf_read
    except native.Unavailable:
        return None
    read.argtypes, read.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_uint64
    data = mx.ones((size_bytes // 4,), dtype=mx.uint32)
    mx.eval(data)
    return size_bytes / min(timed(lambda: read(native.address(data), size_bytes)) for _ in range(rounds)) / 1e9


def timed(work: Callable[[], object]) -> float:
    """Return the seconds `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def facts() -> dict[str, object]:
    """Return what a figure must be read with: processor, cores, load, memory, versions."""
    from mference_kernels import levels  # noqa: PLC0415

    model = re.search(r"^model name\s*: (.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    total = re.search(r"^MemTotal:\s+(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
    return {
        "processor": model[1] if model else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(total[1]) * 1024 if total else None,
        "load": os.getloadavg(),
        "mlx": version("mlx"),
        "kernels": levels.level().variant or f"mlx operations ({levels.level().reason})",
    }


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8")
    return ""


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median and the best of several timings."""
    return {"median": statistics.median(seconds), "best": min(seconds)}


def say(report: Any, indent: int | None = None, stream: Any = None) -> None:
    """Print a JSON object, by default to stdout."""
    print(json.dumps(report, indent=indent), file=stream, flush=True)
