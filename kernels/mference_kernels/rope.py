"""Rotary position embedding, half-split pairs; and of a head's last features, neighbouring pairs."""

import math
from typing import cast

import mlx.core as mx

from mference_kernels import levels
from mference_kernels.norms import rms_norm_ops


def default_frequencies(dims: int, theta: float) -> mx.array:
    """Return the angle per position of each pair: theta^(-2i/dims), float32, shape (dims/2,)."""
    return proportional_frequencies(dims, theta, 1.0)


def proportional_frequencies(dims: int, theta: float, factor: float) -> mx.array:
    """Return frequencies of which only the first `factor` of pairs turn; the others are 0.

    The exponent's divisor is the whole `dims`, so this is not a rotation of the first dims alone.
    Raises: ValueError if `dims` is odd.
    """
    turning = int(factor * dims // 2)
    return _rounded([angle if pair < turning else 0.0 for pair, angle in enumerate(_angles(dims, theta))])


def _angles(dims: int, theta: float) -> list[float]:
    if dims % 2:
        raise ValueError(f"[rope] dims must be even but got {dims}")
    return [theta ** (-2 * pair / dims) for pair in range(dims // 2)]


def _rounded(angles: list[float]) -> mx.array:
    """Return frequencies, taken in double precision, rounded once: a position multiplies what a device's power is off by."""
    return mx.array(angles, dtype=mx.float32)


def yarn_frequencies(
    dims: int, theta: float, *, factor: float, original: int, beta_fast: float, beta_slow: float
) -> mx.array:
    """Return frequencies of `default_frequencies` of which the slow ones are divided by `factor`, with a ramp between.

    A pair is as it was if it turns more than `beta_fast` times over `original` tokens, and divided if less than
    `beta_slow` times. float32, shape (dims/2,).   Raises: ValueError if `dims` is odd.   Source: arXiv 2309.00071.
    """

    def pair(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(beta_fast)), 0), min(math.ceil(pair(beta_slow)), dims - 1)
    span = high - low if high != low else 0.001
    ramp = [min(max((pair - low) / span, 0.0), 1.0) for pair in range(dims // 2)]
    return _rounded(
        [plain / factor * slow + plain * (1 - slow) for plain, slow in zip(_angles(dims, theta), ramp, strict=True)]
    )


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


def trailing_rope_ops(x: mx.array, positions: mx.array, frequencies: mx.array, *, back: bool = False) -> mx.array:
    """Rotate pairs (2i, 2i + 1) of the last features of each head, twice as many as `frequencies`; others pass through.

    Shapes: x (B, L, H, D), positions (B, L), frequencies (R,) -> (B, L, H, D); note that tokens come before heads.
    Dtypes: any float in, same out; angles and the rotation in float32.   Units: as `rope_ops`; `back` turns backwards.
    Raises: ValueError if the head has fewer features.
    """
    turning = 2 * frequencies.shape[0]
    if turning > x.shape[-1]:
        raise ValueError(f"[trailing_rope] at most {x.shape[-1]} features can turn but got {turning}")
    angles = positions.astype(mx.float32)[..., None, None] * frequencies
    cos, sin = mx.cos(angles), mx.sin(angles) * (-1 if back else 1)
    still, turned = x[..., : x.shape[-1] - turning], x[..., x.shape[-1] - turning :].astype(mx.float32)
    pairs = turned.reshape(*turned.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = mx.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    return mx.concatenate([still, turned.astype(x.dtype)], axis=-1)


def trailing_rope(x: mx.array, positions: mx.array, frequencies: mx.array, *, back: bool = False) -> mx.array:
    """Choose as `rope` does; arguments and result as `trailing_rope_ops`."""
    if not levels.cpu():
        return trailing_rope_ops(x, positions, frequencies, back=back)
    from mference_kernels import cpu_sparse  # noqa: PLC0415 - it imports what asks here

    return cpu_sparse.trailing_rope_cpu(x, positions, frequencies, back=back)


def turned_heads_ops(
    x: mx.array,
    positions: mx.array,
    frequencies: mx.array,
    *,
    heads: int,
    eps: float | None = None,
    weight: mx.array | None = None,
    back: bool = False,
    flat: bool = False,
) -> mx.array:
    """Cut rows into heads, scale each to unit root mean square where `eps` is given, then by `weight`, and rotate them.

    Shapes: x (B, L, heads * D), however its axes are cut, weight (D,) -> (B, L, heads, D), `flat` (B, L, heads * D); the rest as `trailing_rope_ops`, norms as `rms_norm_ops`.
    """
    made = x.reshape(*positions.shape, heads, -1)
    made = made if eps is None else rms_norm_ops(made, weight, eps)
    turned = trailing_rope_ops(made, positions, frequencies, back=back)
    return turned.reshape(*positions.shape, -1) if flat else turned


def turned_heads(
    x: mx.array,
    positions: mx.array,
    frequencies: mx.array,
    *,
    heads: int,
    eps: float | None = None,
    weight: mx.array | None = None,
    back: bool = False,
    flat: bool = False,
) -> mx.array:
    """Choose as `rope` does; arguments and result as `turned_heads_ops`."""
    options = {"heads": heads, "eps": eps, "weight": weight, "back": back, "flat": flat}
    if not levels.cpu():
        return turned_heads_ops(x, positions, frequencies, **options)  # type: ignore[arg-type]
    from mference_kernels import cpu_sparse  # noqa: PLC0415

    return cpu_sparse.turned_heads_cpu(x, positions, frequencies, **options)  # type: ignore[arg-type]
