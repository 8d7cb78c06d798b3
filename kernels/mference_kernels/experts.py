"""The routed feed-forward branch over slots in memory."""

from collections.abc import Callable

import mlx.core as mx
from attrs import frozen

from mference_kernels.quant import Matrix, gathered_linear

Activation = Callable[[mx.array, mx.array], mx.array]


@frozen(kw_only=True)
class ExpertWeights:
    """One layer's experts in memory, slot-major: gate and up [slots, I, H], down [slots, H, I].

    `dtype` is what products run in: float32 on CPUs, where the library's half-precision products are slow and coarse.
    """

    gate: Matrix
    up: Matrix
    down: Matrix
    dtype: mx.Dtype


def gated_experts_ops(x: mx.array, slots: mx.array, experts: ExpertWeights, activation: Activation) -> mx.array:
    """Return down(activation(gate(x), up(x))) of each row's slots, not yet weighted.

    Shapes: x (R, H), slots (R, K) int32 -> (R, K, H).   Dtypes: any float in, float32 out.
    Each (row, slot) pair is computed alone: neither other pairs nor the slot number change its bits.
    """
    R, K = slots.shape
    flat = slots.reshape(-1)
    pairs = mx.broadcast_to(x[:, None], (R, K, x.shape[-1])).reshape(R * K, -1)
    gate = gathered_linear(pairs, flat, experts.gate, experts.dtype)
    up = gathered_linear(pairs, flat, experts.up, experts.dtype)
    hidden = activation(gate, up).astype(x.dtype)
    out = gathered_linear(hidden, flat, experts.down, experts.dtype)
    return out.astype(mx.float32).reshape(R, K, -1)


def weighted_sum_ops(y: mx.array, weights: mx.array) -> mx.array:
    """Sum over ranks in order, best first, one rounding per product and per sum.

    Shapes: y (R, K, H), weights (R, K) -> (R, H).   Dtypes: float32.
    """
    w = weights.astype(mx.float32)[..., None]
    total = y[:, 0] * w[:, 0]
    for rank in range(1, y.shape[1]):
        total = total + y[:, rank] * w[:, rank]
    return total


gated_experts, weighted_sum = gated_experts_ops, weighted_sum_ops
