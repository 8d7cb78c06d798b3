"""Asking a scheduler and keeping what it tells, for tests and the gate."""

from threading import Event
from typing import Self

from attrs import define, field

from mference_core.scheduler.request import Delivery, Outcome, Prefilled, Request, Sampled, Scheduling, Ticket


@define(kw_only=True, eq=False)
class Asked:
    """A request that was submitted, and all that was told of it."""

    told: list[Delivery] = field(factory=list)
    ticket: Ticket | None = None
    _ended: Event = field(factory=Event)

    @classmethod
    def of(cls, scheduler: Scheduling, request: Request) -> Self:
        """Submit a request."""
        asked = cls()
        asked.ticket = scheduler.submit(request, asked.hear)
        return asked

    def hear(self, delivery: Delivery) -> None:
        """Keep a delivery."""
        self.told.append(delivery)
        if isinstance(delivery, Outcome):
            self._ended.set()

    def outcome(self, timeout_seconds: float = 60.0) -> Outcome:
        """Wait for the end; raises TimeoutError."""
        if not self._ended.wait(timeout_seconds):
            raise TimeoutError(f"no outcome after {timeout_seconds} s; told {self.told[-3:]}")
        last = self.told[-1]
        assert isinstance(last, Outcome)
        return last

    @property
    def tokens(self) -> list[int]:
        """Tokens told so far."""
        return [delivery.token for delivery in self.told if isinstance(delivery, Sampled)]

    @property
    def prefilled(self) -> list[int]:
        """Prompt tokens told to be done, in order."""
        return [delivery.done for delivery in self.told if isinstance(delivery, Prefilled)]
