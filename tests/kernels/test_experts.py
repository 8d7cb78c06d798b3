"""The routed branch against sums in double precision; ranks are summed in order."""

import math
from typing import Any, cast

import mlx.core as mx
import pytest

from mference_kernels.activations import geglu, swiglu
from mference_kernels.experts import ExpertWeights, gated_experts, weighted_sum
from mference_kernels.quant import Dense, linear

SLOTS, WIDTH, HIDDEN = 5, 24, 32


def numbers(x: mx.array) -> list[Any]:
    return cast("list[Any]", x.tolist())


def weights(dtype: mx.Dtype = mx.float32) -> ExpertWeights:
    mx.random.seed(9)
    gate, up = (mx.random.normal((SLOTS, WIDTH, HIDDEN)) * 0.2 for _ in range(2))
    down = mx.random.normal((SLOTS, HIDDEN, WIDTH)) * 0.2
    return ExpertWeights(
        gate=Dense(weight=gate.astype(dtype)),
        up=Dense(weight=up.astype(dtype)),
        down=Dense(weight=down.astype(dtype)),
        dtype=mx.float32,
    )


def one(experts: ExpertWeights, x: mx.array, slot: int, activation: Any) -> mx.array:
    gate, up, down = (Dense(weight=cast("Dense", m).weight[slot]) for m in (experts.gate, experts.up, experts.down))
    return linear(activation(linear(x, gate), linear(x, up)), down)


@pytest.mark.parametrize("activation", [geglu, swiglu])
def test_each_pair_is_its_experts_block(activation: Any) -> None:
    experts = weights()
    x, slots = mx.random.normal((7, HIDDEN)), mx.array([[r % SLOTS, (r + 2) % SLOTS] for r in range(7)])
    got = gated_experts(x, slots.astype(mx.int32), experts, activation)
    assert got.shape == (7, 2, HIDDEN)
    assert got.dtype == mx.float32
    for r in range(7):
        for rank in range(2):
            want = one(experts, x[r], int(cast("int", slots[r, rank].item())), activation)
            assert numbers(got[r, rank]) == pytest.approx(numbers(want), abs=1e-5)


def test_pairs_do_not_depend_on_each_other_or_on_slots() -> None:
    experts = weights()
    x = mx.random.normal((9, HIDDEN))
    slots = mx.array([[r % SLOTS, (r + 1) % SLOTS, (r + 3) % SLOTS] for r in range(9)], dtype=mx.int32)
    whole = gated_experts(x, slots, experts, geglu)
    moved = mx.array([3, 1, 4, 0, 2])
    swapped = ExpertWeights(
        gate=Dense(weight=cast("Dense", experts.gate).weight[moved]),
        up=Dense(weight=cast("Dense", experts.up).weight[moved]),
        down=Dense(weight=cast("Dense", experts.down).weight[moved]),
        dtype=mx.float32,
    )
    places = mx.argsort(moved).astype(mx.int32)
    assert mx.array_equal(gated_experts(x, places[slots], swapped, geglu), whole)
    for r in range(9):
        for rank in range(3):
            alone = gated_experts(x[r : r + 1], slots[r : r + 1, rank : rank + 1], experts, geglu)
            assert mx.array_equal(alone[0, 0], whole[r, rank])


def test_half_precision_rows_give_float32_outputs() -> None:
    """The hidden activation is rounded to the rows' dtype, as in a run of that dtype; sums stay wide."""
    experts = weights(mx.bfloat16)
    x = mx.random.normal((3, HIDDEN)).astype(mx.bfloat16)
    got = gated_experts(x, mx.array([[0], [1], [4]], dtype=mx.int32), experts, geglu)
    assert got.dtype == mx.float32
    wide = gated_experts(x.astype(mx.float32), mx.array([[0], [1], [4]], dtype=mx.int32), experts, geglu)
    size = float(cast("float", mx.abs(wide).max().item()))
    assert float(cast("float", mx.abs(got - wide).max().item())) < 0.02 * size


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_sums_are_weighted(ranks: int) -> None:
    mx.random.seed(1)
    y, w = mx.random.normal((4, ranks, 6)), mx.random.normal((4, ranks))
    got, rows, shares = numbers(weighted_sum(y, w)), numbers(y), numbers(w)
    for r in range(4):
        want = [math.fsum(rows[r][k][d] * shares[r][k] for k in range(ranks)) for d in range(6)]
        assert got[r] == pytest.approx(want, abs=2e-6)


def test_ranks_are_summed_best_first() -> None:
    """(1e8 + -1e8) + 1 is 1 in float32; in any other order it is 0."""
    y = mx.array([[[1e8], [-1e8], [1.0]]])
    ones = mx.ones((1, 3))
    assert numbers(weighted_sum(y, ones)) == [[1.0]]
    assert numbers(weighted_sum(y[:, ::-1], ones)) == [[0.0]]


def test_sums_do_not_depend_on_other_rows() -> None:
    mx.random.seed(1)
    y, w = mx.random.normal((33, 8, 64)), mx.random.normal((33, 8))
    whole = weighted_sum(y, w)
    assert all(mx.array_equal(weighted_sum(y[r : r + 1], w[r : r + 1])[0], whole[r]) for r in range(33))
