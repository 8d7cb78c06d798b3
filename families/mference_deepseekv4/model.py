"""DeepSeek V4, top to bottom: what a layer is made of, and the layers between embedding and head.

Checked against transformers 5.24.0 (goldens). Where implementations differ, this one clamps the shared expert as it
does routed ones, carries the compressors' state between calls, takes the lower index on ties of router and indexer, and
computes stream mixing, router and sinks in float32.
"""

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from mference_core import Attended, Layer, LayerGraph, LayerState, Router, Step, Weights
from mference_deepseekv4.arch import DeepseekV4Arch
from mference_deepseekv4.attention import attention
from mference_deepseekv4.install import HEAD, TRUNK
from mference_deepseekv4.layout import kv_layout
from mference_deepseekv4.routing import router
from mference_deepseekv4.streams import LayerRows, Site, merged, mixer, norm, write
from mference_kernels.activations import ClampedSwiglu
from mference_kernels.experts import ExpertWeights, gated_experts, gated_linear
from mference_kernels.quant import linear, rows

__all__ = ["kv_layout", "layer_graph", "router"]


def _layer(arch: DeepseekV4Arch, weights: Weights, rule: Router, index: int) -> Layer:
    prefix = f"{TRUNK}layers.{index}."
    first, second = (
        Site(
            mixer=mixer(arch, weights, f"{prefix}{block}_hc."),
            norm=weights.array(f"{prefix}{block}_norm.weight"),
        )
        for block in ("attn", "ffn")
    )
    mix_tokens = attention(arch, weights, index, f"{prefix}attn.")
    gate, up, down = (
        weights.matrix(f"{prefix}ffn.shared_experts.{name}_proj.weight") for name in ("gate", "up", "down")
    )
    activation = ClampedSwiglu(arch.swiglu_limit)

    def attend(x: mx.array, states: Sequence[LayerState], step: Step) -> Attended:
        h = first.read(x)
        h = second.read(write(h, mix_tokens(h.rows, states, step)))
        return Attended(h=h, rows=h.rows)

    def shared(h: LayerRows) -> mx.array:
        return gated_linear(h.rows, gate, up, down, activation)

    def experts(t: mx.array, slots: mx.array, held: ExpertWeights) -> mx.array:
        return gated_experts(t, slots, held, activation)

    def combine(h: LayerRows, s: mx.array, routed: mx.array | None) -> mx.array:
        assert routed is not None
        return write(h, routed, s)

    return Layer(attend=attend, route=partial(rule.route, index), shared=shared, experts=experts, combine=combine)


def layer_graph(arch: DeepseekV4Arch, weights: Weights, rule: Router) -> LayerGraph:
    """Return the whole model; hidden rows are streams (B, L, S, H), which start as copies of the embedding."""
    table, head = weights.matrix(f"{TRUNK}embed_tokens.weight"), weights.matrix(HEAD)
    last, merge = weights.array(f"{TRUNK}norm.weight"), mixer(arch, weights, f"{TRUNK}hc_head.")

    def embed(ids: mx.array) -> mx.array:
        x = rows(ids, table).astype(weights.dtype)[:, :, None]
        return mx.contiguous(mx.broadcast_to(x, (*ids.shape, arch.hc_mult, arch.hidden_size)))

    return LayerGraph(
        embed=embed,
        layers=tuple(_layer(arch, weights, rule, index) for index in range(arch.num_layers)),
        final_norm=lambda x: norm(merged(x, merge), last),
        project=lambda x: linear(x, head).astype(mx.float32),
        dtype=weights.dtype,
        vocab_size=arch.vocab_size,
    )
