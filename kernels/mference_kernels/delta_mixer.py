"""A gated delta network between its projections: convolution, unit queries and keys, rates, the rule, the gated norm.

Source: arXiv 2412.06464, with per-head decay rates. The state of a timeline is its last convolved rows and one matrix per
value head; a timeline's result depends on no other.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from attrs import field, frozen

from mference_kernels import levels
from mference_kernels.activations import silu_ops
from mference_kernels.conv import causal_conv
from mference_kernels.gated_delta import gated_delta
from mference_kernels.norms import rms_norm, unit_norm

Mixed = tuple[mx.array, list[mx.array], list[mx.array]]
"""Outputs (B, L, value heads * value dim), and each timeline's new tail and state."""


def _float32(array: mx.array) -> mx.array:
    made = mx.contiguous(array.astype(mx.float32))
    mx.eval(made)
    return made


@frozen(kw_only=True)
class DeltaMixer:
    """A delta network's own weights, float32: taps (taps, channels), the oldest first, log_rate and dt_bias (value heads), norm (value dim).

    Decay per token is e^g, g = -e^log_rate * log(1 + e^(a + dt_bias)); the learning rate is sigmoid(b).
    """

    taps: mx.array = field(converter=_float32, eq=False)
    log_rate: mx.array = field(converter=_float32, eq=False)
    dt_bias: mx.array = field(converter=_float32, eq=False)
    norm: mx.array = field(converter=_float32, eq=False)
    key_heads: int
    key_dim: int
    unit_eps: float
    norm_eps: float

    @property
    def value_heads(self) -> int:
        """Heads that hold a state."""
        return int(self.log_rate.shape[0])

    @property
    def value_dim(self) -> int:
        """Columns of a state."""
        return int(self.norm.shape[0])

    @property
    def channels(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def check_mixer(
    qkv: mx.array,
    z: mx.array,
    a: mx.array,
    b: mx.array,
    lengths: Sequence[int],
    tails: Sequence[mx.array],
    states: Sequence[mx.array],
    mixer: DeltaMixer,
) -> None:
    """Raise ValueError for arguments of `delta_mixer` that do not fit each other."""
    B, L, _ = qkv.shape
    heads, width = mixer.value_heads, mixer.value_heads * mixer.value_dim
    wanted = {"qkv": (qkv, mixer.channels), "z": (z, width), "a": (a, heads), "b": (b, heads)}
    for name, (array, size) in wanted.items():
        if array.shape != (B, L, size):
            raise ValueError(f"[delta_mixer] {name} must be {(B, L, size)} but got {array.shape}")
    if len(lengths) != B or not all(1 <= length <= L for length in lengths):
        raise ValueError(f"[delta_mixer] lengths must be {B} numbers from 1 to {L} but got {list(lengths)}")
    tail, state = (mixer.taps.shape[0] - 1, mixer.channels), (heads, mixer.key_dim, mixer.value_dim)
    for name, arrays, shape in (("tails", tails, tail), ("states", states, state)):
        if [array.shape for array in arrays] != [shape] * B:
            raise ValueError(f"[delta_mixer] {name} must be {B} of {shape} but got {[x.shape for x in arrays]}")


def delta_mixer_ops(
    qkv: mx.array,
    z: mx.array,
    a: mx.array,
    b: mx.array,
    lengths: Sequence[int],
    tails: Sequence[mx.array],
    states: Sequence[mx.array],
    mixer: DeltaMixer,
) -> Mixed:
    """Mix tokens between a delta network's projections.

    Shapes: qkv (B, L, channels: queries, keys, values), z (B, L, value heads * value dim), a, b (B, L, value heads); per
    timeline a tail (taps - 1, channels) and a state (value heads, key dim, value dim) -> y as z, new tails and states.
    Dtypes: any float in; y and states float32, tails of qkv's dtype.   Units: lengths in tokens; what lies past a
    timeline's length is padding, reaches no state, and gives zeros.   Raises: ValueError for what does not fit.
    """
    check_mixer(qkv, z, a, b, lengths, tails, states, mixer)
    B, L, _ = qkv.shape
    inputs = qkv, z, a, b
    rows: dict[int, tuple[mx.array, mx.array, mx.array]] = {}
    for length in sorted(set(lengths)):
        members = [row for row in range(B) if lengths[row] == length]
        parts = inputs
        if len(members) < B or length < L:
            parts = tuple(part[mx.array(members), :length] for part in inputs)  # type: ignore[assignment]
        tail, state = (_together([arrays[row] for row in members]) for arrays in (tails, states))
        y, tail, state = _advance(*parts, tail, state, mixer)
        y = mx.pad(y, [(0, 0), (0, L - length), (0, 0)])
        rows |= {row: (y[at : at + 1], tail[at], state[at]) for at, row in enumerate(members)}
    first, new_tails, new_states = (list(part) for part in zip(*(rows[row] for row in range(B)), strict=True))
    return (first[0] if B == 1 else mx.concatenate(first)), new_tails, new_states


def _advance(
    qkv: mx.array, z: mx.array, a: mx.array, b: mx.array, tail: mx.array, state: mx.array, mixer: DeltaMixer
) -> tuple[mx.array, mx.array, mx.array]:
    """Take timelines of one length."""
    B, L, _ = qkv.shape
    keys = mixer.key_heads * mixer.key_dim
    decay = -mx.exp(mixer.log_rate) * mx.logaddexp(a.astype(mx.float32) + mixer.dt_bias, 0.0)
    convolved, tail = causal_conv(qkv, tail, mixer.taps.T)
    q, k, v = mx.split(silu_ops(convolved), [keys, 2 * keys], axis=-1)
    q = unit_norm(q.reshape(B, L, mixer.key_heads, -1), mixer.unit_eps) * mixer.key_dim**-0.5
    k = unit_norm(k.reshape(B, L, mixer.key_heads, -1), mixer.unit_eps)
    v = v.reshape(B, L, mixer.value_heads, -1)
    y, state = gated_delta(q, k, v, decay, mx.sigmoid(b.astype(mx.float32)), state)
    gate = silu_ops(z.astype(mx.float32)).reshape(v.shape)
    return (rms_norm(y, mixer.norm, mixer.norm_eps) * gate).reshape(B, L, -1), tail, state


def _together(arrays: list[mx.array]) -> mx.array:
    """Stack arrays of several timelines; a single one is not copied."""
    return arrays[0][None] if len(arrays) == 1 else mx.stack(arrays)


def delta_mixer(*arguments: Any) -> Mixed:
    """Choose: one native call where `levels` allows it, else `delta_mixer_ops`; arguments and result as there."""
    if levels.cpu() is None:
        return delta_mixer_ops(*arguments)
    from mference_kernels import cpu_delta  # noqa: PLC0415 - it imports this module

    return cpu_delta.delta_mixer_cpu(*arguments)
