"""Worker threads: forks, concurrent callers, interrupts, and a core lost to somebody else."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest

from mference_kernels import cpu, native
from mference_kernels.quant import Quantized

TASKS = Path("/proc/self/task")
pytestmark = pytest.mark.usefixtures("restored")


def matrix(out: int, width: int) -> Quantized:
    codes = mx.random.randint(0, 2**31 - 1, (out, width // 8), key=mx.random.key(0)).astype(mx.uint32)
    scales = mx.random.normal((out, width // 64), key=mx.random.key(1))
    return Quantized(codes=codes, scales=scales, biases=scales, bits=4, group_size=64)


FORKED = """
import ctypes, os, sys
import mlx.core as mx
from mference_kernels import native, cpu
from mference_kernels.quant import Quantized
native.choose(native.variants()[-1])
native.set_threads(4)
codes = mx.random.randint(0, 2**31 - 1, (400, 64)).astype(mx.uint32)
scales = mx.random.normal((400, 8))
w = Quantized(codes=codes, scales=scales, biases=scales, bits=4, group_size=64)
x = native.evaluated(mx.random.normal((3, 512)))
want = native.contents(cpu.linear_cpu(x, w))
args, y = cpu.matrix_args(w, "test"), native.Output((3, 400))
outputs = (ctypes.c_void_p * 1)(y.address)
child = os.fork()
for _ in range(50):
    native.check(native.library().mf_linear(ctypes.byref(args), 1, native.address(x), 3, outputs), "test")
if ctypes.string_at(y.address, len(want)) != want:
    os._exit(1)
if child == 0:
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_fork_computes_with_threads_of_its_own() -> None:
    """Parent and child go on at once; the child's result is checked without mlx, which does not survive a fork."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_callers_from_several_threads_get_their_own_results() -> None:
    w = matrix(300, 1024)
    rows = [native.evaluated(mx.random.normal((2, 1024), key=mx.random.key(i))) for i in range(6)]
    want = [native.contents(cpu.linear_cpu(x, w)) for x in rows]
    args = cpu.matrix_args(w, "test")
    wrong: list[int] = []

    def work(i: int) -> None:
        y = (ctypes.c_float * 600)()
        outputs = (ctypes.c_void_p * 1)(ctypes.addressof(y))
        for _ in range(40):
            native.library().mf_linear(ctypes.byref(args), 1, native.address(rows[i]), 2, outputs)
            if bytes(y) != want[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


INTERRUPTED = """
import os, signal, threading, time
import mlx.core as mx
from mference_kernels import native, cpu
from mference_kernels.quant import Quantized
codes = mx.random.randint(0, 2**31 - 1, (512, 64)).astype(mx.uint32)
scales = mx.random.normal((512, 8))
w = Quantized(codes=codes, scales=scales, biases=scales, bits=4, group_size=64)
x = mx.random.normal((8, 512))
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
until = time.monotonic() + 20
try:
    while time.monotonic() < until:
        cpu.linear_cpu(x, w)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_interrupts_are_seen_between_calls() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "interrupted\n", done.stderr


def test_idle_workers_sleep() -> None:
    """After a short spin they use no processor time, whatever the caller does."""
    w, x = matrix(512, 1024), mx.random.normal((1, 1024))
    native.set_threads(4)
    cpu.linear_cpu(x, w)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs to place a process on one core")
def test_more_threads_than_cores_do_not_collapse() -> None:
    """Eight threads on one core take little longer than one: no one waits spinning for a thread that is not running."""
    w, x = matrix(4096, 1024), mx.random.normal((1, 1024))
    cores = os.sched_getaffinity(0)
    seconds: dict[int, float] = {}
    native.set_threads(8)
    cpu.linear_cpu(x, w)
    try:
        for tid in TASKS.iterdir():
            os.sched_setaffinity(int(tid.name), {min(cores)})
        for threads in (1, 8, 1, 8, 1, 8):
            native.set_threads(threads)
            for _ in range(30):
                start = time.perf_counter()
                cpu.linear_cpu(x, w)
                took = time.perf_counter() - start
                seconds[threads] = min(seconds.get(threads, took), took)
    finally:
        for tid in TASKS.iterdir():
            os.sched_setaffinity(int(tid.name), cores)
    assert seconds[8] < 3 * seconds[1] + 2e-3


@pytest.mark.skipif(native.available_cores() < 2 or not TASKS.is_dir(), reason="needs two cores and Linux")
def test_a_worker_keeps_to_a_core_of_its_own() -> None:
    """Left alone, the system may run it on its caller's for seconds, the other idle; the caller goes where it likes."""
    native.set_threads(2)
    w, x = matrix(4000, 512), mx.random.normal((3, 512))
    until = time.monotonic() + 20
    while not any(len(os.sched_getaffinity(int(task.name))) == 1 for task in TASKS.iterdir()):
        assert time.monotonic() < until, "no worker keeps to one core"
        cpu.linear_cpu(x, w)
    assert len(os.sched_getaffinity(0)) == native.available_cores()
