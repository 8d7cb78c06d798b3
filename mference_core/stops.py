"""Stop strings: text is cut before the earliest match, and no part of a match is ever shown."""

from collections.abc import Iterable
from typing import Any

from attrs import define, field

from mference_core.errors import RequestError


def check_stops(value: Any) -> tuple[str, ...]:
    """Read a `stop` option: nothing, a string or a list of strings. Raises `RequestError` if one is empty."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(what="stop", got=repr(value), expected="a string or a list of strings")
    if "" in stops:
        raise RequestError(what="a stop string", got="empty", expected="at least one character")
    return tuple(dict.fromkeys(stops))


def _stops(value: Iterable[str]) -> tuple[str, ...]:
    return check_stops(value if isinstance(value, str) else list(value))


@define(kw_only=True, eq=False)
class StopMatcher:
    """Passes text through until one of `stops` is complete.

    Of several matches the one that is completed first cuts the text (of those the one that begins first), so the
    result is the same however the text arrives.
    """

    stops: tuple[str, ...] = field(default=(), converter=_stops)
    matched: str | None = field(init=False, default=None)
    _held: str = field(init=False, default="")

    @property
    def stopped(self) -> bool:
        """Say whether a stop string was met; no more text comes out then."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """Return the text that can be shown for sure."""
        if self.stopped or not self.stops:
            return "" if self.stopped else text
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max(self._overlap(stop) for stop in self.stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def _overlap(self, stop: str) -> int:
        """Return the length of the longest proper prefix of `stop` that the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def finish(self) -> str:
        """Return the text still held back, now that no match can be completed."""
        shown, self._held = self._held, ""
        return shown
