"""Causal attention of one row over its own keys, grouped heads, optional window."""

from typing import cast

import mlx.core as mx

from mference_kernels import levels

SCORE_BYTES = 64 << 20
"""Largest block of float32 scores held at once; queries are taken in blocks that fit."""


def attention_ops(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    query_start: int,
    key_start: int,
    window: int | None = None,
) -> mx.array:
    """Attend `q` to keys at or before its position, at most `window` of them.

    Shapes: q (H, L, D), k (G, S, D), v (G, S, Dv) with G dividing H -> (H, L, Dv).
    Dtypes: any float in, q's out; scores, softmax and the weighted sum in float32.
    Units: `query_start`, `key_start` are the token positions of q[:, 0] and k[:, 0]; query p sees p - window + 1 .. p.
    Raises: ValueError if G does not divide H or no key is visible.
    Query rows are independent, so their number per call changes no result.
    """
    heads, length, dim = q.shape
    groups, span, _ = k.shape
    if heads % groups:
        raise ValueError(f"[attention] key heads must divide {heads} but got {groups}")
    if key_start > query_start or span < query_start + length - key_start:
        raise ValueError(f"[attention] keys must cover positions to {query_start + length - 1} but got {span} rows")
    wide_k = k.astype(mx.float32)[:, None].swapaxes(-1, -2)
    wide_v = v.astype(mx.float32)[:, None]
    grouped = (q.astype(mx.float32) * scale).reshape(groups, heads // groups, length, dim)
    block = max(1, SCORE_BYTES // (4 * heads * span))
    out = []
    for start in range(0, length, block):
        part = grouped[:, :, start : start + block]
        at = mx.arange(part.shape[2])[:, None] + (query_start + start)
        keys = mx.arange(span)[None, :] + key_start
        visible = keys <= at
        if window is not None:
            visible = visible & (keys > at - window)
        scores = mx.where(visible, part @ wide_k, -mx.inf)
        out.append(mx.softmax(scores, axis=-1) @ wide_v)
    joined = out[0] if len(out) == 1 else mx.concatenate(out, axis=2)
    return joined.reshape(heads, length, v.shape[-1]).astype(q.dtype)


def attention(
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
    """Choose: native kernels where `levels` allows them, else `attention_ops`; arguments and result as there.

    With `ring`, k and v are whole rings: position p lies in row p mod S, and `key_start` is the first position used.
    """
    fast = levels.cpu()
    if fast:
        where = {"query_start": query_start, "key_start": key_start, "window": window, "ring": ring}
        return cast("mx.array", fast.attention_cpu(q, k, v, scale=scale, **where))
    if ring:
        order = mx.arange(key_start, query_start + q.shape[1]) % k.shape[1]
        k, v = k[:, order], v[:, order]
    return attention_ops(q, k, v, scale=scale, query_start=query_start, key_start=key_start, window=window)
