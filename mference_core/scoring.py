"""Collecting what a prefill computes at every position: logits, layers, router choices."""

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field

from mference_core.errors import UsageError
from mference_core.graph import Routing
from mference_kernels.routing import top_k

if TYPE_CHECKING:
    from mference_core.engine import Engine


@define(kw_only=True, eq=False)
class Collector:
    """An observer of one session's prefill that keeps each chunk's final rows, and with `details` every layer's."""

    engine: "Engine"
    details: bool = False
    _last: list[mx.array] = field(factory=list, init=False)
    _layers: dict[int, list[mx.array]] = field(factory=dict, init=False)
    _routings: dict[int, list[Routing]] = field(factory=dict, init=False)

    def __call__(self, index: int, x: Any, routing: Routing | None) -> None:
        """Take one layer's output of one chunk."""
        if index == len(self.engine.graph.layers) - 1:
            rows = self.engine.graph.final_norm(x)[0]
            mx.eval(rows)
            self._last.append(rows)
        if self.details:
            kept = x[0]
            mx.eval(kept)
            self._layers.setdefault(index, []).append(kept)
            if routing is not None:
                mx.eval(routing.ids, routing.weights)
                self._routings.setdefault(index, []).append(routing)

    def logits(self, start: int, stop: int) -> mx.array:
        """Return logits (n, V) float32 of positions `start` to `stop`, or to the end."""
        return self.engine.graph.project(mx.concatenate(self._last)[None, start:stop])[0]

    def details_out(self) -> dict[str, mx.array]:
        """Return `layer.i`, `router.i.experts` (ascending ids) and `router.i.weights` (same order)."""
        out = {f"layer.{index}": mx.concatenate(parts) for index, parts in self._layers.items()}
        for index, routings in self._routings.items():
            ids = mx.concatenate([routing.ids[0] for routing in routings])
            weights = mx.concatenate([routing.weights[0] for routing in routings])
            order = mx.argsort(ids, axis=-1)
            out[f"router.{index}.experts"] = mx.take_along_axis(ids, order, axis=-1)
            out[f"router.{index}.weights"] = mx.take_along_axis(weights, order, axis=-1)
        return out


def top_columns(logits: mx.array, top: int) -> dict[str, mx.array]:
    """Return the `top` best columns of logits (T, V): ids (lower first on ties), log-probabilities, and the mass left."""
    if top > logits.shape[-1]:
        raise UsageError(what="--top", got=str(top), expected=f"at most {logits.shape[-1]}, the vocabulary")
    ids = top_k(logits, top)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    best = mx.take_along_axis(logprobs, ids, axis=-1)
    return {"top_ids": ids, "top_logprobs": best, "tail_mass": mx.maximum(0, 1 - mx.exp(best).sum(axis=-1))}
