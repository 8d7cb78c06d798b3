"""Qwen 3.6, top to bottom: state layout, routing rule, mixers, layer graph.

Checked against transformers 5.24.0 (goldens) and mlx-lm 0.32.2. Where implementations differ, this one normalises keys
and queries of the delta rule by the sum of squares (not the mean), takes the router's softmax over all experts and the
lower index on ties, and keeps the recurrent state [value heads, key dim, value dim] in float32.
"""

from collections.abc import Callable, Sequence
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
    Recurrent,
    RecurrentState,
    Router,
    Routing,
    RowState,
    Step,
    Weights,
)
from mference_kernels.activations import swiglu
from mference_kernels.attention import attention
from mference_kernels.delta_mixer import DeltaMixer, delta_mixer
from mference_kernels.experts import ExpertWeights, gated_experts, gated_linear
from mference_kernels.norms import rms_norm
from mference_kernels.quant import Matrix, linear, linears, rows
from mference_kernels.rope import default_frequencies, partial_rope
from mference_kernels.routing import choose_experts
from mference_qwen36.arch import RMS_EPS, UNIT_EPS, Qwen36Arch, rotary_dims
from mference_qwen36.install import HEAD, TRUNK
from mference_qwen36.programs import attention_program, block_programs, delta_programs

norm = partial(rms_norm, eps=RMS_EPS)
Rows = tuple[mx.array, mx.array]
"""The residual stream and what the feed-forward block reads: both (B, L, H)."""


def kv_layout(arch: Qwen36Arch, context: int, dtype: str) -> KVLayout:
    """Return append-only keys and values for full layers, and for the others a state and the convolution's last rows."""
    row = (arch.num_kv_heads, arch.head_dim)
    state = (arch.linear_num_v_heads, arch.linear_key_head_dim, arch.linear_value_head_dim)
    tail = (arch.linear_conv_kernel_size - 1, arch.conv_channels)
    full = Linear(rows={"k": row, "v": row}, dtype=dtype)
    recurrent = Recurrent(arrays={"s": state, "conv": tail}, dtypes={"conv": dtype})
    layers = (full if arch.is_full(layer) else recurrent for layer in range(arch.num_layers))
    return KVLayout(layers=tuple(layers), context=context)


def router(arch: Qwen36Arch, weights: Weights) -> Router:
    """Return the rule: softmax over all experts, the k best, renormalised."""
    projection = [weights.matrix(f"{TRUNK}layers.{layer}.mlp.gate.weight") for layer in range(arch.num_layers)]

    def scores(layer: int, h: Rows) -> mx.array:
        return linear(h[1].astype(mx.float32), projection[layer])

    def choose(layer: int, logits: mx.array, step: Step | None) -> Routing:
        del layer, step
        ids, shares = choose_experts(logits, arch.top_k_experts, softmax=True, renormalise=True)
        return Routing(ids=ids, weights=shares)

    return Router(experts=arch.num_experts, top_k=arch.top_k_experts, scores=scores, choose=choose)


