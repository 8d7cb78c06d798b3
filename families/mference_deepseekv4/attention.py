"""Attention of all three kinds of layers: queries of low rank, one row per token that is key and value, a sink per head.

The trailing features of queries, rows and entries turn with position; what a query gathers turns back by its own.
"""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from attrs import frozen

from mference_core import CompositeState, CompressedState, LayerState, RowState, Step, Weights
from mference_deepseekv4.arch import CSA, SLIDING, DeepseekV4Arch
from mference_deepseekv4.compressor import Compressor, Indexer, compressor, indexer
from mference_deepseekv4.layout import INDEX, POOL, ROW, WINDOW
from mference_deepseekv4.streams import norm
from mference_kernels.quant import Matrix, linear, linears, split_rows
from mference_kernels.rope import default_frequencies, trailing_rope, yarn_frequencies
from mference_kernels.sparse import sparse_attention


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

    def __call__(self, x: mx.array, states: Sequence[LayerState], step: Step) -> mx.array:
        """Attend x (B, L, H), writing each timeline's real tokens to its state first."""
        B, L, _ = x.shape
        low, row, *inputs = linears(x, self._of_rows())
        low = norm(low, self.q_norm)
        q, *index_q = linears(low, [self.q_up] if self.indexer is None else [self.q_up, self.indexer.queries])
        q = norm(q.reshape(B, L, self.heads, self.head_dim), None)
        q = trailing_rope(q, step.positions, self.frequencies)
        row = trailing_rope(norm(row, self.row_norm)[:, :, None], step.positions, self.frequencies)[:, :, 0]
        mixed = [
            self._timeline(q[b], row[b], [part[b] for part in (*inputs, *index_q)], states[b], step, b)
            for b in range(B)
        ]
        o = trailing_rope(mx.stack(mixed), step.positions, self.frequencies, back=True)
        groups = o.reshape(B, L, len(self.out_down), -1)
        down = [linear(groups[:, :, group], matrix) for group, matrix in enumerate(self.out_down)]
        return linear(mx.concatenate(down, axis=-1), self.out_up)

    def _of_rows(self) -> list[Matrix]:
        """Return every matrix that meets the layer's input: they share one call."""
        matrices = [self.q_down, self.row]
        if self.compressor is not None:
            matrices += [self.compressor.values, self.compressor.gates]
        if self.indexer is not None:
            matrices += [self.indexer.compressor.values, self.indexer.compressor.gates, self.indexer.weights]
        return matrices

    def _timeline(
        self, q: mx.array, row: mx.array, inputs: Sequence[mx.array], state: LayerState, step: Step, b: int
    ) -> mx.array:
        """Attend one timeline: q (L, heads, D) and row (L, D), padding included, which comes out as zeros."""
        real, start = step.lengths[b], step.offsets[b]
        inputs = [part[:real] for part in inputs]
        window, entries, picks = state, row[:0], None
        if self.compressor is not None:
            parts = cast("CompositeState", state).parts
            window = parts[WINDOW]
            entries = self.compressor.take(inputs[0], inputs[1], cast("CompressedState", parts[POOL]))
            if self.indexer is not None:
                keys = self.indexer.compressor.take(inputs[2], inputs[3], cast("CompressedState", parts[INDEX]))
                at = step.positions[b, :real]
                picks = self.indexer.pick(inputs[5], inputs[4], keys, at, start=start, rate=self.rate)
        held = cast("RowState", window)
        held.append(**{ROW: row[None, :real]})
        first, rows, ring = held.visible(real)
        out = sparse_attention(
            q[:real],
            rows[ROW][0],
            entries,
            self.sinks,
            picks,
            scale=self.head_dim**-0.5,
            query_start=start,
            key_start=first,
            window=self.window,
            rate=self.rate,
            ring=ring,
        )
        return mx.pad(out, [(0, q.shape[0] - real), (0, 0), (0, 0)]) if real < q.shape[0] else out


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
        row_norm=weights.array(f"{prefix}kv_norm.weight"),
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
    )
