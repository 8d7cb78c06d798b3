"""Fast paths on the CPU of windows, entries and their indexer: each takes and returns what its `x_ops` does."""

import ctypes
import math
from collections.abc import Sequence

import mlx.core as mx

from mference_kernels import native
from mference_kernels.native_program import Timeline
from mference_kernels.sparse import Seen


def _rows(array: mx.array) -> tuple[mx.array, int | None, int]:
    """Return rows (S, D) or (1, S, D), where they lie, and their type: half-precision ones are read as they are."""
    if not array.size:
        return array, None, native.COMPANIONS[mx.float32]
    held, at, _ = native.heads(array if array.ndim == 3 else array[None])
    return held, at, native.COMPANIONS[held.dtype]


def store_rows_cpu(place: Timeline, rows: mx.array, first: int) -> None:
    """Write rows in place; arguments as `store_rows`."""
    args, dim = place.args, rows.shape[-1]
    to = place.kept[0]
    if to.dtype not in (mx.float32, mx.bfloat16) or to.shape[0] != 1 or to.shape[2] != dim:
        raise ValueError(f"[store_rows] rows must fit {to.dtype} of {to.shape} but got {rows.shape}")
    if (first + args.real) * dim > rows.size:
        raise ValueError(f"[store_rows] rows must be {first + args.real} but got {rows.shape}")
    wide, done, size = native.evaluated(rows, mx.float32), 0, 4 * dim
    at = native.address(wide) + first * size if args.real else 0
    while done < args.real:
        row = (args.start + done) % args.capacity
        count = min(args.real - done, args.capacity - row)
        if to.dtype == mx.float32:
            ctypes.memmove(args.k + row * size, at + done * size, count * size)
        else:
            native.library().mf_narrow(at + done * size, count * dim, args.k + row * size // 2)
        done += count


def sparse_attention_cpu(
    q: mx.array,
    rows: mx.array,
    entries: mx.array,
    sinks: mx.array,
    picks: mx.array | None = None,
    *,
    scale: float,
    query_start: int,
    key_start: int,
    window: int,
    rate: int,
    ring: bool = False,
) -> mx.array:
    """Attend `q` to its window and to entries; arguments, shapes and dtypes as `sparse_attention`.

    Neither the number of queries in a call nor where rows lie changes a bit. float32 rows and entries are read in place.
    """
    part = Seen(
        rows=rows,
        entries=entries,
        picks=picks,
        length=q.shape[0],
        query_start=query_start,
        key_start=key_start,
        ring=ring,
    )
    out = native.Output(q.shape)
    wide = native.evaluated(q, mx.float32)
    _attend(wide, 0, part, sinks, out, scale=scale, window=window, rate=rate)
    return out.array() if q.dtype == mx.float32 else out.array().astype(q.dtype)


def sparse_attentions_cpu(
    q: mx.array, seen: Sequence[Seen], sinks: mx.array, *, scale: float, window: int, rate: int
) -> mx.array:
    """Attend the timelines of a batch; arguments, shapes and dtypes as `sparse_attentions_ops`."""
    out, wide = native.Output(q.shape), native.evaluated(q, mx.float32)
    for b, part in enumerate(seen):
        _attend(wide, b * q.shape[1], part, sinks, out, scale=scale, window=window, rate=rate)
        row_bytes = 4 * q.shape[2] * q.shape[3]
        past = b * q.shape[1] + part.length
        ctypes.memset(out.address + past * row_bytes, 0, (q.shape[1] - part.length) * row_bytes)
    return out.array() if q.dtype == mx.float32 else out.array().astype(q.dtype)


def _attend(
    q: mx.array,
    first: int,
    seen: Seen,
    sinks: mx.array,
    out: native.Output,
    *,
    scale: float,
    window: int,
    rate: int,
) -> None:
    """Fill `out` for the queries of one timeline, rows `first` .. of q (..., H, D)."""
    H, D = q.shape[-2:]
    L, rows, entries, picks = seen.length, seen.rows, seen.entries, seen.picks
    S, end, known = rows.shape[-2], seen.query_start + L, (seen.query_start + L) // rate if rate else 0
    if rows.shape[-1] != D or sinks.shape != (H,):
        raise ValueError(f"[sparse] rows must be (rows, {D}) and sinks ({H},) but got {rows.shape} and {sinks.shape}")
    if seen.key_start > max(0, seen.query_start - window + 1) or end - seen.key_start > S:
        raise ValueError(f"[sparse] rows must cover positions to {end - 1} but got {S} from {seen.key_start}")
    if picks is None and entries.shape[-2] < known:
        raise ValueError(f"[sparse] entries must be {known} but got {entries.shape[-2]}")
    if picks is not None and picks.shape[0] != L:
        raise ValueError(f"[sparse] picks must be of {L} queries but got {picks.shape[0]}")
    if not L * H * D:
        return
    weights = native.evaluated(sinks, mx.float32)
    held_rows, at_rows, rows_type = _rows(rows)
    pool, at_pool, entries_type = _rows(entries)
    which = None if picks is None or not picks.size else native.evaluated(picks, mx.int32)
    offset = 4 * first * H * D
    args = native.SparseArgs(
        *(native.address(q) + offset, at_rows, at_pool, native.address(weights)),
        *(None if which is None else native.address(which), out.address + offset),
        *(L, H, D, seen.query_start, seen.key_start, window, S if seen.ring else 0),
        *(rate if picks is None or which is not None else 0, 0 if which is None else which.shape[1]),
        *(scale, rows_type, entries_type),
    )
    native.check(native.library().mf_sparse_attend(ctypes.byref(args)), "sparse")
    del held_rows, pool  # they own the memory that was read


def pick_entries_cpu(
    q: mx.array, weights: mx.array, keys: mx.array, *, scale: float, query_start: int, rate: int, top_k: int
) -> mx.array:
    """Pick entries; arguments, shapes and dtypes as `pick_entries_ops`."""
    L, H, D = q.shape[-3:]
    E = keys.shape[-2]
    if q.size != L * H * D or weights.size != L * H or keys.shape[-1] != D or (query_start + L) // rate > E:
        raise ValueError(f"[pick] keys must be ({(query_start + L) // rate}, {D}) but got {keys.shape}")
    most = min(top_k, E)
    picks = (ctypes.c_int32 * (L * most))()
    if L * most:
        wide, scores = native.evaluated(q, mx.float32), native.evaluated(weights, mx.float32)
        pool, at_pool, kind = _rows(keys)
        args = native.PickingArgs(
            *(native.address(wide), native.address(scores), at_pool, ctypes.addressof(picks)),
            *(L, H, D, E, query_start, rate, most, scale, kind),
        )
        native.check(native.library().mf_pick_entries(ctypes.byref(args)), "pick")
        del pool
        return mx.array(memoryview(picks).cast("B").cast("i", [L, most]))  # type: ignore[arg-type]
    return mx.zeros((L, most), dtype=mx.int32)


def pool_windows_cpu(
    values: mx.array, gates: mx.array, offsets: mx.array, before: tuple[mx.array, mx.array] | None, first: int
) -> mx.array:
    """Pool windows into entries; arguments, shapes and dtypes as `pool_windows_ops`."""
    N, rate, W = values.shape
    if gates.shape != values.shape or offsets.shape != (rate, W):
        raise ValueError(f"[pool] gates must be {values.shape} but got {gates.shape}")
    if before is not None and (W % 2 or any(part.shape != (rate, W // 2) for part in before)):
        raise ValueError(f"[pool] what is before must be {(rate, W // 2)} but got {before[0].shape}")
    out = native.Output((N, W if before is None else W // 2))
    if out.size:
        held = [native.evaluated(part, mx.float32) for part in (values, gates, offsets, *(before or ()))]
        at = [native.address(part) for part in held]
        args = native.PoolingArgs(*at, *([None] * (5 - len(at))), out.address, N, rate, W, first)
        native.check(native.library().mf_pool_windows(ctypes.byref(args)), "pool")
    return out.array()


def trailing_rope_cpu(x: mx.array, positions: mx.array, frequencies: mx.array, *, back: bool = False) -> mx.array:
    """Rotate the last features of each head; arguments, shapes and dtypes as `trailing_rope_ops`."""
    return _turned(x, x.shape, positions, frequencies, back=back)


def turned_heads_cpu(
    x: mx.array,
    positions: mx.array,
    frequencies: mx.array,
    *,
    heads: int,
    eps: float | None = None,
    weight: mx.array | None = None,
    back: bool = False,
    flat: bool = False,
) -> mx.array:
    """Normalise and rotate heads in one call; arguments, shapes and dtypes as `turned_heads_ops`."""
    B, L = positions.shape
    dim = x.size // max(1, B * L * heads)
    return _turned(x, (B, L, heads, dim), positions, frequencies, back=back, eps=eps, weight=weight, flat=flat)


def _turned(
    x: mx.array,
    shape: Sequence[int],
    positions: mx.array,
    frequencies: mx.array,
    *,
    back: bool,
    eps: float | None = None,
    weight: mx.array | None = None,
    flat: bool = False,
) -> mx.array:
    B, L, H, D = shape
    half = frequencies.shape[0]
    if 2 * half > D:
        raise ValueError(f"[trailing_rope] at most {D} features can turn but got {2 * half}")
    if positions.shape != (B, L) or x.size != math.prod(shape):
        raise ValueError(f"[trailing_rope] positions must be {(B, L)} but got {positions.shape}")
    if weight is not None and weight.shape != (D,):
        raise ValueError(f"[trailing_rope] weight must be {(D,)} but got {weight.shape}")
    wide, at = native.evaluated(x, mx.float32), native.evaluated(positions, mx.int32)
    speeds, y = native.evaluated(frequencies, mx.float32), native.Output((B, L, H * D) if flat else shape)
    if y.size:
        scale = None if weight is None else native.evaluated(weight, mx.float32)
        args = native.TurningArgs(
            *(native.address(wide), native.address(at), native.address(speeds) if half else None),
            *(None if scale is None else native.address(scale), y.address),
            *(B * L, H, D, half, int(back), int(eps is not None), eps or 0.0),
        )
        native.check(native.library().mf_turn_trailing(ctypes.byref(args)), "trailing_rope")
    return y.array() if x.dtype == mx.float32 else y.array().astype(x.dtype)
