"""Figures of a running server, as Prometheus text and as JSON."""

import resource
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field

from mference_core.server.answers import Track

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the histograms in seconds."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@define(eq=False)
class Histogram:
    """Counts of seconds."""

    counts: list[int] = field(factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str, meaning: str) -> list[str]:
        """Return the lines of the exposition format."""
        lines, sofar = [f"# HELP {name} {meaning}", f"# TYPE {name} histogram"], 0
        for bound, count in zip([*map(str, BUCKETS), "+Inf"], self.counts, strict=True):
            sofar += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {sofar}')
        return [*lines, f"{name}_sum {self.total:.6f}", f"{name}_count {sofar}"]


@define(eq=False)
class Metrics:
    """What happened since the start. `engine` returns the figures of the engine and the scheduler, by name."""

    engine: Callable[[], Mapping[str, float]] = dict
    requests: Counter[tuple[str, int]] = field(init=False, factory=Counter)
    totals: Counter[str] = field(init=False, factory=Counter)
    first_token: Histogram = field(init=False, factory=Histogram)
    duration: Histogram = field(init=False, factory=Histogram)
    started: float = field(init=False, factory=time.time)

    def answered(self, route: str, status: int) -> None:
        """Count a response."""
        self.requests[route, status] += 1

    def told(self, name: str, tracks: Sequence[Track], started: float, first: float | None) -> None:
        """Count the answers of one request."""
        now = time.perf_counter()
        self.duration.add(now - started)
        if first is not None:
            self.first_token.add(first - started)
        prompts = [track.end.figures for track in tracks if track.end is not None]
        self.totals["prompt_tokens"] += sum(figures.prompt_tokens for figures in prompts)
        self.totals["cached_tokens"] += sum(figures.cached_tokens for figures in prompts)
        self.totals["completion_tokens"] += sum(track.tokens for track in tracks)
        self.totals["unreadable_calls"] += sum(len(track.malformed) for track in tracks)
        self.totals["unfinished_answers"] += sum(track.end is None or track.end.error is not None for track in tracks)
        self.totals[f"answers_{name}"] += len(tracks)

    def figures(self, active: int) -> dict[str, float]:
        """Return every plain figure by name."""
        totals = self.totals
        found: dict[str, float] = {
            "requests_active": active,
            "prompt_tokens_total": totals["prompt_tokens"],
            "cached_tokens_total": totals["cached_tokens"],
            "completion_tokens_total": totals["completion_tokens"],
            "unreadable_calls_total": totals["unreadable_calls"],
            "unfinished_answers_total": totals["unfinished_answers"],
            "process_start_time_seconds": self.started,
            "process_peak_resident_bytes": peak_bytes(),
        }
        resident = resident_bytes()
        found |= {"process_resident_bytes": resident} if resident is not None else {}
        return found | dict(self.engine())

    def text(self, active: int) -> str:
        """Return all in the Prometheus exposition format."""
        lines = [
            "# HELP mference_requests_total Responses by route and status.",
            "# TYPE mference_requests_total counter",
        ]
        for (route, status), count in sorted(self.requests.items()):
            lines.append(f'mference_requests_total{{route="{route}",status="{status}"}} {count}')
        for name, value in self.figures(active).items():
            kind = "counter" if name.endswith("_total") else "gauge"
            meaning = MEANINGS.get(name, name.replace("_", " "))
            lines += [f"# HELP mference_{name} {meaning}", f"# TYPE mference_{name} {kind}"]
            lines.append(f"mference_{name} {value:.15g}")
        lines += self.first_token.lines("mference_time_to_first_token_seconds", "From submission to the first token.")
        lines += self.duration.lines("mference_answer_seconds", "From submission to the end of all answers.")
        return "\n".join(lines) + "\n"

    def json(self, active: int) -> dict[str, Any]:
        """Return the plain figures for a page."""
        return self.figures(active)


MEANINGS = {
    "requests_active": "Requests that hold a place, waiting ones included.",
    "cached_tokens_total": "Prompt tokens that were not computed again.",
    "unreadable_calls_total": "Tool calls that could not be read and were shown as text.",
    "unfinished_answers_total": "Answers that failed or whose client went away.",
    "expert_hits_total": "Routed experts that were in memory.",
    "expert_misses_total": "Routed experts that had to be read.",
    "expert_bytes_read_total": "Bytes of experts read from disk.",
    "expert_stall_seconds_total": "Time that computing waited for expert reads.",
}


def peak_bytes() -> int:
    """Return the most memory the process had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int | None:
    """Return the memory the process has resident now, where the system says so."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123  a kernel file, read often
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return None
