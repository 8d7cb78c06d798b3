"""Residual streams, plain products, pooled windows and trailing rotary embedding: definitions and native paths."""

import cmath
import math
from typing import Any, cast

import attrs
import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mference_kernels import cpu, cpu_sparse, cpu_streams, native
from mference_kernels.activations import ClampedSwiglu, silu_ops, swiglu
from mference_kernels.dense import row_products, row_products_ops
from mference_kernels.experts import gated_linear, gated_linear_ops
from mference_kernels.norms import rms_norm
from mference_kernels.pooling import pool_windows, pool_windows_ops
from mference_kernels.quant import Dense, Quantized, block_linear, linear_ops, split_rows
from mference_kernels.rope import (
    default_frequencies,
    trailing_rope,
    trailing_rope_ops,
    turned_heads,
    turned_heads_ops,
    yarn_frequencies,
)
from mference_kernels.streams import (
    StreamMixer,
    balanced_ops,
    merge_streams,
    merge_streams_ops,
    read_streams,
    read_streams_ops,
    write_streams,
    write_streams_ops,
)

NATIVE = pytest.mark.usefixtures("restored")
ANY = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def normal(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def numbers(array: mx.array) -> Any:
    return cast("Any", array.tolist())


def close(got: mx.array, want: mx.array, bar: float = 2e-5) -> bool:
    return got.shape == want.shape and float(mx.abs(got - want).max()) <= bar if got.size else got.shape == want.shape


def mixer(streams: int, width: int, seed: int = 0, *, merging: bool = False) -> StreamMixer:
    rows = streams if merging else (2 + streams) * streams
    return StreamMixer(
        fn=normal(rows, streams * width, seed=seed) / math.sqrt(streams * width),
        base=normal(rows, seed=seed + 1),
        scale=mx.array([0.7] if merging else [0.7, 1.3, 0.9]),
        iterations=20,
        eps=1e-6,
        norm_eps=1e-6,
    )


def mixed(row: list[list[float]], site: StreamMixer) -> tuple[list[float], list[float], list[list[float]]]:
    """Return pre, post and mix of one row by the written rule, in double precision."""
    S = len(row)
    flat = [value for stream in row for value in stream]
    root = math.sqrt(sum(v * v for v in flat) / len(flat) + site.norm_eps)
    raw = [sum(a * b / root for a, b in zip(line, flat, strict=True)) for line in numbers(site.fn)]
    base, scale = numbers(site.base), numbers(site.scale)
    pre = [1 / (1 + math.exp(-(raw[j] * scale[0] + base[j]))) + site.eps for j in range(S)]
    if len(raw) == S:
        return pre, [], []
    post = [2 / (1 + math.exp(-(raw[S + j] * scale[1] + base[S + j]))) for j in range(S)]
    cells = [raw[2 * S + n] * scale[2] + base[2 * S + n] for n in range(S * S)]
    mix = []
    for i in range(S):
        line = [math.exp(cell) for cell in cells[i * S : (i + 1) * S]]
        mix.append([cell / sum(line) + site.eps for cell in line])
    for turn in range(2 * site.iterations - 1):
        if turn % 2 == 0:
            sums = [sum(mix[i][j] for i in range(S)) for j in range(S)]
            mix = [[mix[i][j] / (sums[j] + site.eps) for j in range(S)] for i in range(S)]
        else:
            mix = [[cell / (sum(line) + site.eps) for cell in line] for line in mix]
    return pre, post, mix


@given(
    rows=st.integers(1, 5),
    streams=st.integers(1, 4),
    width=st.sampled_from([3, 16, 40]),
    iterations=st.sampled_from([1, 2, 20]),
    seed=st.integers(0, 2**16),
)
@ANY
def test_streams_are_read_and_written_by_the_written_rule(
    rows: int, streams: int, width: int, iterations: int, seed: int
) -> None:
    site = attrs.evolve(mixer(streams, width, seed), iterations=iterations)
    x, y = normal(rows, streams, width, seed=seed + 2), normal(rows, width, seed=seed + 3)
    for read_path, write_path in ((read_streams_ops, write_streams_ops), (read_streams, write_streams)):
        read = read_path(x, site)
        after = numbers(write_path(x, y, read))
        for r, row in enumerate(numbers(x)):
            pre, post, mix = mixed(row, site)
            assert numbers(read.post[r]) == pytest.approx(post, abs=1e-5)
            assert [v for line in numbers(read.mix[r]) for v in line] == pytest.approx(
                [v for line in mix for v in line], abs=1e-5
            )
            u = [sum(pre[j] * row[j][i] for j in range(streams)) for i in range(width)]
            assert numbers(read.u[r]) == pytest.approx(u, abs=2e-5)
            for k in range(streams):
                want = [
                    post[k] * numbers(y)[r][i] + sum(mix[j][k] * row[j][i] for j in range(streams))
                    for i in range(width)
                ]
                assert after[r][k] == pytest.approx(want, abs=2e-5)


@given(rows=st.integers(1, 4), streams=st.integers(1, 4), width=st.sampled_from([3, 16, 40]), seed=st.integers(0, 999))
@ANY
def test_streams_are_merged_by_sigmoids(rows: int, streams: int, width: int, seed: int) -> None:
    site = mixer(streams, width, seed, merging=True)
    x = normal(rows, streams, width, seed=seed + 5)
    for path in (merge_streams_ops, merge_streams):
        got = numbers(path(x, site))
        for r, row in enumerate(numbers(x)):
            pre, _, _ = mixed(row, site)
            want = [sum(pre[j] * row[j][i] for j in range(streams)) for i in range(width)]
            assert got[r] == pytest.approx(want, abs=2e-5)


def test_balanced_matrices_have_unit_columns_and_nearly_unit_rows() -> None:
    """The last step divides by column sums, over the first index."""
    made = balanced_ops(2 * normal(50, 4, 4, seed=1), 20, 1e-6)
    assert close(made.sum(axis=-2), mx.ones((50, 4)), 5e-6)
    assert float(mx.abs(made.sum(axis=-1) - 1).max()) < 0.05
    once = balanced_ops(2 * normal(50, 4, 4, seed=1), 1, 1e-6)
    assert close(once.sum(axis=-2), mx.ones((50, 4)), 1e-4), "but for eps"
    assert float(mx.abs(once.sum(axis=-1) - 1).max()) > 0.1


@NATIVE
def test_rows_alone_threads_and_variants_give_the_same_bits_of_streams() -> None:
    """At the published width; a row beside 36 others, and alone."""
    site, head = mixer(4, 4096, 1), mixer(4, 4096, 2, merging=True)
    x, y = normal(37, 4, 4096, seed=3), normal(37, 4096, seed=4)
    want: list[mx.array] | None = None
    for variant in native.variants():
        native.choose(variant)
        for threads in (1, 3):
            native.set_threads(threads)
            for rows in (slice(0, 37), slice(36, 37), slice(2, 7)):
                read = read_streams(x[rows], site)
                made = [
                    read.u,
                    read.post,
                    read.mix,
                    write_streams(x[rows], y[rows], read),
                    merge_streams(x[rows], head),
                ]
                want = made if want is None else want
                assert all(mx.array_equal(a, b[rows]) for a, b in zip(made, want, strict=True)), (variant, rows)


@NATIVE
def test_shapes_that_do_not_fit_are_refused() -> None:
    x = normal(2, 4, 16, seed=0)
    with pytest.raises(ValueError, match=r"\[streams\] fn must be \(24, 64\)"):
        cpu_streams.read_streams_cpu(x, mixer(4, 8))
    with pytest.raises(ValueError, match=r"\[streams\] y must be \(2, 16\)"):
        write_streams(x, normal(1, 16, seed=1), read_streams(x, mixer(4, 16)))
    with pytest.raises(ValueError, match=r"\[row_products\] w must be \(out, 16\)"):
        cpu_streams.row_products_cpu(x, normal(3, 8, seed=1))


@NATIVE
@given(
    rows=st.integers(0, 21),
    width=st.sampled_from([1, 15, 16, 50, 64]),
    out=st.sampled_from([1, 3, 4, 33, 70]),
    seed=st.integers(0, 999),
)
@ANY
def test_plain_products_are_close_and_each_row_is_alone(rows: int, width: int, out: int, seed: int) -> None:
    x, w = normal(rows, width, seed=seed), normal(out, width, seed=seed + 1)
    first = None
    for variant in native.variants():
        native.choose(variant)
        got = cpu_streams.row_products_cpu(x, w)
        assert close(got, row_products_ops(x, w), 5e-5)
        first = got if first is None else first
        assert mx.array_equal(got, first), variant
        if rows:
            assert mx.array_equal(cpu_streams.row_products_cpu(x[rows - 1 :], w), got[rows - 1 :])
    assert first is not None
    assert mx.array_equal(row_products(x, Dense(weight=w)), first)


def test_a_matrix_is_split_along_its_outputs() -> None:
    """Each part is a matrix of its own, which multiplies as its rows of the whole do."""
    dense = normal(6, 128, seed=1)
    codes, scales, biases = mx.quantize(dense, group_size=64, bits=4)
    packed = Quantized(codes=codes, scales=scales, biases=biases, bits=4, group_size=64)
    x = normal(2, 128, seed=2)
    for whole in (Dense(weight=dense), packed):
        parts = split_rows(whole, 3)
        joined = mx.concatenate([linear_ops(x, part) for part in parts], axis=-1)
        assert close(joined, linear_ops(x, whole), 1e-5)
        with pytest.raises(ValueError, match=r"\[split_rows\] parts must divide 6 outputs but got 4"):
            split_rows(whole, 4)


def pooled(values: Any, gates: Any, offsets: Any, before: Any, first: int) -> list[list[float]]:
    """Return entries by the written rule, a channel at a time, in double precision."""
    out, rate = [], len(offsets)
    for n, (rows, scores) in enumerate(zip(values, gates, strict=True)):
        width = len(rows[0])
        dim = width // 2 if before else width
        entry = []
        for c in range(dim):
            own = c + width - dim
            slots = [(scores[r][own] + offsets[r][own], rows[r][own]) for r in range(rate)]
            if before and (n or first):
                old_values, old_gates = (values[n - 1], gates[n - 1]) if n else before
                slots += [(old_gates[r][c] + offsets[r][c], old_values[r][c]) for r in range(rate)]
            top = max(gate for gate, _ in slots)
            weights = [math.exp(gate - top) for gate, _ in slots]
            entry.append(sum(w * v for w, (_, v) in zip(weights, slots, strict=True)) / sum(weights))
        out.append(entry)
    return out


@NATIVE
@given(
    count=st.integers(1, 4),
    rate=st.sampled_from([2, 4, 9]),
    half=st.sampled_from([3, 16, 20]),
    overlapping=st.booleans(),
    first=st.integers(0, 2),
    seed=st.integers(0, 999),
)
@ANY
def test_windows_are_pooled_by_the_written_rule(
    *, count: int, rate: int, half: int, overlapping: bool, first: int, seed: int
) -> None:
    width = 2 * half
    values, gates = normal(count, rate, width, seed=seed), 3 * normal(count, rate, width, seed=seed + 1)
    offsets = normal(rate, width, seed=seed + 2)
    before = (normal(rate, half, seed=seed + 3), normal(rate, half, seed=seed + 4)) if overlapping else None
    plain_before = tuple(map(numbers, before)) if before else None
    want = mx.array(pooled(numbers(values), numbers(gates), numbers(offsets), plain_before, first))
    assert close(pool_windows_ops(values, gates, offsets, before, first), want)
    assert close(pool_windows(values, gates, offsets, before, first), want)
    made = None
    for variant in native.variants():
        native.choose(variant)
        got = cpu_sparse.pool_windows_cpu(values, gates, offsets, before, first)
        made = got if made is None else made
        assert mx.array_equal(got, made), variant
        earlier = before if count == 1 or before is None else (values[-2, :, :half], gates[-2, :, :half])
        last = cpu_sparse.pool_windows_cpu(values[-1:], gates[-1:], offsets, earlier, first + count - 1)
        assert mx.array_equal(last, got[-1:]), "a window alone is the same"


def turned(row: list[float], position: int, frequencies: list[float]) -> list[float]:
    """Turn neighbouring pairs of the last features as complex numbers."""
    still = len(row) - 2 * len(frequencies)
    out = row[:still]
    for i, frequency in enumerate(frequencies):
        pair = complex(row[still + 2 * i], row[still + 2 * i + 1]) * cmath.exp(1j * position * frequency)
        out += [pair.real, pair.imag]
    return out


@given(dim=st.sampled_from([4, 6, 64]), half=st.sampled_from([1, 2]), at=st.integers(0, 5000), back=st.booleans())
@ANY
def test_the_last_features_turn_in_neighbouring_pairs(*, dim: int, half: int, at: int, back: bool) -> None:
    frequencies = default_frequencies(2 * half, 1e4)
    x, positions = normal(1, 2, 3, dim, seed=at), mx.array([[at, at + 1]], dtype=mx.int32)
    for path in (trailing_rope_ops, trailing_rope):
        got = numbers(path(x, positions, frequencies, back=back))
        for token in range(2):
            for head in range(3):
                position = (at + token) * (-1 if back else 1)
                want = turned(numbers(x)[0][token][head], position, numbers(frequencies))
                assert got[0][token][head] == pytest.approx(want, abs=1e-3 if at > 1000 else 1e-4)


def test_turning_back_undoes_turning() -> None:
    frequencies = default_frequencies(64, 1.6e5)
    x = normal(2, 5, 4, 512, seed=1)
    positions = mx.array([[0, 1, 2, 3, 4], [9000, 9001, 9002, 70000, 70001]], dtype=mx.int32)
    there = trailing_rope(x, positions, frequencies)
    assert not close(there, x, 0.5)
    assert mx.array_equal(there[..., :448], x[..., :448])
    assert close(trailing_rope(there, positions, frequencies, back=True), x, 1e-5)
    with pytest.raises(ValueError, match=r"\[trailing_rope\] at most 8 features can turn but got 64"):
        trailing_rope(x[..., :8], positions, frequencies)


@NATIVE
@pytest.mark.parametrize(("heads", "dim", "half"), [(64, 512, 32), (1, 512, 32), (3, 20, 4)])
@pytest.mark.parametrize("scaled", [None, "plain", "weighted"])
def test_heads_are_normalised_and_turned_in_one_call(heads: int, dim: int, half: int, scaled: str | None) -> None:
    """As by the two operations one after the other; bit for bit where both are native."""
    x, frequencies = normal(2, 3, heads * dim, seed=1), default_frequencies(2 * half, 1e4)
    at = mx.array([[0, 1, 2], [70, 71, 5]], dtype=mx.int32)
    weight = normal(dim, seed=2) if scaled == "weighted" else None
    options: dict[str, Any] = {"heads": heads, "eps": None if scaled is None else 1e-6, "weight": weight}
    want = turned_heads_ops(x, at, frequencies, **options)
    parts = x.reshape(2, 3, heads, dim)
    steps = parts if scaled is None else rms_norm(parts, weight, 1e-6)
    for variant in native.variants():
        native.choose(variant)
        got = turned_heads(x, at, frequencies, **options)
        assert close(got, want)
        assert mx.array_equal(got, trailing_rope(steps, at, frequencies)), variant
        flat = turned_heads(parts, at, frequencies, flat=True, back=True, **options)
        assert mx.array_equal(flat.reshape(parts.shape), trailing_rope(steps, at, frequencies, back=True)), variant


def test_a_second_branch_is_added_before_streams_are_written() -> None:
    site = mixer(4, 40, 3)
    x, y, also = normal(2, 3, 4, 40, seed=1), normal(2, 3, 40, seed=2), normal(2, 3, 40, seed=3)
    read = read_streams(x, site)
    for path in (write_streams, write_streams_ops):
        assert close(path(x, y, read, also), write_streams_ops(x, y + also, read), 1e-6)
    with pytest.raises(ValueError, match="streams"):
        write_streams(x, y, read, also[:1, :1])


@NATIVE
@pytest.mark.parametrize("rows", [(1, 1), (1, 3), (2, 2)])
def test_blocks_of_a_row_meet_matrices_in_turn(rows: tuple[int, int]) -> None:
    parts = [packed(48, 128, 4, 64, seed) for seed in range(3)]
    x = normal(*rows, 3 * 128, seed=9)
    want = mx.concatenate([cpu.linear_cpu(x[..., i * 128 : (i + 1) * 128], w) for i, w in enumerate(parts)], axis=-1)
    got = block_linear(x, parts)
    assert (got.shape, bool(mx.array_equal(got, want))) == ((*rows, 144), True)
    with pytest.raises(ValueError, match=r"\[block_linear\] x must be one row of 384"):
        cpu.block_row_cpu(normal(1, 128, seed=1), parts)


def test_scaled_frequencies_divide_slow_pairs_and_keep_fast_ones() -> None:
    """At the published values: pairs below the ramp turn as they were, those above it 16 times slower."""
    dims, theta, original = 64, 1.6e5, 65_536
    plain = numbers(default_frequencies(dims, theta))
    got = numbers(yarn_frequencies(dims, theta, factor=16.0, original=original, beta_fast=32.0, beta_slow=1.0))
    turns = [original * frequency / (2 * math.pi) for frequency in plain]
    low = dims * math.log(original / (32 * 2 * math.pi)) / (2 * math.log(theta))
    high = dims * math.log(original / (2 * math.pi)) / (2 * math.log(theta))
    assert 15 < low < high < 26
    for i, (before, after) in enumerate(zip(plain, got, strict=True)):
        ramp = min(1.0, max(0.0, (i - math.floor(low)) / (math.ceil(high) - math.floor(low))))
        assert after == pytest.approx(before / 16 * ramp + before * (1 - ramp), rel=2**-23)
        assert turns[i] < 1.1 or after > before / 16 * 1.01
    assert numbers(
        yarn_frequencies(64, 1e4, factor=1.0, original=4096, beta_fast=32.0, beta_slow=1.0)
    ) == pytest.approx(numbers(default_frequencies(64, 1e4)), rel=1e-6)


def test_clamped_gates_and_ups_are_bounded_before_the_product() -> None:
    """Gates have no lower bound: far below zero silu is nothing anyway."""
    gate, up = mx.array([-30.0, -2.0, 0.5, 3.0, 3.0]), mx.array([1.0, 5.0, -7.0, 0.5, -1.0])
    got = ClampedSwiglu(1.5)(gate, up)
    want = silu_ops(mx.array([-30.0, -2.0, 0.5, 1.5, 1.5])) * mx.array([1.0, 1.5, -1.5, 0.5, -1.0])
    assert mx.array_equal(got, want)
    assert not mx.allclose(got, swiglu(gate, up))


def packed(out: int, width: int, bits: int, group: int, seed: int) -> Quantized:
    codes, scales, biases = mx.quantize(normal(out, width, seed=seed), group_size=group, bits=bits)
    return Quantized(codes=codes, scales=scales, biases=biases, bits=bits, group_size=group)


@NATIVE
@pytest.mark.parametrize("limit", [0.25, 1.0, 10.0])
def test_native_blocks_clamp(limit: float) -> None:
    """Two-bit gates in groups of 32 beside ups and downs in groups of 64, as a published layer has them."""
    gate, up, down = packed(64, 128, 2, 32, 1), packed(64, 128, 2, 64, 2), packed(128, 64, 2, 64, 3)
    x = 2 * normal(5, 128, seed=4)
    kind = ClampedSwiglu(limit)
    want = gated_linear_ops(x, gate, up, down, kind)
    first = None
    for variant in native.variants():
        native.choose(variant)
        got = cpu.gated_linear_cpu(x, gate, up, down, kind)
        assert float(mx.abs(got - want).max()) < 2e-5 * (1 + float(mx.abs(want).max())), variant
        first = got if first is None else first
        assert mx.array_equal(got, first), variant
    free = gated_linear_ops(x, gate, up, down, swiglu)
    assert not mx.allclose(want, free, rtol=1e-3) or limit == 10.0
    assert first is not None
    assert mx.array_equal(gated_linear(x, gate, up, down, kind), first)
