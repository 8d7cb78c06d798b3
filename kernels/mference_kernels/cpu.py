"""Fast paths on the CPU: each takes and returns what its `x_ops` does, and evaluates its inputs.

Products follow docs/numerics.md: the same bits for any variant, thread count, batch and slot. They are float32 inside.
"""

import ctypes
import math
import struct
from collections.abc import Sequence

import mlx.core as mx

from mference_kernels import activations, native
from mference_kernels.experts import Activation, ExpertWeights
from mference_kernels.quant import Quantized

BITS, GROUPS = (2, 4, 8), (32, 64, 128)
ACTIVATIONS: dict[Activation, int] = {activations.geglu_ops: 0, activations.swiglu_ops: 1}


def activation_kind(activation: Activation) -> int | None:
    """Return what the library calls an activation, or None for one it lacks; a clamp is told by the bits of its limit."""
    if isinstance(activation, activations.ClampedSwiglu):
        return int(struct.unpack("<i", struct.pack("<f", activation.limit))[0])
    return ACTIVATIONS.get(activation)


def can_multiply(w: object) -> bool:
    """Say whether the native products take `w`: codes of 2, 4 or 8 bits in groups of 32, 64 or 128."""
    return (
        isinstance(w, Quantized)
        and w.bits in BITS
        and w.group_size in GROUPS
        and w.scales.dtype in native.COMPANIONS
        and w.biases.dtype == w.scales.dtype
    )


def can_gate(experts: ExpertWeights, activation: Activation) -> bool:
    """Say whether the native routed block takes these experts and this activation."""
    known = all(can_multiply(w) for w in (experts.gate, experts.up, experts.down))
    return known and activation_kind(activation) is not None


