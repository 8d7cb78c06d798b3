"""Fast paths on the CPU of windows, entries and their indexer: each takes and returns what its `x_ops` does."""

import ctypes

import mlx.core as mx

from mference_kernels import native


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
    L, H, D = q.shape
    S, span, seen = rows.shape[0], query_start + L - key_start, (query_start + L) // rate if rate else 0
    if rows.shape[1:] != (D,) or sinks.shape != (H,):
        raise ValueError(f"[sparse] rows must be (rows, {D}) and sinks ({H},) but got {rows.shape} and {sinks.shape}")
    if key_start > max(0, query_start - window + 1) or span > S:
        raise ValueError(f"[sparse] rows must cover positions to {query_start + L - 1} but got {S} from {key_start}")
    if picks is None and entries.shape[0] < seen:
        raise ValueError(f"[sparse] entries must be {seen} but got {entries.shape[0]}")
    if picks is not None and picks.shape[0] != L:
        raise ValueError(f"[sparse] picks must be of {L} queries but got {picks.shape[0]}")
    out = native.Output((L, H, D))
    if out.size:
        wide, weights = native.evaluated(q, mx.float32), native.evaluated(sinks, mx.float32)
        held_rows, at_rows, _ = native.heads(rows.astype(mx.float32)[None])
        pool, at_pool = (entries, None) if not entries.size else native.heads(entries.astype(mx.float32)[None])[:2]
        which = None if picks is None or not picks.size else native.evaluated(picks, mx.int32)
        args = native.SparseArgs(
            *(native.address(wide), at_rows, at_pool, native.address(weights)),
            *(None if which is None else native.address(which), out.address),
            *(L, H, D, query_start, key_start, window, S if ring else 0),
            *(rate if picks is None or which is not None else 0, 0 if which is None else which.shape[1]),
            scale,
        )
        native.check(native.library().mf_sparse_attend(ctypes.byref(args)), "sparse")
        del held_rows, pool  # they own the memory that was read
    y = out.array()
    return y if y.dtype == q.dtype else y.astype(q.dtype)


def pick_entries_cpu(
    q: mx.array, weights: mx.array, keys: mx.array, *, scale: float, query_start: int, rate: int, top_k: int
) -> mx.array:
    """Pick entries; arguments, shapes and dtypes as `pick_entries_ops`."""
    L, H, D = q.shape
    E = keys.shape[0]
    if weights.shape != (L, H) or keys.shape != (E, D) or (query_start + L) // rate > E:
        raise ValueError(f"[pick] keys must be ({(query_start + L) // rate}, {D}) but got {keys.shape}")
    most = min(top_k, E)
    picks = (ctypes.c_int32 * (L * most))()
    if L * most:
        wide, scores = native.evaluated(q, mx.float32), native.evaluated(weights, mx.float32)
        pool, at_pool, _ = native.heads(keys.astype(mx.float32)[None])
        args = native.PickingArgs(
            *(native.address(wide), native.address(scores), at_pool, ctypes.addressof(picks)),
            *(L, H, D, E, query_start, rate, most, scale),
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
    B, L, H, D = x.shape
    half = frequencies.shape[0]
    if 2 * half > D:
        raise ValueError(f"[trailing_rope] at most {D} features can turn but got {2 * half}")
    if positions.shape != (B, L):
        raise ValueError(f"[trailing_rope] positions must be {(B, L)} but got {positions.shape}")
    if not x.size or not half:
        return x
    wide, at = native.evaluated(x, mx.float32), native.evaluated(positions, mx.int32)
    speeds, y = native.evaluated(frequencies, mx.float32), native.Output(x.shape)
    addresses = native.address(wide), native.address(at), native.address(speeds)
    code = native.library().mf_turn_trailing(*addresses, B * L, H, D, half, int(back), y.address)
    native.check(code, "trailing_rope")
    return y.array() if x.dtype == mx.float32 else y.array().astype(x.dtype)
