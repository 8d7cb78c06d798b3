"""`mference accept`: put a family through the gate."""

import click

from mference_core import plugins
from mference_core.errors import NotAccepted
from mference_core.records import CaseResult


@click.command("accept")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def command(name: str, *, as_json: bool) -> None:
    """Run the acceptance cases against family NAME and record the proof."""
    plugins.find(name)
    gate = plugins.gate()
    if gate is None:
        raise NotAccepted(what="acceptance gate", got="not installed", remedy="reinstall mference")

    def report(case: CaseResult) -> None:
        figures = ", ".join(f"{key} {value}" for key, value in case.figures.items())
        click.echo(f"{'pass' if case.passed else 'FAIL'}  {case.name}  {figures}", err=as_json)

    record = gate.accept(name, report)
    if as_json:
        click.echo(record.encode(), nl=False)
    else:
        here = record.environment
        click.echo(f"{name} is accepted on {here.backend} {here.processor}, mlx {here.mlx}")