@frozen(kw_only=True)
class Attention:
    """Full attention with a gate: `q` projects each head to its query, then the gate of its output."""

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    q_norm: mx.array
    k_norm: mx.array
    frequencies: mx.array
    heads: int
    kv_heads: int
    head_dim: int
    scale: float

    def __call__(self, x: mx.array, states: Sequence[RowState], step: Step) -> mx.array:
        """Attend x (B, L, H), writing each timeline's real tokens to its state first."""
        B, L, _ = x.shape
        both, k, v = linears(x, (self.q, self.k, self.v))
        q, gate = mx.split(both.reshape(B, L, self.heads, 2 * self.head_dim), 2, axis=-1)
        k = k.reshape(B, L, self.kv_heads, self.head_dim)
        v = v.reshape(B, L, self.kv_heads, self.head_dim).swapaxes(1, 2)
        q = partial_rope(norm(q, self.q_norm).swapaxes(1, 2), step.positions, self.frequencies)
        k = partial_rope(norm(k, self.k_norm).swapaxes(1, 2), step.positions, self.frequencies)
        mixed = mx.concatenate([self._row(q, k, v, b, states[b], step) for b in range(B)]).swapaxes(1, 2)
        gated = mixed.astype(mx.float32) * mx.sigmoid(gate.astype(mx.float32))
        return linear(gated.astype(x.dtype).reshape(B, L, -1), self.o)

    def _row(self, q: mx.array, k: mx.array, v: mx.array, b: int, state: RowState, step: Step) -> mx.array:
        real, padding = step.lengths[b], q.shape[2] - step.lengths[b]
        state.append(k=k[b, :, :real], v=v[b, :, :real])
        first, held = state.read(real)
        out = attention(
            q[b, :, :real],
            held["k"],
            held["v"],
            scale=self.scale,
            query_start=step.offsets[b],
            key_start=first,
        )
        return mx.pad(out, [(0, 0), (0, padding), (0, 0)])[None]


@frozen(kw_only=True)
class DeltaNet:
    """The gated delta network: convolved queries, keys and values, a decaying state, and a gated norm."""

    qkv: Matrix
    z: Matrix
    a: Matrix
    b: Matrix
    out: Matrix
    mixer: DeltaMixer

    def __call__(self, x: mx.array, states: Sequence[RecurrentState], step: Step) -> mx.array:
        """Mix x (B, L, H), advancing each timeline's state by its real tokens; padding reaches no state."""
        y = self.advance(linears(x, (self.qkv, self.z, self.a, self.b)), states, step)
        return linear(y.astype(x.dtype), self.out)

    def advance(self, inputs: Sequence[mx.array], states: Sequence[RecurrentState], step: Step) -> mx.array:
        """Take what the four projections gave; returns (B, L, value heads * value dim) float32."""
        qkv, z, a, b = inputs
        tails, held = ([state.values[name] for state in states] for name in ("conv", "s"))
        y, tails, held = delta_mixer(qkv, z, a, b, step.lengths, tails, held, self.mixer)
        for row, state in enumerate(states):
            state.advance(step.lengths[row], s=held[row], conv=tails[row])
        return y


def _attention(arch: Qwen36Arch, weights: Weights, prefix: str) -> Attention:
    q, k, v, o = (weights.matrix(f"{prefix}{name}_proj.weight") for name in ("q", "k", "v", "o"))
    return Attention(
        q=q,
        k=k,
        v=v,
        o=o,
        q_norm=weights.array(f"{prefix}q_norm.weight"),
        k_norm=weights.array(f"{prefix}k_norm.weight"),
        frequencies=default_frequencies(rotary_dims(arch), arch.rope_theta),
        heads=arch.num_heads,
        kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        scale=arch.attention_scale,
    )


def _delta_net(arch: Qwen36Arch, weights: Weights, prefix: str) -> DeltaNet:
    qkv, z, a, b = (weights.matrix(f"{prefix}in_proj_{name}.weight") for name in ("qkv", "z", "a", "b"))
    mixer = DeltaMixer(
        taps=weights.array(f"{prefix}conv1d.weight")[..., 0].T,
        log_rate=weights.array(f"{prefix}A_log"),
        dt_bias=weights.array(f"{prefix}dt_bias"),
        norm=weights.array(f"{prefix}norm.weight"),
        key_heads=arch.linear_num_k_heads,
        key_dim=arch.linear_key_head_dim,
        unit_eps=UNIT_EPS,
        norm_eps=RMS_EPS,
    )
    return DeltaNet(qkv=qkv, z=z, a=a, b=b, out=weights.matrix(f"{prefix}out_proj.weight"), mixer=mixer)


Attend = Callable[[mx.array, Sequence[LayerState], Step], Attended]


