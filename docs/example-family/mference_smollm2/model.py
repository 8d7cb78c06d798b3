"""SmolLM2, top to bottom: state layout, attention, layer graph. Checked against transformers 5.24.0 (goldens)."""

from collections.abc import Sequence
from functools import partial

import mlx.core as mx
from attrs import frozen

from mference_core import Attended, KVLayout, Layer, LayerGraph, LayerState, Linear, RowState, Step, Weights
from mference_kernels.activations import swiglu
from mference_kernels.attention import attention
from mference_kernels.norms import rms_norm
from mference_kernels.quant import Matrix, linear, rows
from mference_kernels.rope import default_frequencies, rope
from mference_smollm2.arch import RMS_EPS, Smollm2Arch
from mference_smollm2.install import TRUNK

norm = partial(rms_norm, eps=RMS_EPS)


def kv_layout(arch: Smollm2Arch, context: int, dtype: str) -> KVLayout:
    """Return append-only rows of keys and values for every layer."""
    row = (arch.num_kv_heads, arch.head_dim)
    layer = Linear(rows={"k": row, "v": row}, dtype=dtype)
    return KVLayout(layers=(layer,) * arch.num_layers, context=context)


@frozen(kw_only=True)
class Attention:
    """The mixer of one layer."""

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    frequencies: mx.array
    heads: int
    kv_heads: int
    head_dim: int

    def __call__(self, x: mx.array, states: Sequence[RowState], step: Step) -> mx.array:
        """Attend x (B, L, H), writing each timeline's real tokens to its state first."""
        B, L, _ = x.shape
        q = linear(x, self.q).reshape(B, L, self.heads, self.head_dim).swapaxes(1, 2)
        k = linear(x, self.k).reshape(B, L, self.kv_heads, self.head_dim).swapaxes(1, 2)
        v = linear(x, self.v).reshape(B, L, self.kv_heads, self.head_dim).swapaxes(1, 2)
        q, k = (rope(part, step.positions, self.frequencies) for part in (q, k))
        mixed = mx.concatenate([self._row(q, k, v, b, states[b], step) for b in range(B)])
        return linear(mixed.swapaxes(1, 2).reshape(B, L, -1), self.o)

    def _row(self, q: mx.array, k: mx.array, v: mx.array, b: int, state: RowState, step: Step) -> mx.array:
        real, padding = step.lengths[b], q.shape[2] - step.lengths[b]
        state.append(k=k[b, :, :real], v=v[b, :, :real])
        first, held = state.read(real)
        out = attention(
            q[b, :, :real],
            held["k"],
            held["v"],
            scale=self.head_dim**-0.5,
            query_start=step.offsets[b],
            key_start=first,
        )
        return mx.pad(out, [(0, 0), (0, padding), (0, 0)])[None]


def _layer(arch: Smollm2Arch, weights: Weights, index: int, frequencies: mx.array) -> Layer:
    prefix = f"{TRUNK}layers.{index}."
    q, k, v, o = (weights.matrix(f"{prefix}self_attn.{name}_proj.weight") for name in "qkvo")
    gate, up, down = (weights.matrix(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    before = weights.array(f"{prefix}input_layernorm.weight")
    after = weights.array(f"{prefix}post_attention_layernorm.weight")
    mixer = Attention(
        q=q,
        k=k,
        v=v,
        o=o,
        frequencies=frequencies,
        heads=arch.num_heads,
        kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
    )

    def attend(x: mx.array, states: Sequence[LayerState], step: Step) -> Attended:
        return Attended(h=x + mixer(norm(x, before), states, step))  # type: ignore[arg-type]

    def shared(h: mx.array) -> mx.array:
        u = norm(h, after)
        return linear(swiglu(linear(u, gate), linear(u, up)), down)

    def combine(h: mx.array, s: mx.array, routed: mx.array | None) -> mx.array:
        del routed
        return h + s

    return Layer(attend=attend, shared=shared, combine=combine)


def layer_graph(arch: Smollm2Arch, weights: Weights) -> LayerGraph:
    """Return the whole model; the embedding table is also the head."""
    table = weights.matrix(f"{TRUNK}embed_tokens.weight")
    last = weights.array(f"{TRUNK}norm.weight")
    frequencies = default_frequencies(arch.head_dim, arch.rope_theta)
    return LayerGraph(
        embed=lambda ids: rows(ids, table).astype(weights.dtype),
        layers=tuple(_layer(arch, weights, index, frequencies) for index in range(arch.num_layers)),
        final_norm=lambda x: norm(x, last),
        project=lambda x: linear(x, table).astype(mx.float32),
        dtype=weights.dtype,
        vocab_size=arch.vocab_size,
    )
