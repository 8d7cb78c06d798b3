"""Answers on their way from the scheduler's thread to a client: the mailbox between them, and what was said so far."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby

from attrs import define, field, frozen

from mference_core.chat import Malformed, Reasoning, Text, ToolCall
from mference_core.chat.format import Event
from mference_core.generate import ENDED, Figures
from mference_core.sampling import LogProbs
from mference_core.scheduler.request import Delivery, Outcome, Prefilled, Sampled, Ticket
from mference_core.server.errors import ApiError, api_error, draining, late
from mference_core.server.served import Prepared, Served
from mference_core.stops import StopMatcher

MAX_WAITING = 8192
"""Deliveries that may wait for a client that does not read; more end its answer."""

GATHER_SECONDS = 0.01
"""Within these no second event is made of one answer."""


@frozen
class Said:
    """Visible text, and the tokens that brought it if their log-probabilities were asked for."""

    text: str
    tokens: tuple[LogProbs, ...] = ()


@frozen
class Thought:
    """Reasoning."""

    text: str


Piece = Said | Thought | ToolCall


@frozen(kw_only=True)
class End:
    """How one answer ended: `finish` is stop, length or tool_calls; `stop` the stop string that ended it.

    `error` is what the client is told of a failure, `cause` what the log is.
    """

    finish: str
    figures: Figures
    stop: str | None = None
    reasoning_tokens: int = 0
    error: ApiError | None = None
    cause: str | None = None


@define(eq=False)
class Mailbox:
    """Carries deliveries from the scheduler's thread into the event loop, many at a time.

    When more than `limit` wait, what comes is dropped and `overflowed` says so. What comes within `GATHER_SECONDS` of
    what was taken last waits until these are over: a fast model costs no more than that many events a second.
    """

    loop: asyncio.AbstractEventLoop
    limit: int = MAX_WAITING
    overflowed: bool = field(init=False, default=False)
    gone: bool = field(init=False, default=False)
    _items: deque[tuple[int, Delivery]] = field(init=False, factory=deque)
    _ready: asyncio.Event = field(init=False, factory=asyncio.Event)
    _called: bool = field(init=False, default=False)
    _taken: float = field(init=False, default=0.0)
    _clock: asyncio.TimerHandle | None = field(init=False, default=None)

    def deliver(self, index: int, delivery: Delivery) -> None:
        """Take a delivery; called on any thread, never blocks."""
        if len(self._items) >= self.limit and not isinstance(delivery, Outcome):
            self.overflowed = True
            return
        self._items.append((index, delivery))
        if not self._called:
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._ready.set)
            except RuntimeError:  # the loop is closed: nobody reads any more
                self._items.clear()

    def leave(self) -> None:
        """Wake the reader: its client went away."""
        self.gone = True
        self._ready.set()

    def close(self) -> None:
        """Stop the clock."""
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    async def take(self, seconds: float) -> list[tuple[int, Delivery]] | None:
        """Return all that waits, nothing when the client is gone, or None after so many seconds of silence."""
        if not self._items and not self.gone:
            if self._clock is None:
                self._wake_after(seconds)
            await self._ready.wait()
        early = self._taken + GATHER_SECONDS - self.loop.time()
        if early > 0 and self._items and not self.gone:
            await asyncio.sleep(early)
        self._ready.clear()
        self._called = False
        taken = []
        while self._items:
            taken.append(self._items.popleft())
        now = self.loop.time()
        silent = not taken and not self.gone and now - self._taken >= seconds
        if taken or silent:
            self._taken = now
        return None if silent else taken

    def _wake_after(self, seconds: float) -> None:
        """Wake the reader after so many seconds in which nothing was taken; one clock serves many takes."""

        def look() -> None:
            left = self._taken + seconds - self.loop.time()
            if left > 0:
                self._clock = self.loop.call_later(left, look)
            else:
                self._clock = None
                self._ready.set()

        self._taken = self._taken or self.loop.time()
        self._clock = self.loop.call_later(max(0.0, self._taken + seconds - self.loop.time()), look)


@define(kw_only=True, eq=False)
class Track:
    """What one answer has said so far, piece by piece.

    A token belongs to the first piece of text that comes after it, so one that brings half a character counts with
    the rest of it. With `single` the first call ends the answer.
    """

    stops: Sequence[str] = ()
    single: bool = False
    decode: Callable[[Sequence[int]], str] = lambda _: ""
    pieces: list[Piece] = field(init=False, factory=list)
    end: End | None = field(init=False, default=None)
    prefilled: Prefilled | None = field(init=False, default=None)
    malformed: list[str] = field(init=False, factory=list)
    tokens: int = field(init=False, default=0)
    reasoning_tokens: int = field(init=False, default=0)
    called: bool = field(init=False, default=False)
    _waiting: list[Sampled] = field(init=False, factory=list)
    _visible: list[int] = field(init=False, factory=list)

    def push(self, delivery: Delivery) -> Piece | None:
        """Take a delivery; return what it adds."""
        if self.end is not None or (self.single and self.called and not isinstance(delivery, Outcome)):
            return None
        if isinstance(delivery, Sampled):
            self.tokens += 1
            self._waiting.append(delivery)
            if len(self.stops) > 1:
                self._visible.append(delivery.token)
            return None
        if isinstance(delivery, Prefilled):
            self.prefilled = delivery
            return None
        if isinstance(delivery, Outcome):
            self.end = self._end(delivery)
            return None
        return self._piece(delivery)

    def _piece(self, event: Event) -> Piece | None:
        waiting, self._waiting = self._waiting, []
        piece: Piece
        match event:
            case Text(text):
                piece = Said(text, tuple(token.logprobs for token in waiting if token.logprobs is not None))
            case Reasoning(text):
                self.reasoning_tokens += len(waiting)
                self._visible.clear()
                piece = Thought(text)
            case ToolCall():
                self.called = True
                self._visible.clear()
                piece = event
            case Malformed(reason):
                self.malformed.append(reason)
                self._waiting = waiting
                return None
        self.pieces.append(piece)
        return piece

    def _end(self, outcome: Outcome) -> End:
        cut = self.single and self.called
        finish, error = outcome.finish_reason, None
        if cut or (self.called and outcome.reason in (*ENDED, "tool_calls")):
            finish = "tool_calls"
        elif finish == "tool_calls":
            finish = "stop"  # the model waits for the result of a call that could not be read
        if outcome.error is not None:
            error = api_error(outcome.error)
        elif outcome.reason == "deadline":
            error = late()
        elif outcome.reason == "cancelled" and not cut:
            error = draining()
        return End(
            finish=finish,
            figures=outcome.figures,
            stop=self._stop() if outcome.reason == "stop_string" else None,
            reasoning_tokens=self.reasoning_tokens,
            error=error,
            cause=None if outcome.error is None else str(outcome.error),
        )

    def _stop(self) -> str | None:
        """Return which stop string it was: of several, the one the tokens since the last other piece complete first."""
        if len(self.stops) < 2:
            return next(iter(self.stops), None)
        matcher = StopMatcher(stops=self.stops)
        matcher.push(self.decode(self._visible))
        return matcher.matched or self.stops[0]

    @property
    def text(self) -> str:
        """All visible text."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Said))

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Thought))

    @property
    def logprobs(self) -> tuple[LogProbs, ...]:
        """The log-probabilities of the visible text's tokens."""
        return tuple(token for piece in self.pieces if isinstance(piece, Said) for token in piece.tokens)

    @property
    def calls(self) -> list[ToolCall]:
        """All calls."""
        return [piece for piece in self.pieces if isinstance(piece, ToolCall)]


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return pieces with neighbours of one kind joined; calls stay apart."""
    found: list[Piece] = []
    for kind, group in groupby(pieces, type):
        same = list(group)
        if kind is Said:
            texts = [piece for piece in same if isinstance(piece, Said)]
            tokens = tuple(token for piece in texts for token in piece.tokens)
            found.append(Said("".join(piece.text for piece in texts), tokens))
        elif kind is Thought:
            found.append(Thought("".join(piece.text for piece in same if isinstance(piece, Thought))))
        else:
            found += same
    return found


@define(kw_only=True, eq=False)
class Answers:
    """The answers of one prepared request, running."""

    mailbox: Mailbox
    tracks: list[Track]
    tickets: list[Ticket] = field(factory=list)

    @classmethod
    def start(cls, prepared: Prepared, served: Served, loop: asyncio.AbstractEventLoop) -> "Answers":
        """Submit all requests or none. Raises what `submit` raises."""
        ask = prepared.ask
        made = cls(
            mailbox=Mailbox(loop),
            tracks=[
                Track(stops=ask.stop, single=not ask.parallel, decode=served.tokenizer.decode)
                for _ in prepared.requests
            ],
        )
        try:
            for index, request in enumerate(prepared.requests):
                made.tickets.append(served.scheduler.submit(request, partial(made.mailbox.deliver, index)))
        except BaseException:
            made.cancel()
            raise
        return made

    def cancel(self) -> None:
        """End whatever still runs."""
        for ticket in self.tickets:
            ticket.cancel()

    @property
    def done(self) -> bool:
        """Say whether every answer ended."""
        return all(track.end is not None for track in self.tracks)

    async def news(self, seconds: float) -> list[tuple[int, Piece]] | None:
        """Return what was said since, neighbours joined, or None after so many seconds of silence."""
        said: list[tuple[int, Piece]] = []
        taken = await self.mailbox.take(seconds)
        if taken is None:
            return None
        for index, delivery in taken:
            track = self.tracks[index]
            piece = track.push(delivery)
            if piece is not None:
                said.append((index, piece))
                if track.single and track.called:
                    self.tickets[index].cancel()
        if self.mailbox.overflowed or self.mailbox.gone:
            self.cancel()
        return [
            (index, piece)
            for index, group in groupby(said, lambda pair: pair[0])
            for piece in merged(piece for _, piece in group)
        ]

    @property
    def error(self) -> ApiError | None:
        """The first error of any answer."""
        return next((track.end.error for track in self.tracks if track.end and track.end.error), None)
