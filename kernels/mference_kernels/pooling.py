"""Pooling windows of tokens into entries: a softmax over the tokens, for each channel on its own."""

import mlx.core as mx

from mference_kernels import levels


def pool_windows_ops(
    values: mx.array, gates: mx.array, offsets: mx.array, before: tuple[mx.array, mx.array] | None, first: int
) -> mx.array:
    """Return one entry per window: its rows weighted by the softmax of their gates plus the offsets of their places.

    With `before`, the values and gates of the window before the first one, windows overlap: rows have two halves, and
    an entry pools the first half of the rows of the window before its own, then the second half of its own rows; the
    first window of a timeline (number 0) has only its own.
    Shapes: values, gates (N, rate, W), offsets (rate, W), before (rate, W / 2) each -> (N, D), D = W or W / 2.
    Dtypes: any float in, float32 inside and out.   Units: `first` is the number of the first window.
    """
    values = values.astype(mx.float32)
    gates = gates.astype(mx.float32) + offsets.astype(mx.float32)
    if before is not None:
        half = values.shape[-1] // 2
        earlier = before[1].astype(mx.float32) + offsets[:, :half].astype(mx.float32)
        if first == 0:
            earlier = mx.full(earlier.shape, -mx.inf)
        shifted_gates = mx.concatenate([earlier[None], gates[:-1, :, :half]])
        shifted = mx.concatenate([before[0].astype(mx.float32)[None], values[:-1, :, :half]])
        values = mx.concatenate([shifted, values[:, :, half:]], axis=1)
        gates = mx.concatenate([shifted_gates, gates[:, :, half:]], axis=1)
    return (mx.softmax(gates, axis=1) * values).sum(axis=1)


def pool_windows(
    values: mx.array, gates: mx.array, offsets: mx.array, before: tuple[mx.array, mx.array] | None, first: int
) -> mx.array:
    """Choose: native kernels where `levels` allows them, else `pool_windows_ops`; arguments and result as there."""
    if not levels.cpu():
        return pool_windows_ops(values, gates, offsets, before, first)
    from mference_kernels import cpu_sparse  # noqa: PLC0415 - it imports what asks here

    return cpu_sparse.pool_windows_cpu(values, gates, offsets, before, first)
