"""Choosing experts natively: the definition's order, and weights to the last bit as the contract says."""

import math
import struct
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_kernels import contract, cpu, native
from mference_kernels.contract import f32
from mference_kernels.delta_contract import exponential
from mference_kernels.program import compiled
from mference_kernels.routing import choose_experts, choose_experts_ops, top_k_ops

pytestmark = pytest.mark.usefixtures("native_library")
coarse = st.sampled_from([-3.0, -0.5, -0.0, 0.0, 0.5, 1.0, 40.0])
score = st.floats(-90, 90, width=32) | coarse


def weights_of(
    scores: Sequence[float], ids: Sequence[int], scale: Sequence[float] | None, *, softmax: bool, renormalise: bool
) -> list[float]:
    """Return what the chosen weigh."""
    found = [scores[i] for i in ids]
    if softmax:
        lanes = [0.0] * contract.LANES
        for i, value in enumerate(scores):
            lane = i % contract.LANES
            lanes[lane] = f32(lanes[lane] + exponential(f32(value - scores[ids[0]])))
        total = contract.tree(lanes)
        found = [f32(exponential(f32(value - scores[ids[0]])) / total) for value in found]
    if renormalise:
        total = found[0]
        for value in found[1:]:
            total = f32(total + value)
        found = [f32(value / total) if total else math.copysign(math.inf, value) for value in found]
    return found if scale is None else [f32(value * scale[i]) for value, i in zip(found, ids, strict=True)]


def bits(values: Sequence[float]) -> list[bytes]:
    return [struct.pack("<f", value) for value in values]


@given(
    rows=st.lists(st.lists(score, min_size=9, max_size=9), min_size=1, max_size=3), k=st.integers(1, 9), data=st.data()
)
@settings(deadline=None, max_examples=80)
def test_ids_are_the_definitions_and_weights_the_contracts(
    rows: list[list[float]], k: int, data: st.DataObject
) -> None:
    softmax, scaled = data.draw(st.booleans()), data.draw(st.booleans())
    renormalise = softmax and data.draw(st.booleans())
    factors = [f32(0.3 + 0.1 * i) for i in range(9)] if scaled else None
    scale = None if factors is None else mx.array(factors)
    scores = mx.array(rows)
    ids, weights = cpu.choose_experts_cpu(scores, k, softmax=softmax, renormalise=renormalise, scale=scale)
    assert mx.array_equal(ids, top_k_ops(scores, k))
    listed: Any = ids.tolist(), weights.tolist()
    for row, chosen, got in zip(rows, *listed, strict=True):
        want = weights_of(row, chosen, factors, softmax=softmax, renormalise=renormalise)
        assert bits(got) == bits(want)


@pytest.mark.parametrize("experts", [8, 128, 256])
@pytest.mark.parametrize("renormalise", [True, False])
def test_the_definition_is_near(experts: int, *, renormalise: bool) -> None:
    scores = mx.random.normal((2, 5, experts), key=mx.random.key(experts)) * 4
    scale = mx.random.uniform(0.5, 2, (experts,), key=mx.random.key(1)).astype(mx.bfloat16)
    ids, weights = choose_experts(scores, 6, softmax=True, renormalise=renormalise, scale=scale)
    want_ids, want = choose_experts_ops(scores, 6, softmax=True, renormalise=renormalise, scale=scale)
    assert (ids.shape, ids.dtype, weights.dtype) == ((2, 5, 6), mx.int32, mx.float32)
    assert mx.array_equal(ids, want_ids)
    assert mx.allclose(weights, want, rtol=2e-6, atol=0)


def test_programs_and_any_number_of_rows_choose_alike() -> None:
    scores = mx.random.normal((1, 300, 64), key=mx.random.key(3))
    scale = mx.random.uniform(0.5, 2, (64,))
    whole = cpu.choose_experts_cpu(scores, 8, softmax=True, renormalise=True, scale=scale)
    program = compiled(lambda p: p.choose(p.input(64), 8, softmax=True, renormalise=True, scale=scale))
    for threads in (1, 3):
        native.set_threads(threads)
        for first, last in ((0, 300), (7, 8), (100, 150)):
            for got in (
                program(scores[:, first:last]),
                cpu.choose_experts_cpu(scores[:, first:last], 8, softmax=True, renormalise=True, scale=scale),
            ):
                assert all(mx.array_equal(a, b[:, first:last]) for a, b in zip(got, whole, strict=True))
    native.set_threads(native.available_cores())


def test_not_a_number_chooses_valid_experts() -> None:
    ids, _ = cpu.choose_experts_cpu(
        mx.array([[math.nan, 1.0, math.nan, 0.0, -math.nan]]), 3, softmax=True, renormalise=True
    )
    (row,) = ids.tolist()  # type: ignore[misc]
    assert len(set(row)) == 3
    assert all(0 <= e < 5 for e in row)


def test_more_than_there_are_and_wrong_factors_are_refused() -> None:
    for k in (0, 6):
        with pytest.raises(ValueError, match=f"k must be in 1..5 but got {k}"):
            cpu.choose_experts_cpu(mx.zeros((1, 5)), k, softmax=True, renormalise=True)
    with pytest.raises(ValueError, match="scale must be"):
        cpu.choose_experts_cpu(mx.zeros((1, 5)), 2, softmax=True, renormalise=True, scale=mx.ones((4,)))
