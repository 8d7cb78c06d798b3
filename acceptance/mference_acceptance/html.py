"""A gate's verdict as a page a person can look at: one file, no scripts, light and dark."""

from collections.abc import Sequence
from html import escape

from mference_acceptance.cases import CASES
from mference_acceptance.table import figure_text
from mference_core.records import AcceptanceRecord, CaseResult, Environment

STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #57606a; --good: #1a7f37; --bad: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --line: #30363d; --soft: #8b949e; --good: #3fb950; --bad: #f85149; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .5rem .75rem .5rem 0; border-top: 1px solid var(--line); }
td.seconds, th.seconds { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.verdict { font-weight: 600; }
.pass { color: var(--good); } .fail { color: var(--bad); }
.soft, dt { color: var(--soft); } .reason { color: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.5rem; } dd { margin: 0; overflow-wrap: anywhere; }
code { font-family: ui-monospace, monospace; } h1 { font-size: 1.6rem; }
"""


def render_page(name: str, cases: Sequence[CaseResult], record: AcceptanceRecord | None, refusal: str = "") -> str:
    """Return the page of a finished gate: accepted with a record, or refused with the reason."""
    accepted = record is not None
    title = f"{name} is {'accepted' if accepted else 'refused'}"
    verdict = '<span class="pass">accepted</span>' if accepted else '<span class="fail">refused</span>'
    rows = "\n".join(_row(case) for case in cases)
    facts = "\n".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in _facts(cases, record))
    reason = f'<p class="reason">{escape(refusal)}</p>' if refusal else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Family {escape(name)}: {verdict}</h1>
{reason}
<dl>
{facts}
</dl>
<table>
<thead><tr><th>case</th><th>verdict</th><th class="seconds">seconds</th><th>what must hold, and figures</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""


def _facts(cases: Sequence[CaseResult], record: AcceptanceRecord | None) -> list[tuple[str, str]]:
    here = record.environment if record is not None else Environment.here()
    seconds = sum(float(case.figures.get("seconds", 0)) for case in cases)
    passed = sum(case.passed for case in cases)
    facts = [
        ("cases", f"{passed} of {len(cases)} pass, {seconds:.1f} s"),
        ("environment", f"{here.backend} {here.processor}, mlx {here.mlx}"),
    ]
    if record is not None:
        spellings = ", ".join(spelling or "(none)" for spelling in record.spellings)
        facts += [
            ("written", record.written),
            ("digest", record.digest),
            ("versions", f"contract {record.contract}, gate {record.gate}"),
            ("arch.family", spellings),
            ("model types", ", ".join(record.model_types)),
        ]
    return facts


def _row(case: CaseResult) -> str:
    holds = next((known.holds for known in CASES if known.name == case.name), "")
    figures = {key: value for key, value in case.figures.items() if key not in ("seconds", "reason")}
    shown = ", ".join(f"{key.replace('_', ' ')} {figure_text(value)}" for key, value in figures.items())
    verdict = "pass" if case.passed else "fail"
    parts = [escape(holds)]
    if shown:
        parts.append(f'<span class="soft">{escape(shown)}</span>')
    if not case.passed:
        parts.append(f'<span class="reason">{escape(str(case.figures.get("reason", "")))}</span>')
    return (
        f'<tr><td><code>{escape(case.name)}</code></td><td class="verdict {verdict}">{verdict}</td>'
        f'<td class="seconds">{float(case.figures.get("seconds", 0)):.2f}</td><td>{"<br>".join(parts)}</td></tr>'
    )
