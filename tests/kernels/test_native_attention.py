"""Native attention: the definition within rounding, and the same bits for any variant, chunk, buffer start and threads."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mference_kernels import cpu, levels, native
from mference_kernels.attention import attention, attention_ops

pytestmark = pytest.mark.usefixtures("restored")


def arrays(
    heads: int, groups: int, length: int, span: int, dim: int, value_dim: int, seed: int = 0
) -> tuple[mx.array, mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(seed), 3)
    q = mx.random.normal((heads, length, dim), key=keys[0])
    k = mx.random.normal((groups, span, dim), key=keys[1])
    return q, k, mx.random.normal((groups, span, value_dim), key=keys[2])


@given(
    groups=st.integers(1, 3),
    share=st.integers(1, 5),
    length=st.integers(1, 9),
    past=st.integers(0, 40),
    dim=st.sampled_from([4, 16, 24, 64, 80]),
    value_dim=st.sampled_from([4, 16, 24, 64, 80]),
    window=st.none() | st.integers(1, 30),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_variants_agree_and_are_close_to_the_definition(
    groups: int, share: int, length: int, past: int, dim: int, value_dim: int, window: int | None, seed: int
) -> None:
    q, k, v = arrays(groups * share, groups, length, past + length, dim, value_dim, seed)
    want = attention_ops(q, k, v, scale=dim**-0.5, query_start=past, key_start=0, window=window)
    first = None
    for variant in native.variants():
        native.choose(variant)
        got = cpu.attention_cpu(q, k, v, scale=dim**-0.5, query_start=past, key_start=0, window=window)
        assert mx.allclose(got, want, rtol=1e-5, atol=1e-5), variant
        first = got if first is None else first
        assert mx.array_equal(got, first), variant


@pytest.mark.parametrize(("heads", "groups", "dim", "window"), [(16, 8, 256, 40), (16, 2, 512, None), (4, 4, 128, 1)])
def test_chunks_threads_and_where_the_buffer_starts_change_no_bit(
    heads: int, groups: int, dim: int, window: int | None
) -> None:
    span, start = 83, 50
    q, k, v = arrays(heads, groups, span - start, span, dim, dim)
    want = cpu.attention_cpu(q, k, v, scale=0.1, query_start=start, key_start=0, window=window)
    for threads in (1, 3):
        native.set_threads(threads)
        for first, last in ((0, 1), (1, 6), (6, 33)):
            skip = 0 if window is None else start + first - window + 1
            got = cpu.attention_cpu(
                q[:, first:last],
                k[:, skip : start + last],
                v[:, skip : start + last],
                scale=0.1,
                query_start=start + first,
                key_start=skip,
                window=window,
            )
            assert mx.array_equal(got, want[:, first:last]), (threads, first)


@pytest.mark.parametrize("first", [0, 3, 20, 21, 40])
@pytest.mark.parametrize("length", [1, 6])
def test_a_ring_gives_the_bits_of_its_rows_in_order(first: int, length: int) -> None:
    """Position p lies in row p mod the ring's size, wherever the window wraps."""
    window, capacity = 9, 20
    positions = mx.arange(first, first + window - 1 + length)
    q, k, v = arrays(4, 2, length, positions.size, 48, 64)
    rings = [mx.full((2, capacity, a.shape[-1]), mx.nan) for a in (k, v)]
    for ring, rows in zip(rings, (k, v), strict=True):
        ring[:, positions % capacity] = rows
    where: dict[str, Any] = {"query_start": first + window - 1, "key_start": first, "window": window}
    want = cpu.attention_cpu(q, k, v, scale=0.2, **where)
    assert mx.array_equal(cpu.attention_cpu(q, *rings, scale=0.2, ring=True, **where), want)
    assert mx.array_equal(attention(q, *rings, scale=0.2, ring=True, **where), want)


def test_a_ring_means_the_same_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays(2, 1, 2, 8, 16, 16)
    where: dict[str, Any] = {"query_start": 12, "key_start": 7, "window": 6}
    want = attention(q, k, v, scale=0.3, ring=True, **where)
    monkeypatch.setattr(levels, "cpu", lambda: None)
    assert mx.allclose(attention(q, k, v, scale=0.3, ring=True, **where), want, rtol=1e-5, atol=1e-5)


def test_slices_of_rows_are_read_in_place_and_others_copied() -> None:
    q, k, v = arrays(4, 2, 2, 30, 32, 32)
    want = cpu.attention_cpu(q, k, v, scale=1.0, query_start=28, key_start=0)
    rows = mx.concatenate([mx.full((2, 5, 32), mx.nan), k, mx.full((2, 9, 32), mx.nan)], axis=1)
    part = rows[:, 5:35]
    mx.eval(part)
    assert native.heads(part)[1:] == (native.address(rows) + 4 * 5 * 32, 44 * 32)
    assert mx.array_equal(cpu.attention_cpu(q, part, v, scale=1.0, query_start=28, key_start=0), want)
    turned = mx.contiguous(v.swapaxes(1, 2)).swapaxes(1, 2)
    assert mx.array_equal(cpu.attention_cpu(q, k, turned, scale=1.0, query_start=28, key_start=0), want)


def test_invisible_keys_are_not_read() -> None:
    q, k, v = arrays(2, 1, 2, 12, 32, 32)
    want = cpu.attention_cpu(q, k, v, scale=1.0, query_start=8, key_start=0, window=3)
    k[:, :6], v[:, :6], k[:, 10:], v[:, 10:] = mx.inf, mx.nan, mx.nan, mx.inf
    assert mx.array_equal(cpu.attention_cpu(q, k, v, scale=1.0, query_start=8, key_start=0, window=3), want)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = arrays(2, 2, 3, 9, 64, 64)
    got = cpu.attention_cpu(1000 * q, 1000 * k, v, scale=1.0, query_start=6, key_start=0)
    assert mx.allclose(got, attention_ops(1000 * q, 1000 * k, v, scale=1.0, query_start=6, key_start=0), atol=1e-5)


def test_results_come_in_the_dtype_of_queries() -> None:
    q, k, v = (array.astype(mx.bfloat16) for array in arrays(4, 2, 2, 8, 64, 64))
    got = cpu.attention_cpu(q, k, v, scale=0.1, query_start=6, key_start=0)
    want = attention_ops(q, k, v, scale=0.1, query_start=6, key_start=0)
    assert got.dtype == mx.bfloat16
    assert mx.allclose(got, want, rtol=2e-2, atol=2e-2)


def test_keys_that_do_not_cover_the_queries_are_refused() -> None:
    q, k, v = arrays(2, 2, 3, 5, 16, 16)
    for start, keys in ((3, 0), (1, 2)):
        with pytest.raises(ValueError, match="keys must cover"):
            cpu.attention_cpu(q, k, v, scale=1.0, query_start=start, key_start=keys)
    with pytest.raises(ValueError, match="must divide 3"):
        cpu.attention_cpu(mx.zeros((3, 3, 16)), k, v, scale=1.0, query_start=2, key_start=0)
