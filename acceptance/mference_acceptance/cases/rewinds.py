"""States: exact bytes, and going back to an earlier token or refusing to."""

from collections.abc import Sequence

from mference_acceptance.case import CaseFailed, Figures, require, same
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
    """Cut to a shorter length a timeline continues as a cold one, bit for bit, or refuses and stays whole."""
    prompt = list(context.longest.ids)
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
            if _cut(session.fork(), length, whole):
                _continue(engine, session.fork(), prompt, length)
            else:
                refused += 1
                require(length not in possible, f"a cut to {length} is refused though every state allows it")
    return {"lengths": len(tried), "refused": refused, "shortest_kept": shortest}


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


def _continue(engine: Engine, session: Session, prompt: list[int], length: int) -> None:
    """Cut, go on otherwise, cut again where that is possible, and go on once more."""
    tail = _other_tail(engine, prompt, length)
    session.rewind(length)
    _equal(complete(session, tail, DECODED), _cold(engine, prompt[:length], tail), f"a timeline cut to {length}")
    again = length + len(tail)
    try:
        session.rewind(again)
    except CannotRewind:
        return
    _equal(
        complete(session, prompt[:2], DECODED),
        _cold(engine, prompt[:length], tail, prompt[:2]),
        f"a timeline cut to {length}, then to {again}",
    )


def _other_tail(engine: Engine, prompt: list[int], cut: int) -> list[int]:
    """Return tokens that differ from the prompt's after `cut`."""
    rest = prompt[cut : cut + 5] or prompt[:3]
    return [(token + 1) % engine.graph.vocab_size for token in rest]


def _cold(engine: Engine, *parts: Sequence[int]) -> Text:
    """Take parts one after the other on a new timeline."""
    session = engine.session()
    for part in parts[:-1]:
        if part:
            session.prefill(part)
    return complete(session, parts[-1], DECODED)


def _equal(got: Text, want: Text, what: str) -> None:
    same(got.logits, want.logits, f"logits of {what}")
    if got.tokens != want.tokens:
        raise CaseFailed(f"{what} gives other tokens")
