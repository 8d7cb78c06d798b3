"""The native CPU library: loading it, and calling it with the addresses of mlx arrays. Calls release the interpreter lock."""

import ctypes
import math
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from mference_kernels import compile as build

OK, BAD_SLOT, NO_MEMORY, BAD_SHAPE = 0, -1, -2, -3
COMPANIONS = {mx.bfloat16: 0, mx.float32: 1, mx.float16: 2}
MOST_MATRICES = 8


class Unavailable(Exception):
    """There is no native library to use; the text says why."""


class MatrixArgs(ctypes.Structure):
    """`mf_matrix` of native/mference.h."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("out", ctypes.c_int64),
        ("in_", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("companions", ctypes.c_int32),
        ("slots", ctypes.c_int32),
    )


class AttentionArgs(ctypes.Structure):
    """`mf_attention` of native/mference.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "length", "span", "dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("query_start", "key_start", "window", "k_stride", "v_stride", "ring")),
        *((name, ctypes.c_int64) for name in ("q_head", "q_row", "out_head", "out_row")),
        ("scale", ctypes.c_float),
        ("type", ctypes.c_int32),
    )


class SparseArgs(ctypes.Structure):
    """`mf_sparse` of native/sparse.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "rows", "entries", "sinks", "picks", "out")),
        *((name, ctypes.c_int64) for name in ("length", "heads", "dim", "query_start", "key_start", "window", "ring")),
        *((name, ctypes.c_int64) for name in ("rate", "most")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("rows_type", "entries_type")),
    )


class PickingArgs(ctypes.Structure):
    """`mf_picking` of native/sparse.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "weights", "keys", "picks")),
        *((name, ctypes.c_int64) for name in ("length", "heads", "dim", "entries", "query_start", "rate", "most")),
        ("scale", ctypes.c_float),
        ("keys_type", ctypes.c_int32),
    )


class PoolingArgs(ctypes.Structure):
    """`mf_pooling` of native/pooling.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "gates", "offsets", "before_values", "before_gates", "out")),
        *((name, ctypes.c_int64) for name in ("count", "rate", "width", "first")),
    )


class TurningArgs(ctypes.Structure):
    """`mf_turning` of native/pooling.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "positions", "frequencies", "weight", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "dim", "half")),
        *((name, ctypes.c_int32) for name in ("back", "scaled")),
        ("eps", ctypes.c_float),
    )


class MixingArgs(ctypes.Structure):
    """`mf_mixing` of native/streams.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "fn", "base", "scale")),
        *((name, ctypes.c_int64) for name in ("rows", "streams", "width", "iterations")),
        *((name, ctypes.c_float) for name in ("eps", "norm_eps")),
        *((name, ctypes.c_void_p) for name in ("u", "post", "mix")),
    )


class BufferView(ctypes.Structure):
    """`Py_buffer`: where an object's memory lies and how it is strided."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        *((name, ctypes.c_ssize_t) for name in ("len", "itemsize")),
        *((name, ctypes.c_int) for name in ("readonly", "ndim")),
        ("format", ctypes.c_char_p),
        *((name, ctypes.POINTER(ctypes.c_ssize_t)) for name in ("shape", "strides", "suboffsets")),
        ("internal", ctypes.c_void_p),
    )


STRIDED = 0x0018
"""PyBUF_STRIDES: shape and strides, writable or not."""


@cache
def library() -> ctypes.CDLL:
    """Return the loaded library.

    Raises `Unavailable` if it was not built, cannot be loaded, or is older than its sources.
    """
    remedy = "build it with 'python -m mference_kernels.compile'"
    if not build.LIBRARY.exists():
        raise Unavailable(f"the native library was not built; {remedy}")
    try:
        made = ctypes.CDLL(str(build.LIBRARY))
    except OSError as error:
        raise Unavailable(f"the native library cannot be loaded ({error}); {remedy}") from error
    pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    made.mf_sources.restype = made.mf_variant_name.restype = ctypes.c_char_p
    if made.mf_sources().decode() != build.digest():
        raise Unavailable(f"the native library is older than its sources; {remedy}")
    made.mf_choose.argtypes = (ctypes.c_char_p,)
    made.mf_linear.argtypes = (pointer, int64, pointer, int64, pointer)
    made.mf_experts.argtypes = (pointer, pointer, pointer, pointer, int64, int64, int32, pointer, pointer)
    made.mf_weighted_sum.argtypes = (pointer, pointer, int64, pointer, pointer, int64, int64, int64, pointer)
    made.mf_table_rows.argtypes = (pointer, pointer, int64, pointer)
    made.mf_attend.argtypes = (pointer,)
    made.mf_norm.argtypes = (pointer, pointer, int32, int64, int64, ctypes.c_float, ctypes.c_float, pointer)
    made.mf_rope.argtypes = (pointer, pointer, pointer, int64, int64, int64, int64, int64, pointer)
    made.mf_choose_experts.argtypes = (pointer, int64, int64, int64, int32, pointer, pointer, pointer)
    made.mf_activate.argtypes = (int32, pointer, pointer, pointer, int64)
    made.mf_run_layers.argtypes = (pointer, int64, int64, int64, pointer, int64, int64, pointer, pointer)
    made.mf_run.argtypes = (pointer, int64, int64, pointer, pointer, pointer)
    for name in ("mf_sparse_attend", "mf_pick_entries", "mf_pool_windows", "mf_read_streams"):
        getattr(made, name).argtypes = (pointer,)
    made.mf_narrow.argtypes, made.mf_narrow.restype = (pointer, int64, pointer), None
    made.mf_turn_trailing.argtypes = (pointer,)
    made.mf_write_streams.argtypes = (pointer, pointer, pointer, pointer, pointer, int64, int64, int64, pointer)
    made.mf_row_products.argtypes = (pointer, pointer, int64, int64, int64, pointer)
    made.mf_read.argtypes, made.mf_read.restype = (pointer, int64), ctypes.c_uint64
    made.mf_set_threads(available_cores())
    return made


