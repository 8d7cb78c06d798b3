"""Experts that stay where they lie, as in a mapped file: kernels that take addresses read them there, others get copies."""

import ctypes
from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
from attrs import field, frozen

from mference_kernels import levels, native
from mference_kernels.experts import Activation, ExpertWeights, gated_experts


@frozen(kw_only=True)
class Shape:
    """What every expert's matrix [out, in] of one role is like; `out` and `width` (in) count values.

    `companions` is the dtype of scales and biases.
    """

    out: int
    width: int
    bits: int
    group_size: int
    companions: mx.Dtype = mx.bfloat16


@frozen(kw_only=True)
class MappedWeights:
    """One layer's experts by address, in place of `ExpertWeights`; a slot is an expert's number.

    `table` holds nine addresses an expert: codes, scales and biases of gate, up, down. `copy(experts)` returns
    those experts in arrays, slot i the i-th of them; `shapes` are those of gate, up and down.
    """

    shapes: tuple[Shape, Shape, Shape]
    table: "ctypes.Array[ctypes.c_void_p]" = field(eq=False, repr=False)
    copy: Callable[[Sequence[int]], ExpertWeights]

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.table) // 9

    def gated(self, x: mx.array, slots: mx.array, activation: Activation) -> mx.array:
        """Return what `gated_experts` does: from the addresses where the native kernels run, else from copies."""
        fast = levels.cpu()  # as `gated_experts` asks, so that slots and mappings give the same bits
        if fast and fast.activation_kind(activation) is not None:
            return cast("mx.array", fast.mapped_experts_cpu(x, slots, self.matrices(), self.table, activation))
        return mapped_experts_ops(x, slots, self, activation)

    def matrices(self) -> list[native.MatrixArgs]:
        """Return gate, up and down as the library takes them with a table."""
        return [
            native.MatrixArgs(
                *(None, None, None, shape.out, shape.width, shape.bits, shape.group_size),
                native.COMPANIONS[shape.companions],
                self.experts,
            )
            for shape in self.shapes
        ]


def mapped_experts_ops(x: mx.array, slots: mx.array, experts: MappedWeights, activation: Activation) -> mx.array:
    """Return the branch from copies of the experts used; shapes and dtypes as `gated_experts`."""
    flat = cast("list[int]", slots.reshape(-1).tolist())
    chosen = sorted(set(flat))
    place = {expert: slot for slot, expert in enumerate(chosen)}
    where = mx.array([place[expert] for expert in flat], dtype=mx.int32).reshape(slots.shape)
    return gated_experts(x, where, experts.copy(chosen), activation)


def reads_addresses() -> bool:
    """Say whether experts are used in place here: on the CPU, with native kernels that `levels` allows."""
    return levels.cpu() is not None
