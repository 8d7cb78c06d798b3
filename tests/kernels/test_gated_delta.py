"""The gated delta rule: its definition against double precision, its chunked form against the definition."""

import math
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_kernels.gated_delta import (
    CHUNK_BAR,
    SEGMENT_TOKENS,
    gated_delta,
    gated_delta_chunked,
    gated_delta_ops,
    unit_lower_inverse,
)
from mference_kernels.norms import unit_norm

Inputs = tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]
KINDS = ("random", "one key", "no decay", "sudden decay", "no learning")


def inputs(rows: int, length: int, keys: int, values: int, dim: int, *, kind: str = "random", seed: int = 0) -> Inputs:
    """Return q, k, v, log decay, rate and state; kinds are the ways in which products of many terms go wrong."""
    mx.random.seed(seed)
    q = unit_norm(mx.random.normal((rows, length, keys, dim)), 1e-6) * dim**-0.5
    k = unit_norm(mx.random.normal((rows, length, keys, dim)), 1e-6)
    v, state = mx.random.normal((rows, length, values, dim)), mx.random.normal((rows, values, dim, dim))
    decay, rate = (
        -mx.exp(mx.random.uniform(-8, 2, (rows, length, values))),
        mx.random.uniform(0, 1, (rows, length, values)),
    )
    if kind == "one key":
        k, decay, rate = mx.broadcast_to(k[:, :1], k.shape), decay * 1e-3, 0.9 + 0.1 * rate
    elif kind == "no decay":
        decay = decay * 0
    elif kind == "sudden decay":
        decay = mx.where(mx.random.uniform(shape=decay.shape) < 0.1, -100.0, decay * 1e-4)
    elif kind == "no learning":
        rate = rate * 0
    arrays = (q, k, v, decay, rate, state)
    mx.eval(*arrays)
    return arrays


def difference(got: tuple[mx.array, mx.array], want: tuple[mx.array, mx.array]) -> float:
    """Return the largest difference of outputs and of states, relative to the largest entry of each."""
    pairs = zip(got, want, strict=True)
    return max(float((mx.abs(a - b).max() / mx.abs(b).max()).item()) for a, b in pairs)  # type: ignore[arg-type]


def in_double(arrays: Inputs) -> tuple[list[Any], list[Any]]:
    """Take the first timeline by the rule as written, in Python's own floats."""
    q, k, v, g, rate, held = (cast("list[Any]", array[0].tolist()) for array in arrays)
    repeat, dims = len(v[0]) // len(k[0]), range(len(held[0]))
    outputs: list[Any] = []
    for t in range(len(q)):
        outputs.append([])
        for h, value in enumerate(v[t]):
            key, query = k[t][h // repeat], q[t][h // repeat]
            s = [[math.exp(g[t][h]) * x for x in row] for row in held[h]]
            recalled = [sum(s[i][j] * key[i] for i in dims) for j in dims]
            update = [rate[t][h] * (value[j] - recalled[j]) for j in dims]
            held[h] = [[s[i][j] + key[i] * update[j] for j in dims] for i in dims]
            outputs[-1].append([sum(held[h][i][j] * query[i] for i in dims) for j in dims])
    return outputs, held


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_is_the_rule_as_written(kind: str) -> None:
    arrays = inputs(1, 9, 2, 4, 6, kind=kind)
    outputs, state = in_double(arrays)
    assert difference(gated_delta_ops(*arrays), (mx.array([outputs]), mx.array([state]))) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 129, 200])
def test_chunks_are_the_definition(kind: str, length: int) -> None:
    """At lengths around the chunk sizes of both kinds of device, also for keys that repeat."""
    arrays = inputs(2, length, 2, 4, 16, kind=kind, seed=length)
    want = gated_delta_ops(*arrays)
    for chunk in (16, 64):
        assert difference(gated_delta_chunked(*arrays, chunk=chunk), want) < CHUNK_BAR


