"""What the blocks of GGUF tensors mean, exactly: as 4-bit affine codes, or as floats.

Every value a block can state is a float32 without rounding (a half-precision scale of 11 bits times at most 12 bits of
codes), so nothing is lost. Q4_1 keeps its codes: value = code * scale + minimum, in groups of 32, which is what affine
quantisation says; only the order of the 4-bit codes inside a group differs.
"""

from collections.abc import Callable

import mlx.core as mx

GROUP = 32
"""Inputs per Q4_1 block, and so per group."""


def _part(blocks: mx.array, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
    return mx.contiguous(blocks[:, start:stop]).view(dtype)


def affine_codes(blocks: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return codes (n, 4) uint32, scales (n, 1) and biases (n, 1) float16 of Q4_1 blocks (n, 20) uint8.

    A block is a scale, a minimum and 16 bytes: byte j has value j in its low half and value j + 16 in its high half.
    """
    packed = blocks[:, 4:]
    codes = mx.concatenate([packed & 15, packed >> 4], axis=1)
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return (
        mx.contiguous(pairs).view(mx.uint32),
        _part(blocks, 0, 2, mx.float16),
        _part(blocks, 2, 4, mx.float16),
    )


def q8_0_values(blocks: mx.array) -> mx.array:
    """Return (n, 32) float32 of Q8_0 blocks (n, 34) uint8: a scale and 32 signed bytes."""
    return _part(blocks, 0, 2, mx.float16).astype(mx.float32) * _part(blocks, 2, 34, mx.int8).astype(mx.float32)


def q6_k_values(blocks: mx.array) -> mx.array:
    """Return (n, 256) float32 of Q6_K blocks (n, 210) uint8.

    A block is 128 bytes of low halves, 64 bytes of high pairs, 16 signed scales and one half-precision scale. Each half
    block of 128 values is four runs of 32: low halves of bytes 0-31 and 32-63, then their high halves; the high pairs
    of byte l serve value l of each run.
    """
    n = blocks.shape[0]
    low = blocks[:, :128].reshape(n, 2, 64)
    high = blocks[:, 128:192].reshape(n, 2, 32)
    first, second = low[..., :32], low[..., 32:]
    runs = [first & 15, second & 15, first >> 4, second >> 4]
    codes = mx.stack([run | (((high >> (2 * at)) & 3) << 4) for at, run in enumerate(runs)], axis=2)
    scales = _part(blocks, 192, 208, mx.int8).reshape(n, 16, 1).astype(mx.float32)
    values = (codes.astype(mx.float32) - 32).reshape(n, 16, 16) * scales
    return values.reshape(n, 256) * _part(blocks, 208, 210, mx.float16).astype(mx.float32)


VALUES: dict[str, tuple[str, Callable[[mx.array], mx.array]]] = {
    "F32": ("F32", lambda blocks: blocks),
    "F16": ("F16", lambda blocks: blocks),
    "BF16": ("BF16", lambda blocks: blocks),
    "Q8_0": ("F32", q8_0_values),
    "Q6_K": ("F32", q6_k_values),
}
"""Type -> dtype it is written in, and blocks of bytes -> values; plain types are copied byte for byte."""


def unrotated(rows: mx.array, head_dim: int) -> mx.array:
    """Return rows (heads * head_dim, ...) of a query or key projection in half-split order.

    GGUF keeps the pairs of a rotation side by side, row 2i and 2i + 1 of a head; published checkpoints, and this
    program, i and i + head_dim / 2. Rows move whole, so codes stay as they are.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return mx.contiguous(pairs.swapaxes(1, 2)).reshape(rows.shape)
