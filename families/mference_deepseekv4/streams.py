"""The residual's streams: what a block reads of them, and how it writes to them. All of it in float32."""

from functools import partial
from typing import NamedTuple

import mlx.core as mx
from attrs import frozen

from mference_core import Weights
from mference_deepseekv4.arch import RMS_EPS, DeepseekV4Arch
from mference_kernels.norms import rms_norm
from mference_kernels.streams import StreamMixer, StreamRead, merge_streams, read_streams, write_streams

norm = partial(rms_norm, eps=RMS_EPS)


class LayerRows(NamedTuple):
    """Streams (B, L, S, H) that a block has read, its input `rows` (B, L, H), and how its output is to be written.

    Streams have the dtype of hidden rows, all else is float32: half-precision rounding would change which entries an
    indexer picks.
    """

    streams: mx.array
    rows: mx.array
    post: mx.array
    mix: mx.array


def mixer(arch: DeepseekV4Arch, weights: Weights, prefix: str) -> StreamMixer:
    """Return the mixing of one site, or of the head."""
    fn, base, scale = (weights.array(f"{prefix}{name}").astype(mx.float32) for name in ("fn", "base", "scale"))
    return StreamMixer(
        fn=fn, base=base, scale=scale, iterations=arch.hc_sinkhorn_iters, eps=arch.hc_eps, norm_eps=RMS_EPS
    )


@frozen(kw_only=True)
class Site:
    """One of a layer's two places where a block reads the streams and writes back to them."""

    mixer: StreamMixer
    norm: mx.array

    def read(self, x: mx.array) -> LayerRows:
        """Return what the block reads of streams x (B, L, S, H), normalised."""
        read = read_streams(x, self.mixer)
        return LayerRows(streams=x, rows=norm(read.u, self.norm), post=read.post, mix=read.mix)


def write(h: LayerRows, y: mx.array, also: mx.array | None = None) -> mx.array:
    """Return the streams (B, L, S, H) after a block that made y (B, L, H) of what it read; `also` is added to y."""
    return write_streams(h.streams, y, StreamRead(u=h.rows, post=h.post, mix=h.mix), also)


def merged(x: mx.array, head: StreamMixer) -> mx.array:
    """Return the rows (B, L, H) that the final norm reads of streams x."""
    return merge_streams(x, head).astype(x.dtype)
