"""How an install is watched: bars in a terminal, plain lines in a log, events for machines."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, define, field

from mference_core.cli.options import notice
from mference_core.experts.plan import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from mference_core.install import InstallProgress

STEADY_SECONDS, STEADY_BYTES = 10.0, 32 << 20
EVENT_SECONDS, LINE_SECONDS = 1.0, 10.0
WORDS = {
    "metadata": "reading what the repository holds",
    "resuming": "verifying what is here",
    "reserving": "reserving",
    "copying": "copying",
    "checking": "checking the source's digests",
    "hashing": "hashing the install",
    "finishing": "finishing",
    "verifying": "verifying",
    "repairing": "repairing",
}


def emit(event: str, **values: Any) -> None:
    """Print one event: a JSON object on a line of its own."""
    click.echo(json.dumps({"event": event, **values}, ensure_ascii=False))


@define
class Meter:
    """Rate and time left of a stage: the plain average since it began, of bytes that were not there before."""

    now: Callable[[], float] = monotonic
    stage: str = ""
    started: float = 0.0
    first_bytes: int = 0

    def see(self, event: "InstallProgress") -> bool:
        """Take note of an event; say whether its stage is a new one."""
        new = event.stage != self.stage
        if new or event.done_bytes < self.first_bytes:
            self.stage, self.started, self.first_bytes = event.stage, self.now(), event.done_bytes
        return new

    def rate(self, event: "InstallProgress") -> float | None:
        """Return bytes per second, None before there are any."""
        moved, seconds = event.done_bytes - self.first_bytes, self.now() - self.started
        return moved / seconds if moved and seconds > 0 else None

    def left_seconds(self, event: "InstallProgress") -> float | None:
        """Return the seconds left, None while it is too early to say."""
        moved, seconds = event.done_bytes - self.first_bytes, self.now() - self.started
        if moved < STEADY_BYTES or seconds < STEADY_SECONDS:
            return None
        return (event.total_bytes - event.done_bytes) * seconds / moved


def left_text(seconds: float | None) -> str:
    """Return how a time left reads."""
    if seconds is None:
        return "estimating"
    if seconds < 60:
        return "less than a minute left"
    if seconds < 3600:
        return f"about {round(seconds / 60)} min left"
    return f"about {round(seconds / 3600)} h left" if seconds < 86_400 else "more than a day left"


@define
class Watcher:
    """Takes events and shows them; a context, for what a terminal needs."""

    bars: "Bars | None" = None
    as_json: bool = False
    meter: Meter = field(factory=Meter)
    _task: Any = None
    _shown: float = 0.0

    def context(self) -> AbstractContextManager[Any]:
        """Return what is entered while events come."""
        return self.bars if self.bars is not None else nullcontext()

    def __call__(self, event: "InstallProgress") -> None:
        """Show an event."""
        new = self.meter.see(event)
        if self.bars is not None:
            self._bar(event, new=new)
            return
        wait = EVENT_SECONDS if self.as_json else LINE_SECONDS
        whole = event.total_bytes and event.done_bytes == event.total_bytes
        if new or whole or self.meter.now() - self._shown >= wait:
            self._shown = self.meter.now()
            if self.as_json:
                self._event(event)
            elif new or not whole:
                notice(self._line(event))

    def _bar(self, event: "InstallProgress", *, new: bool) -> None:
        assert self.bars is not None
        total = event.total_bytes or None
        if new:
            if self._task is not None:
                self.bars.update(self._task, visible=False)
            self._task = self.bars.add_task(WORDS[event.stage], total=total, completed=event.done_bytes)
        where = f" {event.file}" if event.file and event.stage != "metadata" else ""
        self.bars.update(self._task, description=WORDS[event.stage] + where, completed=event.done_bytes, total=total)

    def _event(self, event: "InstallProgress") -> None:
        rate, left = self.meter.rate(event), self.meter.left_seconds(event)
        emit(
            "progress",
            **asdict(event),
            bytes_per_second=None if rate is None else round(rate),
            eta_seconds=None if left is None else round(left),
        )

    def _line(self, event: "InstallProgress") -> str:
        words = WORDS[event.stage]
        if not event.total_bytes:
            return words
        if not event.done_bytes:
            return f"{words}: {format_bytes(event.total_bytes)}"
        percent = 100 * event.done_bytes // event.total_bytes
        text = f"{words}: {percent}%, {format_bytes(event.done_bytes)} of {format_bytes(event.total_bytes)}"
        rate = self.meter.rate(event)
        if rate is None:
            return text
        return f"{text}, {format_bytes(int(rate))}/s, {left_text(self.meter.left_seconds(event))}"


def watcher(*, as_json: bool) -> Watcher:
    """Return what suits where stderr goes."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        return Watcher(as_json=as_json)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Watcher(bars=Progress(*columns, console=console, transient=True))
