"""Gated activations of feed-forward blocks."""

import math
from typing import cast

import mlx.core as mx
from attrs import frozen

from mference_kernels import levels


def gelu_tanh_ops(x: mx.array) -> mx.array:
    """Gaussian error linear unit, tanh form.

    Shapes: any -> same.   Dtypes: any float in, same out; computed in float32.   Source: arXiv 1606.08415.
    """
    wide = x.astype(mx.float32)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + mx.tanh(inner))).astype(x.dtype)


def geglu_ops(gate: mx.array, up: mx.array) -> mx.array:
    """Return gelu_tanh(gate) * up; shapes and dtypes as the inputs."""
    return gelu_tanh_ops(gate) * up


def silu_ops(x: mx.array) -> mx.array:
    """Sigmoid linear unit, x * sigmoid(x).

    Shapes: any -> same.   Dtypes: any float in, same out; computed in float32.   Source: arXiv 1702.03118.
    """
    wide = x.astype(mx.float32)
    return (wide * mx.sigmoid(wide)).astype(x.dtype)


def swiglu_ops(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up; shapes and dtypes as the inputs."""
    return silu_ops(gate) * up


@frozen
class ClampedSwiglu:
    """silu(gate) * up, gate at most `limit` and up from -limit to limit before that; shapes and dtypes as the inputs."""

    limit: float

    def __call__(self, gate: mx.array, up: mx.array) -> mx.array:
        """Return the definition's result; native kernels know the class and its limit."""
        return silu_ops(mx.minimum(gate, self.limit)) * mx.clip(up, -self.limit, self.limit)


def softcap_ops(x: mx.array, cap: float) -> mx.array:
    """Squash into (-cap, cap): cap * tanh(x / cap), float32."""
    return cap * mx.tanh(x.astype(mx.float32) / cap)


def softcap(x: mx.array, cap: float) -> mx.array:
    """Choose: native kernels where `levels` allows them, else `softcap_ops`; arguments and result as there."""
    fast = levels.cpu()
    return cast("mx.array", (fast.softcap_cpu if fast else softcap_ops)(x, cap))


gelu_tanh, geglu = gelu_tanh_ops, geglu_ops
silu, swiglu = silu_ops, swiglu_ops
