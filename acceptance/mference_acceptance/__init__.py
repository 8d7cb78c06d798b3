"""The acceptance gate: what a family must prove on this machine before it is dispatched.

Light to import: the cases and their libraries are loaded by `accept`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mference_core.records import AcceptanceRecord, CaseResult

GATE_VERSION = 2
"""Raised whenever a case is added or made stricter: older records then no longer fit."""


def accept(
    name: str, report: "Callable[[CaseResult], None] | None" = None, records_dir: Path | None = None
) -> "AcceptanceRecord":
    """Put an installed family through every case and write its record.

    `report` gets each result as it comes; a failed one has its `reason` among the figures. The record goes to
    `records_dir`, or to the user's own. Raises `NotAccepted` naming the failed cases, and then writes nothing;
    `PluginError` for a family that cannot be loaded or a folder that cannot be written.
    """
    from mference_acceptance.gate import run_gate  # noqa: PLC0415

    return run_gate(name, GATE_VERSION, report, records_dir)


def render(record: "AcceptanceRecord") -> str:
    """Return a record as a plain text table."""
    from mference_acceptance.table import render_record  # noqa: PLC0415

    return render_record(record)


def render_line(case: "CaseResult") -> str:
    """Return one case's result as a line of that table."""
    from mference_acceptance.table import render_case  # noqa: PLC0415

    return render_case(case)


def page(name: str, cases: "Sequence[CaseResult]", record: "AcceptanceRecord | None", refusal: str = "") -> str:
    """Return a finished gate as an HTML page: with its record, or with the line that refuses the family."""
    from mference_acceptance.html import render_page  # noqa: PLC0415

    return render_page(name, cases, record, refusal)
