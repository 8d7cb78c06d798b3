"""Gemma 4, top to bottom: state layout, routing rule, layer graph.

Checked against transformers 5.24.0 (goldens) and mlx-lm 0.32.2. Where implementations differ, this one takes the router's
softmax over all experts and the lower index on ties, and norms multiply by their weight in float32.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import mlx.core as mx
from attrs import frozen

from mference_core import (
    Attended,
    KVLayout,
    Layer,
    LayerGraph,
    LayerState,
    Linear,
    NativeLayer,
    Ring,
    Router,
    Routing,
    RowState,
    Step,
    Weights,
)
from mference_gemma4.arch import RMS_EPS, Gemma4Arch
from mference_gemma4.install import TRUNK
from mference_gemma4.programs import LayerWriter, head_program
from mference_kernels.activations import geglu, softcap
from mference_kernels.attention import attention
from mference_kernels.experts import ExpertWeights, gated_experts, gated_linear
from mference_kernels.norms import rms_norm
from mference_kernels.quant import Matrix, linear, linears, rows
from mference_kernels.rope import default_frequencies, proportional_frequencies, rope
from mference_kernels.routing import choose_experts

norm = partial(rms_norm, eps=RMS_EPS)


def kv_layout(arch: Gemma4Arch, context: int, chunk: int, dtype: str) -> KVLayout:
    """Return rings for sliding layers and append-only rows for full ones; keys and values differ, so both are kept."""
    layers: list[Linear | Ring] = []
    for layer in range(arch.num_layers):
        row = (arch.kv_heads(layer), arch.head_size(layer))
        rows_of = {"k": row, "v": row}
        if arch.is_full(layer):
            layers.append(Linear(rows=rows_of, dtype=dtype))
        else:
            layers.append(Ring(rows=rows_of, dtype=dtype, window=arch.sliding_window, slack_rows=chunk))
    return KVLayout(layers=tuple(layers), context=context)


def router(arch: Gemma4Arch, weights: Weights) -> Router:
    """Return the rule: softmax over all experts of the scaled residual stream, the k best, renormalised, then scaled."""
    prefixes = [f"{TRUNK}layers.{layer}.router." for layer in range(arch.num_layers)]
    scale = [weights.array(f"{prefix}scale") for prefix in prefixes]
    projection = [weights.matrix(f"{prefix}proj.weight") for prefix in prefixes]
    per_expert = [weights.array(f"{prefix}per_expert_scale").astype(mx.float32) for prefix in prefixes]

    def scores(layer: int, h: mx.array) -> mx.array:
        r = norm(h.astype(mx.float32), None) * scale[layer].astype(mx.float32) * arch.hidden_size**-0.5
        return linear(r, projection[layer]).astype(mx.float32)

    def choose(layer: int, logits: mx.array, step: Step | None) -> Routing:
        del step
        ids, shares = choose_experts(
            logits, arch.top_k_experts, softmax=True, renormalise=True, scale=per_expert[layer]
        )
        return Routing(ids=ids, weights=shares)

    return Router(experts=arch.num_experts, top_k=arch.top_k_experts, scores=scores, choose=choose)


@frozen(kw_only=True)
class Attention:
    """The mixer of one layer; `v` is None where values are the raw keys."""

    q: Matrix
    k: Matrix
    v: Matrix | None
    o: Matrix
    q_norm: mx.array
    k_norm: mx.array
    frequencies: mx.array
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    def __call__(self, x: mx.array, states: Sequence[RowState], step: Step) -> mx.array:
        """Attend x (B, L, H), writing each timeline's real tokens to its state first."""
        B, L, _ = x.shape
        q, k, *own_v = linears(x, (self.q, self.k) if self.v is None else (self.q, self.k, self.v))
        q = q.reshape(B, L, self.heads, self.head_dim)
        k = k.reshape(B, L, self.kv_heads, self.head_dim)
        v = own_v[0].reshape(k.shape) if own_v else k
        q = rope(norm(q, self.q_norm).swapaxes(1, 2), step.positions, self.frequencies)
        k = rope(norm(k, self.k_norm).swapaxes(1, 2), step.positions, self.frequencies)
        v = norm(v, None).swapaxes(1, 2)
        mixed = mx.concatenate([self._row(q, k, v, b, states[b], step) for b in range(B)])
        return linear(mixed.swapaxes(1, 2).reshape(B, L, -1), self.o)

    def _row(self, q: mx.array, k: mx.array, v: mx.array, b: int, state: RowState, step: Step) -> mx.array:
        real, padding = step.lengths[b], q.shape[2] - step.lengths[b]
        state.append(k=k[b, :, :real], v=v[b, :, :real])
        first, held, ring = state.visible(real)
        out = attention(
            q[b, :, :real],
            held["k"],
            held["v"],
            scale=1.0,
            query_start=step.offsets[b],
            key_start=first,
            window=self.window,
            ring=ring,
        )
        return mx.pad(out, [(0, 0), (0, padding), (0, 0)])[None]


