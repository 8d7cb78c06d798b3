"""`mference discard`: remove what an unfinished install left."""

from pathlib import Path

import click

from mference_core.errors import UsageError
from mference_core.locate import installed_path


@click.command("discard")
@click.option("--family", help="Family whose pinned checkpoint was being installed.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="The directory that was being written.")
def command(family: str | None, output: Path | None) -> None:
    """Remove an unfinished install: its staging directory and its saved state, never a finished one."""
    from mference_core.install import discard  # noqa: PLC0415

    if (family is None) == (output is None):
        raise UsageError(what="--family and --output", got="both or neither given", expected="one of them")
    path = output if output is not None else installed_path(str(family))
    discard(path)
    click.echo(f"discarded what was left of {path}")
