"""A scheduler that plays what a test wrote, where no model is needed."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from attrs import define, field

from mference_core.errors import Busy, MferenceError
from mference_core.generate import CANCELLED, Figures
from mference_core.scheduler.request import Deliver, Delivery, Outcome, Request
from mference_core.server.exchange import State
from mference_core.server.metrics import Metrics
from mference_core.server.safety import Policy
from mference_core.server.shelf import Shelf
from mference_core.testing.serving import ALIAS, Running, served_demo, serving

CONTEXT, VOCAB_SIZE = 4096, 4096

Script = Callable[[Request], Iterable[Delivery]]


def outcome(reason: str = "end_of_turn", error: MferenceError | None = None, new: int = 1, cached: int = 0) -> Outcome:
    """Return how an answer of `new` tokens ended."""
    words = {"end_of_turn": "stop", "eos": "stop", "max_tokens": "length", "stop_string": "stop"}
    figures = Figures(prompt_tokens=9, cached_tokens=cached, new_tokens=new)
    return Outcome(reason=reason, finish_reason=words.get(reason, reason), figures=figures, error=error)


@define(eq=False)
class Played:
    """One request that is played."""

    request: Request
    cancelled: threading.Event = field(factory=threading.Event, init=False)
    ended: threading.Event = field(factory=threading.Event, init=False)

    def cancel(self) -> None:
        """Stop the play."""
        self.cancelled.set()

    @property
    def done(self) -> bool:
        """Say whether the outcome was delivered."""
        return self.ended.is_set()


@define(eq=False)
class Scripted:
    """Plays `script` for every request, each on a thread of its own; a play that stops early ends as cancelled."""

    script: Script
    played: list[Played] = field(factory=list, init=False)
    closed: bool = field(default=False, init=False)

    def submit(self, request: Request, deliver: Deliver) -> Played:
        """Begin to play. Raises `Busy` once closed, and whatever the script raises before its first delivery."""
        if self.closed:
            raise Busy(what="the scheduler", got="closing")
        deliveries = iter(self.script(request))
        ticket = Played(request)
        self.played.append(ticket)
        threading.Thread(target=self._play, args=(ticket, deliveries, deliver), daemon=True).start()
        return ticket

    def _play(self, ticket: Played, deliveries: Iterator[Delivery], deliver: Deliver) -> None:
        last: Delivery | None = None
        for delivery in deliveries:
            if ticket.cancelled.is_set():
                break
            last = delivery
            deliver(delivery)
        if not isinstance(last, Outcome):
            deliver(outcome(CANCELLED))
        ticket.ended.set()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse what comes."""
        for ticket in self.played:
            ticket.ended.wait(drain_seconds)
            ticket.cancel()
        self.closed = True


@contextmanager
def serving_script(
    script: Script, family: str, *, held: int = 4, policy: Policy | None = None, drain_seconds: float = 5.0
) -> Iterator[tuple[Running, Scripted]]:
    """Serve a script with the tokenizer and dialect of a family's demo."""
    scripted = Scripted(script)
    served = served_demo(family, scripted, context=CONTEXT, vocab_size=VOCAB_SIZE)
    state = State(shelf=Shelf(loaded=served, aliases=(ALIAS,)), metrics=Metrics(), held=held)
    with serving(state, policy, drain_seconds) as running:
        yield running, scripted
