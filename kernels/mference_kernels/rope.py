"""Rotary position embedding, half-split pairs."""

from typing import cast

import mlx.core as mx

from mference_kernels import levels


def default_frequencies(dims: int, theta: float) -> mx.array:
    """Return the angle per position of each pair: theta^(-2i/dims), float32, shape (dims/2,)."""
    return proportional_frequencies(dims, theta, 1.0)


def proportional_frequencies(dims: int, theta: float, factor: float) -> mx.array:
    """Return frequencies of which only the first `factor` of pairs turn; the others are 0.

    The exponent's divisor is the whole `dims`, so this is not a rotation of the first dims alone.
    Raises: ValueError if `dims` is odd.
    """
    if dims % 2:
        raise ValueError(f"[rope] dims must be even but got {dims}")
    turning = int(factor * dims // 2)
    pairs = mx.arange(dims // 2, dtype=mx.float32)
    angles = mx.power(mx.array(theta, mx.float32), -2.0 * pairs / dims)
    return mx.where(pairs < turning, angles, 0.0)


def rope_ops(x: mx.array, positions: mx.array, frequencies: mx.array) -> mx.array:
    """Rotate pairs (i, i + D/2) of each head by position * frequency.

    Shapes: x (B, H, L, D), positions (B, L), frequencies (D/2,) -> (B, H, L, D).
    Dtypes: any float in, same out; angles and the rotation in float32.
    Units: positions in tokens from 0, frequencies in radians per token.
    Raises: ValueError if `frequencies` is not half the head.
    Source: arXiv 2104.09864, half-split pairs.
    """
    half = x.shape[-1] // 2
    if frequencies.shape != (half,):
        raise ValueError(f"[rope] frequencies must be ({half},) but got {frequencies.shape}")
    angles = positions.astype(mx.float32)[:, None, :, None] * frequencies
    cos, sin = mx.cos(angles), mx.sin(angles)
    a, b = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def partial_rope_ops(x: mx.array, positions: mx.array, frequencies: mx.array) -> mx.array:
    """Rotate the first features of each head, twice as many as `frequencies`; the rest pass through.

    Pairs are (i, i + R/2) inside the first R features; shapes, dtypes and units as `rope_ops`.
    Raises: ValueError if the head has fewer features.
    """
    turning = 2 * frequencies.shape[0]
    if turning > x.shape[-1]:
        raise ValueError(f"[partial_rope] at most {x.shape[-1]} features can turn but got {turning}")
    return mx.concatenate([rope_ops(x[..., :turning], positions, frequencies), x[..., turning:]], axis=-1)


def rope(x: mx.array, positions: mx.array, frequencies: mx.array) -> mx.array:
    """Choose: native kernels where `levels` allows them, else `rope_ops`; arguments and result as there."""
    half = x.shape[-1] // 2
    if frequencies.shape != (half,):
        raise ValueError(f"[rope] frequencies must be ({half},) but got {frequencies.shape}")
    fast = levels.cpu()
    return cast("mx.array", (fast.rope_cpu if fast else rope_ops)(x, positions, frequencies))


def partial_rope(x: mx.array, positions: mx.array, frequencies: mx.array) -> mx.array:
    """Choose as `rope` does; arguments and result as `partial_rope_ops`."""
    fast = levels.cpu()
    return cast("mx.array", (fast.rope_cpu if fast else partial_rope_ops)(x, positions, frequencies))
