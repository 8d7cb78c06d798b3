"""Attention to a window and to compressed entries of the past: all that are visible, or those that an indexer picks.

One row is key and value of every head. An entry pools `rate` tokens, and is visible from the last of them on.
"""

from collections.abc import Sequence

import mlx.core as mx
from attrs import frozen

from mference_kernels import levels
from mference_kernels.attention import SCORE_BYTES
from mference_kernels.fields import array_field
from mference_kernels.native_program import Timeline
from mference_kernels.routing import top_k_ops

KEY_BLOCK = 32
"""Keys that products take at once: their number grows with the queries of a call, and libraries choose kernels by it."""


def _in_blocks(rows: mx.array) -> mx.array:
    """Return rows (N, D) in float32, with zeros after them up to a whole number of blocks."""
    return mx.pad(rows.astype(mx.float32), [(0, -rows.shape[0] % KEY_BLOCK), (0, 0)])


def sparse_attention_ops(
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
) -> mx.array:
    """Attend `q` to the last `window` rows and, in the same softmax, to entries; a sink per head takes its share.

    Shapes: q (L, H, D), rows (S, D), entries (E, D), sinks (H,), picks (L, K) int32 -> (L, H, D).
    Dtypes: any float in, q's out; scores, softmax and sums in float32.
    Units: `query_start`, `key_start` are the token positions of q[0] and rows[0]; query p sees rows p - window + 1 .. p,
    and without picks every entry below (p + 1) // rate, else those of `picks[p]` that are not -1. Rate 0: no entries.
    Raises: ValueError if rows do not cover the queries' windows, or entries are missing.
    Query rows are independent, so their number per call changes no result.
    """
    L, H, _ = q.shape
    given, seen = rows.shape[0], (query_start + L) // rate if rate else 0
    if key_start > max(0, query_start - window + 1) or query_start + L - key_start > given:
        raise ValueError(
            f"[sparse] rows must cover positions to {query_start + L - 1} but got {given} from {key_start}"
        )
    if picks is None and entries.shape[0] < seen:
        raise ValueError(f"[sparse] entries must be {seen} but got {entries.shape[0]}")
    keys, pool = _in_blocks(rows), entries.astype(mx.float32)
    S = keys.shape[0]
    wide, sink = q.astype(mx.float32) * scale, sinks.astype(mx.float32)[None, :, None]
    each = 4 * H * (S + (pool.shape[0] if picks is None else picks.shape[1]))
    each += 0 if picks is None else 4 * picks.shape[1] * q.shape[-1]
    block, out = max(1, SCORE_BYTES // each), []
    for start in range(0, L, block):
        part = wide[start : start + block]
        at = mx.arange(part.shape[0])[:, None] + (query_start + start)
        places = mx.arange(S)[None] + key_start
        near = (places <= at) & (places > at - window)
        scores = [mx.where(near[:, None], part @ keys.T, -mx.inf)]
        if picks is not None:
            chosen = picks[start : start + block]
            far = pool[mx.maximum(chosen, 0)]
            scores.append(mx.where((chosen >= 0)[:, None], part @ far.swapaxes(-1, -2), -mx.inf))
        elif seen:
            far = _in_blocks(pool[:seen])
            visible = mx.arange(far.shape[0])[None] < (at + 1) // rate
            scores.append(mx.where(visible[:, None], part @ far.T, -mx.inf))
        scores.append(mx.broadcast_to(sink, (part.shape[0], H, 1)))
        p = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1)
        total = p[:, :, :S] @ keys
        out.append(total + p[:, :, S:-1] @ far if len(scores) > 2 else total)
    joined = out[0] if len(out) == 1 else mx.concatenate(out)
    return joined.astype(q.dtype)


@frozen(kw_only=True)
class Seen:
    """What the queries of one timeline see, as `sparse_attention` takes it; `length` of the batch's queries are real.

    Where `in_place` says yes, rows and entries may be whole memory (1, capacity, D), whatever of it is used.
    """

    rows: mx.array = array_field()
    entries: mx.array = array_field()
    picks: mx.array | None = array_field(default=None)
    length: int
    query_start: int
    key_start: int
    ring: bool = False


def sparse_attentions_ops(
    q: mx.array, seen: Sequence[Seen], sinks: mx.array, *, scale: float, window: int, rate: int
) -> mx.array:
    """Attend each timeline's queries to what it has; the rest as `sparse_attention_ops`.

    Shapes: q (B, L, H, D), one of `seen` per timeline -> (B, L, H, D), zeros past a timeline's length.
    """
    out = []
    for b, part in enumerate(seen):
        rows, length = part.rows, part.length
        if part.ring:
            rows = rows[mx.arange(part.key_start, part.query_start + length) % rows.shape[0]]
        y = sparse_attention_ops(
            q[b, :length],
            rows,
            part.entries,
            sinks,
            part.picks,
            scale=scale,
            query_start=part.query_start,
            key_start=part.key_start,
            window=window,
            rate=rate,
        )
        out.append(mx.pad(y, [(0, q.shape[1] - length), (0, 0), (0, 0)]))
    return mx.stack(out)


