"""`mference doctor`: what runs here, and why or why not."""

import json
import platform
import shutil
from importlib.metadata import version
from typing import Any

import click

from mference_core import plugins, records
from mference_core.cli.families import describe
from mference_core.experts.plan import available_memory, format_bytes


def _backend() -> dict[str, Any]:
    """Return the environment acceptance records are bound to, or why mlx does not load."""
    try:
        here = records.Environment.here()
    except ImportError as error:
        return {
            "usable": False,
            "why": f"mlx does not load: {error}; on Linux install 'mference[cpu]' or 'mference[cuda]'",
        }
    import mlx.core as mx  # noqa: PLC0415

    info = {key: value for key, value in mx.device_info().items() if isinstance(value, str | int)}
    return {
        "usable": True,
        "backend": here.backend,
        "processor": here.processor,
        "mlx": here.mlx,
        "device": info,
        "dtype": "float32" if here.backend == "cpu" else "bfloat16",
    }


def _kernels(backend: dict[str, Any]) -> dict[str, str]:
    """Return which kernels run, and why not faster ones."""
    if not backend["usable"]:
        return {"path": "none", "why": "mlx does not load"}
    if backend["backend"] != "cpu":
        return {"path": "mlx operations", "why": f"none of our own is proven on {backend['backend']} yet"}
    from mference_core.engine import slow_kernels  # noqa: PLC0415
    from mference_kernels.levels import level  # noqa: PLC0415

    if (slow := slow_kernels()) is not None:
        return {"path": "mlx operations in float32", "why": slow}
    return {"path": f"native {level().variant}", "why": "its first products here equal the contract bit for bit"}


def examine() -> dict[str, Any]:
    """Return everything `doctor` prints."""
    data = records.data_dir()
    existing = next(path for path in (data, *data.parents) if path.exists())
    gate, backend = plugins.gate(), _backend()
    return {
        "mference": version("mference"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "backend": backend,
        "kernels": _kernels(backend),
        "memory_available_bytes": available_memory(),
        "data_dir": str(data),
        "data_dir_free_bytes": shutil.disk_usage(existing).free,
        "gate": None if gate is None else gate.version,
        "families": [describe(entry) for entry in plugins.installed().values()],
    }


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(*, as_json: bool) -> None:
    """Say what runs here: backend, kernels, memory, families and their standing."""
    facts = examine()
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    backend = facts["backend"]
    click.echo(f"mference {facts['mference']}, python {facts['python']}, {facts['system']}")
    if backend["usable"]:
        click.echo(
            f"backend   {backend['backend']} {backend['processor']}, mlx {backend['mlx']}, {backend['dtype']} by default"
        )
    else:
        click.echo(f"backend   {backend['why']}")
    click.echo(f"kernels   {facts['kernels']['path']}: {facts['kernels']['why']}")
    click.echo(f"memory    {format_bytes(facts['memory_available_bytes'], up=False)} available")
    click.echo(f"data      {facts['data_dir']}, {format_bytes(facts['data_dir_free_bytes'], up=False)} free")
    for row in facts["families"]:
        where = f" on {', '.join(row['accepted_on'])}" if row.get("accepted_on") else ""
        click.echo(f"family    {row['name']} ({row['distribution']}): {row['state']}{where}")
