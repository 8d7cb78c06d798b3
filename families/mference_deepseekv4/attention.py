"""Attention of all three kinds of layers: queries of low rank, one row per token that is key and value, a sink per head.

The trailing features of queries, rows and entries turn with position; what a query gathers turns back by its own.
"""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from attrs import frozen

from mference_core import CompositeState, CompressedState, LayerState, RowState, Step, Weights
from mference_deepseekv4.arch import CSA, RMS_EPS, SLIDING, DeepseekV4Arch
from mference_deepseekv4.compressor import Compressor, Indexer, compressor, indexer
from mference_deepseekv4.layout import INDEX, POOL, ROW, WINDOW, append, held
from mference_deepseekv4.streams import norm
from mference_kernels.quant import Matrix, block_linear, linear, linears, split_rows
from mference_kernels.rope import default_frequencies, turned_heads, yarn_frequencies
from mference_kernels.sparse import Seen, sparse_attentions


@frozen(kw_only=True)
class Attention:
    """The mixer of one layer; without a compressor it sees its window alone, without an indexer every entry."""

    q_down: Matrix
    q_norm: mx.array
    q_up: Matrix
    row: Matrix
    row_norm: mx.array
    sinks: mx.array
    out_down: tuple[Matrix, ...]
    out_up: Matrix
    frequencies: mx.array
    compressor: Compressor | None
    indexer: Indexer | None
    heads: int
    head_dim: int
    window: int
    rate: int
    nothing: mx.array

    def __call__(self, x: mx.array, states: Sequence[LayerState], step: Step) -> mx.array:
        """Attend x (B, L, H), writing each timeline's real tokens to its state first."""
        B = x.shape[0]
        low, row, *inputs = linears(x, self._of_rows())
        low = norm(low, self.q_norm)
        q, *index_q = linears(low, [self.q_up] if self.indexer is None else [self.q_up, self.indexer.queries])
        at, turns = step.positions, self.frequencies
        q = turned_heads(q, at, turns, heads=self.heads, eps=RMS_EPS)
        row = turned_heads(row, at, turns, heads=1, eps=RMS_EPS, weight=self.row_norm)
        seen = [self._write(row, (*inputs, *index_q), states[b], step, b) for b in range(B)]
        scale = self.head_dim**-0.5
        mixed = sparse_attentions(q, seen, self.sinks, scale=scale, window=self.window, rate=self.rate)
        o = turned_heads(mixed, at, turns, heads=self.heads, back=True, flat=True)
        return linear(block_linear(o, self.out_down), self.out_up)

    def _of_rows(self) -> list[Matrix]:
        """Return every matrix that meets the layer's input: they share one call."""
        matrices = [self.q_down, self.row]
        if self.compressor is not None:
            matrices += [self.compressor.values, self.compressor.gates]
        if self.indexer is not None:
            matrices += [self.indexer.compressor.values, self.indexer.compressor.gates, self.indexer.weights]
        return matrices

    def _write(self, row: mx.array, inputs: Sequence[mx.array], state: LayerState, step: Step, b: int) -> Seen:
        """Write the real tokens of timeline b to its state; return what its queries see."""
        real, start, at = step.lengths[b], step.offsets[b], b * row.shape[1]
        window, entries, picks = state, self.nothing, None
        if self.compressor is not None:
            parts = cast("CompositeState", state).parts
            window, pool = parts[WINDOW], cast("CompressedState", parts[POOL])
            entries = self.compressor.take(inputs[0], inputs[1], pool, first=at, count=real)
            if self.indexer is not None:
                index = cast("CompressedState", parts[INDEX])
                keys = self.indexer.compressor.take(inputs[2], inputs[3], index, first=at, count=real)
                if (start + real) // self.rate > self.indexer.top_k:
                    own = [inputs[5], inputs[4], step.positions]
                    if own[0].shape[:2] != (1, real):
                        own = [part[b : b + 1, :real] for part in own]
                    picks = self.indexer.pick(own[0], own[1], keys, own[2], start, self.rate)
        ring_of_rows = cast("RowState", window)
        append(ring_of_rows, ROW, row, first=at, count=real)
        first, rows, ring = held(ring_of_rows, real)
        return Seen(
            rows=rows,
            entries=entries,
            picks=picks,
            length=real,
            query_start=start,
            key_start=first,
            ring=ring,
        )


def frequencies(arch: DeepseekV4Arch, layer: int) -> mx.array:
    """Return the angles per position: plain in sliding layers, another base and scaled where there are entries."""
    if arch.kind(layer) == SLIDING:
        return default_frequencies(arch.ca_rope_head_dim, arch.rope_theta)
    return yarn_frequencies(
        arch.ca_rope_head_dim,
        arch.ca_compress_rope_theta,
        factor=arch.ca_rope_scaling_factor,
        original=arch.ca_rope_scaling_original_max,
        beta_fast=arch.ca_rope_scaling_beta_fast,
        beta_slow=arch.ca_rope_scaling_beta_slow,
    )


def attention(arch: DeepseekV4Arch, weights: Weights, layer: int, prefix: str) -> Attention:
    """Return the mixer of a layer."""
    turns, kind = frequencies(arch, layer), arch.kind(layer)
    pool, index = f"{prefix}compressor.", f"{prefix}indexer."
    return Attention(
        q_down=weights.matrix(f"{prefix}wq_a.weight"),
        q_norm=weights.array(f"{prefix}q_norm.weight"),
        q_up=weights.matrix(f"{prefix}wq_b.weight"),
        row=weights.matrix(f"{prefix}wkv.weight"),
        row_norm=weights.array(f"{prefix}kv_norm.weight").astype(mx.float32),
        sinks=weights.array(f"{prefix}attn_sink").astype(mx.float32),
        out_down=split_rows(weights.matrix(f"{prefix}wo_a.weight"), arch.ca_o_groups),
        out_up=weights.matrix(f"{prefix}wo_b.weight"),
        frequencies=turns,
        compressor=compressor(arch, weights, layer, pool, turns) if kind != SLIDING else None,
        indexer=indexer(arch, weights, layer, index, turns) if kind == CSA else None,
        heads=arch.num_heads,
        head_dim=arch.head_dim,
        window=arch.sliding_window,
        rate=arch.rate(layer),
        nothing=mx.zeros((0, arch.head_dim)),
    )
