"""An acceptance record as text."""

from typing import Any

from mference_core.records import AcceptanceRecord, CaseResult

NAME_WIDTH = 22
"""Columns for the longest name of a case."""


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
    return "\n".join([*lines, *(render_case(case, width) for case in record.cases)]) + "\n"


def render_case(case: CaseResult, width: int = NAME_WIDTH) -> str:
    """Return one line: name in `width` columns, verdict, seconds, figures."""
    verdict = "pass" if case.passed else "FAIL"
    rest = ", ".join(f"{key} {figure_text(value)}" for key, value in case.figures.items() if key != "seconds")
    return f"{case.name:<{width}}  {verdict}  {case.figures.get('seconds', 0.0):6.2f} s  {rest}".rstrip()


def figure_text(value: Any) -> str:
    """Return a figure with three digits, text as it is."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
