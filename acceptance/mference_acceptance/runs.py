"""Running a model in the ways that cases compare."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from attrs import define, field, frozen
from mlx.utils import tree_map

from mference_acceptance.arrays import best_token
from mference_core.graph import Routing
from mference_core.session import Session


def first_leaf(x: Any) -> mx.array:
    """Return the rows that goldens describe: the only array of `x`, or the first of its tree."""
    leaves: list[mx.array] = []
    tree_map(leaves.append, x)
    return leaves[0]


@define
class Trace:
    """An observer that keeps what it sees: per layer, in chunk order, output rows and routing of timeline 0."""

    outputs: dict[int, list[Any]] = field(factory=dict)
    routings: dict[int, list[Routing]] = field(factory=dict)

    def __call__(self, index: int, x: Any, routing: Routing | None) -> None:
        """Keep one layer's output of one chunk."""
        self.outputs.setdefault(index, []).append(x)
        if routing is not None:
            self.routings.setdefault(index, []).append(routing)

    def rows(self, index: int) -> mx.array:
        """Return a layer's rows (T, ...)."""
        return mx.concatenate([first_leaf(x)[0] for x in self.outputs[index]])

    def ids(self, index: int) -> mx.array:
        """Return a layer's expert ids (T, k), best first."""
        return mx.concatenate([routing.ids[0] for routing in self.routings[index]])

    def weights(self, index: int) -> mx.array:
        """Return a layer's router weights (T, k)."""
        return mx.concatenate([routing.weights[0] for routing in self.routings[index]])


@frozen(kw_only=True)
class Text:
    """A greedy continuation: its tokens, and the logits (n, V) that each was taken from."""

    tokens: tuple[int, ...]
    logits: mx.array = field(repr=False)


def greedy(session: Session, logits: mx.array, count: int) -> Text:
    """Take the best token `count` times, starting from `logits` (V,)."""
    tokens, seen = [], []
    for _ in range(count):
        seen.append(logits)
        tokens.append(best_token(logits))
        logits = session.decode(tokens[-1])
    return Text(tokens=tuple(tokens), logits=mx.stack(seen))


def complete(session: Session, prompt: Sequence[int], count: int) -> Text:
    """Take a prompt, then `count` greedy tokens."""
    return greedy(session, session.prefill(prompt), count)
