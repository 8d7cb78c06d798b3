"""Timelines that advance together are each what they are alone."""

from collections.abc import Sequence

import mlx.core as mx

from mference_acceptance.arrays import listed
from mference_acceptance.case import LAYER_BAR, Figures, same, within
from mference_acceptance.context import Context
from mference_core.engine import Engine

STEPS = 6


def ragged_batches(context: Context) -> Figures:
    """Prompts of different lengths prefilled and decoded together give each timeline's own logits."""
    prompts = [list(golden.ids) for golden in context.goldens]
    prompts += [list(reversed(context.longest.ids))[: len(prompts[0]) + 3], [1]]
    more = [prompt[: index % 3 + 1] for index, prompt in enumerate(prompts)]
    exact = mx.default_device() == mx.Device(mx.cpu)
    worst = 0.0
    with context.engine() as engine:
        slots = min(engine.checkpoint.arch.top_k_experts + 1, engine.checkpoint.arch.num_experts)
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
