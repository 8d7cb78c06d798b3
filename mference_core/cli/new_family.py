"""`mference new-family`: begin a family's own distribution."""

from pathlib import Path

import click

from mference_core.cli.options import notice


@click.command("new-family")
@click.argument("name")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Folder to write; ./mference-NAME if left out.")
def command(name: str, output: Path | None) -> None:
    """Write a working distribution for a new family NAME: a tiny model that passes the gate, to be changed into yours.

    NAME is lower case, letters and digits. The folder must be new or empty, and appears complete or not at all.
    """
    from mference_core.skeleton import check_name, write_skeleton  # noqa: PLC0415

    check_name(name)
    folder = output if output is not None else Path(f"mference-{name}")
    written = write_skeleton(name, folder)
    click.echo(f"wrote {folder}: {len(written)} files")
    notice(f"next: pip install -e {folder}, then mference accept {name}; see docs/writing-a-family.md")
