"""Root-mean-square and length norms."""

from typing import cast

import mlx.core as mx

from mference_kernels import levels


def rms_norm_ops(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Scale each row to unit root mean square, then by `weight`.

    Shapes: x (..., D), weight (D,) or None -> (..., D).
    Dtypes: any float in, same out; the mean, the root and the product with `weight` are float32.
    Raises: ValueError if `weight` does not match the last axis.
    Source: arXiv 1910.07467.
    """
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"[rms_norm] weight must be {x.shape[-1:]} but got {weight.shape}")
    wide = x.astype(mx.float32)
    scaled = wide * mx.rsqrt(mx.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight is not None:
        scaled = scaled * weight.astype(mx.float32)
    return scaled.astype(x.dtype)


def unit_norm_ops(x: mx.array, eps: float) -> mx.array:
    """Scale each row to unit length; `eps` is added to the sum of squares, not to their mean.

    Shapes: x (..., D) -> same.   Dtypes: any float in, same out; computed in float32.
    """
    wide = x.astype(mx.float32)
    return (wide * mx.rsqrt((wide * wide).sum(axis=-1, keepdims=True) + eps)).astype(x.dtype)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Choose: native kernels where `levels` allows them, else `rms_norm_ops`; arguments and result as there."""
    fast = levels.cpu()
    return cast("mx.array", fast.rms_norm_cpu(x, weight, eps)) if fast else rms_norm_ops(x, weight, eps)


def unit_norm(x: mx.array, eps: float) -> mx.array:
    """Choose as `rms_norm` does; arguments and result as `unit_norm_ops`."""
    fast = levels.cpu()
    return cast("mx.array", fast.unit_norm_cpu(x, eps)) if fast else unit_norm_ops(x, eps)
