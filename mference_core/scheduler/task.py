"""One request on its way through the scheduler."""

import time
from collections.abc import Callable
from contextlib import suppress

from attrs import define, field

from mference_core.errors import MferenceError
from mference_core.generate import CANCELLED, DEADLINE, Answer, Figures
from mference_core.rows import Row
from mference_core.sampling import Sampler
from mference_core.scheduler.request import Deliver, Delivery, Outcome, Prefilled, Request, Sampled
from mference_core.session import Session


@define(kw_only=True, eq=False)
class Task:
    """A request, its answer so far and what it holds; all but `cancel` and `done` belongs to the scheduler's thread."""

    request: Request
    deliver: Deliver
    answer: Answer
    sampler: Sampler
    need_bytes: int
    wake: Callable[[], None]
    submitted: float = field(factory=time.monotonic)
    session: Session | None = field(default=None, init=False)
    row: Row | None = field(default=None, init=False)
    figures: Figures = field(factory=Figures, init=False)
    cancelled: bool = field(default=False, init=False)
    seen_changes: int = field(default=0, init=False)
    started: float = field(default=0.0, init=False)
    first_token: float = field(default=0.0, init=False)
    _done: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """End it within one chunk or token, from any thread; an `Outcome` still follows."""
        self.cancelled = True
        self.wake()

    @property
    def done(self) -> bool:
        """Say whether the `Outcome` was delivered."""
        return self._done

    @property
    def expires(self) -> float | None:
        """Return when its time is over, on the monotonic clock."""
        seconds = self.request.deadline_seconds
        return None if seconds is None else self.submitted + seconds

    def overdue(self, now: float) -> str | None:
        """Return the reason for which it must end now, if there is one."""
        if self.cancelled:
            return CANCELLED
        return DEADLINE if self.expires is not None and now >= self.expires else None

    @property
    def position(self) -> int:
        """Tokens of the prompt that are computed or reused."""
        return 0 if self.session is None else self.session.length

    def tell(self, *deliveries: Delivery) -> None:
        """Deliver; one who raises while being told wants no more."""
        for delivery in deliveries:
            try:
                self.deliver(delivery)
            except Exception:  # noqa: BLE001  a deliverer's fault must not end the others' thread
                self.cancelled = True

    def tell_prefilled(self) -> None:
        """Say how much of the prompt is done."""
        self.tell(Prefilled(self.position, len(self.request.prompt)))

    def take(self, token: int) -> None:
        """Take a token the row made: figures, then the token and what it completes."""
        assert self.row is not None
        now = time.monotonic()
        self.figures.new_tokens += 1
        self.first_token = self.first_token or now
        self.figures.decode_seconds = now - self.first_token
        self.tell(Sampled(token, self.row.chosen), *self.answer.push(token))

    def finish(self, reason: str | None = None, error: MferenceError | None = None) -> None:
        """End the answer, for `reason` where it has not ended itself, let go of everything, and tell the outcome."""
        if reason == DEADLINE and not self.answer.ended:
            self.tell(*self.answer.end(reason))
        if self.session is not None:
            with suppress(MferenceError):
                self.session.recover()
        self.session = self.row = None
        self.tell(
            Outcome(
                reason="error" if error else self.answer.reason,
                finish_reason="error" if error else self.answer.finish_reason,
                figures=self.figures,
                text=self.answer.text,
                error=error,
            )
        )
        self._done = True