def test_chunks_are_the_definition_at_real_head_sizes_and_over_segments() -> None:
    arrays = inputs(1, 70, 16, 32, 128, seed=1)
    assert difference(gated_delta(*arrays), gated_delta_ops(*arrays)) < CHUNK_BAR
    long = inputs(1, SEGMENT_TOKENS + 37, 1, 2, 16, kind="no decay", seed=2)
    assert difference(gated_delta(*long), gated_delta_ops(*long)) < CHUNK_BAR


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5), seed=st.integers(0, 100))
def test_cut_anywhere_the_result_is_the_same(cuts: list[int], seed: int) -> None:
    arrays = inputs(1, sum(cuts), 1, 2, 8, seed=seed)
    want, state, outputs, start = gated_delta_ops(*arrays), arrays[5], [], 0
    for cut in cuts:
        q, k, v, g, rate = (array[:, start : start + cut] for array in arrays[:5])
        out, state = gated_delta(q, k, v, g, rate, state)
        outputs.append(out)
        start += cut
    assert difference((mx.concatenate(outputs, axis=1), state), want) < CHUNK_BAR


@pytest.mark.parametrize("length", [1, 5, 70])
def test_timelines_together_are_each_alone_bit_for_bit(length: int) -> None:
    arrays = inputs(3, length, 2, 4, 16)
    together = gated_delta(*arrays)
    for row in range(3):
        alone = gated_delta(*(array[row : row + 1] for array in arrays))
        for got, want in zip(together, alone, strict=True):
            if mx.default_device() == mx.Device(mx.cpu):
                assert bool(mx.array_equal(got[row : row + 1], want))
            assert bool(mx.allclose(got[row : row + 1], want, rtol=1e-5, atol=1e-5))


def test_heads_share_keys_by_repeating_each() -> None:
    """Value heads 0 and 1 read key head 0, not heads 0 and 2."""
    q, k, v, g, rate, state = inputs(1, 20, 2, 4, 8)
    wide = gated_delta(mx.repeat(q, 2, axis=2), mx.repeat(k, 2, axis=2), v, g, rate, state)
    assert difference(gated_delta(q, k, v, g, rate, state), wide) < CHUNK_BAR
    tiled = gated_delta(mx.tile(q, (1, 1, 2, 1)), mx.tile(k, (1, 1, 2, 1)), v, g, rate, state)
    assert difference(tiled, wide) > 0.01


def test_neither_keys_nor_values_need_be_square() -> None:
    mx.random.seed(0)
    q, k = mx.random.normal((1, 21, 1, 4)) * 0.2, unit_norm(mx.random.normal((1, 21, 1, 4)), 1e-6)
    v, state = mx.random.normal((1, 21, 3, 10)), mx.zeros((1, 3, 4, 10))
    g, rate = -mx.random.uniform(0, 1, (1, 21, 3)), mx.random.uniform(0, 1, (1, 21, 3))
    want = gated_delta_ops(q, k, v, g, rate, state)
    assert (want[0].shape, want[1].shape) == ((1, 21, 3, 10), (1, 3, 4, 10))
    assert difference(gated_delta(q, k, v, g, rate, state), want) < CHUNK_BAR


@pytest.mark.parametrize("size", [1, 2, 4, 32])
def test_the_inverse_of_a_unit_triangle(size: int) -> None:
    """Also of all ones, whose powers pass 1e8 at this size."""
    mx.random.seed(size)
    below = mx.tril(mx.ones((size, size)), -1)
    for a in (below, below * mx.random.uniform(-1, 1, (3, size, size))):
        inverse = unit_lower_inverse(a)
        wrong = mx.abs((mx.eye(size) + a) @ inverse - mx.eye(size)).max()
        assert bool(wrong <= 1e-6 * mx.abs(inverse).max())


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, g, rate, state = inputs(1, 3, 2, 4, 8)
    for run in (gated_delta_ops, gated_delta_chunked, gated_delta):
        with pytest.raises(ValueError, match=r"\[gated_delta\] state must be \(1, 4, 8, 8\) but got \(1, 4, 8, 7\)"):
            run(q, k, v, g, rate, state[..., :7])
        with pytest.raises(ValueError, match=r"\[gated_delta\] key heads must divide 3 but got 2"):
            run(q, k, v[:, :, :3], g, rate, state)
    with pytest.raises(ValueError, match=r"\[gated_delta\] chunk must be a power of two but got 48"):
        gated_delta_chunked(q, k, v, g, rate, state, chunk=48)
