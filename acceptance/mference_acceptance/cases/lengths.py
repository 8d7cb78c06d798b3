"""Prompts of every length, above all those that end just before, at and just after a chunk."""

from collections.abc import Iterator, Sequence
from random import Random

import mlx.core as mx

from mference_acceptance.arrays import number
from mference_acceptance.case import LAYER_BAR, Figures, require, within
from mference_acceptance.cases.parity import golden_bar
from mference_acceptance.context import Context
from mference_acceptance.runs import Trace
from mference_core.engine import Engine, context_limit
from mference_core.routed import routed_branch
from mference_core.router import Router
from mference_core.session import Session
from mference_core.steps import make_step

LONGEST = 320
EVERY, AROUND = 16, (1, 7, 64, 100)
"""Chunk, in tokens, with which each length is tried; chunks with which those around their multiples are."""

LEAST_GAP, DRAWS = 1e-4, 8
"""Lead of each chosen expert over the best left out that token sequences are drawn for, and most draws."""


def prompt_lengths(context: Context) -> Figures:
    """Prompts of every length, 1 to 320, end in the logits that one whole chunk has there, and go on as it does."""
    limit = context_limit(context.checkpoint.config) or LONGEST + 1
    longest = min(LONGEST, limit - 1)
    bar, worst, tried = golden_bar(context), 0.0, 0
    with context.engine(chunk=longest + 1, context=longest + 1) as engine:
        ids, gap = _draw(context, engine, longest + 1)
        whole = _every_logits(engine, ids)
    for chunk in (EVERY, *AROUND):
        lengths = range(1, longest + 1) if chunk == EVERY else _around(chunk, longest)
        with context.engine(chunk=chunk, context=longest + 1) as engine:
            for length, session, logits in _prompts(engine, ids, lengths):
                where = f"of a prompt of {length} tokens in chunks of {chunk}"
                worst = max(worst, within(logits, whole[length - 1], bar, f"last logits {where}"))
                if (length + 1) % chunk < 3 or length % 5 == 0:
                    after = session.decode(ids[length])
                    error = within(after, whole[length], bar, f"logits after the token that follows {where}")
                    worst = max(worst, error)
                tried += 1
    figures: Figures = {"prompts": tried, "longest": longest, "bar": bar, "worst": worst}
    return figures | ({"least_expert_lead": gap} if gap < float("inf") else {})


def _around(chunk: int, longest: int) -> list[int]:
    """Return the lengths next to a few multiples of a chunk."""
    ends = {chunk * times + near for times in (1, 2, 3) for near in (-1, 0, 1)}
    return sorted(length for length in ends if 1 <= length <= longest)


def _prompts(engine: Engine, ids: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, Session, mx.array]]:
    """Yield for each length, rising, a session that took that many tokens, and the logits after them.

    Whole chunks are taken once: a prompt that shares them goes on from a fork, which is what a session of its own
    would hold (`snapshots-and-forks`).
    """
    chunk, base = engine.chunk, engine.session()
    for length in lengths:
        shared = (length - 1) // chunk * chunk
        if shared > base.length:
            base.prefill(ids[base.length : shared])
        session = base.fork()
        yield length, session, session.prefill(ids[shared:length])


def _every_logits(engine: Engine, ids: Sequence[int]) -> mx.array:
    """Return the logits (T, V) at every position of a prompt taken in one chunk."""
    trace = Trace()
    last = engine.session().prefill(ids, observe=trace)
    every = engine.graph.head(trace.outputs[len(engine.graph.layers) - 1][0])[0]
    exact = mx.default_device() == mx.Device(mx.cpu)  # elsewhere a product of one row is another kernel's
    within(last, every[-1], 0.0 if exact else LAYER_BAR, "last logits of the session beside the head's")
    require(bool(mx.isfinite(every).all()), f"logits of {len(ids)} tokens are not finite")
    return every


def _draw(context: Context, engine: Engine, count: int) -> tuple[list[int], float]:
    """Return a token sequence on which the choice of experts hangs least on rounding, and the smallest lead."""
    arch, best, found = engine.checkpoint.arch, -1.0, list[int]()
    router = context.family.ask("mference_router", arch=arch, weights=engine.weights)
    for seed in range(DRAWS):
        random = Random(seed)  # noqa: S311  not a secret
        ids = [random.randrange(engine.graph.vocab_size) for _ in range(count)]
        lead = _least_lead(engine, router, ids)
        if lead > best:
            best, found = lead, ids
        if best > LEAST_GAP:
            break
    return found, best


def _least_lead(engine: Engine, router: Router, ids: Sequence[int]) -> float:
    """Return the smallest lead of a chosen expert over the best left out, all tokens and layers; infinity without."""
    states, step = engine.session().states, make_step([0], mx.array([list(ids)], dtype=mx.int32))
    x, least = engine.graph.embed(step.ids), float("inf")
    for index, layer in enumerate(engine.graph.layers):
        attended, held, routed = layer.attend(x, [states[index]], step), engine.experts[index], None
        if layer.route is not None and held is not None and attended.rows is not None:
            if router.top_k < router.experts and router.looked_up(index) is None:
                ranks = mx.sort(router.ranked_by(index, router.scores(index, attended.h)), axis=-1)
                lead = ranks[..., -router.top_k] - ranks[..., -router.top_k - 1]
                least = min(least, number(lead.min()))
            routed = routed_branch(layer, held, attended.rows, layer.route(attended.h, step), step)
        x = layer.combine(attended.h, layer.shared(attended.h), routed)
    return least
