"""The router's written order: score down, then index up."""

from random import Random

import mlx.core as mx

from mference_acceptance.arrays import listed
from mference_acceptance.case import Figures, require
from mference_acceptance.context import Context
from mference_core.router import Router
from mference_core.steps import make_step

ROWS = 64
SCORES = (-1.5, -0.25, -0.0, 0.0, 0.25, 2.0)
"""Few values for many experts, so that most rows tie at the last place; both zeros are equal."""


def router_ties(context: Context) -> Figures:
    """Experts come best first without repeats, equal scores with the lower id first, whatever rows are beside them.

    Where the router states a bias, the order is that of the scores with it. A layer that chooses by token id takes its
    table's row, whatever the scores, and is not asked about ties.
    """
    tied = tables = 0
    with context.engine() as engine:
        arch = engine.checkpoint.arch
        router = context.family.ask("mference_router", arch=arch, weights=engine.weights)
        for layer in sorted(engine.checkpoint.experts):
            table = router.looked_up(layer)
            if table is None:
                tied += _try_layer(router, layer)
            else:
                _try_table(router, layer, table, engine.graph.vocab_size)
                tables += 1
    figures: Figures = {"layers": len(engine.checkpoint.experts), "rows_tied_at_the_last_place": tied}
    return figures | ({"layers_that_choose_by_token": tables} if tables else {})


def synthetic_scores(experts: int, seed: int) -> list[list[float]]:
    """Return rows of coarse scores: all equal, then rising, falling, then random."""
    random = Random(seed)  # noqa: S311  not a secret
    rows = [[0.0] * experts, [-0.0, 0.0] * (experts // 2) + [0.0] * (experts % 2)]
    rows += [[float(e) for e in range(experts)], [float(-e) for e in range(experts)]]
    return rows + [[random.choice(SCORES) for _ in range(experts)] for _ in range(ROWS)]


def expected_order(row: list[float], top_k: int) -> list[int]:
    """Return the rule itself: score down, index up."""
    return sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k]


def tied_under(bias: list[float], rows: list[list[float]]) -> list[list[float]]:
    """Return scores that a bias turns into rows, rounding aside, so that they tie once it is added."""
    return [[value - offset for value, offset in zip(row, bias, strict=True)] for row in rows]


def _try_layer(router: Router, layer: int) -> int:
    rows = synthetic_scores(router.experts, seed=layer)
    bias = router.bias(layer) if router.bias is not None else None
    if bias is not None:
        fits = bias.shape == (router.experts,) and bias.dtype == mx.float32
        require(fits, f"layer {layer} bias is {bias.dtype} of shape {bias.shape}, not float32 ({router.experts},)")
        rows += tied_under(listed(bias), rows)
    scores = mx.array(rows, dtype=mx.float32)
    rows, ranks = listed(scores), listed(router.ranked_by(layer, scores))
    step = make_step([0], mx.zeros((1, len(rows)), dtype=mx.int32))
    chosen = router.choose(layer, scores[None], step)
    require(chosen.ids.shape == (1, len(rows), router.top_k), f"layer {layer} ids have shape {chosen.ids.shape}")
    require(chosen.weights.shape == chosen.ids.shape, f"layer {layer} weights have shape {chosen.weights.shape}")
    require(bool(mx.isfinite(chosen.weights).all()), f"layer {layer} has weights that are not finite")
    tied = 0
    for row, rank, got in zip(rows, ranks, listed(chosen.ids[0]), strict=True):
        want = expected_order(rank, router.top_k)
        require(len(set(got)) == router.top_k, f"layer {layer} chooses an expert twice: {got}")
        require(got == want, f"layer {layer} chooses {got} for scores {row}, expected {want}")
        tied += _ties(rank, want)
    alone = make_step([0], mx.zeros((1, 1), dtype=mx.int32))
    for index in (0, len(rows) // 2, len(rows) - 1):
        single = router.choose(layer, scores[None, index : index + 1], alone)
        equal = mx.array_equal(single.ids[0, 0], chosen.ids[0, index])
        require(bool(equal), f"layer {layer} chooses otherwise when a row is alone")
    return tied


def _try_table(router: Router, layer: int, table: mx.array, vocabulary: int) -> None:
    """Hold the choice of every token id against its row, under scores that would choose otherwise."""
    where = f"layer {layer}"
    require(table.shape == (vocabulary, router.top_k), f"{where} table has shape {list(table.shape)}")
    entries = table.astype(mx.int64)
    valid = bool(((entries >= 0) & (entries < router.experts)).all())
    require(valid, f"{where} table names experts outside 0 to {router.experts - 1}")
    ids = mx.arange(vocabulary, dtype=mx.int32)[None]
    rows = synthetic_scores(router.experts, seed=layer)
    kinds = mx.array(rows, dtype=mx.float32)
    for shift in range(min(3, len(rows))):
        scores = kinds[(mx.arange(vocabulary) + shift) % len(rows)][None]
        chosen = router.choose(layer, scores, make_step([0], ids))
        require(bool(mx.array_equal(chosen.ids[0], entries)), f"{where} does not take its table's rows")
        require(chosen.weights.shape == chosen.ids.shape, f"{where} weights have shape {chosen.weights.shape}")
        require(bool(mx.isfinite(chosen.weights).all()), f"{where} has weights that are not finite")
    fallen = router.choose(layer, scores[:, ::-1], make_step([0], ids[:, ::-1]))
    same = mx.array_equal(fallen.ids[:, ::-1], chosen.ids) and mx.array_equal(fallen.weights[:, ::-1], chosen.weights)
    require(bool(same), f"{where} weighs a token otherwise beside others")


def _ties(row: list[float], chosen: list[int]) -> bool:
    """Say whether an expert left out has the score of the last one chosen."""
    return any(row[e] == row[chosen[-1]] for e in range(len(row)) if e not in chosen)
