"""`mference repair`: what is damaged of an install, fetched again."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from attrs import asdict

from mference_core import plugins
from mference_core.checkpoint import GTURBO
from mference_core.cli.install import plan_asker
from mference_core.cli.install_progress import emit, watcher
from mference_core.cli.options import install_argument, installed_directory, notice
from mference_core.errors import InstallError, ManifestError, MferenceError, UsageError
from mference_core.experts.plan import format_bytes
from mference_core.manifest import RECEIPT_NAME

if TYPE_CHECKING:
    from mference_core.install.original import Original
    from mference_core.install.planning import Reader
    from mference_core.install.repair import Recorded, RepairReport


@click.command("repair")
@install_argument
@click.option("--source", type=click.Path(path_type=Path), help="The model directory it was installed from.")
@click.option("--repo", help="The repository it was installed from: OWNER/NAME; the recorded one if left out.")
@click.option("--revision", help="Its commit, tag or branch, with --repo; main if left out.")
@click.option("--write-receipt", is_flag=True, help="Write the receipt that --verify trusted-receipt asks for.")
@click.option(
    "--connections", type=click.IntRange(1, 32), default=4, show_default=True, help="Ranges downloaded at a time."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON event per line.")
def command(
    directory: Path | None,
    family: str | None,
    source: Path | None,
    repo: str | None,
    revision: str | None,
    *,
    write_receipt: bool,
    connections: int,
    as_json: bool,
) -> None:
    """Verify an install and fetch again what is damaged, from where it came from; what is intact stays as it is.

    With digests of its experts (`mference verify --expert-digests`) single experts are fetched, otherwise a damaged file
    is compared with its source until it is good. A repair that was stopped goes on with the same command.
    """
    from mference_core.install.repair import repair_install  # noqa: PLC0415

    if source is not None and repo is not None:
        raise UsageError(what="--source and --repo", got="both given", expected="one source")
    if revision is not None and repo is None:
        raise UsageError(what="--revision", got="without --repo", expected="both, or neither")
    path = installed_directory(directory, family)
    watch = watcher(as_json=as_json)
    opening = _opening(source, repo, revision, connections)
    try:
        with watch.context():
            report = repair_install(path, opening, write_receipt=write_receipt, progress=watch)
    except KeyboardInterrupt:
        if not as_json:
            notice("interrupted: what was repaired is kept, the same command goes on from there")
        raise
    except MferenceError as error:
        if as_json:
            emit("error", message=str(error), kind=type(error).__name__)
        raise
    _say(report, path, as_json=as_json)


def _say(report: "RepairReport", path: Path, *, as_json: bool) -> None:
    if as_json:
        emit("repaired", **{**asdict(report), "path": str(report.path), "left": [str(one) for one in report.left]})
    else:
        for damage in report.left:
            notice(f"left: {damage}")
    if report.left:
        several = len(report.left) > 1
        got = f"still with {len(report.left)} file{'s' if several else ''} too many"
        remedy = f"remove {'them' if several else 'it'} and run the same command"
        raise ManifestError(what=f"{report.path}", got=got, expected="files of its manifest only", remedy=remedy)
    if as_json:
        return
    done = f"repaired {', '.join(report.repaired)} of" if report.repaired else "nothing to repair in"
    click.echo(
        f"{done} {report.path}: {format_bytes(report.fetched_bytes)} fetched, "
        f"{format_bytes(report.changed_bytes)} changed in {report.seconds:.1f} s" + _next(path, written=report.receipt)
    )


def _next(path: Path, *, written: bool) -> str:
    if written or (path / RECEIPT_NAME).exists():
        return "; wrote a receipt" if written else ""
    return f"; for a receipt run 'mference verify --write-receipt {shlex.quote(str(path))}'"


def _opening(
    source: Path | None, repo: str | None, revision: str | None, connections: int
) -> "Callable[[Recorded], AbstractContextManager[Original]]":
    @contextmanager
    def opening(recorded: "Recorded") -> "Iterator[Original]":
        from mference_core.install.original import folder_original, hub_original  # noqa: PLC0415

        reader, known = _reader(recorded)
        if source is not None:
            yield folder_original(source, reader)
            return
        from mference_core.install.hub import hub_from_environment  # noqa: PLC0415
        from mference_core.install.remote import connected  # noqa: PLC0415

        where = (repo, revision or "main") if repo is not None else known
        if where is None:
            raise InstallError(
                what=f"the source of {recorded.path}",
                got="not recorded",
                remedy="give --source DIR, or --repo OWNER/NAME --revision COMMIT",
            )
        hub = hub_from_environment()
        notice(f"repairing {recorded.path} from {where[0]} at {where[1]} on {hub.endpoint}")
        with connected(hub, *where, connections) as client:
            yield hub_original(client, where[1], reader)

    return opening


def _reader(recorded: "Recorded") -> "tuple[Reader, tuple[str, str] | None]":
    """Return the family that reads an install, and repository and revision of its source if they are known."""
    from mference_core.install.planning import Reader  # noqa: PLC0415

    name = plugins.name_for(recorded.manifest.spelling, None, on_disk=GTURBO)
    family = plugins.dispatch(name, notice)
    reader = Reader(contract=family.contract, plan_for=plan_asker(family))
    if recorded.origin is not None:
        return reader, (recorded.origin.repo, recorded.origin.commit)
    for pinned in family.family.pinned:
        if recorded.snapshot == f"sha256:{pinned.index_sha256}":
            return reader, (pinned.repo, pinned.revision)
    return reader, None
