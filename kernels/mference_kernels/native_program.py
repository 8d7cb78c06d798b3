"""What programs are to the native library: its structures, and the rows of a timeline as it takes them."""

import ctypes

import mlx.core as mx

from mference_kernels import native


class OpArgs(ctypes.Structure):
    """`mf_op` of native/program.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("code", "kind", "in1", "in2", "in3", "out")),
        *((name, ctypes.c_int64) for name in ("dim", "count", "groups", "extra", "window")),
        ("f", ctypes.c_float),
        ("g", ctypes.c_float),
        ("weight", ctypes.c_void_p),
        ("matrices", ctypes.c_void_p),
    )


class ProgramArgs(ctypes.Structure):
    """`mf_program` of native/program.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ops", "widths", "offsets")),
        *((name, ctypes.c_int64) for name in ("count", "registers", "row_floats")),
    )


class TimelineArgs(ctypes.Structure):
    """`mf_timeline` of native/program.h."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("k_stride", "v_stride", "capacity", "start", "real")),
        ("type", ctypes.c_int32),
    )


class HeldArgs(ctypes.Structure):
    """`mf_held` of native/program.h."""

    _fields_ = (
        ("matrices", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("slot_of", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class LayerArgs(ctypes.Structure):
    """`mf_layer` of native/program.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("program", "timelines", "experts", "ids"))


class Timeline:
    """Keys and values of one timeline, (heads, capacity, dim) of one dtype, written in place.

    The row of a position is position mod capacity. `start` is the position of the first new token, `count` their number.
    """

    def __init__(self, k: mx.array, v: mx.array, start: int, count: int) -> None:
        if k.dtype != v.dtype or k.dtype not in native.COMPANIONS or k.shape[:2] != v.shape[:2]:
            raise ValueError(f"[timeline] keys and values must fit but got {k.shape} {k.dtype} and {v.shape} {v.dtype}")
        _, capacity, dim = k.shape
        self.kept = k, v
        self.args = TimelineArgs(
            *(native.address(k), native.address(v), capacity * dim, capacity * v.shape[2], capacity, start, count),
            native.COMPANIONS[k.dtype],
        )
