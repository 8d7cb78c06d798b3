"""Attention against sums in double precision: causal, windowed, grouped, one query at a time."""

import math
from random import Random
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_kernels import attention as module
from mference_kernels.attention import attention

Rows = list[list[list[float]]]


def numbers(x: mx.array) -> list[Any]:
    return cast("list[Any]", x.tolist())


def formula(q: Rows, k: Rows, v: Rows, scale: float, query_start: int, key_start: int, window: int | None) -> Rows:
    """Return what each query makes of the keys at or before it, at most `window` of them."""
    share = len(q) // len(k)
    out: Rows = []
    for head, queries in enumerate(q):
        keys, values = k[head // share], v[head // share]
        mixed = []
        for i, query in enumerate(queries):
            at = query_start + i
            oldest = 0 if window is None else at - window + 1
            seen = [j for j in range(len(keys)) if oldest <= key_start + j <= at]
            scores = [scale * math.fsum(a * b for a, b in zip(query, keys[j], strict=True)) for j in seen]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            total = math.fsum(weights)
            mixed.append(
                [
                    math.fsum(w * values[j][d] for w, j in zip(weights, seen, strict=True)) / total
                    for d in range(len(values[0]))
                ]
            )
        out.append(mixed)
    return out


def random_rows(random: Random, heads: int, length: int, dim: int) -> Rows:
    return [[[random.gauss(0, 1) for _ in range(dim)] for _ in range(length)] for _ in range(heads)]


@given(
    groups=st.integers(1, 2),
    share=st.integers(1, 3),
    length=st.integers(1, 6),
    past=st.integers(0, 12),
    lost=st.integers(0, 5),
    window=st.one_of(st.none(), st.integers(1, 8)),
    dims=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_queries_see_what_they_may(
    groups: int, share: int, length: int, past: int, lost: int, window: int | None, dims: tuple[int, int], seed: int
) -> None:
    """`lost` keys have been forgotten by a ring: those no query's window reaches."""
    random = Random(seed)  # noqa: S311  not a secret
    lost = 0 if window is None else min(lost, max(0, past - window + 1))
    q = random_rows(random, groups * share, length, dims[0])
    k = random_rows(random, groups, past - lost + length, dims[0])
    v = random_rows(random, groups, past - lost + length, dims[1])
    scale = random.choice([1.0, 0.3])
    got = attention(mx.array(q), mx.array(k), mx.array(v), scale=scale, query_start=past, key_start=lost, window=window)
    want = formula(q, k, v, scale, past, lost, window)
    for mine, theirs in zip(numbers(got), want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a == pytest.approx(b, abs=3e-6)


def inputs(length: int, span: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(3)
    shapes = ((4, length, 32), (2, span, 32), (2, span, 32))
    q, k, v = (mx.random.normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("blocks", [1, 3, 7, 29, 30])
def test_blocks_of_queries_change_no_bit(monkeypatch: pytest.MonkeyPatch, window: int | None, blocks: int) -> None:
    q, k, v = inputs(30, 50)

    def run() -> mx.array:
        return attention(q, k, v, scale=1.0, query_start=20, key_start=0, window=window)

    whole = run()
    monkeypatch.setattr(module, "SCORE_BYTES", 4 * 4 * 50 * blocks)
    assert mx.array_equal(run(), whole)
    monkeypatch.setattr(module, "SCORE_BYTES", 1)
    assert mx.array_equal(run(), whole)


@pytest.mark.parametrize("window", [None, 8])
def test_a_query_alone_gets_the_same_bits(window: int | None) -> None:
    q, k, v = inputs(12, 30)
    whole = attention(q, k, v, scale=1.0, query_start=18, key_start=0, window=window)
    for i in range(12):
        alone = attention(q[:, i : i + 1], k, v, scale=1.0, query_start=18 + i, key_start=0, window=window)
        assert mx.array_equal(alone[:, 0], whole[:, i])


def test_keys_out_of_sight_do_not_count() -> None:
    """Values of the future, and from before the window, may be anything finite."""
    q, k, v = inputs(1, 20)
    v[:, 11:], v[:, :4] = 1e30, -1e30
    got = attention(q, k, v, scale=1.0, query_start=10, key_start=0, window=7)
    assert float(cast("float", mx.abs(got).max().item())) < 10


def test_large_scores_do_not_overflow() -> None:
    q, k, v = inputs(4, 4)
    got = attention(q * 1e4, k * 1e4, v, scale=1.0, query_start=0, key_start=0)
    assert bool(mx.isfinite(got).all())
    assert mx.array_equal(got[:, 0].reshape(2, 2, 32), mx.broadcast_to(v[:, None, 0], (2, 2, 32)))


def test_half_precision_is_the_float32_result_rounded() -> None:
    q, k, v = inputs(5, 9, mx.bfloat16)
    got = attention(q, k, v, scale=0.5, query_start=4, key_start=0)
    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    assert mx.array_equal(got, attention(q, k, v, scale=0.5, query_start=4, key_start=0).astype(mx.bfloat16))


@pytest.mark.parametrize(
    ("groups", "span", "query_start", "key_start", "text"),
    [
        (3, 10, 5, 0, r"\[attention\] .*heads.* 4 but got .*3"),
        (2, 10, 6, 0, r"\[attention\] keys must cover positions to 10 but got 10 rows"),
        (2, 10, 3, 4, r"\[attention\] keys must cover"),
    ],
)
def test_keys_that_do_not_cover_the_queries_are_refused(
    groups: int, span: int, query_start: int, key_start: int, text: str
) -> None:
    q, k = mx.zeros((4, 5, 8)), mx.zeros((groups, span, 8))
    with pytest.raises(ValueError, match=text):
        attention(q, k, k, scale=1.0, query_start=query_start, key_start=key_start)
