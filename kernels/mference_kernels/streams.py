"""Several residual streams: read by one block, written by it, mixed with each other (manifold hyper-connections)."""

import mlx.core as mx
from attrs import frozen

from mference_kernels import levels
from mference_kernels.fields import array_field
from mference_kernels.norms import rms_norm_ops


@frozen(kw_only=True)
class StreamMixer:
    """What one site mixes by: fn ((2 + S) * S, S * H), base ((2 + S) * S), scale (3), float32, for S streams of width H.

    The rows of fn and base are S of `pre`, S of `post`, then S * S of the streams' mixing, first index first.
    """

    fn: mx.array = array_field()
    base: mx.array = array_field()
    scale: mx.array = array_field()
    iterations: int
    eps: float
    norm_eps: float


@frozen(kw_only=True)
class StreamRead:
    """What a block reads, `u` (..., H), and what its output is written by: `post` (..., S), `mix` (..., S, S); float32."""

    u: mx.array = array_field()
    post: mx.array = array_field()
    mix: mx.array = array_field()


def balanced_ops(logits: mx.array, iterations: int, eps: float) -> mx.array:
    """Return nearly doubly stochastic matrices (..., S, S): softmax over the second index, columns and rows in turn.

    A column sum runs over the first index. Columns are divided `iterations` times, rows one time less; float32.
    Source: arXiv 1306.0895 (Sinkhorn), arXiv 2512.24880.
    """
    made = mx.softmax(logits, axis=-1) + eps
    made = made / (made.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        made = made / (made.sum(axis=-1, keepdims=True) + eps)
        made = made / (made.sum(axis=-2, keepdims=True) + eps)
    return made


def _mixed(x: mx.array, mixer: StreamMixer) -> tuple[mx.array, mx.array]:
    """Return streams (..., S, H) in float32, and the product of fn with all of a row's, normalised (..., rows of fn)."""
    flat = x.astype(mx.float32).reshape(*x.shape[:-2], -1)
    return flat.reshape(x.shape), rms_norm_ops(flat, None, mixer.norm_eps) @ mixer.fn.T


def read_streams_ops(x: mx.array, mixer: StreamMixer) -> StreamRead:
    """Mix what a block reads: u = sum of pre_j x_j.

    Shapes: x (..., S, H) -> u (..., H), post (..., S), mix (..., S, S).   Dtypes: any float in, float32 inside and out.
    """
    S = x.shape[-2]
    wide, logits = _mixed(x, mixer)
    parts = [logits[..., :S], logits[..., S : 2 * S], logits[..., 2 * S :]]
    offsets = [mixer.base[:S], mixer.base[S : 2 * S], mixer.base[2 * S :]]
    pre, post, mix = (
        part * mixer.scale[i] + offset for i, (part, offset) in enumerate(zip(parts, offsets, strict=True))
    )
    pre = mx.sigmoid(pre) + mixer.eps
    return StreamRead(
        u=(pre[..., None] * wide).sum(axis=-2),
        post=2 * mx.sigmoid(post),
        mix=balanced_ops(mix.reshape(*mix.shape[:-1], S, S), mixer.iterations, mixer.eps),
    )


def write_streams_ops(x: mx.array, y: mx.array, read: StreamRead, also: mx.array | None = None) -> mx.array:
    """Return the streams after a block: stream k is post_k y + sum over j of mix[j, k] x_j; `also` is added to y first.

    Shapes: x (..., S, H), y and also (..., H) -> (..., S, H).   Dtypes: any float in, x's out; float32 inside.
    """
    wide, total = x.astype(mx.float32), y.astype(mx.float32)
    total = total if also is None else total + also.astype(mx.float32)
    total = read.post[..., None] * total[..., None, :]
    for j in range(x.shape[-2]):
        total = total + read.mix[..., j, :, None] * wide[..., j : j + 1, :]
    return total.astype(x.dtype)


def merge_streams_ops(x: mx.array, mixer: StreamMixer) -> mx.array:
    """Return the one stream that is left after the last layer: sum of w_j x_j, w the sigmoid of the first S rows of fn.

    Shapes: x (..., S, H) -> (..., H); fn (S, S * H), base (S), scale (1).   Dtypes: any float in, float32 out and inside.
    """
    wide, logits = _mixed(x, mixer)
    weight = mx.sigmoid(logits * mixer.scale[0] + mixer.base) + mixer.eps
    return (weight[..., None] * wide).sum(axis=-2)


def read_streams(x: mx.array, mixer: StreamMixer) -> StreamRead:
    """Choose: native kernels where `levels` allows them, else `read_streams_ops`; arguments and result as there."""
    if not levels.cpu():
        return read_streams_ops(x, mixer)
    from mference_kernels import cpu_streams  # noqa: PLC0415 - it imports this module

    u, post, mix = cpu_streams.read_streams_cpu(x, mixer)
    return StreamRead(u=u, post=post, mix=mix)


def write_streams(x: mx.array, y: mx.array, read: StreamRead, also: mx.array | None = None) -> mx.array:
    """Choose as `read_streams` does; arguments and result as `write_streams_ops`."""
    if not levels.cpu():
        return write_streams_ops(x, y, read, also)
    from mference_kernels import cpu_streams  # noqa: PLC0415

    return cpu_streams.write_streams_cpu(x, y, read, also)


def merge_streams(x: mx.array, mixer: StreamMixer) -> mx.array:
    """Choose as `read_streams` does; arguments and result as `merge_streams_ops`."""
    if not levels.cpu():
        return merge_streams_ops(x, mixer)
    from mference_kernels import cpu_streams  # noqa: PLC0415

    return cpu_streams.merge_streams_cpu(x, mixer)
