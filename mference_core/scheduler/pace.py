"""How much of a prompt one call takes while others wait for their next token."""

from attrs import define, field

MEMORY = 0.8
"""Weight of all earlier calls against the newest one."""


@define
class Pace:
    """Learns what a call of n tokens costs, `fixed + n * each` seconds, and chooses n.

    A call should not take longer than `target_seconds`. Where its fixed part is longer than that anyway, as it is while
    experts come from a disk, small calls would only add up, so it may have as many tokens as double the time.
    """

    target_seconds: float
    _sums: list[float] = field(factory=lambda: [0.0] * 5, init=False)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a call."""
        new = (1.0, float(tokens), seconds, float(tokens * tokens), tokens * seconds)
        self._sums = [MEMORY * old + value for old, value in zip(self._sums, new, strict=True)]

    def costs(self) -> tuple[float, float]:
        """Return the fixed seconds and those of each token, the least squares of what was seen; neither below 0."""
        weight, n, t, nn, nt = self._sums
        if not weight:
            return 0.0, 0.0
        spread = weight * nn - n * n
        if spread <= 1e-6 * nn * weight:
            return 0.0, t / n
        each = (weight * nt - n * t) / spread
        fixed = (t - each * n) / weight
        if fixed < 0:
            return 0.0, nt / nn
        return (fixed, each) if each > 0 else (t / weight, 0.0)

    def tokens(self, most: int) -> int:
        """Return how many tokens the next call should take, from 1 to `most`."""
        fixed, each = self.costs()
        spare = max(self.target_seconds - fixed, fixed)
        return most if each * most <= spare else max(1, int(spare / each))
