"""Parts of a layer as native programs, for float32 rows on the CPU: what `model.py` computes call by call."""

from typing import Any

import mlx.core as mx
from attrs import frozen

from mference_kernels.activations import swiglu
from mference_kernels.program import Builder, Program, Register, compiled
from mference_kernels.quant import Matrix
from mference_qwen36.arch import RMS_EPS


@frozen(kw_only=True)
class DeltaPrograms:
    """What comes before a delta network's mixer, and after it."""

    project: Program
    close: Program


@frozen(kw_only=True)
class BlockPrograms:
    """The parts of one layer's feed-forward block."""

    route: Program
    shared: Program
    combine: Program


def attention_program(mixer: Any, before: mx.array, after: mx.array) -> Program:
    """Write an `Attention` between its two norms: x in; the residual stream and what the block reads out."""

    def write(p: Builder) -> tuple[Register, Register]:
        x, heads, groups, dim = p.input(before.size), mixer.heads, mixer.kv_heads, mixer.head_dim
        both, k, v = p.linears(p.norm(x, before, RMS_EPS), (mixer.q, mixer.k, mixer.v))
        q, gate = p.part(both, heads, 0, dim), p.part(both, heads, dim, dim)
        q = p.rotate(p.norm(q, mixer.q_norm, RMS_EPS, heads), mixer.frequencies, heads)
        k = p.rotate(p.norm(k, mixer.k_norm, RMS_EPS, groups), mixer.frequencies, groups)
        mixed = p.attend(q, k, v, heads=heads, groups=groups, scale=mixer.scale)
        h = p.add(x, p.linear(p.sigmoid_gate(gate, mixed), mixer.o))
        return h, p.norm(h, after, RMS_EPS)

    return compiled(write)


def delta_programs(net: Any, before: mx.array, after: mx.array) -> DeltaPrograms:
    """Write what surrounds the mixer of a `DeltaNet`: x in, its inputs out; x and its output in, as `attention_program` out."""

    def project(p: Builder) -> list[Register]:
        return p.linears(p.norm(p.input(before.size), before, RMS_EPS), (net.qkv, net.z, net.a, net.b))

    def close(p: Builder) -> tuple[Register, Register]:
        x, y = p.input(before.size), p.input(net.mixer.value_heads * net.mixer.value_dim)
        h = p.add(x, p.linear(y, net.out))
        return h, p.norm(h, after, RMS_EPS)

    return DeltaPrograms(project=compiled(project), close=compiled(close))


def block_programs(
    hidden: int, router: Matrix, top_k: int, shared_gate: Matrix, feed_forward: tuple[Matrix, Matrix, Matrix]
) -> BlockPrograms:
    """Write the routing rule, the shared expert with its gate, and the sum of all three branches."""

    def route(p: Builder) -> tuple[Register, Register]:
        return p.choose(p.linear(p.input(hidden), router), top_k, softmax=True, renormalise=True)

    def shared(p: Builder) -> tuple[Register]:
        t = p.input(hidden)
        return (p.sigmoid_gate(p.linear(t, shared_gate), p.gated(t, *feed_forward, swiglu)),)

    def combine(p: Builder) -> tuple[Register]:
        h, s, routed = p.input(hidden), p.input(hidden), p.input(hidden)
        return (p.add(h, p.add(routed, s)),)

    return BlockPrograms(route=compiled(route), shared=compiled(shared), combine=compiled(combine))
