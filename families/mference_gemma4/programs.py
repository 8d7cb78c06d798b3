"""Parts of a layer as native programs, for float32 rows on the CPU: bit for bit what `model.py` computes call by call."""

from typing import Any

import mlx.core as mx
from attrs import frozen

from mference_gemma4.arch import RMS_EPS
from mference_kernels.activations import geglu
from mference_kernels.program import Builder, Program, Register, compiled
from mference_kernels.quant import Matrix


@frozen(kw_only=True)
class LayerPrograms:
    """The parts of one layer."""

    attend: Program
    shared: Program
    combine: Program


def layer_programs(
    mixer: Any, norms: dict[str, mx.array], feed_forward: tuple[Matrix, Matrix, Matrix], scalar: mx.array
) -> LayerPrograms:
    """Write the programs of a layer from its `Attention`, norm weights, shared block and output scalar."""
    hidden = norms["input_layernorm"].size

    def norm(p: Builder, x: Register, name: str) -> Register:
        return p.norm(x, norms[name], RMS_EPS)

    def attend(p: Builder) -> tuple[Register, Register]:
        x = p.input(hidden)
        own = (mixer.q, mixer.k) if mixer.v is None else (mixer.q, mixer.k, mixer.v)
        q, k, *v = p.linears(norm(p, x, "input_layernorm"), own)
        values = p.norm(v[0] if v else k, None, RMS_EPS, mixer.kv_heads)
        turned_q = p.rotate(p.norm(q, mixer.q_norm, RMS_EPS, mixer.heads), mixer.frequencies, mixer.heads)
        turned_k = p.rotate(p.norm(k, mixer.k_norm, RMS_EPS, mixer.kv_heads), mixer.frequencies, mixer.kv_heads)
        mixed = p.attend(
            turned_q, turned_k, values, heads=mixer.heads, groups=mixer.kv_heads, scale=1.0, window=mixer.window
        )
        h = p.add(x, norm(p, p.linear(mixed, mixer.o), "post_attention_layernorm"))
        return h, norm(p, h, "pre_feedforward_layernorm_2")

    def shared(p: Builder) -> tuple[Register]:
        s = p.gated(norm(p, p.input(hidden), "pre_feedforward_layernorm"), *feed_forward, geglu)
        return (norm(p, s, "post_feedforward_layernorm_1"),)

    def combine(p: Builder) -> tuple[Register]:
        h, s, routed = p.input(hidden), p.input(hidden), p.input(hidden)
        e = norm(p, routed, "post_feedforward_layernorm_2")
        return (p.scale(p.add(h, norm(p, p.add(s, e), "post_feedforward_layernorm")), scalar),)

    return LayerPrograms(attend=compiled(attend), shared=compiled(shared), combine=compiled(combine))


def route_program(hidden: int, scale: mx.array, projection: Matrix, per_expert: mx.array, top_k: int) -> Program:
    """Write the routing rule of one layer: hidden rows in; ids and weights out."""

    def route(p: Builder) -> tuple[Register, Register]:
        r = p.scale(p.norm(p.input(hidden), None, RMS_EPS), scale, hidden**-0.5)
        return p.choose(p.linear(r, projection), top_k, softmax=True, renormalise=True, scale=per_expert)

    return compiled(route)


def head_program(last: mx.array, table: Matrix, cap: float) -> Program:
    """Write the head without its norm: rows in, logits out."""

    def project(p: Builder) -> tuple[Register]:
        return (p.softcap(p.linear(p.input(last.size), table), cap),)

    return compiled(project)
