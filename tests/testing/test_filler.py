"""Seeded values: uniform codes, scales that keep a product's size, nothing repeated row by row."""

import struct

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mference_core.errors import UsageError
from mference_core.tensors import Quant
from mference_core.testing.filler import BLOCK_BYTES, Filler, encode

FLOATS = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


@given(st.floats(-(2.0**15), 2.0**15, width=32), st.sampled_from(list(FLOATS)))
def test_floats_are_rounded_as_the_array_library_rounds(value: float, dtype: str) -> None:
    expected = mx.array([value], dtype=mx.float32).astype(FLOATS[dtype])
    assert encode(value, dtype) == bytes(memoryview(expected.view(mx.uint8)))  # type: ignore[arg-type]


def test_an_integer_dtype_has_no_floats() -> None:
    with pytest.raises(UsageError, match="float dtype is I64"):
        encode(1.0, "I64")


def floats(data: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("columns", [64, 704, 2816, 8192])
def test_weights_have_mean_0_and_a_variance_near_1_over_columns(bits: int, columns: int) -> None:
    """One bias to a scale, and from -half to +half of the range: the mean of uniform codes cancels."""
    filler, quant, size = Filler(1), Quant(bits=bits, group_size=64), 40_000
    scales, biases = (
        floats(b"".join(filler.companion("a", kind, quant, columns, size))) for kind in ("scales", "biases")
    )
    half = ((1 << bits) - 1) / 2
    assert all(scale > 0 and abs(bias / scale + half) <= half / 256 for scale, bias in zip(scales, biases, strict=True))
    spread = ((1 << bits) ** 2 - 1) / 12
    variance = sum(scale**2 for scale in scales) / len(scales) * spread
    assert 0.48 <= variance * columns <= 2.05
    assert len(set(scales)) == 8


def test_codes_are_uniform() -> None:
    counts = [0] * 256
    for byte in b"".join(Filler(0).codes("a", 1 << 20)):
        counts[byte] += 1
    assert max(abs(count - 4096) for count in counts) < 6 * 4096**0.5


def test_no_two_rows_of_a_large_table_are_equal() -> None:
    """A block repeats at another byte of each row, so equal rows, and ties between them, do not occur."""
    row = 1408
    data = b"".join(Filler(0).codes("table", 3 * BLOCK_BYTES))
    rows = [data[i : i + row] for i in range(0, len(data) - row, row)]
    assert len(set(rows)) == len(rows)


@given(st.text(max_size=8), st.integers(0, 3 * BLOCK_BYTES))
def test_pieces_have_the_size_asked_for(name: str, size: int) -> None:
    assert sum(map(len, SHARED.codes(name, size))) == size


SHARED = Filler(5)


def test_plain_tensors() -> None:
    filler = Filler(0)
    assert floats(b"".join(filler.plain("norm", "BF16", (300,), 600, 8))) == [1.0] * 300
    wide = b"".join(filler.plain("conv", "F32", (64, 48), 64 * 48 * 4, 8))
    values = struct.unpack(f"<{64 * 48}f", wide)
    assert max(map(abs, values)) <= (3 / 48) ** 0.5 * 1.001
    assert abs(sum(v * v for v in values) / len(values) * 48 - 1) < 0.1
    ids = struct.unpack("<24q", b"".join(filler.plain("table", "I64", (4, 6), 192, 16)))
    assert ids == tuple((ids[0] + i) % 16 for i in range(24))
