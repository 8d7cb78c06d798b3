"""Choosing experts: one rule on every backend, score down, then index up."""

from typing import cast

import mlx.core as mx

from mference_kernels import levels

INDEX_BITS = 20


def top_k_ops(scores: mx.array, k: int) -> mx.array:
    """Return the ids of the `k` largest scores, best first; the lower index wins a tie.

    Shapes: scores (..., E) -> (..., k) int32.   Dtypes: any float in, compared as float32.
    Each score and its index become one integer key, so no sort can see a tie, stable or not.
    Raises: ValueError if `k` is not in 1..E or E exceeds 2^20.
    """
    experts = scores.shape[-1]
    if not 1 <= k <= experts <= 1 << INDEX_BITS:
        raise ValueError(f"[top_k] k must be in 1..{min(experts, 1 << INDEX_BITS)} but got {k}")
    bits = (scores.astype(mx.float32) + 0.0).view(mx.int32)  # + 0.0 makes -0.0 equal 0.0
    ordered = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    keys = -ordered * (1 << INDEX_BITS) + mx.arange(experts, dtype=mx.int64)
    return mx.argsort(keys, axis=-1)[..., :k].astype(mx.int32)


top_k = top_k_ops


def choose_experts_ops(
    scores: mx.array, k: int, *, softmax: bool, renormalise: bool, scale: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return the ids of the `k` best, as `top_k_ops` does, and what they weigh.

    Shapes: scores (..., E), scale (E,) or None -> (..., k) int32, (..., k) float32.   Dtypes: any float in.
    A weight is the score, or with `softmax` its share of all experts; with `renormalise` it is divided by the sum of the
    chosen, in order; with `scale` it is multiplied by the expert's own. float32 throughout.
    """
    wide = scores.astype(mx.float32)
    ids = top_k_ops(wide, k)
    weights = mx.take_along_axis(mx.softmax(wide, axis=-1) if softmax else wide, ids, axis=-1)
    if renormalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, weights if scale is None else weights * scale.astype(mx.float32)[ids]


def choose_experts(
    scores: mx.array, k: int, *, softmax: bool, renormalise: bool, scale: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Choose: native kernels where `levels` allows them, else `choose_experts_ops`; arguments and result as there."""
    fast = levels.cpu()
    path = fast.choose_experts_cpu if fast else choose_experts_ops
    return cast("tuple[mx.array, mx.array]", path(scores, k, softmax=softmax, renormalise=renormalise, scale=scale))
