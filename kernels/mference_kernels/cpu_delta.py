"""Fast paths of gated delta networks on the CPU: each takes and returns what its `x_ops` does, and evaluates its inputs.

docs/numerics.md, "Gated delta networks": the same bits for any variant, thread count, batch, and cut into calls.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from mference_kernels import native
from mference_kernels.delta_mixer import DeltaMixer, Mixed, check_mixer
from mference_kernels.gated_delta import check_delta

MOST_TAPS = 8


class MixerArgs(ctypes.Structure):
    """`mf_delta_mixer` of native/delta.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "z", "a", "b", "lengths")),
        *((name, ctypes.c_void_p) for name in ("tails", "new_tails", "states", "new_states")),
        *((name, ctypes.c_void_p) for name in ("taps", "log_rate", "dt_bias", "norm", "y")),
        *((name, ctypes.c_int64) for name in ("batch", "length", "tap_count", "key_heads", "value_heads")),
        *((name, ctypes.c_int64) for name in ("key_dim", "value_dim")),
        *((name, ctypes.c_float) for name in ("q_scale", "unit_eps", "norm_eps")),
    )


@cache
def _library() -> ctypes.CDLL:
    made = native.library()
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    made.mf_gated_delta.argtypes = (*[pointer] * 6, *[int64] * 6, pointer, pointer)
    made.mf_causal_conv.argtypes = (*[pointer] * 3, *[int64] * 4, pointer, pointer)
    made.mf_delta_mix.argtypes = (pointer,)
    return made


def gated_delta_cpu(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Take tokens by the rule as written; arguments and result as `gated_delta_ops`. How tokens are cut changes no bit."""
    check_delta(q, v, state)
    B, L, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    out, after = native.Output(v.shape), native.Output(state.shape)
    if out.size and after.size:
        wide = [native.evaluated(array, mx.float32) for array in (q, k, v, log_decay, beta, state)]
        at = [native.address(array) for array in wide]
        code = _library().mf_gated_delta(*at, B, L, Hk, Hv, Dk, Dv, out.address, after.address)
        native.check(code, "gated_delta")
        return out.array(), after.array()
    return out.array(), state


def can_filter(weight: mx.array) -> bool:
    """Say whether the native convolution takes these filters: 2 to 8 taps."""
    return 2 <= weight.shape[-1] <= MOST_TAPS


def causal_conv_cpu(x: mx.array, tail: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """Filter each channel over its own past; arguments and result as `causal_conv_ops`, bit for bit."""
    B, L, C = x.shape
    taps = weight.shape[-1]
    if weight.shape != (C, taps):
        raise ValueError(f"[causal_conv] weight must be ({C}, taps) but got {weight.shape}")
    if tail.shape != (B, taps - 1, C):
        raise ValueError(f"[causal_conv] tail must be {(B, taps - 1, C)} but got {tail.shape}")
    y, after = native.Output(x.shape), native.Output(tail.shape)
    if not y.size or not after.size:
        return y.array(), tail.astype(x.dtype)
    kept = tail.astype(x.dtype)
    wide, past = native.evaluated(x, mx.float32), native.evaluated(kept, mx.float32)
    filters = native.evaluated(weight.T, mx.float32)
    at = (native.address(array) for array in (wide, past, filters))
    native.check(_library().mf_causal_conv(*at, B, L, C, taps, y.address, after.address), "causal_conv")
    return y.array(), after.array().astype(x.dtype)


def delta_mixer_cpu(
    qkv: mx.array,
    z: mx.array,
    a: mx.array,
    b: mx.array,
    lengths: Sequence[int],
    tails: Sequence[mx.array],
    states: Sequence[mx.array],
    mixer: DeltaMixer,
) -> Mixed:
    """Mix tokens between a delta network's projections in one call; arguments and result as `delta_mixer_ops`."""
    check_mixer(qkv, z, a, b, lengths, tails, states, mixer)
    B, L, _ = qkv.shape
    y = native.Output(z.shape)
    new_tails, new_states = ([mx.empty(array.shape) for array in arrays] for arrays in (tails, states))
    mx.eval(new_tails, new_states)  # at once, for whoever computes them has to be woken
    wide = [native.evaluated(array, mx.float32) for array in (qkv, z, a, b)]
    held_tails = [native.evaluated(tail, mx.float32) for tail in tails]
    held_states = [native.evaluated(state, mx.float32) for state in states]
    counts = (ctypes.c_int32 * B)(*lengths)
    lists = [
        (ctypes.c_void_p * B)(*addresses)
        for addresses in (
            map(native.address, held_tails),
            map(native.address, new_tails),
            map(native.address, held_states),
            map(native.address, new_states),
        )
    ]
    weights = (mixer.taps, mixer.log_rate, mixer.dt_bias, mixer.norm)
    args = MixerArgs(
        *map(native.address, wide),
        ctypes.addressof(counts),
        *map(ctypes.addressof, lists),
        *map(native.address, weights),
        y.address,
        *(B, L, mixer.taps.shape[0], mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim),
        *(mixer.key_dim**-0.5, mixer.unit_eps, mixer.norm_eps),
    )
    native.check(_library().mf_delta_mix(ctypes.byref(args)), "delta_mixer")
    return y.array(), [tail.astype(qkv.dtype) for tail in new_tails], new_states
