"""States: exact bytes, and going back to an earlier token or refusing to."""

from collections.abc import Sequence

import mlx.core as mx

from mference_acceptance.case import LAYER_BAR, CaseFailed, Figures, require, same, within
from mference_acceptance.context import Context
from mference_acceptance.runs import Text, complete
from mference_core.engine import Engine
from mference_core.errors import CannotRewind
from mference_core.session import Session

CHUNK = 7
DECODED = 4
BLOCK_ROWS = 256
"""Append-only rows usually grow by so many; lengths around it are tried."""


def state_bytes(context: Context) -> Figures:
    """Every timeline holds exactly the bytes its layout declares, at every length, in both dtypes."""
    lengths = (0, 1, 2, 15, 16, 17, 64, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, BLOCK_ROWS + 40)
    figures: Figures = {}
    for dtype in ("float32", "bfloat16"):
        with context.engine("mlx", dtype=dtype, context=lengths[-1], chunk=64) as engine:
            session, ids = engine.session(), context.longest.ids
            for length in lengths:
                if length > session.length:
                    session.prefill([ids[at % len(ids)] for at in range(session.length, length)])
                held, declared = session.nbytes, engine.layout.bytes_at(length)
                kept = sum(array.nbytes for state in session.states for array in state.arrays)
                require(held == declared, f"{length} tokens in {dtype} take {held} bytes, {declared} are declared")
                require(kept == declared, f"{length} tokens in {dtype} hold arrays of {kept} bytes, not {declared}")
            require(session.states[0].length == lengths[-1], "a state does not count its tokens")
            figures[f"{dtype}_bytes"] = session.nbytes
    return {"lengths": len(lengths), **figures}


def snapshots_and_forks(context: Context) -> Figures:
    """Restored and forked timelines continue as ones that were never left, bit for bit."""
    prompt, cuts = list(context.longest.ids), (1, CHUNK, len(context.longest.ids) // 2, len(context.longest.ids) - 1)
    size = 0
    with context.engine(chunk=CHUNK) as engine:
        for cut in cuts:
            head, tail, other = prompt[:cut], prompt[cut:], _other_tail(engine, prompt, cut)
            want, want_other = _cold(engine, head, tail), _cold(engine, head, other)
            session = engine.session()
            session.prefill(head)
            saved, twin = session.snapshots(), session.fork()
            size = max(size, sum(snapshot.nbytes for snapshot in saved))
            _equal(complete(session, tail, DECODED), want, f"a timeline left at {cut} and gone on")
            _equal(complete(twin, other, DECODED), want_other, f"a fork at {cut}")
            session.restore(saved, head)
            _equal(complete(session, other, DECODED), want_other, f"a timeline restored at {cut}")
            fresh = engine.session()
            fresh.restore(saved, head)
            _equal(complete(fresh, tail, DECODED), want, f"a new timeline restored at {cut}")
    return {"cuts": len(cuts), "snapshot_bytes": size}


def rewinding(context: Context) -> Figures:
    """Cut to a shorter length a timeline continues as a cold one of the same calls, bit for bit, or refuses and stays whole.

    On CPUs, where no row's result depends on the others, calls need not be the same. Elsewhere a product of another
    number of rows is another kernel's: a timeline that is cut within a call continues as a cold one within rounding.
    """
    prompt, exact, worst = list(context.longest.ids), mx.default_device() == mx.Device(mx.cpu), 0.0
    with context.engine(chunk=CHUNK) as engine:
        session = engine.session()
        session.prefill(prompt)
        whole = _cold(engine, prompt, [prompt[0]])
        possible = [n for n in range(len(prompt) + 1) if all(s.can_truncate(n) for s in session.states)]
        require({0, len(prompt)} <= set(possible), "a timeline cannot be cut to nothing, or not at all")
        shortest = min(n for n in possible if n)
        tried = {0, 1, 2, len(prompt) // 3, len(prompt) // 2, shortest - 1, shortest, len(prompt) - 1, len(prompt)}
        refused = 0
        for length in sorted(tried):
            if not _cut(session.fork(), length, whole):
                refused += 1
                require(length not in possible, f"a cut to {length} is refused though every state allows it")
                continue
            if not exact:
                ended = _after(engine, prompt[:length], prompt[length:])
                _continue(engine, ended, prompt, length, 0.0)
            worst = max(worst, _continue(engine, session.fork(), prompt, length, 0.0 if exact else LAYER_BAR))
    return {"lengths": len(tried), "refused": refused, "shortest_kept": shortest, "worst": worst}


def _cut(session: Session, length: int, whole: Text) -> bool:
    """Say whether a cut succeeds; a refused one must have changed nothing."""
    before = session.length
    try:
        session.rewind(length)
    except CannotRewind:
        require(session.length == before, f"a refused cut to {length} left {session.length} tokens")
        _equal(complete(session, session.tokens[:1], DECODED), whole, f"a timeline after a refused cut to {length}")
        return False
    lengths = {state.length for state in session.states} | {session.length}
    require(lengths == {length}, f"after a cut to {length} the states hold {sorted(lengths)} tokens")
    return True


def _continue(engine: Engine, session: Session, prompt: list[int], length: int, bar: float) -> float:
    """Cut, go on otherwise, cut again where that is possible, and go on once more; return the worst error, 0 if equal."""
    tail = _other_tail(engine, prompt, length)
    session.rewind(length)
    want = _cold(engine, prompt[:length], tail)
    worst = _close(complete(session, tail, DECODED), want, bar, f"a timeline cut to {length}")
    again = length + len(tail)
    try:
        session.rewind(again)
    except CannotRewind:
        return worst
    want = _cold(engine, prompt[:length], tail, prompt[:2])
    more = _close(complete(session, prompt[:2], DECODED), want, bar, f"a timeline cut to {length}, then to {again}")
    return max(worst, more)


def _other_tail(engine: Engine, prompt: list[int], cut: int) -> list[int]:
    """Return tokens that differ from the prompt's after `cut`."""
    rest = prompt[cut : cut + 5] or prompt[:3]
    return [(token + 1) % engine.graph.vocab_size for token in rest]


def _cold(engine: Engine, *parts: Sequence[int]) -> Text:
    """Take parts one after the other on a new timeline."""
    return complete(_after(engine, *parts[:-1]), parts[-1], DECODED)


def _after(engine: Engine, *parts: Sequence[int]) -> Session:
    """Return a new timeline that has taken parts one after the other."""
    session = engine.session()
    for part in parts:
        if part:
            session.prefill(part)
    return session


def _equal(got: Text, want: Text, what: str) -> None:
    _close(got, want, 0.0, what)


def _close(got: Text, want: Text, bar: float, what: str) -> float:
    """Hold a text against another: the same tokens, logits within `bar` or, where it is 0, equal bit for bit."""
    error, logits = 0.0, f"logits of {what}"
    if bar:
        error = within(got.logits, want.logits, bar, logits)
    else:
        same(got.logits, want.logits, logits)
    if got.tokens != want.tokens:
        raise CaseFailed(f"{what} gives other tokens")
    return error
