"""An acceptance record as text."""

from typing import Any

from mference_core.records import AcceptanceRecord


def render_record(record: AcceptanceRecord) -> str:
    """Return a heading and one line per case: name, verdict, seconds, figures."""
    here = record.environment
    spellings = ", ".join(spelling or "(none)" for spelling in record.spellings)
    lines = [
        f"family {record.family} accepted on {here.backend} {here.processor}, mlx {here.mlx}, at {record.written}",
        f"contract {record.contract}, gate {record.gate}, digest {record.digest[:16]}",
        f"arch.family: {spellings}; model types: {', '.join(record.model_types)}",
        "",
    ]
    width = max((len(case.name) for case in record.cases), default=0)
    for case in record.cases:
        verdict = "pass" if case.passed else "FAIL"
        rest = ", ".join(f"{key} {_text(value)}" for key, value in case.figures.items() if key != "seconds")
        line = f"{case.name:<{width}}  {verdict}  {case.figures.get('seconds', 0.0):6.2f} s  {rest}"
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
