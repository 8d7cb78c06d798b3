"""Requests served together, and prompts whose beginning was computed before."""

from collections.abc import Sequence

import mlx.core as mx

from mference_acceptance.arrays import best_token
from mference_acceptance.case import LAYER_BAR, Figures, require, same, within
from mference_acceptance.cases.contract import reference_arch
from mference_acceptance.context import Context
from mference_core.engine import Engine
from mference_core.generate import GenerateOptions
from mference_core.prefix.cache import PrefixCache
from mference_core.prefix.disk import DiskPieces
from mference_core.prefix.key import cache_key
from mference_core.sampling import SamplingOptions, log_probs
from mference_core.scheduler.request import Request, Sampled
from mference_core.scheduler.scheduler import Scheduler, SchedulerOptions
from mference_core.testing.asking import Asked

CHUNK = 96
"""Tokens of a call: prompts are longer, so that they are taken by pieces beside others' decoding."""

DECODED = 5
MUCH_BYTES = 1 << 30


def concurrent_requests(context: Context) -> Figures:
    """Answers of requests served together, some taking prompts while others decode, are those of each alone."""
    longest = context.longest.ids
    prompts = [golden.ids for golden in context.goldens]
    prompts += [longest[::-1], (*longest[:70], *longest[::-1]), longest[:1], longest]
    arch = reference_arch(context)
    slots = min(arch.top_k_experts + 1, arch.num_experts) if arch.num_experts else "resident"
    room = 2 * len(longest) + DECODED
    with context.engine(chunk=CHUNK, context=room) as engine:
        want = [_alone(engine, prompt) for prompt in prompts]
    options = SchedulerOptions(max_active=4, max_waiting=len(prompts))
    with Scheduler.loading(lambda: context.engine(chunk=CHUNK, context=room, slots=slots), options) as scheduler:
        asked = [Asked.of(scheduler, _request(prompt)) for prompt in prompts]
        for one in asked:
            error = one.outcome().error
            require(error is None, f"a request failed: {error}")
        steps = scheduler.load().decode_steps
    exact = mx.default_device() == mx.Device(mx.cpu)
    for number, (one, (tokens, best)) in enumerate(zip(asked, want, strict=True)):
        where = f"request {number} of {len(prompts)}, prompt of {len(prompts[number])} tokens,"
        require(one.tokens == tokens, f"{where} answers {one.tokens}, alone {tokens}")
        got = [told.logprobs.logprob for told in one.told if isinstance(told, Sampled) and told.logprobs]
        near = [abs(a - b) <= (0 if exact else LAYER_BAR) for a, b in zip(got, best, strict=True)]
        require(all(near), f"{where} has log-probabilities {got}, alone {best}")
    together = len(prompts) * DECODED
    require(steps < together, f"{together} tokens took {steps} steps: none were made together")
    return {"requests": len(prompts), "tokens": together, "steps": steps}


def prefix_reuse(context: Context) -> Figures:
    """Prompts that begin like earlier ones go on from what was kept, in memory or on disk, as cold ones do."""
    longest, reused, worst = list(context.longest.ids), list[int](), 0.0
    twice = [*longest, *longest[::-1]]
    prompts = [twice, twice, [*twice[:-1], twice[0]], [*twice[:200], *longest], [*twice, *longest[:9]], twice[:130]]
    room, folder = 3 * len(longest), context.fresh_folder()
    exact = mx.default_device() == mx.Device(mx.cpu)
    with context.engine(chunk=CHUNK, context=room) as engine:
        cold = [engine.session().prefill(prompt) for prompt in prompts]
        for where in ("memory", "disk"):
            disk = DiskPieces(folder, cache_key(engine), MUCH_BYTES)
            cache = PrefixCache(engine=engine, limit_bytes=MUCH_BYTES, disk=disk)
            for number, (prompt, want) in enumerate(zip(prompts, cold, strict=True)):
                count, logits = _served(cache, prompt)
                what = f"logits of prompt {number}, {count} of {len(prompt)} tokens from {where},"
                if exact:
                    same(logits, want, what)
                worst = max(worst, within(logits, want, LAYER_BAR, what))
                reused.append(count)
            kept = cache.figures()
            cache.close()
    first, again = reused[: len(prompts)], reused[len(prompts) :]
    least = len(twice) - CHUNK
    require(first[0] == 0, f"a first prompt reuses {first[0]} tokens")
    require(min(first[1], again[0]) >= least, f"the same prompt reuses {first[1]} tokens, {again[0]} of them from disk")
    require(max(reused) < max(map(len, prompts)), "all of a prompt is reused and nothing is left to answer from")
    return {"reused": ", ".join(map(str, reused)), "bytes": kept.nbytes, "disk_bytes": kept.disk_bytes, "worst": worst}


def _request(prompt: Sequence[int]) -> Request:
    options = GenerateOptions(max_new=DECODED, sampling=SamplingOptions(temperature=0))
    return Request(prompt=tuple(prompt), options=options, logprobs=0)


def _alone(engine: Engine, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """Return greedy tokens and their log-probabilities."""
    session, tokens, best = engine.session(), list[int](), list[float]()
    logits = session.prefill(prompt)
    for _ in range(DECODED):
        tokens.append(best_token(logits))
        best.append(log_probs(logits, tokens[-1]).logprob)
        logits = session.decode(tokens[-1])
    return tokens, best


def _served(cache: PrefixCache, prompt: Sequence[int]) -> tuple[int, mx.array]:
    """Take a prompt as a scheduler does; return the tokens reused and the logits after it."""
    engine, session, logits = cache.engine, cache.engine.session(), None
    read = cache.fetch(prompt)
    if read is not None:
        cache.adopt(prompt, read.result())
    reused = cache.restore(session, prompt)
    require(session.tokens == list(prompt[:reused]), "a restored timeline does not hold what it says")
    while session.length < len(prompt):
        end = cache.end(session.length, prompt)
        logits = engine.forward([session], [prompt[session.length : end]])
        cache.keep(session, prompt)
    assert logits is not None
    return reused, logits[0]
