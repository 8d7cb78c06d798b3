"""Programs: each operation has the bits of the kernel of its name, whatever the variant, the rows of a call and the chain."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mference_kernels import cpu, native
from mference_kernels.activations import geglu, softcap, softcap_ops, swiglu
from mference_kernels.experts import ExpertWeights, gated_linear_ops, weighted_sum
from mference_kernels.measure import matrix
from mference_kernels.native_program import Timeline
from mference_kernels.program import Builder, Program, Register, compiled
from mference_kernels.quant import Dense, Quantized
from mference_kernels.rope import default_frequencies

pytestmark = pytest.mark.usefixtures("restored")
H, HEADS, GROUPS, D = 128, 4, 2, 32
EPS = 1e-6
STORED = (mx.float32, mx.bfloat16, mx.float16)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def small(out: int, width: int, bits: int = 4) -> Quantized:
    return matrix(out, width, bits, 32)


def run(write: Callable[[Builder], Sequence[Register]], *inputs: mx.array, **options: Any) -> list[mx.array]:
    program = compiled(write)
    assert program.runs(*inputs)
    return program(*inputs, **options)


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("dtype", STORED)
def test_operations_on_rows(rows: int, dtype: mx.Dtype) -> None:
    x, y = normal(2, rows, H), normal(2, rows, H, seed=1)
    weight, one = normal(H, seed=2).astype(dtype), normal(1, seed=3).astype(dtype)

    def write(p: Builder) -> tuple[Register, ...]:
        a, b = p.input(H), p.input(H)
        return (
            p.norm(a, weight, EPS),
            p.norm(a, weight[:D], EPS, HEADS),
            p.add(a, b),
            p.multiply(a, b),
            p.scale(a, weight, 0.3),
            p.scale(a, one),
            p.part(a, HEADS, 8, 5),
        )

    got = run(write, x, y)
    wide = weight.astype(mx.float32)
    want = [
        cpu.rms_norm_cpu(x, weight, EPS),
        cpu.rms_norm_cpu(x.reshape(2, rows, HEADS, D), weight[:D], EPS).reshape(x.shape),
        x + y,
        x * y,
        (x * wide) * mx.array(0.3),
        x * one.astype(mx.float32),
        x.reshape(2, rows, HEADS, D)[..., 8:13].reshape(2, rows, -1),
    ]
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        assert mx.array_equal(a, b), index


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_and_feed_forward_blocks(rows: int) -> None:
    x, ws = normal(1, rows, H), [small(H, H), small(48, H, 8), small(H, H, 2)]
    block = small(64, H), small(64, H), small(H, 64)

    def write(p: Builder) -> tuple[Register, ...]:
        a = p.input(H)
        return (*p.linears(a, ws), p.gated(a, *block, geglu), p.gated(p.linear(a, ws[0]), *block, swiglu))

    *products, gated, other = run(write, x)
    assert all(mx.array_equal(a, b) for a, b in zip(products, cpu.linears_cpu(x, ws), strict=True))
    assert mx.array_equal(gated, cpu.gated_linear_cpu(x, *block, geglu))
    assert mx.array_equal(other, cpu.gated_linear_cpu(products[0], *block, swiglu))
    plain = [Dense(weight=cpu.rows_cpu(mx.arange(w.codes.shape[0]), w)) for w in block]
    assert mx.allclose(gated, gated_linear_ops(x, *plain, geglu), rtol=1e-4, atol=1e-5)


@given(value=st.floats(-300, 300, width=32), cap=st.sampled_from([1.0, 30.0, 50.0]))
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_caps_keep_the_digits_of_small_values(value: float, cap: float) -> None:
    x = mx.array([value, -value, value * 1e-6, value * 1e-20, 0.0])
    got, want = softcap(x, cap), softcap_ops(x, cap)
    assert mx.allclose(got, want, rtol=1e-6, atol=0)
    assert mx.array_equal(got[:1], -got[1:2])


def test_gates_and_caps_have_the_same_bits_everywhere() -> None:
    x, gate = normal(3, 7, H), normal(3, 7, H, seed=1) * 20

    def write(p: Builder) -> tuple[Register, ...]:
        a, b = p.input(H), p.input(H)
        return p.sigmoid_gate(a, b), p.softcap(a, 30.0)

    first: list[mx.array] | None = None
    for variant in native.variants():
        native.choose(variant)
        got = run(write, gate, x)
        assert mx.allclose(got[0], mx.sigmoid(gate) * x, rtol=1e-5, atol=1e-7)
        assert mx.array_equal(got[1], softcap(gate, 30.0))
        first = first or got
        assert all(mx.array_equal(a, b) for a, b in zip(got, first, strict=True)), variant


class Attending:
    """A program that turns, appends and attends, beside the same call by call on rows in order."""

    def __init__(self, dtype: mx.Dtype, window: int | None, capacity: int) -> None:
        self.dtype, self.window, self.frequencies = dtype, window, default_frequencies(D, 1e4)
        self.rings = [mx.zeros((GROUPS, capacity, D), dtype) for _ in range(2)]
        mx.eval(self.rings)
        self.k, self.v = (mx.zeros((GROUPS, 0, D), dtype) for _ in range(2))

        def write(p: Builder) -> tuple[Register]:
            q, k, v = p.input(HEADS * D), p.input(GROUPS * D), p.input(GROUPS * D)
            q, k = p.rotate(q, self.frequencies, HEADS), p.rotate(k, self.frequencies, GROUPS)
            return (p.attend(q, k, v, heads=HEADS, groups=GROUPS, scale=0.2, window=window),)

        self.program: Program = compiled(write)

    @property
    def length(self) -> int:
        return int(self.k.shape[1])

    def line(self, count: int) -> Timeline:
        return Timeline(self.rings[0], self.rings[1], self.length, count)

    def want(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """Return the rows (L, HEADS * D) of tokens (L, width) that come next, and remember them."""
        start, L = self.length, q.shape[0]
        at = mx.arange(start, start + L)[None]

        def heads(x: mx.array) -> mx.array:
            return x.reshape(1, L, -1, D).swapaxes(1, 2)

        q, k = (cpu.rope_cpu(heads(x), at, self.frequencies)[0] for x in (q, k))
        self.k = mx.concatenate([self.k, k.astype(self.dtype)], axis=1)
        self.v = mx.concatenate([self.v, heads(v)[0].astype(self.dtype)], axis=1)
        mixed = cpu.attention_cpu(q, self.k, self.v, scale=0.2, query_start=start, key_start=0, window=self.window)
        return mixed.swapaxes(0, 1).reshape(L, -1)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(("window", "capacity"), [(None, 64), (9, 20)])
def test_rows_are_appended_where_they_belong_and_attended(dtype: mx.Dtype, window: int | None, capacity: int) -> None:
    """Two timelines at different places, padding, rings that wrap: each has the bits it has alone and in order."""
    lines = [Attending(dtype, window, capacity) for _ in range(2)]
    for seed, lengths in enumerate(((3, 1), (1, 1), (5, 12), (1, 1), (9, 2), (1, 1), (12, 12))):
        L = max(lengths)
        q, k, v = (
            normal(2, L, heads * D, seed=10 * seed + heads + i) for i, heads in enumerate((HEADS, GROUPS, GROUPS))
        )
        positions = mx.array([[line.length + i for i in range(L)] for line in lines])
        places = [line.line(count) for line, count in zip(lines, lengths, strict=True)]
        (got,) = lines[0].program(q, k, v, positions=positions, timelines=places)
        for b, (line, count) in enumerate(zip(lines, lengths, strict=True)):
            want = line.want(q[b, :count], k[b, :count], v[b, :count])
            assert mx.array_equal(got[b, :count], want), (seed, b)
            assert mx.array_equal(got[b, count:], mx.zeros_like(got[b, count:]))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_stored_rows_are_rounded_as_the_library_rounds(dtype: mx.Dtype) -> None:
    """To nearest, ties to even; subnormal, largest, infinite and undefined values too."""
    key = mx.random.key(5)
    spread = mx.random.normal((6, GROUPS * D), key=key) * 2.0 ** (mx.arange(6 * GROUPS * D).reshape(6, -1) % 60 - 35.0)
    special = mx.array(
        [0.0, -0.0, 65504, 65519.9, 65520, 3e38, -3e38, 6e-8, 2.9e-8, 3e-8, 6.1e-5, mx.inf, -mx.inf, mx.nan]
    )
    v = mx.concatenate([spread, mx.pad(special, (0, GROUPS * D - special.size))[None]])
    one = Attending(dtype, None, 16)
    one.program(
        normal(1, 7, HEADS * D),
        normal(1, 7, GROUPS * D),
        v[None],
        positions=mx.arange(7)[None],
        timelines=[one.line(7)],
    )
    got = one.rings[1][:, :7].swapaxes(0, 1).reshape(7, -1)
    want = v.astype(dtype)
    assert mx.array_equal(got, want, equal_nan=True)
    assert mx.array_equal(
        mx.signbit(got) if hasattr(mx, "signbit") else got < 0, mx.signbit(want) if hasattr(mx, "signbit") else want < 0
    )


def test_registers_share_memory_only_when_they_may() -> None:
    """A long program of few live rows needs few; its result is that of single steps."""
    ws = [small(H, H) for _ in range(12)]

    def write(p: Builder) -> tuple[Register]:
        x = first = p.input(H)
        for w in ws:
            x = p.add(p.norm(p.linear(x, w), None, EPS), first)
        return (x,)

    program, x = compiled(write), normal(1, 4, H)
    assert program.args is not None
    assert program.args.row_floats <= 3 * H
    want = x
    for w in ws:
        want = cpu.rms_norm_cpu(cpu.linear_cpu(want, w), None, EPS) + x
    assert mx.array_equal(program(x)[0], want)


def test_what_kernels_do_not_know_never_runs() -> None:
    dense = Dense(weight=normal(H, H))
    assert not compiled(lambda p: (p.linear(p.input(H), dense),)).runs()
    plain = compiled(lambda p: (p.gated(p.input(H), small(64, H), small(64, H), small(H, 64), lambda g, u: g * u),))
    assert not plain.runs()
    ready = compiled(lambda p: (p.add(p.input(H), p.input(H)),))
    assert ready.runs(normal(1, H))
    assert not ready.runs(normal(1, H).astype(mx.bfloat16))


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda p: (p.add(p.input(H), p.input(D)),), "widths must be equal"),
        (lambda p: (p.norm(p.input(H), normal(D), EPS),), "weight must be"),
        (lambda p: (p.norm(p.input(H), None, EPS, 3),), "cannot be 3 parts"),
        (lambda p: (p.linear(p.input(D), small(H, H)),), "must take 32 values"),
        (lambda p: (p.part(p.input(H), HEADS, 30, 3),), "has no 30 to 33"),
        (lambda p: (p.input(H),), "must be computed"),
        (lambda p: p.choose(p.input(H), H + 1, softmax=True, renormalise=True), "cannot choose 129"),
    ],
)
def test_programs_that_cannot_be_meant_are_refused(write: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        compiled(write)


def test_arguments_that_do_not_fit_are_refused() -> None:
    one = Attending(mx.float32, None, 4)
    rows = [normal(1, 5, width) for width in (HEADS * D, GROUPS * D, GROUPS * D)]
    with pytest.raises(ValueError, match="timelines must be"):
        one.program(*rows, positions=mx.arange(5)[None])
    with pytest.raises(ValueError, match="positions must be"):
        one.program(*rows, timelines=[one.line(5)])
    with pytest.raises(ValueError, match="shapes do not fit"):
        one.program(*rows, positions=mx.arange(5)[None], timelines=[one.line(5)])
    with pytest.raises(ValueError, match="inputs must be"):
        one.program(rows[0], positions=mx.arange(5)[None], timelines=[one.line(5)])


def experts_of(count: int) -> ExpertWeights:
    gate, up = (matrix(64, H, 4, 32, (count,)) for _ in range(2))
    return ExpertWeights(gate=gate, up=up, down=matrix(H, 64, 4, 32, (count,)), dtype=mx.float32)


def test_weighted_sums_take_rows_of_any_shape() -> None:
    y, weights = normal(6, 3, H), normal(2, 3, 3)
    assert mx.array_equal(weighted_sum(y, weights).reshape(6, H), weighted_sum(y, weights.reshape(6, 3)))
