"""What a run cost: the footer and the JSON summary."""

import resource
import sys
from typing import TYPE_CHECKING, Any

from mference_core.experts.plan import format_bytes
from mference_core.gturbo.verification import TOLD_BYTES

if TYPE_CHECKING:
    from mference_core.engine import Engine
    from mference_core.generate import Generation


def peak_memory_bytes() -> int:
    """Return the process's peak resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def summary(engine: "Engine", generation: "Generation") -> dict[str, Any]:
    """Return the JSON object of a finished run; times in seconds, sizes in bytes, rates in tokens per second."""
    import mlx.core as mx  # noqa: PLC0415

    figures, stats = generation.figures, engine.stats
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "tool_calls": [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in generation.calls],
        "finish_reason": generation.finish_reason,
        "stop": generation.reason,
        "prompt_tokens": figures.prompt_tokens,
        "completion_tokens": figures.new_tokens,
        "cached_tokens": figures.cached_tokens,
        "timings": {
            "prefill_seconds": figures.prefill_seconds,
            "prefill_tokens_per_second": figures.prefill_rate,
            "decode_seconds": figures.decode_seconds,
            "decode_tokens_per_second": figures.decode_rate,
            "expert_stall_seconds": stats.stall_seconds,
        },
        "peak_memory_bytes": peak_memory_bytes(),
        "mlx_peak_memory_bytes": mx.get_peak_memory(),
        "expert_slots": engine.memory.experts_held,
        "expert_hit_rate": 1.0 if engine.memory.resident else stats.hit_rate,
        "bytes_read": stats.bytes_read,
        "lookahead": {
            "predicted": stats.predicted,
            "confirmed": stats.confirmed,
            "bytes_read": stats.ahead_bytes,
            "wasted_bytes": stats.wasted_bytes,
        },
        "verification": _verification(engine),
        "dtype": engine.dtype,
    }


def _verification(engine: "Engine") -> dict[str, Any] | None:
    """Return what was hashed since the load began, None for a directory that has no digests.

    `seconds` are those of all threads together, `waited_seconds` those in which nothing else was done.
    """
    done = engine.checkpoint.verification
    if done is None:
        return None
    seconds, waited = round(done.seconds, 6), round(done.waited_seconds, 6)
    return {"policy": done.policy, "bytes": done.bytes, "seconds": seconds, "waited_seconds": waited}


def footer(engine: "Engine", generation: "Generation") -> str:
    """Return one line: why it stopped, tokens and rates, peak memory, expert hits and bytes read per token."""
    figures, facts = generation.figures, summary(engine, generation)
    tokens = max(1, figures.prompt_tokens - figures.cached_tokens + figures.new_tokens)
    return (
        f"[stop={generation.reason} prefill={figures.prompt_tokens - figures.cached_tokens}tok/"
        f"{figures.prefill_seconds:.2f}s={figures.prefill_rate:.1f}tok/s cached={figures.cached_tokens}tok "
        f"new={figures.new_tokens}tok decode={figures.decode_seconds:.2f}s={figures.decode_rate:.3f}tok/s "
        f"peak={format_bytes(facts['peak_memory_bytes'])} hits={facts['expert_hit_rate']:.1%} "
        f"read={format_bytes(facts['bytes_read'] // tokens)}/tok{_ahead(facts['lookahead'])}{_verified(facts['verification'])}]"
    )


def _verified(figures: dict[str, Any] | None) -> str:
    """Return what was verified, or nothing where it was too little to be felt."""
    if figures is None or figures["bytes"] < TOLD_BYTES:
        return ""
    waited = f", {figures['waited_seconds']:.1f}s waited for" if figures["waited_seconds"] >= 0.1 else ""
    return f" verified={format_bytes(figures['bytes'])}/{figures['seconds']:.1f}s{waited}"


def _ahead(figures: dict[str, int]) -> str:
    """Return how guesses turned out, or nothing where none were made."""
    if not figures["predicted"]:
        return ""
    wasted = figures["wasted_bytes"] / max(1, figures["bytes_read"])
    right = figures["confirmed"] / figures["predicted"]
    return f" ahead={right:.0%} right, {format_bytes(figures['bytes_read'])} read, {wasted:.0%} wasted"
