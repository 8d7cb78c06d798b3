"""What a router is: hidden rows in, (expert ids, weights) out, in a written tie order."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from attrs import frozen

from mference_core.graph import Routing, Step


@frozen(kw_only=True)
class Router:
    """A family's routing rule, in two halves so that the gate can try ties on the second alone.

    scores(layer, h) -> (B, L, experts) float32, from resident weights.
    choose(layer, scores, step) -> Routing of `top_k` experts, best first; equal scores take the lower id first.
    bias(layer) -> (experts,) float32, or None where that layer has none: for rules that rank experts by scores plus a
        bias which is no part of the weights. `choose` adds it itself, in float32, to the scores as they are; stated
        here too so that whoever judges the order knows what is equal. Left out by rules that rank by scores alone.
    table(layer) -> (vocabulary, top_k) integer, or None: the experts of each token id, for layers that choose by it and
        only weigh by scores; such a layer's `choose` needs the step, and takes a row in its own order. A row may repeat
        an expert: each place counts. Left out by rules that have no such layer.
    """

    experts: int
    top_k: int
    scores: Callable[[int, Any], mx.array]
    choose: Callable[[int, mx.array, Step | None], Routing]
    bias: Callable[[int], mx.array | None] | None = None
    table: Callable[[int], mx.array | None] | None = None

    def looked_up(self, layer: int) -> mx.array | None:
        """Return the table of a layer that chooses by token id, or None for one that chooses by scores."""
        return self.table(layer) if self.table is not None else None

    def ranked_by(self, layer: int, scores: mx.array) -> mx.array:
        """Return what `choose` ranks by, (B, L, experts) float32: scores, with the layer's bias where it has one."""
        bias = self.bias(layer) if self.bias is not None else None
        return scores if bias is None else scores + bias

    def route(self, layer: int, h: Any, step: Step) -> Routing:
        """Return the routing of hidden rows `h`, shapes (B, L, top_k)."""
        return self.choose(layer, self.scores(layer, h), step)


def no_router() -> Router:
    """Return the rule of a family without routed layers: no experts, and asking it is an error."""

    def scores(layer: int, h: Any) -> mx.array:
        del h
        raise ValueError(f"[router] layer {layer} is dense")

    def choose(layer: int, logits: mx.array, step: Step | None) -> Routing:
        del logits, step
        raise ValueError(f"[router] layer {layer} is dense")

    return Router(experts=0, top_k=0, scores=scores, choose=choose)
