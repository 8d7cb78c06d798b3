"""`mference accept`: put a family through the gate."""

from pathlib import Path

import click

from mference_core import plugins
from mference_core.errors import NotAccepted, UsageError
from mference_core.records import AcceptanceRecord, CaseResult


@click.command("accept")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write the verdict as a page, whatever it is.")
def command(name: str, *, as_json: bool, html: Path | None) -> None:
    """Run the acceptance cases against family NAME and record the proof."""
    plugins.find(name)
    gate = plugins.gate()
    if gate is None:
        raise NotAccepted(what="acceptance gate", got="not installed", remedy="reinstall mference")
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise UsageError(what="--html", got=f"'{html}'", expected="a file in a folder that exists")
    results: list[CaseResult] = []

    def report(case: CaseResult) -> None:
        results.append(case)
        click.echo(gate.line(case), err=as_json)

    def show(record: AcceptanceRecord | None, refusal: str = "") -> None:
        if html is not None:
            html.write_text(gate.page(name, results, record, refusal), "utf-8")

    try:
        record = gate.accept(name, report)
    except NotAccepted as error:
        show(None, str(error))
        raise
    show(record)
    if as_json:
        click.echo(record.encode(), nl=False)
    else:
        here = record.environment
        click.echo(f"{name} is accepted on {here.backend} {here.processor}, mlx {here.mlx}")
