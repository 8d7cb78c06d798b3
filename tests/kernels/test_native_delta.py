"""Native gated delta networks: each rounding as written, whatever the variant, threads, batch and cut into calls."""

import os
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mference_kernels import compile as build
from mference_kernels import cpu_delta, delta_contract, native
from mference_kernels.conv import causal_conv, causal_conv_ops
from mference_kernels.gated_delta import gated_delta, gated_delta_ops

pytestmark = pytest.mark.usefixtures("restored")
RESULTS = "91dc493fb23af756"
"""Digest of all results of exercise_delta.c, on any machine with any variant."""

FLAGS = ("-std=c11", "-O1", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-Wno-psabi")
NEEDED = ("api", "arena", "delta", "neon", "pool", "portable")
GIVEN = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
Inputs = tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]


def rule_inputs(rows: int, length: int, keys: int, share: int, dims: tuple[int, int], seed: int) -> Inputs:
    mx.random.seed(seed)
    key_dim, value_dim = dims
    q, k = (mx.random.normal((rows, length, keys, key_dim)) * key_dim**-0.5 for _ in range(2))
    v = mx.random.normal((rows, length, keys * share, value_dim))
    g = -mx.exp(mx.random.uniform(-8, 3, (rows, length, keys * share)))
    rate = mx.random.uniform(0, 1, (rows, length, keys * share))
    arrays = q, k, v, g, rate, mx.random.normal((rows, keys * share, key_dim, value_dim))
    mx.eval(*arrays)
    return arrays


@given(
    length=st.integers(1, 4),
    keys=st.integers(1, 2),
    share=st.integers(1, 2),
    key_dim=st.sampled_from([1, 4, 17]),
    value_dim=st.sampled_from([1, 5, 33, 40]),
    seed=st.integers(0, 999),
)
@GIVEN
def test_the_rule_rounds_as_written(
    length: int, keys: int, share: int, key_dim: int, value_dim: int, seed: int
) -> None:
    arrays = rule_inputs(1, length, keys, share, (key_dim, value_dim), seed)
    q, k, v, g, rate, held = (array[0].tolist() for array in arrays)
    want = delta_contract.delta_rule(q, k, v, g, rate, held)
    for variant in native.variants():
        native.choose(variant)
        out, state = cpu_delta.gated_delta_cpu(*arrays)
        assert out[0].tolist() == want, variant
        assert state[0].tolist() == held, variant


@pytest.mark.parametrize("shape", [(16, 32, 128, 128), (2, 4, 64, 64), (1, 3, 24, 40)])
def test_cuts_threads_variants_and_batches_change_no_bit(shape: tuple[int, int, int, int]) -> None:
    keys, values, key_dim, value_dim = shape
    arrays = rule_inputs(2, 37, keys, values // keys, (key_dim, value_dim), 3)
    want, last = cpu_delta.gated_delta_cpu(*arrays)
    close = gated_delta_ops(*arrays)
    assert mx.allclose(want, close[0], rtol=1e-5, atol=1e-5)
    assert mx.allclose(last, close[1], rtol=1e-5, atol=1e-5)
    for variant in native.variants():
        native.choose(variant)
        for threads in (1, 3):
            native.set_threads(threads)
            state, outputs = arrays[5][1:], []
            for first, end in ((0, 1), (1, 2), (2, 18), (18, 37)):
                q, k, v, g, rate = (array[1:, first:end] for array in arrays[:5])
                out, state = gated_delta(q, k, v, g, rate, state)
                outputs.append(out)
            assert mx.array_equal(mx.concatenate(outputs, axis=1), want[1:]), (variant, threads)
            assert mx.array_equal(state, last[1:]), (variant, threads)


def test_a_state_is_not_changed_in_place() -> None:
    """Snapshots hold the arrays themselves."""
    arrays = rule_inputs(1, 3, 1, 1, (16, 16), 0)
    before = arrays[5].tolist()
    gated_delta(*arrays)
    assert arrays[5].tolist() == before


@given(
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    channels=st.integers(1, 40),
    taps=st.integers(2, 9),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
)
@GIVEN
def test_the_convolution_is_its_definition_bit_for_bit(
    cuts: list[int], channels: int, taps: int, dtype: mx.Dtype
) -> None:
    mx.random.seed(channels)
    x, weight = mx.random.normal((2, sum(cuts), channels)).astype(dtype), mx.random.normal((channels, taps))
    tail = mx.random.normal((2, taps - 1, channels)).astype(dtype)
    want, last = causal_conv_ops(x, tail, weight)
    for variant in native.variants():
        native.choose(variant)
        start, held, parts = 0, tail, []
        for cut in cuts:
            part, held = causal_conv(x[:, start : start + cut], held, weight)
            parts.append(part)
            start += cut
        assert mx.array_equal(mx.concatenate(parts, axis=1), want), variant
        assert held.dtype == dtype
        assert mx.array_equal(held, last), variant


def exercise(program: Path, cc: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    """Build exercise_delta.c with the sources it needs into `program`."""
    sources = [str(build.SOURCES / f"{name}.c") for name in NEEDED]
    main = str(Path(__file__).with_name("exercise_delta.c"))
    command = [*cc, *FLAGS, *flags, f"-I{build.SOURCES}", "-o", str(program), main, *sources]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_portable_code_touches_no_byte_it_should_not(tmp_path: Path) -> None:
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
    built = exercise(tmp_path / "run", ["aarch64-linux-gnu-gcc"], "-static", "-Wall", "-Wextra", "-Werror")
    assert built.returncode == 0, built.stderr
    command = ["qemu-aarch64", "-cpu", "max", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{variant} {RESULTS}" for variant in ("neon", "portable")]