def _mixer(arch: Gemma4Arch, weights: Weights, index: int) -> Attention:
    prefix, full = f"{TRUNK}layers.{index}.self_attn.", arch.is_full(index)
    if full:
        frequencies = proportional_frequencies(arch.full_head_dim, arch.full_rope_theta, arch.partial_rotary_factor)
    else:
        frequencies = default_frequencies(arch.head_dim, arch.rope_theta)
    return Attention(
        q=weights.matrix(f"{prefix}q_proj.weight"),
        k=weights.matrix(f"{prefix}k_proj.weight"),
        v=None if full else weights.matrix(f"{prefix}v_proj.weight"),
        o=weights.matrix(f"{prefix}o_proj.weight"),
        q_norm=weights.array(f"{prefix}q_norm.weight"),
        k_norm=weights.array(f"{prefix}k_norm.weight"),
        frequencies=frequencies,
        heads=arch.num_heads,
        kv_heads=arch.kv_heads(index),
        head_dim=arch.head_size(index),
        window=None if full else arch.sliding_window,
    )


def _layer(arch: Gemma4Arch, weights: Weights, rule: Router, index: int) -> Layer:
    prefix = f"{TRUNK}layers.{index}."
    array = {name: weights.array(f"{prefix}{name}.weight") for name in _norm_names()}
    mixer = _mixer(arch, weights, index)
    gate, up, down = (weights.matrix(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    scalar = weights.array(f"{prefix}layer_scalar")
    native = LayerWriter(
        mixer=mixer,
        norms=array,
        feed_forward=(gate, up, down),
        router_scale=weights.array(f"{prefix}router.scale"),
        router=weights.matrix(f"{prefix}router.proj.weight"),
        per_expert=weights.array(f"{prefix}router.per_expert_scale"),
        top_k=arch.top_k_experts,
        scalar=scalar,
    ).programs()

    def attend(x: mx.array, states: Sequence[LayerState], step: Step) -> Attended:
        if native.attend.runs(x):
            rows_of = cast("Sequence[RowState]", states)
            timelines = [state.extend(real) for state, real in zip(rows_of, step.lengths, strict=True)]
            h, t = native.attend(x, positions=step.positions, timelines=timelines)
            return Attended(h=h, rows=t)
        a = mixer(norm(x, array["input_layernorm"]), states, step)  # type: ignore[arg-type]
        h = x + norm(a, array["post_attention_layernorm"])
        return Attended(h=h, rows=norm(h, array["pre_feedforward_layernorm_2"]))

    def shared(h: mx.array) -> mx.array:
        if native.shared.runs(h):
            return native.shared(h)[0]
        s = gated_linear(norm(h, array["pre_feedforward_layernorm"]), gate, up, down, geglu)
        return norm(s, array["post_feedforward_layernorm_1"])

    def route(h: mx.array, step: Step) -> Routing:
        if native.route.runs(h):
            ids, shares = native.route(h)
            return Routing(ids=ids, weights=shares)
        return rule.route(index, h, step)

    def experts(t: mx.array, slots: mx.array, held: ExpertWeights) -> mx.array:
        return gated_experts(t, slots, held, geglu)

    def combine(h: mx.array, s: mx.array, routed: mx.array | None) -> mx.array:
        assert routed is not None
        if native.combine.runs(h, s, routed):
            return native.combine(h, s, routed)[0]
        e = norm(routed.astype(h.dtype), array["post_feedforward_layernorm_2"])
        return (h + norm(s + e, array["post_feedforward_layernorm"])) * scalar.astype(h.dtype)

    whole = NativeLayer(program=native.whole, attended=lambda h, rows: Attended(h=h[0], rows=rows))
    return Layer(attend=attend, route=route, shared=shared, experts=experts, combine=combine, native=whole)


def _norm_names() -> tuple[str, ...]:
    feedforward = tuple(f"{when}_feedforward_layernorm" for when in ("pre", "post"))
    numbered = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    return ("input_layernorm", "post_attention_layernorm", *feedforward, *numbered)


def layer_graph(arch: Gemma4Arch, weights: Weights, rule: Router) -> LayerGraph:
    """Return the whole model; the embedding table is also the head."""
    table = weights.matrix(f"{TRUNK}embed_tokens.weight")
    last = weights.array(f"{TRUNK}norm.weight")
    factor = mx.array(arch.hidden_size**0.5).astype(weights.dtype)  # rounded to the weights' dtype, as trained

    native = head_program(last, table, arch.final_logit_softcap)

    def embed(ids: mx.array) -> mx.array:
        return rows(ids, table).astype(weights.dtype) * factor

    def project(x: mx.array) -> mx.array:
        if native.runs(x):
            return native(x)[0]
        return softcap(linear(x, table), arch.final_logit_softcap)

    return LayerGraph(
        embed=embed,
        layers=tuple(_layer(arch, weights, rule, index) for index in range(arch.num_layers)),
        final_norm=lambda x: norm(x, last),
        project=project,
        dtype=weights.dtype,
        vocab_size=arch.vocab_size,
    )
