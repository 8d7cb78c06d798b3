"""`mference install`: repack a local checkpoint into a .gturbo directory."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from attrs import asdict

from mference_core import plugins
from mference_core.checkpoint import peek
from mference_core.cli.options import notice
from mference_core.experts.plan import format_bytes
from mference_core.locate import check_reads

if TYPE_CHECKING:
    from rich.console import Console


@click.command("install")
@click.option("--source", type=click.Path(path_type=Path), required=True, help="A quantised MLX directory.")
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="The .gturbo directory to write.")
@click.option("--family", help="Family by name; left out, the source says.")
@click.option("--overwrite", is_flag=True, help="Replace an existing install.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(source: Path, output: Path, family: str | None, *, overwrite: bool, as_json: bool) -> None:
    """Repack a local checkpoint, values byte for byte, into OUTPUT.

    Memory stays bounded whatever the size; nothing appears at OUTPUT before it is complete and on disk.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn  # noqa: PLC0415

    from mference_core.install import InstallProgress, install_local  # noqa: PLC0415

    seen = peek(source)
    loaded = plugins.dispatch(family or plugins.name_for(seen.spelling, seen.model_type, on_disk=seen.kind), notice)
    check_reads(loaded, seen)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = _stderr()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("installing", total=None)

        def progress(done: InstallProgress) -> None:
            bars.update(task, description=done.file, completed=done.done_bytes, total=done.total_bytes)

        report = install_local(
            source,
            output,
            loaded.contract,
            lambda arch: loaded.ask("mference_install_plan", arch=arch),
            overwrite=overwrite,
            progress=progress,
            known_ids={pinned.index_sha256: pinned.model_id for pinned in loaded.family.pinned},
        )
    if as_json:
        click.echo(json.dumps({**asdict(report), "path": str(report.path), "family": loaded.family.name}))
    else:
        click.echo(
            f"installed {report.path}: {report.files} files, {format_bytes(report.size_bytes)} "
            f"({report.size_bytes} bytes) in {report.seconds:.1f} s"
        )


def _stderr() -> "Console":
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=True)
