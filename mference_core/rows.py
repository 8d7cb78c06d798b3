"""Timelines that make tokens together: one choice and one call of the model a step, for one row or many."""

from collections.abc import Sequence
from typing import Protocol, cast

import mlx.core as mx
from attrs import define, field

from mference_core.engine import Engine
from mference_core.errors import MferenceError, NumericError
from mference_core.sampling import LogProbs, Sampler, best_rows, greedy, log_probs, sample_rows
from mference_core.session import Session
from mference_kernels import levels


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
    """One timeline that makes tokens: `left` is how many more it may make; `place` says what the next comes from.

    `logprobs` None asks for none, else for the chosen token's and that many others'; `chosen` then holds them.
    A constraint that is finished leaves only `stop_ids` to choose from.
    """

    session: Session
    sampler: Sampler
    left: int
    logprobs: int | None = None
    constraint: Constraint | None = None
    stop_ids: Sequence[int] = ()
    chosen: LogProbs | None = field(default=None, init=False)
    token: int = field(default=0, init=False)
    plain: bool = field(init=False)
    _batch: mx.array = field(init=False, repr=False)
    _at: int = field(default=0, init=False)
    _queued: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        """Settle whether its next token is the best logit, so that it need not be known to go on from it."""
        self.plain = self.sampler.options.plain_greedy and self.logprobs is None and self.constraint is None

    def place(self, batch: mx.array, at: int, *, queued: bool = False) -> None:
        """Say that its logits are row `at` of `batch` (B, V); `queued`, that its session has yet to count its token."""
        self._batch, self._at, self._queued = batch, at, queued

    @property
    def logits(self) -> mx.array:
        """What its next token comes from, (V,)."""
        return self._batch[self._at]

    def choose(self, token: int) -> None:
        """Take a chosen token: count it, find its log-probabilities, and tell the constraint."""
        self.token = token
        self.left -= 1
        if self.logprobs is not None:
            self.chosen = log_probs(self.logits, token, self.logprobs)
        if self.constraint is not None and not self.constraint.finished():
            self.constraint.accept(token)

    def settle(self) -> bool:
        """Count a token that was taken ahead; return whether there was one."""
        queued, self._queued = self._queued, False
        if queued:
            self.session.settle([self.token])
        return queued


Made = int | MferenceError
"""A row's token, or why it has none."""


def make_tokens(engine: Engine, rows: Sequence[Row]) -> list[Made]:
    """Choose each row's next token from its logits; a row that cannot has its error instead and stays as it was.

    Where every row is greedy and calls only queue work, the step after is queued before the tokens are read.
    """
    plain = [row for row in rows if row.plain]
    if len(plain) == len(rows):
        return _make_plain(engine, rows, ahead=only_queues(engine))
    made: dict[int, Made] = dict(zip(map(id, plain), _make_plain(engine, plain, ahead=False), strict=True))
    able, logits = list[Row](), list[mx.array]()
    for row in rows:
        if not row.plain:
            try:
                logits.append(_masked(engine, row))
                able.append(row)
            except Exception as error:  # noqa: BLE001  a constraint's fault is its own row's
                made[id(row)] = as_error(error)
    for row, token in zip(able, sample_rows([row.sampler for row in able], logits), strict=True):
        made[id(row)] = token
        if not isinstance(token, NumericError):
            try:
                row.choose(token)
            except Exception as error:  # noqa: BLE001
                made[id(row)] = as_error(error)
    return [made[id(row)] for row in rows]


def take_tokens(engine: Engine, rows: Sequence[Row]) -> None:
    """Advance each row by the token it made, all in one call.

    Rows that have ended are left out. On failure every row stays as it was, and may be taken again.
    """
    waiting = [row for row in rows if not row.settle()]
    if not waiting:
        return
    logits = engine.forward([row.session for row in waiting], [[row.token] for row in waiting])
    assert logits is not None
    if only_queues(engine):
        mx.async_eval(logits)
    for at, row in enumerate(waiting):
        row.place(logits, at)


def as_error(error: Exception) -> MferenceError:
    """Return what a user can be told of an exception."""
    if isinstance(error, MferenceError):
        return error
    return MferenceError(
        what="this request", got=f"failed: {type(error).__name__}: {error}", remedy="ask for less, or try again"
    )


def only_queues(engine: Engine) -> bool:
    """Say whether calls return at once: no expert has to be read first, and no native kernel computes meanwhile."""
    return levels.cpu() is None and all(held is None or held.source.full for held in engine.experts)


def _masked(engine: Engine, row: Row) -> mx.array:
    """Return the logits that the row chooses from."""
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


def _together(rows: Sequence[Row]) -> mx.array:
    """Return the logits (B, V) of rows; without a copy where they are those of one call, in its order."""
    batch = rows[0]._batch  # noqa: SLF001
    if batch.shape[0] == len(rows) and all(r._batch is batch and r._at == at for at, r in enumerate(rows)):  # noqa: SLF001
        return batch
    return mx.stack([row.logits for row in rows])


def _make_plain(engine: Engine, rows: Sequence[Row], *, ahead: bool) -> list[Made]:
    """Choose the best tokens; `ahead`, with the step after queued before they are read."""
    if not rows:
        return []
    logits = _together(rows)
    best, tokens = logits.max(axis=-1), greedy(logits)
    going, queued = [at for at, row in enumerate(rows) if row.left > 1 and ahead], None
    if going:
        mx.async_eval(best, tokens)
        known = mx.minimum(tokens, engine.graph.vocab_size - 1)  # a row without a token goes on from any id, in vain
        sessions = [rows[at].session for at in going]
        queued = engine.forward_arrays(sessions, known if len(going) == len(rows) else known[mx.array(going)])
        mx.async_eval(queued)
    made = cast("list[Made]", best_rows([row.sampler for row in rows], best, tokens))
    places = {at: place for place, at in enumerate(going)}
    for at, (row, token) in enumerate(zip(rows, made, strict=True)):
        if isinstance(token, MferenceError):
            row.session.recover()
            continue
        row.choose(token)
        if queued is not None and at in places:
            row.place(queued, places[at], queued=True)
    return made
