"""Every variant of the native products equals the contract bit for bit, whatever the shape, threads, batch and slot."""

import ctypes
import mmap

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mference_kernels import contract, cpu, native
from mference_kernels.quant import Quantized, linear_ops, rows_ops

pytestmark = pytest.mark.usefixtures("restored")
LAYOUTS = [(bits, group) for bits in (2, 4, 8) for group in (32, 64, 128)]
DTYPES = (mx.bfloat16, mx.float32, mx.float16)


def matrix(out: int, width: int, bits: int, group: int, seed: int = 0, dtype: mx.Dtype = mx.bfloat16) -> Quantized:
    keys = mx.random.split(mx.random.key(seed), 3)
    words = mx.random.randint(-(2**31), 2**31 - 1, (out, width * bits // 32), key=keys[0]).view(mx.uint32)
    scales = mx.random.normal((out, width // group), key=keys[1]).astype(dtype)
    biases = mx.random.normal((out, width // group), key=keys[2]).astype(dtype)
    return Quantized(codes=words, scales=scales, biases=biases, bits=bits, group_size=group)


def inputs(rows: int, width: int, seed: int = 0) -> mx.array:
    """Rows whose values span many binades, with some outliers and zeros."""
    keys = mx.random.split(mx.random.key(seed + 1000), 3)
    x = mx.random.normal((rows, width), key=keys[0]) * mx.exp(4 * mx.random.normal((rows, width), key=keys[1]))
    return mx.where(mx.random.uniform(shape=x.shape, key=keys[2]) < 0.1, 0.0, x)


def expected(x: mx.array, w: Quantized) -> mx.array:
    lists = [array.tolist() for array in (w.codes, w.scales, w.biases)]
    return mx.array(contract.products(lists, x.tolist(), w.bits, w.group_size), dtype=mx.float32)


def same_bits(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a.view(mx.int32), b.view(mx.int32)))


def test_every_machine_has_the_portable_variant() -> None:
    assert native.variants()[-1] == "portable"


@given(
    layout=st.sampled_from(LAYOUTS),
    groups=st.integers(1, 35),
    out=st.integers(1, 19),
    rows=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_variants_equal_the_contract(
    layout: tuple[int, int], groups: int, out: int, rows: int, dtype: mx.Dtype, seed: int
) -> None:
    bits, group = layout
    groups = max(1, min(groups, 4000 // (rows * out)))
    w, x = matrix(out, groups * group, bits, group, seed, dtype), inputs(rows, groups * group, seed)
    want = expected(x, w)
    for variant in native.variants():
        native.choose(variant)
        assert same_bits(cpu.linear_cpu(x, w), want), variant


@pytest.mark.parametrize(("bits", "group"), LAYOUTS)
@pytest.mark.parametrize("width", [2816, 704 + 64, 128])
def test_real_widths_equal_the_contract(bits: int, group: int, width: int) -> None:
    w, x = matrix(3, width, bits, group), inputs(2, width)
    want = expected(x, w)
    for variant in native.variants():
        native.choose(variant)
        assert same_bits(cpu.linear_cpu(x, w), want), variant


@pytest.mark.parametrize(("bits", "group"), LAYOUTS)
def test_variants_agree_on_many_rows_and_outputs(bits: int, group: int) -> None:
    w, x = matrix(301, 17 * group, bits, group), inputs(150, 17 * group)
    native.choose("portable")
    want = cpu.linear_cpu(x, w)
    for variant in native.variants():
        native.choose(variant)
        assert same_bits(cpu.linear_cpu(x, w), want), variant


def test_threads_and_batch_change_no_bit() -> None:
    """A row's result is the same alone and among others, on one thread and on many."""
    w, x = matrix(500, 1408, 4, 64), inputs(70, 1408)
    for variant in native.variants():
        native.choose(variant)
        native.set_threads(1)
        want = cpu.linear_cpu(x, w)
        for threads in (2, 3, 8):
            native.set_threads(threads)
            assert same_bits(cpu.linear_cpu(x, w), want)
        for row in (0, 1, 33, 69):
            assert same_bits(cpu.linear_cpu(x[row : row + 1], w), want[row : row + 1])
        for start, stop in ((0, 3), (5, 12), (30, 47)):
            assert same_bits(cpu.linear_cpu(x[start:stop], w), want[start:stop])


def test_extreme_values_equal_the_contract() -> None:
    """Steps at both ends of the range, integers that round up to the limit, and a row of zeros."""
    limit = [8355711.0, 8355710.5, -8355711.0, 4194301.5, 0.5, 1.5, -2.5, 0.0] * 4
    tiny = [1e-40, -3e-39, 1e-45, 2e-38] * 8
    large = [3e38, -1e38, 1e30, 5.0] * 8
    x = mx.array([[*limit, *tiny], [*large, *[0.0] * 32], [0.0] * 64, [*[8355711.5] * 32, *tiny]], dtype=mx.float32)
    w = matrix(4, 64, 4, 32, seed=3)
    want = expected(x, w)
    for variant in native.variants():
        native.choose(variant)
        assert same_bits(cpu.linear_cpu(x, w), want), variant


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x = mx.ones((1, 256))
    x[0, 77] = bad
    for variant in native.variants():
        native.choose(variant)
        assert bool(mx.isnan(cpu.linear_cpu(x, matrix(5, 256, 4, 64))).all())


@pytest.mark.parametrize(("bits", "group"), LAYOUTS)
def test_results_are_close_to_exact_products(bits: int, group: int) -> None:
    """Within float32 rounding: an error below 1e-6 of the output, as root mean squares."""
    w = matrix(64, 1408 // group * group, bits, group, dtype=mx.float32)
    x = mx.random.normal((3, 1408 // group * group), key=mx.random.key(5))
    exact = linear_ops(x, w)
    error = cpu.linear_cpu(x, w) - exact
    assert float(mx.sqrt(mx.mean(error * error) / mx.mean(exact * exact))) < 1e-6


def test_several_matrices_in_one_call_equal_each_alone() -> None:
    x = inputs(5, 1024).astype(mx.bfloat16).reshape(1, 5, 1024)
    ws = [matrix(40, 1024, 4, 64), matrix(7, 1024, 8, 64, 1), matrix(200, 1024, 8, 64, 2), matrix(9, 1024, 2, 128, 3)]
    for y, w in zip(cpu.linears_cpu(x, ws), ws, strict=True):
        assert y.dtype == mx.bfloat16
        assert y.shape == (1, 5, w.codes.shape[0])
        assert mx.array_equal(y, cpu.linear_cpu(x, w))


@pytest.mark.parametrize(("bits", "group"), LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_table_rows_equal_the_definition(bits: int, group: int, dtype: mx.Dtype) -> None:
    w = matrix(50, 512, bits, group, dtype=dtype)
    ids = mx.array([[3, 49], [0, 3]])
    wide = Quantized(
        codes=w.codes,
        scales=w.scales.astype(mx.float32),
        biases=w.biases.astype(mx.float32),
        bits=bits,
        group_size=group,
    )
    assert mx.allclose(cpu.rows_cpu(ids, w), rows_ops(ids, wide), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="out of range"):
        cpu.rows_cpu(mx.array([50]), w)


@pytest.mark.parametrize(("bits", "group"), LAYOUTS)
def test_memory_beyond_a_matrix_is_not_read(bits: int, group: int) -> None:
    """Codes, scales and biases that end where readable memory ends, as in a mapped file; a read past it is fatal."""
    width, out = 11 * group, 3
    w, x = matrix(out, width, bits, group), inputs(3, width)
    want = cpu.linear_cpu(x, w)
    args, areas = cpu.matrix_args(w, "test"), []
    for name, array in (("codes", w.codes), ("scales", w.scales), ("biases", w.biases)):
        data = native.contents(array)
        room = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
        area = mmap.mmap(-1, room + mmap.PAGESIZE)
        area[room - len(data) : room] = data
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + room), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        setattr(args, name, start + room - len(data))
        areas.append(area)
    for variant in native.variants():
        native.choose(variant)
        y = native.Output((3, out))
        outputs = (ctypes.c_void_p * 1)(y.address)
        native.check(native.library().mf_linear(ctypes.byref(args), 1, native.address(x), 3, outputs), "test")
        assert same_bits(y.array(), want)


@pytest.mark.parametrize("out", [1, 16 << 10, 16385, 40000])
def test_small_and_large_results_are_complete(out: int) -> None:
    """Results are copied below a size and written in place above it; both hold every value and stay as they are."""
    w, x = matrix(out, 64, 4, 64), inputs(1, 64)
    first = cpu.linear_cpu(x, w)
    others = [cpu.linear_cpu(inputs(1, 64, seed), w) for seed in range(1, 4)]
    assert same_bits(first, cpu.linear_cpu(x, w))
    assert not any(mx.array_equal(first, other) for other in others)
    assert same_bits(first[:, -1:], expected(x, part(w, out - 1)))


def part(w: Quantized, row: int) -> Quantized:
    return Quantized(
        codes=w.codes[row:], scales=w.scales[row:], biases=w.biases[row:], bits=w.bits, group_size=w.group_size
    )


def test_bad_arguments_are_refused() -> None:
    w = matrix(4, 128, 4, 64)
    with pytest.raises(ValueError, match=r"\[linear\] x must end in 128"):
        cpu.linear_cpu(mx.ones((1, 64)), w)
    odd = Quantized(codes=w.codes, scales=w.scales[:, :1], biases=w.biases[:, :1], bits=4, group_size=64)
    with pytest.raises(ValueError, match="companions"):
        cpu.linear_cpu(mx.ones((1, 128)), odd)
    six = Quantized(codes=w.codes, scales=w.scales, biases=w.biases, bits=6, group_size=64)
    assert not cpu.can_multiply(six)
    with pytest.raises(ValueError, match="bits"):
        cpu.linear_cpu(mx.ones((1, 128)), six)


def test_empty_rows_give_empty_results() -> None:
    assert cpu.linear_cpu(mx.zeros((0, 128)), matrix(4, 128, 4, 64)).shape == (0, 4)
