"""Choosing experts: one rule on every backend, score down, then index up."""

import mlx.core as mx

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