def _attending(arch: Qwen36Arch, weights: Weights, prefix: str) -> Attend:
    """Return a full layer up to its feed-forward block: one program, or call by call."""
    before, after = (weights.array(f"{prefix}{name}_layernorm.weight") for name in ("input", "post_attention"))
    mixer = _attention(arch, weights, f"{prefix}self_attn.")
    native = attention_program(mixer, before, after)

    def attend(x: mx.array, states: Sequence[LayerState], step: Step) -> Attended:
        held = cast("Sequence[RowState]", states)
        if native.runs(x):
            timelines = [state.extend(real) for state, real in zip(held, step.lengths, strict=True)]
            h, t = native(x, positions=step.positions, timelines=timelines)
        else:
            h = x + mixer(norm(x, before), held, step)
            t = norm(h, after)
        return Attended(h=(h, t), rows=t)

    return attend


def _advancing(arch: Qwen36Arch, weights: Weights, prefix: str) -> Attend:
    """Return a recurrent layer up to its feed-forward block: two programs and the mixer between, or call by call."""
    before, after = (weights.array(f"{prefix}{name}_layernorm.weight") for name in ("input", "post_attention"))
    mixer = _delta_net(arch, weights, f"{prefix}linear_attn.")
    native = delta_programs(mixer, before, after)

    def attend(x: mx.array, states: Sequence[LayerState], step: Step) -> Attended:
        held = cast("Sequence[RecurrentState]", states)
        if native.project.runs(x) and native.close.runs(x):
            h, t = native.close(x, mixer.advance(native.project(x), held, step))
        else:
            h = x + mixer(norm(x, before), held, step)
            t = norm(h, after)
        return Attended(h=(h, t), rows=t)

    return attend


def _layer(arch: Qwen36Arch, weights: Weights, rule: Router, index: int) -> Layer:
    prefix = f"{TRUNK}layers.{index}."
    gate, up, down = (
        weights.matrix(f"{prefix}mlp.shared_expert.{name}_proj.weight") for name in ("gate", "up", "down")
    )
    shared_gate = weights.matrix(f"{prefix}mlp.shared_expert_gate.weight")
    projection = weights.matrix(f"{prefix}mlp.gate.weight")
    native = block_programs(arch.hidden_size, projection, arch.top_k_experts, shared_gate, (gate, up, down))

    def route(h: Rows, step: Step) -> Routing:
        if native.route.runs(h[1]):
            ids, shares = native.route(h[1])
            return Routing(ids=ids, weights=shares)
        return rule.route(index, h, step)

    def shared(h: Rows) -> mx.array:
        if native.shared.runs(h[1]):
            return native.shared(h[1])[0]
        opened = mx.sigmoid(linear(h[1], shared_gate).astype(mx.float32))
        return opened * gated_linear(h[1], gate, up, down, swiglu).astype(mx.float32)

    def experts(t: mx.array, slots: mx.array, held: ExpertWeights) -> mx.array:
        return gated_experts(t, slots, held, swiglu)

    def combine(h: Rows, s: mx.array, routed: mx.array | None) -> mx.array:
        assert routed is not None
        if native.combine.runs(h[0], s, routed):
            return native.combine(h[0], s, routed)[0]
        return h[0] + (routed + s).astype(h[0].dtype)

    attend = (_attending if arch.is_full(index) else _advancing)(arch, weights, prefix)
    return Layer(attend=attend, route=route, shared=shared, experts=experts, combine=combine)


def layer_graph(arch: Qwen36Arch, weights: Weights, rule: Router) -> LayerGraph:
    """Return the whole model."""
    table, head = weights.matrix(f"{TRUNK}embed_tokens.weight"), weights.matrix(HEAD)
    last = weights.array(f"{TRUNK}norm.weight")
    return LayerGraph(
        embed=lambda ids: rows(ids, table).astype(weights.dtype),
        layers=tuple(_layer(arch, weights, rule, index) for index in range(arch.num_layers)),
        final_norm=lambda x: norm(x, last),
        project=lambda x: linear(x, head).astype(mx.float32),
        dtype=weights.dtype,
        vocab_size=arch.vocab_size,
    )
