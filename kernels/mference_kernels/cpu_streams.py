"""Fast paths on the CPU of streams and of plain products: each takes and returns what its `x_ops` does."""

import ctypes
import math

import mlx.core as mx

from mference_kernels import native
from mference_kernels.streams import StreamMixer, StreamRead


def row_products_cpu(x: mx.array, w: mx.array) -> mx.array:
    """Return x wT, each row alone; shapes and dtypes as `row_products_ops`."""
    *lead, width = x.shape
    if w.ndim != 2 or w.shape[1] != width:
        raise ValueError(f"[row_products] w must be (out, {width}) but got {w.shape}")
    wide, matrix = native.evaluated(x, mx.float32), native.evaluated(w, mx.float32)
    y = native.Output((*lead, w.shape[0]))
    if y.size:
        at = native.address(wide), native.address(matrix), wide.size // width, width, w.shape[0], y.address
        native.check(native.library().mf_row_products(*at), "row_products")
    return y.array()


def _mix(x: mx.array, mixer: StreamMixer, *, merging: bool) -> tuple[mx.array, mx.array, mx.array]:
    *lead, S, H = x.shape
    R = math.prod(lead)
    mixes = S if merging else (2 + S) * S
    if mixer.fn.shape != (mixes, S * H) or mixer.base.shape != (mixes,):
        raise ValueError(f"[streams] fn must be {(mixes, S * H)} but got {mixer.fn.shape}")
    wide = native.evaluated(x, mx.float32)
    held = [native.evaluated(array, mx.float32) for array in (mixer.fn, mixer.base, mixer.scale)]
    u, post, mix = native.Output((*lead, H)), native.Output((*lead, S)), native.Output((*lead, S, S))
    if u.size:
        args = native.MixingArgs(
            *(native.address(array) for array in (wide, *held)),
            *(R, S, H, mixer.iterations, mixer.eps, mixer.norm_eps, u.address),
            *((None, None) if merging else (post.address, mix.address)),
        )
        native.check(native.library().mf_read_streams(ctypes.byref(args)), "streams")
    return u.array(), post.array(), mix.array()


def read_streams_cpu(x: mx.array, mixer: StreamMixer) -> tuple[mx.array, mx.array, mx.array]:
    """Return u, post and mix; shapes and dtypes as `read_streams_ops`."""
    return _mix(x, mixer, merging=False)


def merge_streams_cpu(x: mx.array, mixer: StreamMixer) -> mx.array:
    """Return the weighted sum of the streams; shapes and dtypes as `merge_streams_ops`."""
    return _mix(x, mixer, merging=True)[0]


def write_streams_cpu(x: mx.array, y: mx.array, read: StreamRead, also: mx.array | None = None) -> mx.array:
    """Return the streams after a block; shapes and dtypes as `write_streams_ops`."""
    *lead, S, H = x.shape
    if y.shape != (*lead, H) or read.post.shape != (*lead, S) or read.mix.shape != (*lead, S, S):
        raise ValueError(f"[streams] y must be {(*lead, H)} but got {y.shape}")
    if also is not None and also.shape != y.shape:
        raise ValueError(f"[streams] what is added must be {y.shape} but got {also.shape}")
    held = [native.evaluated(array, mx.float32) for array in (x, y, read.post, read.mix)]
    more = None if also is None else native.evaluated(also, mx.float32)
    out = native.Output((*lead, S, H))
    if out.size:
        extra = None if more is None else native.address(more)
        at = *(native.address(array) for array in held), extra, math.prod(lead), S, H, out.address
        native.check(native.library().mf_write_streams(*at), "streams")
    return out.array() if x.dtype == mx.float32 else out.array().astype(x.dtype)
