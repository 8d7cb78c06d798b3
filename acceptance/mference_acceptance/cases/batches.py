"""Timelines that advance together are each what they are alone."""

from collections.abc import Sequence

import mlx.core as mx

from mference_acceptance.arrays import best_token, listed
from mference_acceptance.case import LAYER_BAR, Figures, same, within
from mference_acceptance.cases.contract import reference_arch
from mference_acceptance.context import Context
from mference_core.engine import Engine

STEPS = 6
PIECES = (13, 70)
"""Tokens of a joining prompt that one call takes."""


def ragged_batches(context: Context) -> Figures:
    """Prompts of different lengths prefilled and decoded together give each timeline's own logits."""
    prompts = [list(golden.ids) for golden in context.goldens]
    prompts += [list(reversed(context.longest.ids))[: len(prompts[0]) + 3], [1]]
    more = [prompt[: index % 3 + 1] for index, prompt in enumerate(prompts)]
    exact = mx.default_device() == mx.Device(mx.cpu)
    worst = 0.0
    with context.engine() as engine:
        arch = engine.checkpoint.arch
        slots = min(arch.top_k_experts + 1, arch.num_experts) if arch.num_experts else "resident"
        alone = [_advance(engine, [prompt], [extra]) for prompt, extra in zip(prompts, more, strict=True)]
        together = _advance(engine, prompts, more)
    with context.engine(slots=slots) as engine:
        streamed = _advance(engine, prompts[::-1], more[::-1])[:, ::-1]
    for row, single in enumerate(alone):
        for what, batch in (("resident", together), (f"with {slots} slots", streamed)):
            where = f"logits of timeline {row} of {len(prompts)}, {what},"
            if exact:
                same(batch[:, row], single[:, 0], where)
            worst = max(worst, within(batch[:, row], single[:, 0], LAYER_BAR, where))
    return {"timelines": len(prompts), "worst": worst}


def joining_timelines(context: Context) -> Figures:
    """Prompts taken by pieces in the very calls in which others decode change none of them, nor they the prompts."""
    exact = mx.default_device() == mx.Device(mx.cpu)
    arch, late = reference_arch(context), context.longest.ids
    others = [context.goldens[0].ids, context.goldens[0].ids[::-1]]
    worst = 0.0
    slots = min(arch.top_k_experts + 1, arch.num_experts) if arch.num_experts else "resident"
    with context.engine(slots=slots) as engine:
        for size in PIECES:
            pieces = [late[start : start + size] for start in range(0, len(late), size)]
            together = _join(engine, others, pieces)
            apart = _join(engine, others, [()] * len(pieces)), _join(engine, [], pieces)
            where = f"beside each other, {size} tokens of the prompt a call,"
            for got, want, who in (
                (together[:, :-1], apart[0], f"logits of timelines that decode, {where}"),
                (together[:, -1:], apart[1], f"logits of a prompt that joins, {where}"),
            ):
                if exact:
                    same(got, want, who)
                worst = max(worst, within(got, want, LAYER_BAR, who))
    return {"pieces": ", ".join(map(str, PIECES)), "worst": worst}


def _join(engine: Engine, others: Sequence[Sequence[int]], pieces: Sequence[Sequence[int]]) -> mx.array:
    """Decode after `others`, a call per piece of a further prompt, which takes part where it is not empty.

    Returns logits (calls, timelines, V).
    """
    sessions = [engine.session() for _ in range(len(others) + any(pieces))]
    best = [best_token(session.prefill(prompt)) for session, prompt in zip(sessions, others, strict=False)]
    seen = []
    for piece in pieces:
        logits = engine.forward(sessions, [[token] for token in best] + ([list(piece)] if piece else []))
        assert logits is not None
        seen.append(logits)
        best = listed(mx.argmax(logits[: len(others)], axis=-1)) if others else []
    return mx.stack(seen)


def _advance(engine: Engine, prompts: Sequence[list[int]], more: Sequence[list[int]]) -> mx.array:
    """Take prompts, then ragged further tokens, then greedy ones, together; return logits (steps, B, V)."""
    sessions = [engine.session() for _ in prompts]
    seen = []
    for tokens in (prompts, more):
        logits = engine.forward(sessions, tokens)
        assert logits is not None
        seen.append(logits)
    for _ in range(STEPS):
        best = listed(mx.argmax(seen[-1], axis=-1))
        logits = engine.forward(sessions, [[token] for token in best])
        assert logits is not None
        seen.append(logits)
    return mx.stack(seen)
