"""The generators behind sampling: splitmix64 and xorshift64*, and how a request's seed becomes one state per token.

`splitmix64`, `uniform` and the row hash of `gumbel` follow the published scheme bit for bit. Only the state of a draw
differs: splitmix64(seed + index) makes neighbouring seeds one stream shifted by a token, so here the seed is mixed
first and seeds 1 and 2 share nothing.
"""

import mlx.core as mx

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
STAR = 2685821657736338717


def splitmix64(value: int) -> int:
    """Return the splitmix64 output of `value` (both unsigned 64-bit, the sum wraps)."""
    z = (value + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def _step(state: int) -> int:
    state ^= (state << 13) & MASK
    state ^= state >> 7
    return state ^ ((state << 17) & MASK)


def uniform(state: int) -> float:
    """Return the number in [0, 1), a multiple of 2**-24, that xorshift64* draws from `state` after one discarded."""
    state = _step(_step(state or GOLDEN))
    return (((state * STAR) & MASK) >> 40) / (1 << 24)


def draw_state(seed: int, index: int) -> int:
    """Return the state for generated token `index` (from 0) of a request seeded with `seed`."""
    return splitmix64((splitmix64(seed) + index) & MASK)


def _u64(value: int) -> mx.array:
    """Make a uint64 scalar: the array constructor takes no integers above the signed range."""
    return mx.array([value & 0xFFFFFFFF, value >> 32], dtype=mx.uint32).view(mx.uint64)


def gumbel(state: int, rows: int) -> mx.array:
    """Return one Gumbel value per row: -log(-log u), u = (top 24 bits of splitmix64(state ^ row) + 1/2) / 2**24.

    Shapes: -> (rows,) float32. Near u = 1 the value is taken through log1p, since u itself would round to 1.
    """
    z = (mx.arange(rows).astype(mx.uint64) ^ _u64(state)) + _u64(GOLDEN)
    z = (z ^ (z >> 30)) * _u64(MIX_1)
    z = (z ^ (z >> 27)) * _u64(MIX_2)
    top = ((z ^ (z >> 31)) >> 40).astype(mx.float32)
    unit = 1 / (1 << 24)
    low = -mx.log((top + 0.5) * unit)
    high = -mx.log1p(-((1 << 24) - top - 0.5) * unit)
    return -mx.log(mx.where(top < (1 << 23), low, high))
