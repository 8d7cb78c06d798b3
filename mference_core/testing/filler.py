"""Seeded values for tensors of any size: a few blocks of bytes, made once and repeated, so that writing costs no work.

Codes are uniform. Scales are such that a product keeps the size of its input, whatever the width, so activations stay
finite through any number of layers; vectors of floats are ones, as norms and scalars are in a trained model.
"""

import struct
from collections.abc import Callable, Iterator
from hashlib import blake2b
from math import log2, sqrt
from random import Random

from mference_core.errors import UsageError
from mference_core.tensors import Quant

# Odd, so that no two rows of a tensor are equal: a block repeats at another byte of each row.
BLOCK_BYTES = (8 << 20) - 1
SMALL_UNITS = (256 << 10) - 1
MANTISSAS = range(8, 16)
"""Scales are one of these times one power of two."""
MANTISSA_RMS = sqrt(sum(m * m for m in MANTISSAS) / len(MANTISSAS))
FLOATS = {"BF16": 2, "F16": 2, "F32": 4}


class Block:
    """Bytes repeated for ever, in units of `unit` bytes that are never cut."""

    def __init__(self, data: bytes, unit: int) -> None:
        self._view = memoryview(data)
        self._unit = unit

    def pieces(self, key: str, size: int) -> Iterator[memoryview]:
        """Yield `size` bytes that begin at a place chosen by `key`: equal keys, equal bytes."""
        units = len(self._view) // self._unit
        at = int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) % units * self._unit
        while size:
            take = min(size, len(self._view) - at)
            yield self._view[at : at + take]
            at, size = 0, size - take


class Filler:
    """Makes the bytes of tensors from one seed; a tensor's bytes depend on the seed, its name and its form only."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = Random(f"mference-synthetic {seed}")  # noqa: S311 (test data)
        self._codes = Block(self._random.randbytes(BLOCK_BYTES), 1)
        self._choices = self._random.randbytes(SMALL_UNITS)
        self._made: dict[tuple[object, ...], Block] = {}

    def codes(self, name: str, size: int) -> Iterator[memoryview]:
        """Yield `size` bytes of packed codes."""
        return self._codes.pieces(f"{self._seed} {name}", size)

    def companion(self, name: str, kind: str, quant: Quant, columns: int, size: int) -> Iterator[memoryview]:
        """Yield `size` bytes of BF16 scales or biases (`kind`) of codes with `columns` inputs per row.

        Weights then have mean 0 and a variance of 1 / columns, within a factor of 2.
        """
        levels = 1 << quant.bits
        deviation = sqrt((levels**2 - 1) / 12)  # of uniform codes
        exponent = round(log2(1 / sqrt(columns) / deviation / MANTISSA_RMS))
        factor = 1.0 if kind == "scales" else -(levels - 1) / 2

        def value(choice: int) -> float:
            return MANTISSAS[choice % len(MANTISSAS)] * 2.0**exponent * factor

        block = self._block((kind, quant.bits, columns), "BF16", value)
        return block.pieces(f"{self._seed} {name}", size)

    def plain(self, name: str, dtype: str, shape: tuple[int, ...], size: int, below: int) -> Iterator[memoryview]:
        """Yield `size` bytes of a tensor that is not quantised.

        Vectors of floats are ones, matrices uniform with variance 1 / columns, integers count up to `below` and again.
        """
        if dtype not in FLOATS:
            width = {"I64": 8, "I32": 4, "U32": 4}[dtype]
            key = ("integers", dtype, below)
            if key not in self._made:
                self._made[key] = Block(b"".join(i.to_bytes(width, "little") for i in range(max(1, below))), width)
            return self._made[key].pieces("", size)
        if len(shape) < 2:
            return self._block(("ones", dtype), dtype, lambda _: 1.0).pieces("", size)
        edge = sqrt(3 / shape[-1])
        block = self._block(("spread", dtype, shape[-1]), dtype, lambda choice: edge * (2 * choice - 255) / 255)
        return block.pieces(f"{self._seed} {name}", size)

    def _block(self, key: tuple[object, ...], dtype: str, value: Callable[[int], float]) -> Block:
        """Return the block of `value(choice)` over this filler's random choices, each 0 to 255."""
        if key not in self._made:
            table = [encode(value(choice), dtype) for choice in range(256)]
            data = bytearray(len(self._choices) * FLOATS[dtype])
            for byte in range(FLOATS[dtype]):
                data[byte :: FLOATS[dtype]] = self._choices.translate(bytes(entry[byte] for entry in table))
            self._made[key] = Block(bytes(data), FLOATS[dtype])
        return self._made[key]


def encode(value: float, dtype: str) -> bytes:
    """Return a float as little-endian BF16 (rounded to nearest, ties to even), F16 or F32."""
    if dtype == "F16":
        return struct.pack("<e", value)
    wide = struct.pack("<f", value)
    if dtype == "F32":
        return wide
    if dtype != "BF16":
        raise UsageError(what="float dtype", got=dtype, expected="BF16, F16 or F32")
    bits = int.from_bytes(wide, "little")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF).to_bytes(2, "little")