def matrix_args(w: Quantized, what: str) -> native.MatrixArgs:
    """Return a matrix, or a stack with one leading axis, as the library takes it; its arrays must outlive the call."""
    if not can_multiply(w):
        raise ValueError(f"[{what}] bits and groups must be {BITS} and {GROUPS} but got {w.bits} and {w.group_size}")
    *stack, out, words = w.codes.shape
    width = words * 32 // w.bits
    if w.scales.shape != (*stack, out, width // w.group_size) or w.biases.shape != w.scales.shape or len(stack) > 1:
        raise ValueError(f"[{what}] companions must fit codes {w.codes.shape} but got {w.scales.shape}")
    return native.MatrixArgs(
        native.address(w.codes),
        native.address(w.scales),
        native.address(w.biases),
        out,
        width,
        w.bits,
        w.group_size,
        native.COMPANIONS[w.scales.dtype],
        stack[0] if stack else 1,
    )


def linears_cpu(x: mx.array, ws: Sequence[Quantized]) -> list[mx.array]:
    """Return x wT of each w, in one call for projections that share their input.

    Shapes: x (..., in), each w [out, in] -> (..., out).   Dtypes: any float in, same out; float32 inside.
    """
    args = (native.MatrixArgs * len(ws))(*(matrix_args(w, "linear") for w in ws))
    *lead, width = x.shape
    if any(arg.in_ != width or w.codes.ndim != 2 for arg, w in zip(args, ws, strict=True)):
        raise ValueError(f"[linear] x must end in {args[0].in_} but got {x.shape}")
    wide = native.evaluated(x, mx.float32)
    results = [native.Output((*lead, arg.out)) for arg in args]
    if wide.size and all(result.size for result in results):
        outputs = (ctypes.c_void_p * len(ws))(*(result.address for result in results))
        code = native.library().mf_linear(args, len(ws), native.address(wide), wide.size // width, outputs)
        native.check(code, "linear")
    ys = [result.array() for result in results]
    return ys if x.dtype == mx.float32 else [y.astype(x.dtype) for y in ys]


def block_row_cpu(x: mx.array, parts: Sequence[Quantized]) -> mx.array:
    """Multiply the parts of a single row by matrices in turn, in place; shapes and dtypes as `block_linear`."""
    *lead, width = x.shape
    args = [matrix_args(w, "block_linear") for w in parts]
    if x.size != width or any(arg.in_ * len(args) != width for arg in args):
        raise ValueError(f"[block_linear] x must be one row of {len(args) * args[0].in_} but got {x.shape}")
    wide, y = native.evaluated(x, mx.float32), native.Output((*lead, sum(arg.out for arg in args)))
    at, to = native.address(wide), y.address
    for arg in args:
        outputs = (ctypes.c_void_p * 1)(to)
        native.check(native.library().mf_linear(ctypes.byref(arg), 1, at, 1, outputs), "block_linear")
        at, to = at + 4 * arg.in_, to + 4 * arg.out
    return y.array() if x.dtype == mx.float32 else y.array().astype(x.dtype)


def linear_cpu(x: mx.array, w: Quantized) -> mx.array:
    """Return x wT; shapes and dtypes as `linear_ops`."""
    return linears_cpu(x, [w])[0]


def rows_cpu(ids: mx.array, w: Quantized) -> mx.array:
    """Return rows of `w` in float32: code * scale, rounded, plus bias, rounded.

    Shapes: ids (...) integer -> (..., in).   Raises: ValueError for an id outside the table.
    """
    args = matrix_args(w, "rows")
    which = native.evaluated(ids, mx.int32)
    y = native.Output((*ids.shape, args.in_))
    if y.size:
        library = native.library()
        code = library.mf_table_rows(ctypes.byref(args), native.address(which), which.size, y.address)
        native.check(code, "rows")
    return y.array()


def gated_experts_cpu(
    x: mx.array,
    slots: mx.array,
    experts: ExpertWeights,
    activation: Activation,
    weights: mx.array | None = None,
) -> mx.array:
    """Return down(activation(gate(x), up(x))) of each row's slots; with `weights` their sum in rank order.

    Shapes: x (R, H), slots (R, K) int32, weights (R, K) -> (R, K, H), summed (R, H).   Dtypes: float32 out and inside.
    Each (row, slot) pair is computed alone: neither other pairs nor the slot number change its bits.
    Raises: ValueError for a slot outside the slabs or an activation the library lacks.
    """
    roles = (experts.gate, experts.up, experts.down)
    args = [matrix_args(w, "experts") for w in roles if isinstance(w, Quantized)]
    if len(args) != len(roles):
        raise ValueError("[experts] matrices must be quantised")
    return _experts((native.MatrixArgs * 3)(*args), None, x, slots, activation, weights)


def gated_linear_cpu(x: mx.array, gate: Quantized, up: Quantized, down: Quantized, activation: Activation) -> mx.array:
    """Return down(activation(gate(x), up(x))) in one call; shapes as `gated_linear_ops`, float32 inside, x's dtype out."""
    args = (native.MatrixArgs * 3)(*(matrix_args(w, "gated") for w in (gate, up, down)))
    *lead, width = x.shape
    if width != args[0].in_:
        raise ValueError(f"[gated] x must end in {args[0].in_} but got {x.shape}")
    rows = x.size // width
    slots = (ctypes.c_int32 * rows)()  # one expert, number 0
    y = native.Output((*lead, args[2].out))
    _run_experts(args, None, native.evaluated(x, mx.float32), ctypes.addressof(slots), (rows, 1), activation, None, y)
    return y.array() if x.dtype == mx.float32 else y.array().astype(x.dtype)


def mapped_experts_cpu(
    x: mx.array,
    ids: mx.array,
    shapes: Sequence[native.MatrixArgs],
    table: "ctypes.Array[ctypes.c_void_p]",
    activation: Activation,
    weights: mx.array | None = None,
) -> mx.array:
    """Return what `gated_experts_cpu` does, of experts that lie anywhere in memory, as a mapped file.

    `table` holds nine addresses per expert: codes, scales and biases of gate, up, down; `shapes` are the three
    matrices, their own addresses unused, `slots` the experts in the table.
    """
    if len(table) != 9 * shapes[0].slots:
        raise ValueError(f"[experts] table must hold {9 * shapes[0].slots} addresses but got {len(table)}")
    return _experts((native.MatrixArgs * 3)(*shapes), table, x, ids, activation, weights)


def _experts(
    args: "ctypes.Array[native.MatrixArgs]",
    table: "ctypes.Array[ctypes.c_void_p] | None",
    x: mx.array,
    slots: mx.array,
    activation: Activation,
    weights: mx.array | None,
) -> mx.array:
    R, K = slots.shape
    if x.shape != (R, args[0].in_):
        raise ValueError(f"[experts] x must be {(R, args[0].in_)} but got {x.shape}")
    if weights is not None and weights.shape != slots.shape:
        raise ValueError(f"[experts] weights must be {slots.shape} but got {weights.shape}")
    wide, which = native.evaluated(x, mx.float32), native.evaluated(slots, mx.int32)
    scale = None if weights is None else native.evaluated(weights, mx.float32)
    y = native.Output((R, K, args[2].out) if scale is None else (R, args[2].out))
    at = native.address(which) if y.size else None
    _run_experts(args, table, wide, at, (R, K), activation, scale, y)
    return y.array()


def _run_experts(
    args: "ctypes.Array[native.MatrixArgs]",
    table: "ctypes.Array[ctypes.c_void_p] | None",
    x: mx.array,
    slots: int | None,
    shape: tuple[int, int],
    activation: Activation,
    weights: mx.array | None,
    y: native.Output,
) -> None:
    """Fill `y`; `x` and `weights` are evaluated, `slots` is where the slots of `shape` (rows, choices) lie."""
    kind = activation_kind(activation)
    if kind is None:
        raise ValueError(f"[experts] activation must be geglu or swiglu but got {activation!r}")
    if y.size:
        scale = None if weights is None else native.address(weights)
        code = native.library().mf_experts(args, table, native.address(x), slots, *shape, kind, scale, y.address)
        native.check(code, "experts")


def placed_sum_cpu(outputs: Sequence[mx.array], place: Sequence[int] | None, weights: mx.array) -> mx.array:
    """Return the weighted sum over ranks of pairs that lie in several arrays; arguments as `placed_sum_ops`.

    Without `place` the pairs lie in order. Bit for bit as `weighted_sum_ops`.
    """
    *lead, K = weights.shape
    R, width = math.prod(lead), outputs[0].shape[-1]
    wide = [native.evaluated(y, mx.float32) for y in outputs if y.size]
    scale, total = native.evaluated(weights, mx.float32), native.Output((*lead, width))
    if total.size:
        starts = (ctypes.c_int64 * (len(wide) + 1))()
        for i, y in enumerate(wide):
            starts[i + 1] = starts[i] + y.size // width
        if starts[len(wide)] < (R * K if place is None else 1):
            raise ValueError(f"[weighted_sum] outputs must have {R * K} rows but got {starts[len(wide)]}")
        pieces = (ctypes.c_void_p * len(wide))(*(native.address(y) for y in wide))
        where = None if place is None else (ctypes.c_int32 * (R * K))(*place)
        at = native.address(scale), R, K, width, total.address
        native.check(native.library().mf_weighted_sum(pieces, starts, len(wide), where, *at), "weighted_sum")
    return total.array()


def attention_cpu(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    query_start: int,
    key_start: int,
    window: int | None = None,
    ring: bool = False,
) -> mx.array:
    """Attend `q` to keys at or before its position; arguments, shapes and dtypes as `attention`.

    Neither the number of queries in a call nor where the keys start changes a bit. Keys and values are read in place, also
    from slices of their rows, and half-precision ones widened as they are met.
    """
    H, L, D = q.shape
    G, S, E = v.shape
    if H % G:
        raise ValueError(f"[attention] key heads must divide {H} but got {G}")
    if k.shape != (G, S, D):
        raise ValueError(f"[attention] keys must be {(G, S, D)} but got {k.shape}")
    span = query_start + L - key_start
    if key_start > query_start or span > S or (window is not None and window < 1):
        raise ValueError(f"[attention] keys must cover positions to {query_start + L - 1} but got {S} rows")
    out = native.Output((H, L, E))
    if out.size:
        wide = native.evaluated(q, mx.float32)
        if k.dtype != v.dtype:
            k, v = k.astype(mx.float32), v.astype(mx.float32)
        held_k, at_k, stride_k = native.heads(k)
        held_v, at_v, stride_v = native.heads(v)
        args = native.AttentionArgs(
            *(native.address(wide), at_k, at_v, out.address),
            *(H, G, L, span, D, E, query_start, key_start, window or 0, stride_k, stride_v, S if ring else 0),
            *(L * D, D, L * E, E, scale, native.COMPANIONS[held_k.dtype]),
        )
        native.check(native.library().mf_attend(ctypes.byref(args)), "attention")
        del held_k, held_v  # they own the memory that was read
    y = out.array()
    return y if y.dtype == q.dtype else y.astype(q.dtype)


def rms_norm_cpu(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Scale each row to unit root mean square, then by `weight`; shapes and dtypes as `rms_norm_ops`."""
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"[rms_norm] weight must be {x.shape[-1:]} but got {weight.shape}")
    return _norm(x, weight, x.shape[-1], eps)


def unit_norm_cpu(x: mx.array, eps: float) -> mx.array:
    """Scale each row to unit length; shapes and dtypes as `unit_norm_ops`."""
    return _norm(x, None, 1, eps)


def _norm(x: mx.array, weight: mx.array | None, divisor: float, eps: float) -> mx.array:
    if weight is not None and weight.dtype not in native.COMPANIONS:
        weight = weight.astype(mx.float32)
    wide, y = native.evaluated(x, mx.float32), native.Output(x.shape)
    if y.size:
        at, kind = (None, 0) if weight is None else (native.address(weight), native.COMPANIONS[weight.dtype])
        width = x.shape[-1]
        rows = y.size // width
        native.library().mf_norm(native.address(wide), at, kind, rows, width, divisor, eps, y.address)
    return y.array() if x.dtype == mx.float32 else y.array().astype(x.dtype)


def rope_cpu(x: mx.array, positions: mx.array, frequencies: mx.array) -> mx.array:
    """Rotate the first features of each head, twice as many as `frequencies`; the rest pass through.

    Shapes, dtypes and units as `rope_ops` and `partial_rope_ops`; angles below 2^20.
    """
    B, H, L, D = x.shape
    half = frequencies.shape[0]
    if 2 * half > D:
        raise ValueError(f"[partial_rope] at most {D} features can turn but got {2 * half}")
    if positions.shape != (B, L):
        raise ValueError(f"[rope] positions must be {(B, L)} but got {positions.shape}")
    wide, at = native.evaluated(x, mx.float32), native.evaluated(positions, mx.int32)
    speeds, y = native.evaluated(frequencies, mx.float32), native.Output(x.shape)
    if y.size and half:
        addresses = native.address(wide), native.address(at), native.address(speeds)
        native.check(native.library().mf_rope(*addresses, B, H, L, D, half, y.address), "rope")
    elif y.size:
        return x
    return y.array() if x.dtype == mx.float32 else y.array().astype(x.dtype)


def choose_experts_cpu(
    scores: mx.array, k: int, *, softmax: bool, renormalise: bool, scale: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return the ids of the `k` best and their weights; arguments, shapes and dtypes as `choose_experts_ops`."""
    *lead, experts = scores.shape
    if not 1 <= k <= experts:
        raise ValueError(f"[choose] k must be in 1..{experts} but got {k}")
    if scale is not None and scale.shape != (experts,):
        raise ValueError(f"[choose] scale must be {(experts,)} but got {scale.shape}")
    wide, factor = native.evaluated(scores, mx.float32), None if scale is None else native.evaluated(scale, mx.float32)
    ids, weights = native.Output((*lead, k), whole=True), native.Output((*lead, k))
    if ids.size:
        at = None if factor is None else native.address(factor)
        rows, rule = ids.size // k, softmax + 2 * renormalise
        where = native.address(wide), rows, experts, k, rule, at, ids.address, weights.address
        native.check(native.library().mf_choose_experts(*where), "choose")
    return ids.array(), weights.array()


def softcap_cpu(x: mx.array, cap: float) -> mx.array:
    """Return cap * tanh(x / cap); shapes and dtypes as `softcap_ops`."""
    wide, y, limit = native.evaluated(x, mx.float32), native.Output(x.shape), ctypes.c_float(cap)
    if y.size:
        where = native.address(wide), ctypes.addressof(limit), y.address
        native.check(native.library().mf_activate(3, *where, y.size), "softcap")
    return y.array()