def available_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def variants() -> tuple[str, ...]:
    """Return the variants this machine can run, best first; empty without a library."""
    try:
        made = library()
    except Unavailable:
        return ()
    names, index = [], 0
    while (name := made.mf_variant_name(index)) is not None:
        names.append(name.decode())
        index += 1
    return tuple(name for name in names if name)


def choose(variant: str) -> None:
    """Use `variant` from the next call on.

    Raises `Unavailable` if this machine cannot run it.
    """
    if library().mf_choose(variant.encode()):
        raise Unavailable(f"this machine has no '{variant}'; it has {', '.join(variants())}")


def set_threads(count: int) -> int:
    """Use `count` threads, the calling one included; return how many are used. No result depends on it."""
    return int(library().mf_set_threads(count))


def evaluated(array: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
    """Return `array` computed and row-contiguous, as `dtype` if given."""
    if dtype is not None and array.dtype != dtype:
        array = array.astype(dtype)
    buffer: Any = array  # a view computes it
    if not memoryview(buffer).c_contiguous:
        array = mx.contiguous(array)
        mx.eval(array)
    return array


def reshaped(array: mx.array, shape: Sequence[int]) -> mx.array:
    """Return `array` in another shape; of a small one on the CPU a copy, made without waking the scheduler."""
    if array.nbytes > Output.SMALL_BYTES or array.dtype != mx.float32 or mx.default_device() != mx.Device(mx.cpu):
        return array.reshape(shape)
    buffer: Any = evaluated(array)
    view: Any = memoryview(buffer).cast("B").cast("f", list(shape))
    return mx.array(view)


def store(array: mx.array, row: int, rows: mx.array, first: int, count: int) -> None:
    """Write rows `first` and on of float32 `rows` (..., D), flattened, into those of `array` (R, D) from `row` on, at once.

    Whatever shares the memory of `array` changes with it.   Raises: ValueError if they do not fit.
    """
    R, D = array.shape
    if array.dtype != mx.float32 or rows.shape[-1] != D or row + count > R or (first + count) * D > rows.size:
        raise ValueError(f"[store] {count} rows must fit {array.shape} from {row} on but got {rows.shape}")
    if count * D:
        wide = evaluated(rows, mx.float32)
        ctypes.memmove(address(array) + 4 * row * D, address(wide) + 4 * first * D, 4 * count * D)


class Output:
    """Memory for a result of `shape`, float32, or int32 if `whole`: fill it at `address`, then take `array()` once.

    Small results are copied into mlx, which costs less than having it compute an empty array first.
    """

    SMALL_BYTES = 1 << 16

    def __init__(self, shape: Sequence[int], *, whole: bool = False) -> None:
        self.shape, self.size = tuple(shape), math.prod(shape)
        self.whole = whole
        self._large: mx.array | None = None
        if 4 * self.size > self.SMALL_BYTES:
            self._large = mx.empty(self.shape, mx.int32 if whole else mx.float32)
            self.address = address(self._large)
        else:
            self._small = (ctypes.c_float * self.size)()
            self.address = ctypes.addressof(self._small)

    def array(self) -> mx.array:
        """Return the result."""
        if self._large is not None:
            return self._large
        if not self.size:
            return mx.zeros(self.shape, mx.int32 if self.whole else mx.float32)
        view: Any = memoryview(self._small).cast("B").cast("i" if self.whole else "f", list(self.shape))
        return mx.array(view)


def address(array: mx.array) -> int:
    """Return where a row-contiguous array of at least one value lies, computing it if need be."""
    buffer: Any = array
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def heads(array: mx.array) -> tuple[mx.array, int, int]:
    """Return an array (heads, rows, dim), where it lies, and the values from one head to the next.

    Rows of a head must be contiguous; a slice of a state's rows is, and is used in place, others are copied, as are
    those of other dtypes than `COMPANIONS`, which become float32.
    """
    if array.dtype not in COMPANIONS:
        array = array.astype(mx.float32)
    size = array.dtype.size
    view = BufferView()
    get = ctypes.pythonapi.PyObject_GetBuffer
    get(ctypes.py_object(array), ctypes.byref(view), STRIDED)
    between, row, value = view.strides[0], view.strides[1], view.strides[2]
    where = view.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    count, rows, dim = array.shape
    if (
        (value != size and dim > 1)
        or (row != size * dim and rows > 1)
        or (between % size and count > 1)
        or where is None
    ):
        array = mx.contiguous(array)
        return array, address(array), rows * dim
    return array, where, between // size


def check(code: int, what: str) -> None:
    """Raise what a library call reported."""
    if code == NO_MEMORY:
        raise MemoryError(f"[{what}] no memory for scratch")
    if code:
        raise ValueError(f"[{what}] {'an index is out of range' if code == BAD_SLOT else 'shapes do not fit'}")


def contents(array: mx.array) -> bytes:
    """Return a copy of the bytes of an array."""
    buffer: Any = evaluated(array)
    return bytes(memoryview(buffer).cast("B"))
