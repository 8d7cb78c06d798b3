"""Native norms and rotary embedding: each rounding as written, close to the definitions, rows independent of each other."""

import math
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mference_kernels import contract, cpu, norms, rope
from mference_kernels.contract import f32

pytestmark = pytest.mark.usefixtures("restored")
DTYPES = (mx.float32, mx.bfloat16, mx.float16)


def norm_contract(x: list[float], weight: list[float] | None, divisor: float, eps: float) -> list[float]:
    lanes = [0.0] * contract.LANES
    for i, value in enumerate(x):
        lanes[i % contract.LANES] = f32(lanes[i % contract.LANES] + f32(value * value))
    scale = f32(1.0 / f32(math.sqrt(f32(f32(contract.tree(lanes) / divisor) + eps))))
    scaled = [f32(value * scale) for value in x]
    return scaled if weight is None else [f32(s * w) for s, w in zip(scaled, weight, strict=True)]


@given(
    rows=st.integers(1, 20), dim=st.integers(1, 70), dtype=st.sampled_from([None, *DTYPES]), seed=st.integers(0, 999)
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_norms_round_as_written(rows: int, dim: int, dtype: mx.Dtype | None, seed: int) -> None:
    keys = mx.random.split(mx.random.key(seed), 2)
    x = mx.random.normal((rows, dim), key=keys[0])
    weight = None if dtype is None else mx.random.normal((dim,), key=keys[1]).astype(dtype)
    listed: Any = x.tolist(), None if weight is None else weight.astype(mx.float32).tolist()
    want = [norm_contract(row, listed[1], dim, f32(1e-6)) for row in listed[0]]
    assert cpu.rms_norm_cpu(x, weight, 1e-6).tolist() == want
    if weight is None:
        assert cpu.unit_norm_cpu(x, 1e-6).tolist() == [norm_contract(row, None, 1.0, f32(1e-6)) for row in listed[0]]


def test_norms_keep_shape_and_dtype_and_choose() -> None:
    x = mx.random.normal((2, 3, 64)).astype(mx.bfloat16)
    weight = mx.random.normal((64,))
    got = norms.rms_norm(x, weight, 1e-6)
    assert (got.shape, got.dtype) == ((2, 3, 64), mx.bfloat16)
    assert mx.array_equal(got, cpu.rms_norm_cpu(x, weight, 1e-6))
    assert mx.allclose(got, norms.rms_norm_ops(x, weight, 1e-6), rtol=1e-2, atol=1e-2)
    assert mx.array_equal(norms.unit_norm(x, 1e-6), cpu.unit_norm_cpu(x, 1e-6))
    assert norms.rms_norm(mx.zeros((0, 64)), weight, 1e-6).shape == (0, 64)
    with pytest.raises(ValueError, match="weight must be"):
        cpu.rms_norm_cpu(x, mx.ones((32,)), 1e-6)


@pytest.mark.parametrize(("dim", "half"), [(64, 32), (64, 8), (256, 128), (6, 3), (16, 0)])
def test_rotations_are_the_exact_ones(dim: int, half: int) -> None:
    """Angles are rounded to float32 as defined; from there the result is within one rounding of each of three operations."""
    x = mx.random.normal((2, 3, 5, dim), key=mx.random.key(half))
    positions = mx.array([[0, 1, 77, 4095, 262143], [5, 6, 7, 8, 131071]])
    frequencies = rope.default_frequencies(2 * half, 10000.0) if half else mx.zeros((0,))
    got: Any = cpu.rope_cpu(x, positions, frequencies).tolist()
    listed: Any = x.tolist(), positions.tolist(), frequencies.tolist()
    for b in range(2):
        for h in range(3):
            for row in range(5):
                was, now = listed[0][b][h][row], got[b][h][row]
                for i in range(half):
                    angle = f32(f32(listed[1][b][row]) * listed[2][i])
                    cosine, sine = math.cos(angle), math.sin(angle)
                    first, second = was[i], was[half + i]
                    size = 3e-7 * (abs(first) + abs(second)) + 1e-12
                    assert abs(now[i] - (first * cosine - second * sine)) < size
                    assert abs(now[half + i] - (second * cosine + first * sine)) < size
                assert now[2 * half :] == was[2 * half :]


def test_rotations_choose_and_rows_are_independent() -> None:
    x = mx.random.normal((1, 4, 40, 64))
    positions, frequencies = mx.arange(1000, 1040)[None], rope.default_frequencies(64, 1e6)
    want = cpu.rope_cpu(x, positions, frequencies)
    assert mx.array_equal(rope.rope(x, positions, frequencies), want)
    assert mx.array_equal(
        rope.partial_rope(x, positions, frequencies[:10]), cpu.rope_cpu(x, positions, frequencies[:10])
    )
    assert mx.allclose(want, rope.rope_ops(x, positions, frequencies), atol=1e-5)
    for at in (0, 13, 39):
        alone = cpu.rope_cpu(x[:, :, at : at + 1], positions[:, at : at + 1], frequencies)
        assert mx.array_equal(alone, want[:, :, at : at + 1])
    turned = mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)
    assert mx.array_equal(cpu.rope_cpu(turned, positions, frequencies), want)
    with pytest.raises(ValueError, match="at most 64 features"):
        cpu.rope_cpu(x, positions, mx.ones((33,)))
    with pytest.raises(ValueError, match="positions must be"):
        cpu.rope_cpu(x, positions[:, 1:], frequencies)
