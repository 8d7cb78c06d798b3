"""What serving experts costs, and how guesses about them turned out."""

from collections.abc import Collection, Iterable

from attrs import astuple, define, field, frozen


@frozen
class ExpertStats:
    """What serving experts cost: uses that found or missed a slot, bytes read, seconds the caller waited for reads.

    Looking ahead: experts `predicted` for the next request, those it `confirmed`, bytes read for guesses (`ahead_bytes`,
    a part of `bytes_read`), and those of experts that the next request did not name (`wasted_bytes`).
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    stall_seconds: float = 0.0
    predicted: int = 0
    confirmed: int = 0
    ahead_bytes: int = 0
    wasted_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per use, 0 to 1; 0 when nothing was used."""
        return self.hits / max(1, self.hits + self.misses)

    def __add__(self, other: "ExpertStats") -> "ExpertStats":
        return ExpertStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @staticmethod
    def total(stats: Iterable["ExpertStats"]) -> "ExpertStats":
        """Add the figures of several layers."""
        return sum(stats, start=ExpertStats())


@define(kw_only=True)
class Guesses:
    """One layer's guesses. A guess is about the next request, which settles it; `expert_bytes` is the size of one.

    Counts of experts: `predicted`, and `confirmed` by the request. `read_bytes` were read for guesses, `wasted_bytes` of
    them for experts that the request did not name.
    """

    expert_bytes: int
    predicted: int = field(default=0, init=False)
    confirmed: int = field(default=0, init=False)
    read_bytes: int = field(default=0, init=False)
    wasted_bytes: int = field(default=0, init=False)
    _expected: frozenset[int] = field(default=frozenset(), init=False)
    _read: frozenset[int] = field(default=frozenset(), init=False)

    def note(self, expected: Collection[int], read: Collection[int]) -> None:
        """Expect a request for `expected` next; those in `read` are being read for it."""
        self._expected, self._read = frozenset(expected), frozenset(read)
        self.predicted += len(self._expected)
        self.read_bytes += len(self._read) * self.expert_bytes

    def settle(self, experts: Collection[int]) -> None:
        """Hold the request that came against what was expected."""
        if self._expected:
            self.confirmed += len(self._expected.intersection(experts))
            self.wasted_bytes += len(self._read.difference(experts)) * self.expert_bytes
            self._expected = self._read = frozenset()

    @property
    def stats(self) -> ExpertStats:
        """Return the figures so far."""
        return ExpertStats(
            predicted=self.predicted,
            confirmed=self.confirmed,
            ahead_bytes=self.read_bytes,
            wasted_bytes=self.wasted_bytes,
        )
