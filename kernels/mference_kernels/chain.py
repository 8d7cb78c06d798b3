"""Layers as native programs, run one after another in one call for as long as the experts they choose are in memory."""

import ctypes
from collections.abc import Sequence
from math import prod

import mlx.core as mx

from mference_kernels import native
from mference_kernels.native_program import HeldArgs, LayerArgs, Timeline, TimelineArgs
from mference_kernels.program import Program

AWAY = 1
OTHERS = 3
"""Outputs of a routed layer's program after its next rows and what its family needs later: rows, ids, weights."""


class Held:
    """A layer's experts where they lie: three stacked matrices, or with `table` nine addresses an expert.

    `slot_of` is int32 per expert, negative for one that is not in memory; its owner keeps it up to date.
    """

    def __init__(
        self,
        matrices: Sequence[native.MatrixArgs],
        slot_of: "ctypes.Array[ctypes.c_int32]",
        table: "ctypes.Array[ctypes.c_void_p] | None" = None,
        kept: object = None,
    ) -> None:
        array = (native.MatrixArgs * 3)(*matrices)
        self.kept = array, slot_of, table, kept
        at = None if table is None else ctypes.addressof(table)
        self.args = HeldArgs(ctypes.addressof(array), at, ctypes.addressof(slot_of), len(slot_of))


class Chain:
    """Programs of all layers, with their experts; None stands for the experts of a dense layer.

    A program takes rows and returns the next ones, then, if it has experts, arrays of its family's, the experts' rows,
    ids and weights. Raises: ValueError if the layers do not fit together.
    """

    def __init__(self, programs: Sequence[Program], held: Sequence[Held | None]) -> None:
        routed = [program for program, experts in zip(programs, held, strict=True) if experts is not None]
        self.width = programs[0].inputs[0]
        self.outputs = routed[0].outputs if routed else programs[0].outputs
        self.choices = self.outputs[-1][0] if routed else 0
        rows = all(program.inputs == (self.width,) and program.outputs[0][0] == self.width for program in programs)
        if not rows or any(program.outputs != self.outputs for program in routed):
            raise ValueError("[chain] all layers must take and return the same rows")
        self._kept = programs, held
        self._rows = 0
        self._layers = (LayerArgs * len(programs))()
        for layer, program, experts in zip(self._layers, programs, held, strict=True):
            assert program.args is not None
            layer.program = ctypes.addressof(program.args)
            layer.experts = None if experts is None else ctypes.addressof(experts.args)

    def _room(self, rows: int) -> None:
        """Have buffers for `rows` rows: two for those between layers, and the other outputs'."""
        if rows == self._rows:
            return
        sizes = [self.width, *(width for width, _ in self.outputs)]
        self._buffers = [(ctypes.c_float * (rows * size))() for size in sizes]
        self._arrays = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, self._buffers))
        self.ids = [(ctypes.c_int32 * (rows * self.choices))() for _ in self._layers]
        for layer, ids in zip(self._layers, self.ids, strict=True):
            layer.ids = ctypes.addressof(ids) if layer.experts else None
        self._rows = rows

    def run(
        self, first: int, x: mx.array, positions: mx.array, timelines: Sequence[Sequence[Timeline]]
    ) -> tuple[int, list[mx.array]]:
        """Take rows x (B, 1, width) float32 through the layers from `first` on; `timelines[i]` are layer i's.

        Returns how many layers are done, from layer 0, and if those are all, [rows]; else the next layer has come as
        far as its experts, which are not all in memory: then its outputs after the first. `ids[i]` are what layer i
        chose. Raises as `Program.__call__`.
        """
        lead, rows = x.shape[:-1], prod(x.shape[:-1])
        self._room(rows)
        held, where = native.evaluated(x, mx.float32), native.evaluated(positions, mx.int32)
        ctypes.memmove(self._at(0), native.address(held), 4 * rows * self.width)
        lines = [_together(of_layer) for of_layer in timelines[first:]]
        for index, line in enumerate(lines, start=first):
            self._layers[index].timelines = ctypes.addressof(line)
        done = ctypes.c_int64()
        code = native.library().mf_run_layers(
            ctypes.addressof(self._layers) + first * ctypes.sizeof(LayerArgs),
            *(len(self._layers) - first, rows, len(timelines[first]), self._arrays, len(self.outputs) - 1),
            *(self.choices, native.address(where), ctypes.byref(done)),
        )
        if code == AWAY:
            wanted = range(2, len(self._buffers))
            return first + done.value, [self._array(index, (*lead, self.outputs[index - 1][0])) for index in wanted]
        native.check(code, "chain")
        return first + done.value, [self._array(0, (*lead, self.width))]

    def _at(self, index: int) -> int:
        """Return where a buffer lies now; those of rows change places."""
        return self._arrays[index] or 0

    def _array(self, index: int, shape: Sequence[int]) -> mx.array:
        """Copy a buffer, as it lies now, into an array."""
        buffer = (ctypes.c_float * prod(shape)).from_address(self._at(index))
        whole = index > 0 and self.outputs[index - 1][1]
        return mx.array(memoryview(buffer).cast("B").cast("i" if whole else "f", list(shape)))  # type: ignore[arg-type]


def _together(timelines: Sequence[Timeline]) -> ctypes.Structure | ctypes.Array[TimelineArgs]:
    """Return the arguments of timelines, one after another in memory."""
    if len(timelines) == 1:
        return timelines[0].args
    return (TimelineArgs * len(timelines))(*(line.args for line in timelines))
