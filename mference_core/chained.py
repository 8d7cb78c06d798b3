"""The decode step where every layer is a native program too: one call for all of them while nothing must be read."""

import time
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from mference_core.experts.mapping import RECHECK_SECONDS, MappedExperts
from mference_core.graph import LayerGraph, NativeLayer, Routing, Step
from mference_core.routed import LayerExperts
from mference_core.state import LayerState, RowState
from mference_core.steps import Observer, StepFunction, advance, finish_layer
from mference_kernels.chain import OTHERS, Chain, Held


def decode_step(graph: LayerGraph, experts: Sequence[LayerExperts | None]) -> StepFunction:
    """Return the step that decodes with these experts: chained where every layer can be, else `advance`."""
    whole = [layer.native for layer in graph.layers]
    if not all(native is not None and native.program.runs() for native in whole):
        return advance
    held: list[Held | None] = []
    for layer, source in zip(graph.layers, experts, strict=True):
        native = None if source is None else source.native()
        if layer.route is not None and native is None:
            return advance
        held.append(native)
    layers = cast("list[NativeLayer]", whole)
    return ChainedStep(graph, experts, layers, Chain([native.program for native in layers], held))


class ChainedStep:
    """A step function, for one token of each timeline; whatever it cannot take goes to `advance`, with the same bits."""

    def __init__(
        self,
        graph: LayerGraph,
        experts: Sequence[LayerExperts | None],
        layers: Sequence[NativeLayer],
        chain: Chain,
    ) -> None:
        self._bound = graph, experts
        self._layers, self._chain = layers, chain
        self._mapped = [e.source for e in experts if e is not None and isinstance(e.source, MappedExperts)]
        self._looked = -RECHECK_SECONDS

    def __call__(
        self,
        graph: LayerGraph,
        experts: Sequence[LayerExperts | None],
        states: Sequence[Sequence[LayerState]],
        step: Step,
        observe: Observer | None = None,
    ) -> Any:
        """Take `step.ids` (B, 1) through every layer; arguments and result as `advance`."""
        mine = graph is self._bound[0] and experts is self._bound[1] and observe is None
        if not mine or step.ids.shape[1] != 1 or not all(isinstance(s, RowState) for of in states for s in of):
            return advance(graph, experts, states, step, observe)
        x = graph.embed(step.ids)
        if not self._layers[0].program.runs(x):
            return advance(graph, experts, states, step, observe)
        self._look()
        timelines = [[cast("RowState", state).extend(1) for state in of_layer] for of_layer in states]
        done, count = 0, len(graph.layers)
        while done < count:
            first = done
            done, arrays = self._chain.run(first, x, step.positions, timelines)
            self._note(first, done)
            x = arrays[0] if done == count else self._rest(done, arrays, step)
            done = min(done + 1, count)
        return x

    def _look(self) -> None:
        """Learn now and then which pages of mapped experts are still in memory."""
        if self._mapped:
            self._mapped[0].check_open()
            now = time.monotonic()
            if now - self._looked >= RECHECK_SECONDS:
                self._looked = now
                for source in self._mapped:
                    source.look()

    def _note(self, first: int, done: int) -> None:
        """Count the uses of experts of the layers that are done."""
        experts = self._bound[1]
        for index in range(first, done):
            held = experts[index]
            if held is not None and not held.source.full:
                held.source.note_all_hit_use(tuple(dict.fromkeys(self._chain.ids[index])))

    def _rest(self, index: int, arrays: Sequence[mx.array], step: Step) -> Any:
        """Finish a layer whose experts must be read."""
        graph, experts = self._bound
        attended_of = self._layers[index].attended
        assert attended_of is not None
        rows, ids, weights = arrays[-OTHERS:]
        attended = attended_of(arrays[:-OTHERS], rows)
        return finish_layer(graph, experts, index, attended, Routing(ids=ids, weights=weights), step)
