"""Timelines that make tokens together: one choice and one call of the model a step, for one row or many."""

from collections.abc import Sequence
from typing import Protocol, cast

import mlx.core as mx
from attrs import define, field

from mference_core.engine import Engine
from mference_core.errors import MferenceError, NumericError
from mference_core.sampling import LogProbs, Sampler, greedy, log_probs, sample_rows
from mference_core.session import Session


class Constraint(Protocol):
    """A grammar that one answer must follow, advanced token by token. Belongs to one request.

    All is called on the thread that makes the tokens; an array must not wait for work of another thread's stream.
    """

    def allowed(self) -> mx.array | None:
        """Return which ids may come next, (V,) bool, or None where every id may."""
        ...

    def accept(self, token: int) -> None:
        """Take the chosen id, one of those allowed. Not called for what follows a finished answer."""
        ...

    def finished(self) -> bool:
        """Say whether the answer is complete and nothing but a stop id may follow."""
        ...


@define(kw_only=True, eq=False)
class Row:
    """One timeline that makes tokens: `left` is how many more it may make, `logits` (V,) what the next comes from.

    `logprobs` None asks for none, else for the chosen token's and that many others'; `chosen` then holds them.
    A constraint that is finished leaves only `stop_ids` to choose from.
    """

    session: Session
    sampler: Sampler
    left: int
    logits: mx.array | None = field(default=None, repr=False)
    logprobs: int | None = None
    constraint: Constraint | None = None
    stop_ids: Sequence[int] = ()
    chosen: LogProbs | None = field(default=None, init=False)
    token: int = field(default=0, init=False)
    _queued: bool = field(default=False, init=False)

    @property
    def plain(self) -> bool:
        """Say whether its next token is the best logit, so that it need not be known to go on from it."""
        return self.sampler.options.plain_greedy and self.logprobs is None and self.constraint is None


def make_tokens(engine: Engine, rows: Sequence[Row]) -> list[int | MferenceError]:
    """Choose each row's next token from its logits; a row that cannot has its error instead and stays as it was.

    Where every row is greedy and everything is in memory, the step after is queued before the tokens are read.
    """
    if all(row.plain for row in rows) and in_memory(engine):
        return _make_ahead(engine, rows)
    made: list[int | MferenceError] = [0] * len(rows)
    able, logits = list[int](), list[mx.array]()
    for at, row in enumerate(rows):
        try:
            logits.append(_masked(engine, row))
            able.append(at)
        except Exception as error:  # noqa: BLE001  a constraint's fault is its own row's
            made[at] = as_error(error)
    for at, token in zip(able, sample_rows([rows[at].sampler for at in able], logits), strict=True):
        made[at] = token
        if not isinstance(token, NumericError):
            try:
                _chosen(rows[at], token)
            except Exception as error:  # noqa: BLE001
                made[at] = as_error(error)
    return made


def take_tokens(engine: Engine, rows: Sequence[Row]) -> None:
    """Advance each row by the token it made, all in one call; the logits are queued, not yet computed.

    Rows that have ended are left out. On failure every row stays as it was, and may be taken again.
    """
    waiting = [row for row in rows if not row._queued]  # noqa: SLF001
    for row in rows:
        if row._queued:  # noqa: SLF001
            row.session.settle([row.token])
            row._queued = False  # noqa: SLF001
    if not waiting:
        return
    logits = engine.forward([row.session for row in waiting], [[row.token] for row in waiting])
    assert logits is not None
    for at, row in enumerate(waiting):
        row.logits = logits[at]
    mx.async_eval([row.logits for row in waiting])


def _chosen(row: Row, token: int) -> None:
    row.token = token
    row.left -= 1
    if row.logprobs is not None:
        assert row.logits is not None
        row.chosen = log_probs(row.logits, token, row.logprobs)
    if row.constraint is not None and not row.constraint.finished():
        row.constraint.accept(token)


def as_error(error: Exception) -> MferenceError:
    """Return what a user can be told of an exception."""
    if isinstance(error, MferenceError):
        return error
    return MferenceError(
        what="this request", got=f"failed: {type(error).__name__}: {error}", remedy="ask for less, or try again"
    )


def in_memory(engine: Engine) -> bool:
    """Say whether calls only queue work: no expert has to be read first."""
    return all(held is None or held.source.full for held in engine.experts)


def _masked(engine: Engine, row: Row) -> mx.array:
    """Return the logits that the row chooses from."""
    assert row.logits is not None
    if row.constraint is None:
        return row.logits
    if row.constraint.finished():
        ids = mx.arange(engine.graph.vocab_size)
        allowed = (ids[:, None] == mx.array(list(row.stop_ids), dtype=ids.dtype)).any(axis=-1)
    else:
        mask = row.constraint.allowed()
        if mask is None:
            return row.logits
        allowed = mask
    return mx.where(allowed, row.logits, -mx.inf)


def _make_ahead(engine: Engine, rows: Sequence[Row]) -> list[int | MferenceError]:
    coming = _checked_greedy(mx.stack([cast("mx.array", row.logits) for row in rows]))
    mx.async_eval(coming)
    going = [at for at, row in enumerate(rows) if row.left > 1]
    if going:
        known = mx.minimum(coming, engine.graph.vocab_size - 1)  # a row without a token goes on from any id, in vain
        tokens = known if len(going) == len(rows) else known[mx.array(going)]
        logits = engine.forward_arrays([rows[at].session for at in going], tokens)
        queued = {at: logits[index] for index, at in enumerate(going)}
        mx.async_eval(list(queued.values()))
    made: list[int | MferenceError] = []
    for at, (row, token) in enumerate(zip(rows, cast("list[int]", coming.tolist()), strict=True)):
        if token == engine.graph.vocab_size:
            row.session.recover()
            made.append(_broken(row.sampler))
            continue
        _chosen(row, token)
        row.sampler.accept(token)
        if at in going:
            row.logits, row._queued = queued[at], True  # noqa: SLF001
        made.append(token)
    return made


def _broken(sampler: Sampler) -> NumericError:
    return NumericError(what=f"logits of step {sampler.count}", got="not finite", expected="finite numbers")


def _checked_greedy(logits: mx.array) -> mx.array:
    """Return each row's best id (lowest on ties), or V where a logit of it is NaN or plus infinity."""
    bad = (mx.isnan(logits) | (logits == mx.inf)).any(axis=-1)
    return mx.where(bad, mx.array(logits.shape[-1], mx.uint32), greedy(logits))
