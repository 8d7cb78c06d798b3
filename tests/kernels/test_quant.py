"""Products with dense and packed matrices against sums in double precision."""

import math
from random import Random
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_kernels.quant import Dense, Matrix, Quantized, gathered_linear, linear, rows

WIDTHS = [(2, 64), (2, 32), (4, 64), (4, 32), (8, 64), (8, 128)]


def numbers(x: mx.array) -> list[Any]:
    return cast("list[Any]", x.tolist())


def packed(random: Random, shape: tuple[int, ...], bits: int, group: int) -> tuple[Quantized, list[Any]]:
    """Return a packed matrix, or a stack of them, and its values: code * scale + bias."""
    *lead, outputs, inputs = shape
    count = math.prod(lead)
    words: list[int] = []
    scales: list[float] = []
    biases: list[float] = []
    values: list[list[list[float]]] = []
    for _ in range(count):
        matrix = []
        for _ in range(outputs):
            codes = [random.randrange(1 << bits) for _ in range(inputs)]
            per_word = 32 // bits
            cut = [codes[start : start + per_word] for start in range(0, inputs, per_word)]
            words += [sum(code << (bits * i) for i, code in enumerate(word)) for word in cut]
            row_scales = [random.choice([-1, 1]) * random.randrange(1, 64) / 256 for _ in range(inputs // group)]
            row_biases = [random.randrange(-64, 64) / 64 for _ in range(inputs // group)]
            scales += row_scales
            biases += row_biases
            matrix.append([code * row_scales[i // group] + row_biases[i // group] for i, code in enumerate(codes)])
        values.append(matrix)
    grouped = (*lead, outputs, inputs // group)
    made = Quantized(
        codes=mx.array(words, dtype=mx.uint32).reshape(*lead, outputs, inputs * bits // 32),
        scales=mx.array(scales).reshape(grouped),
        biases=mx.array(biases).reshape(grouped),
        bits=bits,
        group_size=group,
    )
    return made, values if lead else values[0]


def product(x: list[float], matrix: list[list[float]]) -> list[float]:
    return [math.fsum(a * b for a, b in zip(x, row, strict=True)) for row in matrix]


def close(got: list[float], x: list[float], matrix: list[list[float]]) -> bool:
    """Say whether products are right to a few roundings of their largest partial sums."""
    size = product([abs(a) for a in x], [[abs(b) for b in row] for row in matrix])
    return all(
        abs(mine - exact) <= 3e-6 * largest + 1e-6
        for mine, exact, largest in zip(got, product(x, matrix), size, strict=True)
    )


@given(
    width=st.sampled_from(WIDTHS),
    length=st.integers(1, 9),
    outputs=st.sampled_from([1, 8, 33]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_packed_products_follow_the_packing(width: tuple[int, int], length: int, outputs: int, seed: int) -> None:
    random = Random(seed)  # noqa: S311  not a secret
    w, values = packed(random, (outputs, 128), *width)
    x = [[random.gauss(0, 1) for _ in range(128)] for _ in range(length)]
    for got, row in zip(numbers(linear(mx.array(x), w)), x, strict=True):
        assert close(got, row, values)
    ids = mx.array([outputs - 1, 0, outputs - 1])
    assert numbers(rows(ids, w)) == [values[outputs - 1], values[0], values[outputs - 1]]


def test_dense_products_and_rows() -> None:
    mx.random.seed(0)
    w, x = mx.random.normal((5, 40)), mx.random.normal((2, 3, 40))
    dense = Dense(weight=w)
    for batch, given_batch in zip(numbers(linear(x, dense)), numbers(x), strict=True):
        assert all(close(got, row, numbers(w)) for got, row in zip(batch, given_batch, strict=True))
    assert mx.array_equal(rows(mx.array([[4, 0]]), dense), w[mx.array([[4, 0]])])


def test_results_come_back_in_the_dtype_of_the_rows() -> None:
    """Products themselves run in the dtype of the matrix: float32 here, rounded once at the end."""
    w, _ = packed(Random(1), (8, 64), 4, 64)  # noqa: S311
    mx.random.seed(0)
    x = mx.random.normal((3, 64)).astype(mx.bfloat16)
    for matrix in (w, Dense(weight=mx.random.normal((8, 64)))):
        got = linear(x, matrix)
        assert got.dtype == mx.bfloat16
        assert mx.array_equal(got, linear(x.astype(mx.float32), matrix).astype(mx.bfloat16))


def stacks() -> list[Matrix]:
    mx.random.seed(5)
    return [packed(Random(2), (6, 16, 64), bits, 32)[0] for bits in (2, 4, 8)] + [  # noqa: S311
        Dense(weight=mx.random.normal((6, 16, 64)))
    ]


def part(w: Matrix, index: int) -> Matrix:
    """Return one matrix of a stack."""
    if isinstance(w, Dense):
        return Dense(weight=w.weight[index])
    return Quantized(
        codes=w.codes[index], scales=w.scales[index], biases=w.biases[index], bits=w.bits, group_size=w.group_size
    )


@pytest.mark.parametrize("w", stacks())
@pytest.mark.parametrize("count", [1, 3, 40])
def test_each_row_meets_the_matrix_of_its_slot(w: Matrix, count: int) -> None:
    mx.random.seed(0)
    x, slots = mx.random.normal((count, 64)), [(7 * i + 2) % 6 for i in range(count)]
    got = gathered_linear(x, mx.array(slots, dtype=mx.int32), w, mx.float32)
    assert got.shape == (count, 16)
    for i, slot in enumerate(slots):
        assert close(numbers(got[i]), numbers(x[i]), numbers(rows(mx.arange(16), part(w, slot))))


@pytest.mark.parametrize("w", stacks())
def test_a_row_alone_gets_the_same_bits_in_any_slot(w: Matrix) -> None:
    """Neither the rows beside it, nor their order, nor where its matrix lies, may change a result."""
    mx.random.seed(0)
    x, slots = mx.random.normal((40, 64)), [(5 * i + 1) % 6 for i in range(40)]
    whole = gathered_linear(x, mx.array(slots, dtype=mx.int32), w, mx.float32)
    backwards = gathered_linear(x[::-1], mx.array(slots[::-1], dtype=mx.int32), w, mx.float32)
    assert mx.array_equal(backwards[::-1], whole)
    for i in (0, 17, 39):
        small = part_stack(w, slots[i])
        for alone in (
            gathered_linear(x[i : i + 1], mx.array([slots[i]], dtype=mx.int32), w, mx.float32),
            gathered_linear(x[i : i + 1], mx.array([0], dtype=mx.int32), small, mx.float32),
        ):
            assert mx.array_equal(alone[0], whole[i])


def part_stack(w: Matrix, index: int) -> Matrix:
    """Return a stack of one."""
    one = part(w, index)
    if isinstance(one, Dense):
        return Dense(weight=one.weight[None])
    return Quantized(
        codes=one.codes[None],
        scales=one.scales[None],
        biases=one.biases[None],
        bits=one.bits,
        group_size=one.group_size,
    )


@pytest.mark.parametrize("count", [1, 3, 12])
def test_narrow_companions_are_widened_exactly(count: int) -> None:
    """bfloat16 scales and biases give the very bits of the same values kept in float32."""
    wide, _ = packed(Random(3), (6, 16, 64), 4, 64)  # noqa: S311
    narrow = Quantized(
        codes=wide.codes,
        scales=wide.scales.astype(mx.bfloat16),
        biases=wide.biases.astype(mx.bfloat16),
        bits=4,
        group_size=64,
    )
    mx.random.seed(0)
    x, slots = mx.random.normal((count, 64)), mx.arange(count, dtype=mx.int32) % 6
    assert mx.array_equal(gathered_linear(x, slots, narrow, mx.float32), gathered_linear(x, slots, wide, mx.float32))


def test_rows_of_a_batch_do_not_depend_on_each_other() -> None:
    """Linear maps too, at every number of rows: what makes chunks and batches bit-equal on CPUs."""
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("promised on CPUs only")
    mx.random.seed(0)
    x = mx.random.normal((70, 64))
    for w in (packed(Random(4), (48, 64), 4, 64)[0], packed(Random(4), (8, 64), 8, 64)[0]):  # noqa: S311
        whole = linear(x, w)
        for count in (1, 2, 3, 5, 16, 33):
            assert mx.array_equal(linear(x[:count], w), whole[:count])


def test_bytes_are_counted() -> None:
    w, _ = packed(Random(0), (2, 16, 64), 4, 32)  # noqa: S311
    assert w.nbytes == 2 * 16 * 64 // 2 + 2 * 2 * 16 * 2 * 4
    assert Dense(weight=mx.zeros((3, 5))).nbytes == 60
