"""One token timeline on a loaded model."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define, field

from mference_core.errors import CannotRewind, RequestError
from mference_core.state import LayerState, Snapshot
from mference_core.states import new_states
from mference_core.steps import Observer

if TYPE_CHECKING:
    from mference_core.engine import Engine


@define(kw_only=True, eq=False)
class Session:
    """Tokens already taken, and every layer's state of them.

    A call that fails or is interrupted leaves the session where it was; should a state be unable to go back, the
    session says so on every later call until `reset`.
    """

    engine: "Engine"
    tokens: list[int] = field(factory=list, init=False, repr=False)
    states: tuple[LayerState, ...] = field(init=False, repr=False)  # to print arrays is to compute them
    _marks: tuple[Snapshot, ...] | None = field(default=None, init=False, repr=False)
    _broken: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.states = new_states(self.engine.layout)

    @property
    def length(self) -> int:
        """Tokens held."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.states)

    def check_room(self, count: int) -> None:
        """Raise `RequestError` if `count` more tokens do not fit the context or the session is broken."""
        if self._broken:
            raise RequestError(what="session", got="interrupted mid-way", remedy="reset it or restore a snapshot")
        limit = self.engine.context
        if self.length + count > limit:
            raise RequestError(
                what=f"prompt of {count} tokens after {self.length}",
                got=f"{self.length + count} tokens",
                expected=f"at most {limit}",
                remedy="shorten it or raise --max-context",
            )

    def prefill(
        self,
        tokens: Sequence[int],
        progress: Callable[[int], None] | None = None,
        observe: Observer | None = None,
    ) -> mx.array:
        """Take tokens in chunks; return the logits (V,) float32 after the last one.

        `progress` gets the number of tokens done after each chunk. Raises `RequestError` on an empty prompt or one
        that does not fit, before anything is computed.
        """
        if not tokens:
            raise RequestError(what="prompt", got="empty", expected="at least one token")
        self.recover()
        self.check_room(len(tokens))
        self.engine.check_ids(tokens)
        first, done, logits = self.length, 0, None
        while done < len(tokens):
            end = self.engine.cuts.end(first + done, first + len(tokens)) - first
            logits = self.engine.forward([self], [tokens[done:end]], want_logits=end == len(tokens), observe=observe)
            done = end
            if progress is not None:
                progress(done)
        assert logits is not None
        return logits[0]

    def decode(self, token: int) -> mx.array:
        """Take one token; return the logits (V,) float32 after it, not yet evaluated."""
        return self.prefill([token])

    def reuse(self, prompt: Sequence[int]) -> int:
        """Keep what is held of `prompt`, always less than all of it, and return how many tokens that is.

        A layer that cannot rewind so far makes the session start again.
        """
        self.recover()
        pairs = zip(self.tokens, prompt, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(self.length, len(prompt)))
        common = min(common, len(prompt) - 1)
        if self._broken or common < 1:
            self.reset()
            return 0
        try:
            self.rewind(common)
        except CannotRewind:
            self.reset()
        return self.length

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens; raises `CannotRewind`, unchanged, if some layer cannot."""
        self.recover()
        stuck = [index for index, state in enumerate(self.states) if not state.can_truncate(length)]
        if stuck or not 0 <= length <= self.length:
            raise CannotRewind(
                what=f"session of {self.length} tokens cut to {length}: layers {stuck or 'all'}",
                got="unable to rewind so far",
                remedy="restore a snapshot or start again",
            )
        for state in self.states:
            state.truncate(length)
        del self.tokens[length:]
        self._broken = False

    def reset(self) -> None:
        """Forget everything."""
        for state in self.states:
            state.truncate(0)
        self.tokens.clear()
        self._marks, self._broken = None, False

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Copy every layer's state."""
        self.recover()
        return tuple(state.snapshot() for state in self.states)

    def restore(self, snapshots: Sequence[Snapshot], tokens: Sequence[int]) -> None:
        """Become what `snapshots` were taken of, when it held `tokens`."""
        for state, snapshot in zip(self.states, snapshots, strict=True):
            state.restore(snapshot)
        self.tokens[:] = tokens
        self._marks, self._broken = None, False

    def fork(self) -> "Session":
        """Return a new session that holds the same tokens and shares nothing."""
        twin = Session(engine=self.engine)
        twin.restore(self.snapshots(), self.tokens)
        return twin

    def begin(self) -> None:
        """Remember every state before a call; `settle` or `recover` must follow."""
        self._marks = tuple(state.mark() for state in self.states)

    def settle(self, tokens: Sequence[int]) -> None:
        """Count the tokens of the call that is done."""
        self.tokens.extend(tokens)
        self._marks = None

    def recover(self) -> None:
        """Return every state to the tokens held, if a call did not settle, or mark the session broken."""
        marks, self._marks = self._marks, None
        if marks is None and all(state.length == self.length for state in self.states):
            return
        try:
            for state, mark in zip(self.states, marks or (), strict=marks is not None):
                state.undo(mark)
            for state in self.states:
                state.truncate(self.length)
        except CannotRewind:
            self._broken = True
