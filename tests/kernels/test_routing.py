"""The order of experts: score down, then index up, whatever the values."""

import math
import struct
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_kernels.routing import INDEX_BITS, top_k

finite = st.floats(width=32, allow_nan=False, allow_infinity=True)
coarse = st.sampled_from([-2.0, -0.5, -0.0, 0.0, 0.5, 1.0])


def order(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]


def chosen(scores: mx.array, k: int) -> list[Any]:
    return cast("list[Any]", top_k(scores, k).tolist())


@given(row=st.lists(st.one_of(coarse, finite), min_size=1, max_size=40), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_row_is_ordered_by_score_then_index(row: list[float], data: st.DataObject) -> None:
    """Infinities, denormals and both zeros included; -0.0 equals 0.0."""
    k = data.draw(st.integers(1, len(row)))
    assert chosen(mx.array([row]), k) == [order(row, k)]


@pytest.mark.parametrize("k", [1, 3, 8, 128])
def test_all_equal_scores_take_the_first_experts(k: int) -> None:
    assert chosen(mx.zeros((2, 3, 128)), k) == [[list(range(k))] * 3] * 2


def test_a_tie_at_the_last_place_takes_the_lower_index() -> None:
    """Scores of 192 experts on a coarse grid: where sorts by partition choose another set in most rows."""
    rows = [[float((31 * e + 7 * r) % 5) for e in range(192)] for r in range(50)]
    assert chosen(mx.array(rows), 8) == [order(row, 8) for row in rows]


def test_neighbouring_floats_are_told_apart() -> None:
    up = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", 1.5))[0] + 1))[0]
    assert chosen(mx.array([[1.5, up, 1.5, -up, -1.5]]), 5) == [[1, 0, 2, 4, 3]]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_scores_are_compared_as_they_are(dtype: mx.Dtype) -> None:
    scores = mx.array([[1.0, 1.0 + 2**-20, 2.0, 1.0]]).astype(dtype)
    assert chosen(scores, 4) == [[2, 0, 1, 3]]


@pytest.mark.parametrize("experts", [8, 128, 512])
def test_rows_do_not_depend_on_their_neighbours(experts: int) -> None:
    mx.random.seed(0)
    scores = mx.round(mx.random.normal((37, experts)) * 4) / 4
    whole = top_k(scores, 8)
    assert all(mx.array_equal(top_k(scores[r : r + 1], 8)[0], whole[r]) for r in range(37))


def test_ids_are_int32_and_distinct() -> None:
    ids = top_k(mx.zeros((4, 16)), 16)
    assert ids.dtype == mx.int32
    assert chosen(mx.zeros((4, 16)), 16) == [list(range(16))] * 4


def test_not_a_number_never_repeats_an_expert() -> None:
    """What is chosen then does not matter, as the engine refuses the row; that ids stay valid does."""
    (row,) = chosen(mx.array([[math.nan, 1.0, math.nan, 0.0, -math.nan]]), 3)
    assert len(set(row)) == 3
    assert all(0 <= e < 5 for e in row)


@pytest.mark.parametrize(("k", "experts"), [(0, 8), (9, 8), (-1, 8)])
def test_more_experts_than_there_are_cannot_be_chosen(k: int, experts: int) -> None:
    with pytest.raises(ValueError, match=rf"\[top_k\] k must be in 1..{experts} but got {k}"):
        top_k(mx.zeros((1, experts)), k)
    assert 1 << INDEX_BITS >= 1024
