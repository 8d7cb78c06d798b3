"""`mference families`: what is installed, and whether the gate has accepted it here."""

import json

import click

from mference_core import plugins, records
from mference_core.errors import PluginError


def describe(entry: plugins.Entry) -> dict[str, object]:
    """Return a family's name, distribution and standing, without importing it."""
    mine = [record for record in records.known_records() if record.family == entry.name]
    try:
        digest = records.family_digest(entry.folder)
    except PluginError as error:
        return {"name": entry.name, "distribution": entry.distribution, "state": str(error)}
    proofs = [record.environment for record in mine if record.digest == digest]
    state = "accepted" if proofs else "changed since accepted" if mine else "not accepted"
    where = [f"{proof.backend} {proof.processor} mlx {proof.mlx}" for proof in proofs]
    return {
        "name": entry.name,
        "distribution": f"{entry.distribution} {entry.version}",
        "state": state,
        "accepted_on": sorted(set(where)),
        "digest": digest,
    }


@click.command("families")
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
def command(*, as_json: bool) -> None:
    """List installed model families and whether they are accepted."""
    rows = [describe(entry) for entry in plugins.installed().values()]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        proofs = row.get("accepted_on")
        where = f" on {', '.join(proofs)}" if isinstance(proofs, list) and proofs else ""
        click.echo(f"{row['name']:<14} {row['distribution']:<24} {row['state']}{where}")
    if not rows:
        click.echo("no families are installed", err=True)
