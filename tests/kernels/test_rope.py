"""Rotary position embedding against complex numbers in double precision."""

import cmath
import math
from random import Random
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_kernels.rope import default_frequencies, proportional_frequencies, rope


def numbers(x: mx.array) -> list[Any]:
    return cast("list[Any]", x.tolist())


ROUNDED = 2**-24
"""A value rounded to float32 once, relative: positions multiply what frequencies are off by."""


@pytest.mark.parametrize(("dims", "theta"), [(2, 1e4), (32, 1e4), (256, 1e4), (512, 1e6)])
def test_default_frequencies_fall_geometrically(dims: int, theta: float) -> None:
    assert numbers(default_frequencies(dims, theta)) == pytest.approx(
        [theta ** (-2 * i / dims) for i in range(dims // 2)], rel=ROUNDED
    )


@pytest.mark.parametrize(("dims", "factor", "turning"), [(512, 0.25, 64), (64, 0.25, 8), (64, 0.5, 16), (8, 1.0, 4)])
def test_proportional_frequencies_divide_by_the_whole_head(dims: int, factor: float, turning: int) -> None:
    got = numbers(proportional_frequencies(dims, 1e6, factor))
    assert got[:turning] == pytest.approx([1e6 ** (-2 * i / dims) for i in range(turning)], rel=ROUNDED)
    assert got[turning:] == [0.0] * (dims // 2 - turning)


def turned(row: list[float], position: int, frequencies: list[float]) -> list[float]:
    """Turn pairs (i, i + D/2) as complex numbers."""
    half = len(row) // 2
    pairs = [complex(row[i], row[i + half]) * cmath.exp(1j * position * frequencies[i]) for i in range(half)]
    return [pair.real for pair in pairs] + [pair.imag for pair in pairs]


@given(heads=st.integers(1, 3), half=st.integers(1, 9), start=st.integers(0, 4000), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_pairs_turn_by_position_times_frequency(heads: int, half: int, start: int, seed: int) -> None:
    random = Random(seed)  # noqa: S311  not a secret
    positions = [[start, start + 1, 0], [7, start, start]]
    x = [[[[random.gauss(0, 1) for _ in range(2 * half)] for _ in range(3)] for _ in range(heads)] for _ in range(2)]
    frequencies = default_frequencies(2 * half, 1e4)
    got = numbers(rope(mx.array(x), mx.array(positions), frequencies))
    for b in range(2):
        for h in range(heads):
            for i in range(3):
                want = turned(x[b][h][i], positions[b][i], numbers(frequencies))
                assert got[b][h][i] == pytest.approx(want, abs=2e-3 if start > 500 else 2e-4)


def test_position_zero_turns_nothing() -> None:
    mx.random.seed(0)
    x = mx.random.normal((1, 2, 3, 8))
    assert mx.array_equal(rope(x, mx.zeros((1, 3), dtype=mx.int32), default_frequencies(8, 1e4)), x)


def test_still_pairs_pass_through_bit_for_bit() -> None:
    """Of 32 pairs the first 8 turn: dims 0-7 and 32-39; this is not a rotation of the first 16 dims."""
    mx.random.seed(0)
    x = mx.random.normal((1, 1, 4, 64))
    got = rope(x, mx.array([[5, 6, 7, 800]]), proportional_frequencies(64, 1e6, 0.25))
    still = [*range(8, 32), *range(40, 64)]
    moving = [*range(8), *range(32, 40)]
    assert mx.array_equal(got[..., still], x[..., still])
    assert bool((got[..., moving] != x[..., moving]).any(axis=(0, 1, 2)).all())


def test_scores_depend_on_distance_alone() -> None:
    mx.random.seed(0)
    q, k = mx.random.normal((1, 1, 1, 32)), mx.random.normal((1, 1, 1, 32))
    frequencies = default_frequencies(32, 1e4)

    def score(a: int, b: int) -> float:
        turned_q, turned_k = (rope(x, mx.array([[p]]), frequencies) for x, p in ((q, a), (k, b)))
        return cast("float", (turned_q * turned_k).sum().item())

    assert score(10, 3) == pytest.approx(score(110, 103), abs=1e-4)
    assert not math.isclose(score(10, 3), score(3, 10), abs_tol=1e-2)


def test_half_precision_is_the_float32_result_rounded() -> None:
    mx.random.seed(0)
    x, at, f = mx.random.normal((1, 2, 5, 16)).astype(mx.bfloat16), mx.arange(5)[None], default_frequencies(16, 1e4)
    assert mx.array_equal(rope(x, at, f), rope(x.astype(mx.float32), at, f).astype(mx.bfloat16))


def test_tokens_do_not_depend_on_their_neighbours() -> None:
    mx.random.seed(0)
    x, at, f = (
        mx.random.normal((2, 3, 9, 64)),
        mx.stack([mx.arange(9), mx.arange(50, 59)]),
        default_frequencies(64, 1e4),
    )
    together = rope(x, at, f)
    for i in range(9):
        assert mx.array_equal(rope(x[1:, :, i : i + 1], at[1:, i : i + 1], f)[0, :, 0], together[1, :, i])


def test_frequencies_of_another_head_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[rope\] frequencies must be \(8,\) but got \(4,\)"):
        rope(mx.zeros((1, 1, 1, 16)), mx.array([[0]]), default_frequencies(8, 1e4))
    with pytest.raises(ValueError, match=r"\[rope\] dims must be even but got 127"):
        default_frequencies(127, 1e4)
