"""Products with plain matrices of few outputs, each row alone: no result depends on the rows beside it."""

import mlx.core as mx

from mference_kernels import levels
from mference_kernels.quant import Dense, Matrix, linear


def row_products_ops(x: mx.array, w: mx.array) -> mx.array:
    """Return x wT.

    Shapes: x (..., in), w (out, in) -> (..., out).   Dtypes: any float in, float32 out and inside.
    """
    return x.astype(mx.float32) @ w.astype(mx.float32).T


def row_products(x: mx.array, w: Matrix) -> mx.array:
    """Choose: native kernels where `levels` allows them, else `row_products_ops`; quantised matrices go to `linear`."""
    if not isinstance(w, Dense):
        return linear(x.astype(mx.float32), w)
    if not levels.cpu():
        return row_products_ops(x, w.weight)
    from mference_kernels import cpu_streams  # noqa: PLC0415 - it imports what asks here

    return cpu_streams.row_products_cpu(x, w.weight)
