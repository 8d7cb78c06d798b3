"""Looking ahead: while a layer's experts are at work, the next layer's are guessed, and those that are missing read.

The next layer's router says what it would choose if its input were this layer's, which is right most of the time since
a layer adds little to the residual; where it chooses by token id, it is right for certain. A guess changes what is read
when, never a result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from attrs import evolve

from mference_core.errors import UsageError
from mference_core.graph import LayerGraph, Step
from mference_core.routed import LayerExperts
from mference_core.router import Router

LOOKAHEAD = ("off", "on", "auto")
READS = 2
"""Most experts read for one guess: the first missing ones, by rank. More would delay what is known to be needed."""


class LookAhead:
    """What follows layer `index`, or nothing where the next layer is dense, all in memory or not to be guessed.

    Only calls of one token per timeline look ahead: longer ones need nearly every expert, and read in that order anyway.
    """

    def __init__(
        self, graph: LayerGraph, experts: Sequence[LayerExperts | None], index: int, h: Any, step: Step
    ) -> None:
        held = experts[index + 1] if index + 1 < len(experts) else None
        wanted = held is not None and held.ahead and not held.source.full and step.ids.shape[1] == 1
        self._held = held if wanted else None
        self._route: Callable[[Any, Step], Any] | None = graph.layers[index + 1].route if wanted else None
        self._h, self._step = h, step
        self._ids: mx.array | None = None

    def predict(self) -> mx.array | None:
        """Return the expected experts (B, 1, k), perhaps not computed yet, or None where there is nothing to expect."""
        if self._ids is None and self._route is not None:
            self._ids = self._route(self._h, self._step).ids
            self._h = None
        return self._ids

    def begin(self) -> None:
        """Begin to read; this layer's own reads should be done."""
        ids = self.predict()
        if ids is None or self._held is None:
            return
        rows: Any = ids[:, 0].tolist()
        by_rank = dict.fromkeys(expert for rank in zip(*rows, strict=True) for expert in rank)
        self._held.source.look_ahead(tuple(by_rank), self._held.ahead, certain=self._held.certain)
        self._held = None


def looking_ahead(
    experts: Sequence[LayerExperts | None], router: Router, lookahead: str
) -> tuple[LayerExperts | None, ...]:
    """Let layers be guessed; those that choose by token id are known, so all that they miss is worth reading.

    Raises: UsageError for a value of `--lookahead` that is none of `LOOKAHEAD`.
    """
    if lookahead not in LOOKAHEAD:
        raise UsageError(what="--lookahead", got=f"'{lookahead}'", expected="off, on or auto")
    if not looks_ahead(lookahead):
        return tuple(experts)
    made: list[LayerExperts | None] = []
    for index, held in enumerate(experts):
        known = held is not None and router.looked_up(index) is not None
        reads = router.experts if known else READS
        made.append(None if held is None else evolve(held, ahead=reads, certain=known))
    return tuple(made)


def looks_ahead(lookahead: str) -> bool:
    """Say whether a value of `--lookahead` makes guesses here.

    `auto` does on Metal alone. On CPUs reads take the cores that compute: measured, waiting fell and the time per token
    did not. On CUDA each further array that is read back costs half a millisecond.
    """
    on_metal = mx.default_device() != mx.Device(mx.cpu) and mx.metal.is_available()
    return lookahead == "on" or (lookahead == "auto" and on_metal)
