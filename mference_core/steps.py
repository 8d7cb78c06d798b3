"""Advancing timelines through the layers: the one step that serves prefill and decode alike."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mference_core.graph import LayerGraph, Routing, Step
from mference_core.routed import LayerExperts, routed_branch
from mference_core.state import LayerState

Observer = Callable[[int, Any, Routing | None], None]
"""Gets each layer's index, output and routing as they are built, not yet evaluated."""

StepFunction = Callable[
    [LayerGraph, Sequence[LayerExperts | None], Sequence[Sequence[LayerState]], Step, Observer | None], Any
]


def make_step(offsets: Sequence[int], ids: mx.array, lengths: Sequence[int] | None = None) -> Step:
    """Describe a call that advances ids (B, L); columns past `lengths[b]` are padding."""
    B, L = ids.shape
    starts = mx.array(list(offsets), dtype=mx.int32)[:, None]
    return Step(
        offsets=tuple(offsets),
        lengths=tuple(lengths) if lengths is not None else (L,) * B,
        positions=starts + mx.arange(L, dtype=mx.int32)[None],
        ids=ids,
    )


def advance(
    graph: LayerGraph,
    experts: Sequence[LayerExperts | None],
    states: Sequence[Sequence[LayerState]],
    step: Step,
    observe: Observer | None = None,
) -> Any:
    """Take `step.ids` (B, L) through every layer, writing each timeline's real tokens to its states.

    `states[i][b]` is layer i's state of timeline b. Returns the last layer's rows, to be evaluated by the caller.
    While a layer's missing experts are read, its shared branch and the experts already in memory run.
    """
    x = graph.embed(step.ids)
    for index, layer in enumerate(graph.layers):
        attended = layer.attend(x, states[index], step)
        routing, routed, held = None, None, experts[index]
        shared = layer.shared(attended.h)
        if layer.route is not None:
            assert held is not None
            assert attended.rows is not None
            routing = layer.route(attended.h, step)
            if not held.source.full:
                mx.async_eval(routing.ids, shared)
            routed = routed_branch(layer, held, attended.rows, routing, step)
        x = layer.combine(attended.h, shared, routed)
        if observe is not None:
            observe(index, x, routing)
    return x
