"""What is asked of the scheduler and what it tells: one request, its deliveries, its ticket."""

from collections.abc import Callable, Mapping
from typing import Protocol

from attrs import field, frozen

from mference_core.chat.format import Event, StreamDecoder
from mference_core.errors import MferenceError
from mference_core.generate import Figures, GenerateOptions
from mference_core.rows import Constraint
from mference_core.sampling import LogProbs

__all__ = ["Constraint", "Deliver", "Delivery", "Outcome", "Prefilled", "Request", "Sampled", "Scheduling", "Ticket"]


@frozen(kw_only=True)
class Request:
    """One answer wanted of the model.

    `prompt` is the whole token history. `logprobs` None asks for none, else for the chosen token's and that many
    alternatives. `deadline_seconds` counts from submission, waiting included.
    """

    prompt: tuple[int, ...]
    options: GenerateOptions = field(factory=GenerateOptions)
    stop_ids: Mapping[int, str] = field(factory=dict)
    decoder: StreamDecoder | None = None
    logprobs: int | None = None
    constraint: Constraint | None = None
    deadline_seconds: float | None = None


@frozen
class Prefilled:
    """Prompt tokens computed or reused so far."""

    done: int
    total: int


@frozen
class Sampled:
    """A token, before the events it completes; a stop id is told too."""

    token: int
    logprobs: LogProbs | None = None


@frozen(kw_only=True)
class Outcome:
    """How a request ended; always the last delivery.

    `reason` is one of `generate`'s; `finish_reason` the usual word for it. When it failed both are `error`, which is set.
    """

    reason: str
    finish_reason: str
    figures: Figures
    text: str = ""
    error: MferenceError | None = None


Delivery = Prefilled | Sampled | Event | Outcome

Deliver = Callable[[Delivery], None]
"""Called on the scheduler's own thread, in order, quickly; it must not raise."""


class Ticket(Protocol):
    """A request that was taken."""

    def cancel(self) -> None:
        """End it within one chunk or token, from any thread; an `Outcome` still follows. Again is harmless."""
        ...

    @property
    def done(self) -> bool:
        """Say whether the `Outcome` was delivered."""
        ...


class Scheduling(Protocol):
    """What a server needs of a scheduler."""

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        """Take a request, from any thread. Raises `Busy` when the queue is full, `RequestError` for one that cannot run."""
        ...

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones end for so long, cancel the rest, stop the thread."""
        ...
