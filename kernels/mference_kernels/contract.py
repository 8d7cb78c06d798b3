"""The numeric contract of quantised products, in plain Python: what every native variant must return, bit for bit.

docs/numerics.md says it in words. Slow on purpose: exact integers, and each float32 rounding written out.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any

LANES = 16
LARGEST = 8355711
SMALLEST_STEP = -126


def f32(value: float) -> float:
    """Round to float32, once; what overflows becomes infinite.

    Sums and products of two float32 values are computed in double precision first: with more than twice the digits
    plus two, rounding twice equals rounding once.
    """
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def integers(x: Sequence[float]) -> tuple[float, list[int]]:
    """Return the step and the integers of one group: the smallest power of two that keeps |x / step| at most 8355711.

    The integer is x / step rounded to nearest, ties to even; the step is at least 2^-126. A group holding a NaN or an
    infinity has step NaN and integers 0.
    """
    if not all(math.isfinite(value) for value in x):
        return math.nan, [0] * len(x)
    largest = max(abs(value) for value in x)
    exponent = SMALLEST_STEP
    while round(largest / 2.0**exponent) > LARGEST:
        exponent += 1
    return 2.0**exponent, [round(value / 2.0**exponent) for value in x]


def tree(lanes: Sequence[float]) -> float:
    """Sum 16 accumulators: halves, quarters, eighths, the last pair."""
    values = list(lanes)
    while len(values) > 1:
        half = len(values) // 2
        values = [f32(values[i] + values[i + half]) for i in range(half)]
    return values[0]


def product(
    codes: Sequence[int], scales: Sequence[float], biases: Sequence[float], x: Sequence[float], group_size: int
) -> float:
    """Return one output: the row's codes, scales and biases (float32 values) against inputs `x`."""
    lanes = [0.0] * LANES
    for group, (scale, bias) in enumerate(zip(scales, biases, strict=True)):
        here = slice(group * group_size, (group + 1) * group_size)
        step, whole = integers(x[here])
        words = [(value + 128) >> 8 for value in whole]
        upper = sum(code * word for code, word in zip(codes[here], words, strict=True))
        lower = sum(c * (value - 256 * word) for c, value, word in zip(codes[here], whole, words, strict=True))
        dot = f32(256 * f32(upper) + lower)
        scaled = f32(dot * f32(scale * step))
        shift = f32(bias * f32(f32(sum(whole)) * step))
        lane = group % LANES
        lanes[lane] = f32(lanes[lane] + f32(scaled + shift))
    return tree(lanes)


def unpack(words: Sequence[int], bits: int) -> list[int]:
    """Return the codes of packed 32-bit words, lowest bits first."""
    mask = (1 << bits) - 1
    return [word >> shift & mask for word in words for shift in range(0, 32, bits)]


def products(matrix: Any, x: Any, bits: int, group_size: int) -> list[list[float]]:
    """Return rows x (R, in) times a matrix (packed words (out, in * bits / 32), scales, biases), transposed: (R, out)."""
    rows = [(unpack(words, bits), scales, biases) for words, scales, biases in zip(*matrix, strict=True)]
    return [[product(*row, values, group_size) for row in rows] for values in x]
