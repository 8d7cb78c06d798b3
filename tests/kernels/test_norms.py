"""Root-mean-square norms against the formula in double precision."""

import math
from random import Random

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_kernels.norms import rms_norm, rms_norm_ops

EPS = 1e-6


def formula(row: list[float], weight: list[float] | None) -> list[float]:
    root = math.sqrt(math.fsum(x * x for x in row) / len(row) + EPS)
    return [x / root * (1.0 if weight is None else weight[i]) for i, x in enumerate(row)]


@given(
    rows=st.integers(1, 5), dim=st.sampled_from([1, 2, 31, 64, 257]), weighted=st.booleans(), seed=st.integers(0, 99)
)
@settings(max_examples=40, deadline=None)
def test_rows_follow_the_formula(rows: int, dim: int, weighted: bool, seed: int) -> None:  # noqa: FBT001
    random = Random(seed)  # noqa: S311  not a secret
    x = [[random.gauss(0, 3) for _ in range(dim)] for _ in range(rows)]
    w = [random.gauss(0, 1) for _ in range(dim)] if weighted else None
    got = rms_norm(mx.array(x), None if w is None else mx.array(w), EPS).tolist()
    for row, line in zip(x, got, strict=True):  # type: ignore[arg-type]
        assert line == pytest.approx(formula(row, w), rel=3e-6, abs=1e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_is_the_float32_result_rounded_once(dtype: mx.Dtype) -> None:
    """Weight included: rounding before the product with it would differ."""
    mx.random.seed(1)
    x, w = mx.random.normal((3, 96)).astype(dtype), mx.random.normal((96,)).astype(dtype)
    got = rms_norm(x, w, EPS)
    wide = rms_norm_ops(x.astype(mx.float32), w.astype(mx.float32), EPS)
    assert got.dtype == dtype
    assert mx.array_equal(got, wide.astype(dtype))


def test_large_half_precision_values_do_not_overflow() -> None:
    x = mx.full((1, 64), 60_000.0, dtype=mx.float16)
    assert rms_norm(x, None, EPS).tolist() == [[1.0] * 64]


def test_a_row_of_zeros_stays_zero() -> None:
    assert not bool(rms_norm(mx.zeros((2, 8)), mx.ones((8,)), EPS).any())


@pytest.mark.parametrize("dim", [32, 64, 2816])
def test_rows_do_not_depend_on_their_neighbours(dim: int) -> None:
    mx.random.seed(2)
    x, w = mx.random.normal((2, 17, dim)), mx.random.normal((dim,))
    together = rms_norm(x, w, EPS)
    assert all(
        mx.array_equal(rms_norm(x[b : b + 1, i : i + 1], w, EPS)[0, 0], together[b, i]) for b in (0, 1) for i in (0, 16)
    )


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[rms_norm\] weight must be \(8,\) but got \(4,\)"):
        rms_norm(mx.zeros((2, 8)), mx.ones((4,)), EPS)
