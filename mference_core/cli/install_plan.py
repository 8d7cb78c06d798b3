"""`mference install --plan`: what an install would download, write and need, before it does any of it."""

from pathlib import Path
from shutil import disk_usage
from typing import Any

import click

from mference_core.checkpoint import Checkpoint, open_checkpoint, peek
from mference_core.cli.install import Wanted, licence_of
from mference_core.cli.install_progress import emit
from mference_core.cli.show import memory_lines, memory_rows
from mference_core.experts.plan import format_bytes
from mference_core.locate import Found


def show_plan(what: Wanted, *, as_json: bool) -> None:
    """Print the plan of an install; nothing is written, a saved download stays as it is."""
    from mference_core import engine  # noqa: PLC0415

    facts, checkpoint = _local(what) if what.source else _remote(what)
    family = what.loaded[0]
    dtype = engine.resolve_dtype("auto")
    rows = memory_rows(Found(family=family, path=checkpoint.path), checkpoint, dtype)
    facts |= {
        "family": family.family.name,
        "output": str(what.output),
        "output_exists": what.output.exists(),
        "disk_free_bytes": disk_usage(_existing(what.output)).free,
        "dtype": dtype,
        "memory": rows,
        "dropped_tensors": len(checkpoint.dropped),
    }
    if as_json:
        emit("plan", **facts)
        return
    for line in _lines(facts):
        click.echo(line)
    for line in memory_lines(rows, dtype):
        click.echo(line)


def _existing(path: Path) -> Path:
    """Return the nearest parent that is there."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def _local(what: Wanted) -> tuple[dict[str, Any], Checkpoint]:
    from mference_core.install.local import local_bytes  # noqa: PLC0415

    assert what.source is not None
    seen = peek(what.source)
    reader = what.reader(seen)
    checkpoint = open_checkpoint(seen, reader.contract, reader.plan_for)
    output_bytes, disk_bytes = local_bytes(checkpoint, reader.plan_for, expert_digests=what.expert_digests)
    return {"source": str(what.source), "output_bytes": output_bytes, "disk_bytes": disk_bytes}, checkpoint


def _remote(what: Wanted) -> tuple[dict[str, Any], Checkpoint]:
    from mference_core.install.hub import hub_from_environment  # noqa: PLC0415
    from mference_core.install.metadata import read_metadata  # noqa: PLC0415
    from mference_core.install.planning import make_plan  # noqa: PLC0415
    from mference_core.install.remote import connected  # noqa: PLC0415
    from mference_core.install.saved import kept_bytes  # noqa: PLC0415

    hub = hub_from_environment()
    with connected(hub, what.repo, what.revision) as client:
        remote = read_metadata(client, what.revision, index_sha256=what.index_sha256)
    plan = make_plan(remote, what.reader(remote.seen), expert_digests=what.expert_digests)
    kept = kept_bytes(what.output, what.repo, what.revision)
    facts = {
        "source": f"{what.repo} at {remote.commit}",
        "licence": licence_of(what, hub),
        "ranges": len(plan.requests.ranges),
        "download_bytes": plan.download_bytes,
        "check_bytes": plan.check_bytes,
        "digests_stated": sum(file.digest is not None for file in remote.files.values()),
        "source_files": len(remote.files),
        "kept_bytes": kept[0] if kept else 0,
        "output_bytes": plan.output_bytes,
        "disk_bytes": plan.disk_bytes,
    }
    return facts, plan.checkpoint


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"{facts['source']}, family {facts['family']}, to {facts['output']}"]
    if "download_bytes" in facts:
        lines += [
            f"  licence           {facts['licence']}",
            f"  download          {_size(facts['download_bytes'])} in {facts['ranges']} ranges",
            f"  for checking      {_size(facts['check_bytes'])} more",
            f"  digests stated    of {facts['digests_stated']} of {facts['source_files']} files",
        ]
        if facts["kept_bytes"]:
            lines.append(f"  here already      {_size(facts['kept_bytes'])}")
    lines += [
        f"  on disk           {_size(facts['output_bytes'])}",
        f"  free space        {_size(facts['disk_bytes'])} wanted, {_size(facts['disk_free_bytes'])} there",
        f"  left out          {facts['dropped_tensors']} tensors",
    ]
    if facts["output_exists"]:
        lines.append("  already there: it would take --overwrite")
    return lines


def _size(count: int) -> str:
    return f"{format_bytes(count)} ({count} bytes)"
