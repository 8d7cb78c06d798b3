"""The gated delta rule: a linear-attention state that decays, forgets by key and learns by key.

Per value head, with key k, value v, query q, decay e^g <= 1 and learning rate b, each token does

    S <- e^g S;   u = b (v - S'k);   S <- S + k u';   o = S'q        S (Dk, Dv)

Source: arXiv 2412.06464. Several value heads may share one key head: head h reads key head h // (Hv / Hk).
"""

import mlx.core as mx

from mference_kernels import levels

CHUNK_TOKENS = 64
"""Tokens the chunked form takes at once on GPUs, where matrix products cost little."""

CPU_CHUNK_TOKENS = 16
"""The same on CPUs, where only the number of operations counts (measured: 1.7 times as fast as 64)."""

CHUNK_BAR = 1e-5
"""Largest difference of the two forms, relative to the largest output or state entry (measured: 2e-6)."""

SEGMENT_TOKENS = 1024
"""Tokens whose chunks are prepared together: bounds memory, changes no bit."""


def gated_delta_ops(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Take tokens one by one: the definition.

    Shapes: q, k (B, L, Hk, Dk), v (B, L, Hv, Dv), log_decay, beta (B, L, Hv), state (B, Hv, Dk, Dv) ->
    outputs (B, L, Hv, Dv) and the state after them.   Dtypes: float32.
    q and k come normalised and scaled.   Raises: ValueError if Hk does not divide Hv or the state does not fit.
    """
    check_delta(q, v, state)
    _, L, Hk, _ = q.shape
    Hv = v.shape[2]
    held, repeat, outputs = state, Hv // Hk, []
    for t in range(L):
        key = mx.repeat(k[:, t], repeat, axis=1)[..., None, :]
        query = mx.repeat(q[:, t], repeat, axis=1)[..., None, :]
        held = mx.exp(log_decay[:, t])[..., None, None] * held
        update = beta[:, t][..., None, None] * (v[:, t][..., None, :] - key @ held)
        held = held + key.swapaxes(-1, -2) * update
        outputs.append((query @ held)[..., 0, :])
    return mx.stack(outputs, axis=1), held


def gated_delta_chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    *,
    chunk: int = CHUNK_TOKENS,
) -> tuple[mx.array, mx.array]:
    """Take tokens in chunks of matrix products; shapes, dtypes and errors as `gated_delta_ops`.

    Inside a chunk the updates solve (I + A) U = b (V - e^G K S) with A strictly lower triangular, inverted for all
    chunks at once; only the state goes from chunk to chunk. `chunk` is a power of two.
    Within `CHUNK_BAR` of the definition.
    """
    check_delta(q, v, state)
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"[gated_delta] chunk must be a power of two but got {chunk}")
    length = q.shape[1]
    size = min(chunk, 1 << (length - 1).bit_length())
    step = max(size, SEGMENT_TOKENS // size * size)
    outputs = []
    for start in range(0, length, step):
        qs, ks, vs, decays, betas = (array[:, start : start + step] for array in (q, k, v, log_decay, beta))
        out, state = _segment(qs, ks, vs, decays, betas, state, size)
        outputs.append(out)
    return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)), state


def _segment(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array, size: int
) -> tuple[mx.array, mx.array]:
    """Take one segment; heads are grouped (B, Hk, R, ...) so that key heads are never repeated."""
    B, L, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    q, k = _cut(q, Hk, size), _cut(k, Hk, size)  # (N, B, Hk, 1, size, Dk)
    v = _cut(v, Hk, size)  # (N, B, Hk, R, size, Dv)
    g, rate = _cut(log_decay[..., None], Hk, size)[..., 0], _cut(beta[..., None], Hk, size)
    row, column = mx.arange(size)[:, None], mx.arange(size)[None, :]
    # Decay from token i to token t as the sum of what lies between: a difference of long sums would lose digits.
    between = mx.cumsum(mx.where(row > column, g[..., :, None], 0.0), axis=-2)
    decay = mx.where(row >= column, mx.exp(between), 0.0)
    since_start = mx.exp(mx.cumsum(g, axis=-1))[..., None]
    overlap = mx.where(row > column, rate * (k @ k.swapaxes(-1, -2)) * decay, 0.0)
    solve = unit_lower_inverse(overlap)
    wanted, recalled = solve @ (rate * v), solve @ (rate * since_start * k)
    within = (q @ k.swapaxes(-1, -2)) * decay
    asked, kept = q * since_start, (k * decay[..., -1, :, None]).swapaxes(-1, -2)
    held, outputs = state.reshape(B, Hk, Hv // Hk, Dk, Dv), []
    for n in range(q.shape[0]):
        update = wanted[n] - recalled[n] @ held
        outputs.append(asked[n] @ held + within[n] @ update)
        held = since_start[n, ..., -1:, :] * held + kept[n] @ update
    out = mx.stack(outputs, axis=1)  # (B, N, Hk, R, size, Dv)
    out = out.transpose(0, 1, 4, 2, 3, 5).reshape(B, -1, Hv, Dv)[:, :L]
    return out, held.reshape(state.shape)


def _cut(x: mx.array, groups: int, size: int) -> mx.array:
    """Cut (B, L, H, D) into chunks (N, B, groups, H / groups, size, D), the last filled up with tokens that do nothing."""
    B, L, H, D = x.shape
    count = -(-L // size)
    padded = mx.pad(x, [(0, 0), (0, count * size - L), (0, 0), (0, 0)])
    return padded.reshape(B, count, size, groups, H // groups, D).transpose(1, 0, 3, 4, 2, 5)


def unit_lower_inverse(a: mx.array) -> mx.array:
    """Return the inverse of I + a for strictly lower triangular matrices.

    Shapes: a (..., C, C), C a power of two -> (..., C, C).   Dtypes: float32.
    Blocks are joined two by two: of [[P, 0], [a, Q]] the corner is -Q^-1 a P^-1. Unlike a product of powers of `a`
    no intermediate is larger than the inverse itself.
    """
    *lead, size, _ = a.shape
    done = 1
    inverse = mx.ones((*lead, size, 1, 1), a.dtype)
    while done < size:
        count = size // (2 * done)
        blocks = mx.diagonal(a.reshape(*lead, count, 2 * done, count, 2 * done), axis1=-4, axis2=-2)
        below = mx.moveaxis(blocks, -1, -3)[..., done:, :done]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -below if done == 1 else -(second @ (below @ first))
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        inverse = mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
        done *= 2
    return inverse[..., 0, :, :]


def check_delta(q: mx.array, v: mx.array, state: mx.array) -> None:
    """Raise ValueError for heads or a state that do not fit."""
    keys, values = q.shape[2], v.shape[2]
    if values % keys:
        raise ValueError(f"[gated_delta] key heads must divide {values} but got {keys}")
    expected = (q.shape[0], values, q.shape[3], v.shape[3])
    if state.shape != expected:
        raise ValueError(f"[gated_delta] state must be {expected} but got {state.shape}")


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Choose: native where `levels` allows it, else one token by the definition, more in chunks of the device's size."""
    if levels.cpu() is not None:
        from mference_kernels import cpu_delta  # noqa: PLC0415 - it imports this module

        return cpu_delta.gated_delta_cpu(q, k, v, log_decay, beta, state)
    if q.shape[1] == 1:
        return gated_delta_ops(q, k, v, log_decay, beta, state)
    chunk = CPU_CHUNK_TOKENS if mx.default_device() == mx.Device(mx.cpu) else CHUNK_TOKENS
    return gated_delta_chunked(q, k, v, log_decay, beta, state, chunk=chunk)
