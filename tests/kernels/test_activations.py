"""Activations against their formulas in double precision."""

import math
from collections.abc import Callable

import mlx.core as mx
import pytest

from mference_kernels.activations import geglu_ops, gelu_tanh_ops, silu_ops, softcap_ops, swiglu_ops

POINTS = [-60.0, -20.0, -3.5, -1.0, -0.125, -0.0, 0.0, 1e-6, 0.3, 1.0, 2.75, 20.0, 60.0]


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize(("ops", "formula"), [(gelu_tanh_ops, gelu), (silu_ops, silu)])
def test_values_are_those_of_the_formula(
    ops: Callable[[mx.array], mx.array], formula: Callable[[float], float]
) -> None:
    got = ops(mx.array(POINTS)).tolist()
    assert got == pytest.approx([formula(x) for x in POINTS], rel=2e-6, abs=1e-7)


@pytest.mark.parametrize("ops", [gelu_tanh_ops, silu_ops])
def test_half_precision_is_the_float32_result_rounded(ops: Callable[[mx.array], mx.array]) -> None:
    for dtype in (mx.bfloat16, mx.float16):
        x = mx.array(POINTS).astype(dtype)
        got = ops(x)
        assert got.dtype == dtype
        assert mx.array_equal(got, ops(x.astype(mx.float32)).astype(dtype))


@pytest.mark.parametrize(("gated", "ops"), [(geglu_ops, gelu_tanh_ops), (swiglu_ops, silu_ops)])
def test_gates_multiply(gated: Callable[[mx.array, mx.array], mx.array], ops: Callable[[mx.array], mx.array]) -> None:
    gate, up = mx.array([POINTS]), mx.array([POINTS[::-1]])
    assert gated(gate, up).shape == (1, len(POINTS))
    assert mx.array_equal(gated(gate, up), ops(gate) * up)


def test_softcap_bounds_and_keeps_small_values() -> None:
    got = softcap_ops(mx.array([-1e4, 0.0, 1e-3, 1e4]), 30.0).tolist()
    assert got == pytest.approx([-30.0, 0.0, 1e-3, 30.0], rel=1e-6)
