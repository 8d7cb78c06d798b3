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
    """One layer, in parts and whole."""

    attend: Program
    route: Program
    shared: Program
    combine: Program
    whole: Program


@frozen(kw_only=True)
class LayerWriter:
    """Writes the operations of one layer: its `Attention`, norm weights, shared block, router, and output scalar."""

    mixer: Any
    norms: dict[str, mx.array]
    feed_forward: tuple[Matrix, Matrix, Matrix]
    router_scale: mx.array
    router: Matrix
    per_expert: mx.array
    top_k: int
    scalar: mx.array

    def _norm(self, p: Builder, x: Register, name: str) -> Register:
        return p.norm(x, self.norms[name], RMS_EPS)

    def attend(self, p: Builder, x: Register) -> tuple[Register, Register]:
        """Write what leads to the residual stream after attention, and to the experts' rows."""
        m = self.mixer
        own = (m.q, m.k) if m.v is None else (m.q, m.k, m.v)
        q, k, *v = p.linears(self._norm(p, x, "input_layernorm"), own)
        values = p.norm(v[0] if v else k, None, RMS_EPS, m.kv_heads)
        turned_q = p.rotate(p.norm(q, m.q_norm, RMS_EPS, m.heads), m.frequencies, m.heads)
        turned_k = p.rotate(p.norm(k, m.k_norm, RMS_EPS, m.kv_heads), m.frequencies, m.kv_heads)
        mixed = p.attend(turned_q, turned_k, values, heads=m.heads, groups=m.kv_heads, scale=1.0, window=m.window)
        h = p.add(x, self._norm(p, p.linear(mixed, m.o), "post_attention_layernorm"))
        return h, self._norm(p, h, "pre_feedforward_layernorm_2")

    def route(self, p: Builder, h: Register) -> tuple[Register, Register]:
        """Write what leads to ids and weights."""
        r = p.scale(p.norm(h, None, RMS_EPS), self.router_scale, h.width**-0.5)
        return p.choose(p.linear(r, self.router), self.top_k, softmax=True, renormalise=True, scale=self.per_expert)

    def shared(self, p: Builder, h: Register) -> Register:
        """Write the branch that every row meets."""
        s = p.gated(self._norm(p, h, "pre_feedforward_layernorm"), *self.feed_forward, geglu)
        return self._norm(p, s, "post_feedforward_layernorm_1")

    def combine(self, p: Builder, h: Register, s: Register, routed: Register) -> Register:
        """Write the tail."""
        e = self._norm(p, routed, "post_feedforward_layernorm_2")
        return p.scale(p.add(h, self._norm(p, p.add(s, e), "post_feedforward_layernorm")), self.scalar)

    def whole(self, p: Builder, x: Register) -> tuple[Register, ...]:
        """Write all of it: the next rows, the residual stream, the experts' rows, ids and weights."""
        h, rows = self.attend(p, x)
        ids, shares = self.route(p, h)
        routed = p.experts(rows, ids, shares, geglu)
        return self.combine(p, h, self.shared(p, h), routed), h, rows, ids, shares

    def programs(self) -> LayerPrograms:
        """Return everything."""
        width = self.norms["input_layernorm"].size
        return LayerPrograms(
            attend=compiled(lambda p: self.attend(p, p.input(width))),
            route=compiled(lambda p: self.route(p, p.input(width))),
            shared=compiled(lambda p: (self.shared(p, p.input(width)),)),
            combine=compiled(lambda p: (self.combine(p, p.input(width), p.input(width), p.input(width)),)),
            whole=compiled(lambda p: self.whole(p, p.input(width))),
        )


def head_program(last: mx.array, table: Matrix, cap: float) -> Program:
    """Write the head without its norm: rows in, logits out."""

    def project(p: Builder) -> tuple[Register]:
        return (p.softcap(p.linear(p.input(last.size), table), cap),)

    return compiled(project)
