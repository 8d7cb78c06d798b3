"""The routed feed-forward branch over slots in memory."""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import mlx.core as mx
from attrs import frozen

from mference_kernels import levels
from mference_kernels.quant import Matrix, gathered_linear, linear, linear_ops

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


def gated_linear_ops(x: mx.array, gate: Matrix, up: Matrix, down: Matrix, activation: Activation) -> mx.array:
    """Return down(activation(gate(x), up(x))), a feed-forward block that every row meets.

    Shapes: x (..., H), gate and up [I, H], down [H, I] -> (..., H).   Dtypes: as `linear_ops`.
    """
    return linear_ops(activation(linear_ops(x, gate), linear_ops(x, up)), down)


def gated_linear(x: mx.array, gate: Matrix, up: Matrix, down: Matrix, activation: Activation) -> mx.array:
    """Choose: one native call where `levels` allows it, else the definition; arguments and result as there."""
    fast = levels.cpu()
    if fast and fast.activation_kind(activation) is not None and all(fast.can_multiply(w) for w in (gate, up, down)):
        return cast("mx.array", fast.gated_linear_cpu(x, gate, up, down, activation))
    return linear(activation(linear(x, gate), linear(x, up)), down)


def weighted_sum_ops(y: mx.array, weights: mx.array) -> mx.array:
    """Sum over ranks in order, best first, one rounding per product and per sum.

    Shapes: y (R, K, H), weights (..., K), R rows of them -> (..., H).   Dtypes: float32.
    """
    *lead, ranks = weights.shape
    w = weights.astype(mx.float32).reshape(-1, ranks, 1)
    total = y[:, 0] * w[:, 0]
    for rank in range(1, ranks):
        total = total + y[:, rank] * w[:, rank]
    return total.reshape(*lead, y.shape[-1])


def placed_sum_ops(outputs: Sequence[mx.array], place: Sequence[int], weights: mx.array) -> mx.array:
    """Sum over ranks as `weighted_sum_ops`, of pairs that lie anywhere in several arrays.

    Shapes: each output (..., H), weights (..., K) -> (..., H); `place[row * K + rank]` counts rows of all outputs in order.
    """
    width, ranks = outputs[0].shape[-1], weights.shape[-1]
    joined = mx.concatenate([y.reshape(-1, width) for y in outputs])
    return weighted_sum_ops(joined[mx.array(list(place), dtype=mx.int32)].reshape(-1, ranks, width), weights)


def weighted_sum(y: mx.array, weights: mx.array) -> mx.array:
    """Choose: native kernels where `levels` allows them, else `weighted_sum_ops`; arguments, result and bits as there."""
    fast = levels.cpu()
    return cast("mx.array", fast.placed_sum_cpu([y], None, weights)) if fast else weighted_sum_ops(y, weights)


def placed_sum(outputs: Sequence[mx.array], place: Sequence[int], weights: mx.array) -> mx.array:
    """Choose as `weighted_sum` does; arguments and result as `placed_sum_ops`."""
    fast = levels.cpu()
    path = fast.placed_sum_cpu if fast else placed_sum_ops
    return cast("mx.array", path(outputs, place, weights))


class PlacedExperts(Protocol):
    """Experts in no slots, which know themselves how to compute from where they lie."""

    def gated(self, x: mx.array, slots: mx.array, activation: Activation) -> mx.array:
        """Return what `gated_experts` does; a slot is an expert's number."""


def gated_experts(
    x: mx.array, slots: mx.array, experts: ExpertWeights | PlacedExperts, activation: Activation
) -> mx.array:
    """Choose: experts in slots go to native kernels where `levels` allows them, else to `gated_experts_ops`.

    Others compute themselves. Arguments and result as there.
    """
    if not isinstance(experts, ExpertWeights):
        return experts.gated(x, slots, activation)
    fast = levels.cpu()
    if fast and fast.can_gate(experts, activation):
        return cast("mx.array", fast.gated_experts_cpu(x, slots, experts, activation))
    return gated_experts_ops(x, slots, experts, activation)
