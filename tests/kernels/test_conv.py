"""Short causal convolutions, unit norms and partial rotary embedding."""

import math

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_kernels.conv import causal_conv
from mference_kernels.norms import unit_norm
from mference_kernels.rope import default_frequencies, partial_rope, rope


def test_the_last_tap_meets_the_row_itself() -> None:
    x = mx.array([[[1.0], [0.0], [0.0], [0.0], [0.0]]])
    out, tail = causal_conv(x, mx.zeros((1, 3, 1)), mx.array([[1000.0, 100.0, 10.0, 1.0]]))
    assert out.reshape(-1).tolist() == [1.0, 10.0, 100.0, 1000.0, 0.0]
    assert tail.reshape(-1).tolist() == [0.0, 0.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5), taps=st.integers(2, 5), dtype=st.sampled_from([4, 2]))
def test_cut_anywhere_the_bits_are_the_same(cuts: list[int], taps: int, dtype: int) -> None:
    kind = mx.float32 if dtype == 4 else mx.bfloat16
    mx.random.seed(sum(cuts))
    x, weight = mx.random.normal((2, sum(cuts), 6)).astype(kind), mx.random.normal((6, taps))
    tail = mx.random.normal((2, taps - 1, 6)).astype(kind)
    want, last = causal_conv(x, tail, weight)
    assert (want.dtype, last.dtype) == (mx.float32, kind)
    start, parts = 0, []
    for cut in cuts:
        part, tail = causal_conv(x[:, start : start + cut], tail, weight)
        parts.append(part)
        start += cut
    assert bool(mx.array_equal(mx.concatenate(parts, axis=1), want))
    assert bool(mx.array_equal(tail, last))
    assert bool(mx.array_equal(last[:, -1], x[:, -1]))


def test_channels_keep_apart() -> None:
    mx.random.seed(0)
    x, tail, weight = mx.random.normal((1, 5, 3)), mx.random.normal((1, 2, 3)), mx.random.normal((3, 3))
    whole = causal_conv(x, tail, weight)[0]
    for channel in range(3):
        own = slice(channel, channel + 1)
        alone = causal_conv(x[..., own], tail[..., own], weight[own])[0]
        assert bool(mx.array_equal(whole[..., own], alone))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[causal_conv\] weight must be \(3, taps\) but got \(2, 4\)"):
        causal_conv(mx.zeros((1, 5, 3)), mx.zeros((1, 3, 3)), mx.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"\[causal_conv\] tail must be \(1, 3, 3\) but got \(1, 4, 3\)"):
        causal_conv(mx.zeros((1, 5, 3)), mx.zeros((1, 4, 3)), mx.zeros((3, 4)))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_a_unit_norm_adds_its_constant_to_the_sum(scale: float) -> None:
    """Not to the mean: for short rows the two differ."""
    row = [3.0 * scale, 4.0 * scale, 0.0, 0.0]
    expected = [value / math.sqrt(sum(v * v for v in row) + 1e-6) for value in row]
    assert bool(mx.allclose(unit_norm(mx.array(row), 1e-6), mx.array(expected), rtol=1e-6, atol=0))


def test_partial_rope_turns_the_first_features_only() -> None:
    mx.random.seed(0)
    x, positions = mx.random.normal((1, 2, 3, 16)), mx.array([[5, 6, 7]])
    frequencies = default_frequencies(8, 1e4)
    out = partial_rope(x, positions, frequencies)
    assert bool(mx.array_equal(out[..., 8:], x[..., 8:]))
    assert bool(mx.array_equal(out[..., :8], rope(x[..., :8], positions, frequencies)))
    assert not bool(mx.allclose(out[..., :8], x[..., :8]))
    whole = default_frequencies(16, 1e4)
    assert bool(mx.array_equal(partial_rope(x, positions, whole), rope(x, positions, whole)))
    with pytest.raises(ValueError, match=r"\[partial_rope\] at most 16 features can turn but got 18"):
        partial_rope(x, positions, default_frequencies(18, 1e4))