def pick_entries_ops(
    q: mx.array, weights: mx.array, keys: mx.array, *, scale: float, query_start: int, rate: int, top_k: int
) -> mx.array:
    """Return for each query the `top_k` visible entries of the largest sum over heads of weight * relu(q . key * scale).

    Shapes: q (L, H, D), weights (L, H), either with a leading 1, keys (E, D) -> (L, min(top_k, E)) int32, ascending, -1
    after the last.
    Dtypes: any float in; scores in float32. The lower entry wins a tie.
    Units: as `sparse_attention_ops`; at most `top_k` visible entries are all picked.
    """
    L, H, D = q.shape[-3:]
    q, weights = q.reshape(L, H, D), weights.reshape(L, H)
    E = min(keys.shape[0], (query_start + L) // rate)
    count = min(top_k, keys.shape[0])
    if not E:
        return mx.full((L, count), -1, dtype=mx.int32)
    wide, pool = q.astype(mx.float32), keys[:E].astype(mx.float32)
    block, out = max(1, SCORE_BYTES // (4 * H * E)), []
    for start in range(0, L, block):
        part = wide[start : start + block]
        dots = mx.maximum(part @ pool.T * scale, 0)
        scores = (dots * weights[start : start + block].astype(mx.float32)[..., None]).sum(axis=1)
        visible = (mx.arange(part.shape[0])[:, None] + (query_start + start + 1)) // rate
        scores = mx.where(mx.arange(E)[None] < visible, scores, -mx.inf)
        picks = top_k_ops(scores, min(count, E))
        picks = mx.sort(mx.where(picks < visible, picks, E), axis=-1)
        out.append(mx.pad(mx.where(picks < E, picks, -1), [(0, 0), (0, count - picks.shape[1])], constant_values=-1))
    return mx.concatenate(out).astype(mx.int32)


def sparse_attention(
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
    """Choose: native kernels where `levels` allows them, else `sparse_attention_ops`; arguments and result as there.

    With `ring`, rows are a whole ring: position p lies in row p mod S, and `key_start` is the first position used.
    """
    where = {"query_start": query_start, "key_start": key_start, "window": window, "rate": rate}
    if levels.cpu():
        from mference_kernels import cpu_sparse  # noqa: PLC0415 - it imports what asks here

        return cpu_sparse.sparse_attention_cpu(q, rows, entries, sinks, picks, scale=scale, ring=ring, **where)
    if ring:
        rows = rows[mx.arange(key_start, query_start + q.shape[0]) % rows.shape[0]]
    return sparse_attention_ops(q, rows, entries, sinks, picks, scale=scale, **where)


def pick_entries(
    q: mx.array, weights: mx.array, keys: mx.array, *, scale: float, query_start: int, rate: int, top_k: int
) -> mx.array:
    """Choose as `sparse_attention` does; arguments and result as `pick_entries_ops`."""
    where = {"query_start": query_start, "rate": rate, "top_k": top_k}
    if levels.cpu():
        from mference_kernels import cpu_sparse  # noqa: PLC0415

        return cpu_sparse.pick_entries_cpu(q, weights, keys, scale=scale, **where)
    return pick_entries_ops(q, weights, keys, scale=scale, **where)


def sparse_attentions(
    q: mx.array, seen: Sequence[Seen], sinks: mx.array, *, scale: float, window: int, rate: int
) -> mx.array:
    """Choose as `sparse_attention` does; arguments and result as `sparse_attentions_ops`."""
    if not levels.cpu():
        return sparse_attentions_ops(q, seen, sinks, scale=scale, window=window, rate=rate)
    from mference_kernels import cpu_sparse  # noqa: PLC0415

    return cpu_sparse.sparse_attentions_cpu(q, seen, sinks, scale=scale, window=window, rate=rate)


def in_place() -> bool:
    """Say whether rows are stored and read where they lie: native kernels do."""
    return levels.cpu() is not None


def store_rows(place: Timeline, rows: mx.array, first: int = 0) -> None:
    """Write rows `first` and on of `rows` (..., D), flattened, into the keys of a timeline, at once.

    Only where `in_place` says yes, for float32 and bfloat16 timelines of one head.   Raises: ValueError if shapes do not fit.
    """
    from mference_kernels import cpu_sparse  # noqa: PLC0415

    cpu_sparse.store_rows_cpu(place, rows, first)
