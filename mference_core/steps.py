"""Advancing timelines through the layers: the one step that serves prefill and decode alike."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mference_core.ahead import LookAhead
from mference_core.graph import Attended, LayerGraph, Routing, Step
from mference_core.routed import LayerExperts, routed_branch
from mference_core.state import LayerState
from mference_kernels import levels

Observer = Callable[[int, Any, Routing | None], None]
"""Gets each layer's index, output and routing as they are built, not yet evaluated."""

StepFunction = Callable[
    [LayerGraph, Sequence[LayerExperts | None], Sequence[Sequence[LayerState]], Step, Observer | None], Any
]


def make_step(offsets: Sequence[int], ids: mx.array, lengths: Sequence[int] | None = None) -> Step:
    """Describe a call that advances ids (B, L); columns past `lengths[b]` are padding."""
    B, L = ids.shape
    return Step(
        offsets=tuple(offsets),
        lengths=tuple(lengths) if lengths is not None else (L,) * B,
        positions=mx.array([list(range(start, start + L)) for start in offsets], dtype=mx.int32),
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
    While a layer's missing experts are read, its shared branch and the experts already in memory run; while the last of
    them compute, those that the next layer is expected to miss are read.
    """
    x = graph.embed(step.ids)
    at_once = levels.cpu() is not None
    for index, layer in enumerate(graph.layers):
        attended = layer.attend(x, states[index], step)
        routing, routed, held = None, None, experts[index]
        shared = Once(partial(layer.shared, attended.h))
        if layer.route is not None:
            assert held is not None
            assert attended.rows is not None
            if not at_once:  # queued first, so that it runs while the router's choice is waited for
                shared()
            routing = layer.route(attended.h, step)
            following = LookAhead(graph, experts, index, attended.h, step)
            if not held.source.full and not at_once:
                guess = following.predict()
                mx.async_eval(routing.ids, shared(), *([] if guess is None else [guess]))
            meanwhile = partial(_both, shared, following.predict)
            routed = routed_branch(layer, held, attended.rows, routing, step, meanwhile, following.begin)
        x = layer.combine(attended.h, shared(), routed)
        if observe is not None:
            observe(index, x, routing)
    return x


def finish_layer(
    graph: LayerGraph,
    experts: Sequence[LayerExperts | None],
    index: int,
    attended: Attended,
    routing: Routing,
    step: Step,
) -> Any:
    """Return the rows after layer `index`, whose router has chosen: what `advance` does where kernels compute at once."""
    layer, held, rows = graph.layers[index], experts[index], attended.rows
    assert held is not None
    assert rows is not None
    shared, following = Once(partial(layer.shared, attended.h)), LookAhead(graph, experts, index, attended.h, step)
    meanwhile = partial(_both, shared, following.predict)
    routed = routed_branch(layer, held, rows, routing, step, meanwhile, following.begin)
    return layer.combine(attended.h, shared(), routed)


def _both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


class Once:
    """Work done when it is first asked for. Native kernels compute at once: their shared branch waits for reads to begin."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._done, self._result = work, False, None

    def __call__(self) -> Any:
        """Return what the work returned."""
        if not self._done:
            self._result, self._done = self._work(), True
        return self._result
