"""Short causal convolutions over positions, one filter per channel."""

import mlx.core as mx

from mference_kernels import levels


def causal_conv_ops(x: mx.array, tail: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """Filter each channel over its own past; return the result and the tail for the next call.

    Shapes: x (B, L, C), tail (B, K-1, C), weight (C, K) -> (B, L, C), (B, K-1, C).
    Dtypes: any float in; the result is float32, the tail of x's dtype.   Units: `tail` holds the K-1 rows before x.
    weight[:, K-1] multiplies the row itself, weight[:, 0] the oldest; taps are summed oldest first, so where a
    sequence is cut changes no bit.   Raises: ValueError if tail or weight do not fit.
    """
    B, L, C = x.shape
    taps = weight.shape[-1]
    if weight.shape != (C, taps):
        raise ValueError(f"[causal_conv] weight must be ({C}, taps) but got {weight.shape}")
    if tail.shape != (B, taps - 1, C):
        raise ValueError(f"[causal_conv] tail must be {(B, taps - 1, C)} but got {tail.shape}")
    rows = mx.concatenate([tail.astype(x.dtype), x], axis=1)
    wide, filters = rows.astype(mx.float32), weight.astype(mx.float32)
    total = wide[:, :L] * filters[:, 0]
    for tap in range(1, taps):
        total = total + wide[:, tap : tap + L] * filters[:, tap]
    return total, rows[:, L:]


def causal_conv(x: mx.array, tail: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """Choose: native where `levels` allows it and the taps are few, else `causal_conv_ops`; the same bits."""
    if levels.cpu() is not None:
        from mference_kernels import cpu_delta  # noqa: PLC0415 - it imports this module's neighbours

        if cpu_delta.can_filter(weight):
            return cpu_delta.causal_conv_cpu(x, tail, weight)
    return causal_conv_ops(x, tail, weight)
