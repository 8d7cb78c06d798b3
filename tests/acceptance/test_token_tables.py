"""Layers that choose by token id: their tables are held, and what does not keep to them is caught."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx
import pytest

from mference_core.graph import Routing, Step
from mference_core.plugins import LoadedFamily
from mference_core.router import Router

Broken = Callable[..., LoadedFamily]
Refused = Callable[[str, LoadedFamily], str]
Passed = Callable[[str, LoadedFamily], Mapping[str, Any]]
VOCABULARY = 256
Look = Callable[[mx.array, mx.array, Step], mx.array]


def table_of(router: Router) -> mx.array:
    """Return a table whose rows name experts in no order, one of them twice."""
    first = mx.arange(VOCABULARY)[:, None] * 5 + mx.array([3, 0, 3, 6, 2, 5, 1, 4])[None, : router.top_k] * 3
    return first % router.experts


def looked_up(table: mx.array, scores: mx.array, step: Step) -> mx.array:
    del scores
    return table[step.ids]


def by_token(real: Router, look: Look = looked_up, table: Callable[[mx.array], mx.array] = lambda t: t) -> Router:
    """Let layer 0 choose by token id, as `look` does; `table` is what is said of it."""
    true = table_of(real)

    def choose(layer: int, scores: mx.array, step: Step | None) -> Routing:
        if layer:
            return real.choose(layer, scores, step)
        assert step is not None
        ids = look(true, scores, step)
        weights = mx.softmax(mx.take_along_axis(scores, ids, axis=-1), axis=-1)
        return Routing(ids=ids, weights=weights)

    return attrs.evolve(real, choose=choose, table=lambda layer: None if layer else table(true))


def test_a_table_is_no_matter_of_scores(broken: Broken, figures: Passed) -> None:
    """A row that names an expert twice is taken as it is; the other layers are still asked about ties."""
    plain = figures("router-ties", broken(mference_router=lambda real: real))
    found = figures("router-ties", broken(mference_router=by_token))
    assert "layers_that_choose_by_token" not in plain
    assert found["layers_that_choose_by_token"] == 1
    assert found["layers"] == plain["layers"]
    assert 0 < found["rows_tied_at_the_last_place"] < plain["rows_tied_at_the_last_place"]


def by_scores(table: mx.array, scores: mx.array, step: Step) -> mx.array:
    del step
    return mx.argsort(-scores, axis=-1)[..., : table.shape[1]]


def best_first(table: mx.array, scores: mx.array, step: Step) -> mx.array:
    ids = table[step.ids]
    order = mx.argsort(-mx.take_along_axis(scores, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)


def neighbours(table: mx.array, scores: mx.array, step: Step) -> mx.array:
    """Look up the token beside, where there is one."""
    del scores
    return table[mx.concatenate([step.ids[:, 1:], step.ids[:, -1:]], axis=1)]


@pytest.mark.parametrize("look", [by_scores, best_first, neighbours])
def test_a_choice_that_is_not_the_tables_is_caught(broken: Broken, refused: Refused, look: Look) -> None:
    family = broken(mference_router=lambda real: by_token(real, look))
    assert "layer 0 does not take its table's rows" in refused("router-ties", family)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (lambda t: t[:-1], "table has shape"),
        (lambda t: t[:, :1], "table has shape"),
        (lambda t: t + 1, "names experts outside"),
        (lambda t: t - 1, "names experts outside"),
        (lambda t: t[::-1], "does not take its table's rows"),
    ],
)
def test_a_table_that_is_not_what_is_said_is_caught(
    broken: Broken, refused: Refused, table: Callable[[mx.array], mx.array], reason: str
) -> None:
    assert reason in refused("router-ties", broken(mference_router=lambda real: by_token(real, table=table)))


def test_weights_that_depend_on_the_rows_beside_are_caught(broken: Broken, refused: Refused) -> None:
    def spread(real: Router) -> Router:
        made = by_token(real)

        def choose(layer: int, scores: mx.array, step: Step | None) -> Routing:
            chosen = made.choose(layer, scores, step)
            return attrs.evolve(chosen, weights=chosen.weights / (1 + mx.arange(scores.shape[1])[None, :, None]))

        return attrs.evolve(made, choose=choose)

    assert "weighs a token otherwise beside others" in refused("router-ties", broken(mference_router=spread))
