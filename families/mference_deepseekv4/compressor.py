"""Entries of the past: each pools a window of tokens, and the indexer picks among them.

The first half of a row of an overlapping window belongs to the entry of the *next* window. What of it the next call
needs is in the state: without it, decoding and prefilling in pieces differ from prefilling at once.
"""

import mlx.core as mx
from attrs import frozen

from mference_core import CompressedState, Weights
from mference_deepseekv4.arch import CSA, RMS_EPS, DeepseekV4Arch
from mference_deepseekv4.layout import ENTRY, GATES, VALUES, append, held
from mference_kernels.pooling import pool_windows
from mference_kernels.quant import Dense, Matrix
from mference_kernels.rope import turned_heads
from mference_kernels.sparse import pick_entries


def plain(weights: Weights, name: str) -> mx.array:
    """Return a matrix that is stored as plain values."""
    matrix = weights.matrix(name)
    assert isinstance(matrix, Dense)
    return matrix.weight


@frozen(kw_only=True)
class Compressor:
    """Makes entries of tokens' values and gates; `offsets` (rate, width) are added to the gates by place in the window."""

    values: Matrix
    gates: Matrix
    offsets: mx.array
    norm: mx.array
    frequencies: mx.array
    overlapping: bool

    def take(self, values: mx.array, gates: mx.array, state: CompressedState, *, first: int, count: int) -> mx.array:
        """Take tokens' values and gates, rows `first` and on of (B, L, width); return all entries so far, as `held` does."""
        windows = state.take(first=first, count=count, **{VALUES: values, GATES: gates})
        if windows.count:
            before = (windows.before[VALUES], windows.before[GATES]) if self.overlapping else None
            pooled = pool_windows(windows.rows[VALUES], windows.rows[GATES], self.offsets, before, windows.first)
            numbers = range(windows.first, windows.first + windows.count)
            at = mx.array([[number * state.layout.rate for number in numbers]], dtype=mx.int32)
            turned = turned_heads(pooled, at, self.frequencies, heads=1, eps=RMS_EPS, weight=self.norm, flat=True)
            append(state.entries, ENTRY, turned, first=0, count=windows.count)
        return held(state.entries, 1)[1]


def compressor(arch: DeepseekV4Arch, weights: Weights, layer: int, prefix: str, frequencies: mx.array) -> Compressor:
    """Return a layer's compressor, or its indexer's."""
    return Compressor(
        values=weights.matrix(f"{prefix}wkv.weight"),
        gates=weights.matrix(f"{prefix}wgate.weight"),
        offsets=plain(weights, f"{prefix}ape"),
        norm=weights.array(f"{prefix}norm.weight").astype(mx.float32),
        frequencies=frequencies,
        overlapping=arch.kind(layer) == CSA,
    )


@frozen(kw_only=True)
class Indexer:
    """Picks the entries that a query attends to, by queries and entries of its own.

    The release rotates both by a Hadamard matrix and rounds them to 8 or 4 bits; the first changes nothing, the second
    is not done here.
    """

    compressor: Compressor
    queries: Matrix
    weights: Matrix
    heads: int
    dims: int
    top_k: int

    def pick(
        self, queries: mx.array, weights: mx.array, keys: mx.array, positions: mx.array, start: int, rate: int
    ) -> mx.array:
        """Return the picks (L, top_k) of queries (1, L, heads * dims), head weights (1, L, heads), positions (1, L).

        Head weights are meant over the root of the heads' number, which is a part of the scale. While at most `top_k`
        entries are visible none is left out, and nothing needs to be scored.
        """
        turned = turned_heads(queries, positions, self.compressor.frequencies, heads=self.heads)
        return pick_entries(
            turned,
            weights,
            keys,
            scale=(self.dims * self.heads) ** -0.5,
            query_start=start,
            rate=rate,
            top_k=self.top_k,
        )


def indexer(arch: DeepseekV4Arch, weights: Weights, layer: int, prefix: str, frequencies: mx.array) -> Indexer:
    """Return a layer's indexer."""
    return Indexer(
        compressor=compressor(arch, weights, layer, f"{prefix}compressor.", frequencies),
        queries=weights.matrix(f"{prefix}wq_b.weight"),
        weights=weights.matrix(f"{prefix}weights_proj.weight"),
        heads=arch.ca_index_n_heads,
        dims=arch.ca_index_head_dim,
        top_k=arch.ca_index_top_k,
    )
