"""Where a prompt is cut and where experts are kept change nothing."""

from collections.abc import Sequence

import mlx.core as mx

from mference_acceptance.case import LAYER_BAR, Figures, require, same, within
from mference_acceptance.context import Context
from mference_acceptance.context import slot_counts as counts_to_try
from mference_acceptance.runs import Text, complete
from mference_core.engine import Engine, can_map

CHUNKS = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64, 70, 100)
"""Prefill chunks in tokens: small ones, powers of two and their neighbours, and past the usual golden prompt."""

DECODED = 5


def chunk_sizes(context: Context) -> Figures:
    """Prefill chunks of any size give the tokens of one whole chunk, and its logits within rounding."""
    golden, worst, equal = context.longest, 0.0, 0
    whole = _text(context, chunk=len(golden.ids))
    for chunk in CHUNKS:
        text = _text(context, chunk=chunk)
        require(text.tokens == whole.tokens, f"chunks of {chunk} tokens give {text.tokens}, one chunk {whole.tokens}")
        worst = max(worst, within(text.logits, whole.logits, LAYER_BAR, f"logits with chunks of {chunk} tokens"))
        equal += bool(mx.array_equal(text.logits, whole.logits))
    return {"chunks": len(CHUNKS), "worst": worst, "bit_equal": f"{equal} of {len(CHUNKS)}"}


def _text(context: Context, chunk: int) -> Text:
    with context.engine(chunk=chunk) as engine:
        return complete(engine.session(), context.longest.ids, DECODED)


def slot_counts(context: Context) -> Figures:
    """Tokens and logits are equal bit for bit for every number of expert slots, resident, quantised or installed.

    In float32 from both directories, in bfloat16 from the install.
    """
    runs, read, tried = 0, 0, tuple[int | str, ...]()
    for dtype, kinds in (("float32", ("mlx", "gturbo")), ("bfloat16", ("gturbo",))):
        more_runs, more_read, tried = _compare_slots(context, dtype, kinds)
        runs, read = runs + more_runs, read + more_read
    return {"runs": runs, "slots": ", ".join(map(str, tried)), "bytes_read": read}


def _compare_slots(context: Context, dtype: str, kinds: Sequence[str]) -> tuple[int, int, tuple[int | str, ...]]:
    """Return runs made, bytes read and slot counts tried."""
    runs, read = 0, 0
    with context.engine("mlx", dtype=dtype) as engine:
        wanted = complete(engine.session(), context.longest.ids, DECODED)
        tried: tuple[int | str, ...] = (*counts_to_try(engine), "resident")
        tried += ("mapped",) if engine.experts and can_map(engine.checkpoint) else ()
    for kind in kinds:
        for slots in tried:
            with context.engine(kind, slots=slots, dtype=dtype) as engine:
                for again in ("cold", "warm") if slots == tried[0] else ("cold",):
                    text = complete(engine.session(), context.longest.ids, DECODED)
                    where = f"{dtype} logits of the {kind} directory with {slots} slots, {again}"
                    same(text.logits, wanted.logits, where)
                    require(text.tokens == wanted.tokens, f"{where}: other tokens")
                    runs += 1
                read += _bytes_read(engine, slots)
    return runs, read, tried


def _bytes_read(engine: Engine, slots: int | str) -> int:
    stats = engine.stats
    if isinstance(slots, int) and engine.checkpoint.experts:
        held = [experts.source.slots for experts in engine.experts if experts is not None]
        require(set(held) == {slots}, f"{sorted(set(held))} slots are held where {slots} were asked for")
        require(stats.misses > 0, f"nothing was read though only {slots} experts fit")
    return stats.bytes_read
