"""`mference install`: a checkpoint of a hub, or of this machine, into a .gturbo directory."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, evolve, field, frozen

from mference_core import plugins
from mference_core.checkpoint import Peek, peek
from mference_core.cli.install_progress import Watcher, emit, watcher
from mference_core.cli.options import notice
from mference_core.errors import DigestMismatch, MferenceError, UsageError
from mference_core.experts.plan import format_bytes
from mference_core.gturbo.digests import DIGESTS_NAME
from mference_core.locate import check_reads, installed_path
from mference_core.plugins import LoadedFamily

if TYPE_CHECKING:
    from mference_core.install import InstallReport
    from mference_core.install.hub import Hub
    from mference_core.install.planning import Reader


@frozen(kw_only=True)
class Wanted:
    """What a command line asks for: a source, where it goes, and the family if it is known already."""

    output: Path
    family: LoadedFamily | None
    source: Path | None = None
    repo: str = ""
    revision: str = ""
    index_sha256: str | None = None
    licence: str = ""
    expert_digests: bool = False
    loaded: list[LoadedFamily] = field(factory=list)

    def reader(self, seen: Peek) -> "Reader":
        """Return the family that reads a source of this kind; raises as `plugins.dispatch` does."""
        from mference_core.install.planning import Reader  # noqa: PLC0415

        family = self.family
        if family is None:
            name = plugins.name_for(seen.spelling, seen.model_type, on_disk=seen.kind)
            family = plugins.dispatch(name, notice)
        check_reads(family, seen)
        self.loaded[:] = [family]
        return Reader(
            contract=family.contract,
            plan_for=plan_asker(family),
            known_ids={pinned.index_sha256: pinned.model_id for pinned in family.family.pinned},
        )


def plan_asker(family: LoadedFamily) -> Callable[[Any], Any]:
    """Return what asks a family for its install plan."""
    return lambda arch: family.ask("mference_install_plan", arch=arch)


def wanted(
    family: str | None, source: Path | None, repo: str | None, revision: str | None, output: Path | None
) -> Wanted:
    """Read the options that name source and output; raises `UsageError`, and the errors of a family that is named."""
    if source is not None and repo is not None:
        raise UsageError(what="--source and --repo", got="both given", expected="one source")
    if revision is not None and repo is None:
        raise UsageError(what="--revision", got="without --repo", expected="both, or neither")
    if source is None and repo is None and family is None:
        raise UsageError(what="no source named", remedy="give --family NAME, --repo OWNER/NAME or --source DIR")
    if output is None and (source is not None or repo is not None):
        raise UsageError(what="no output named", remedy="give --output DIR")
    loaded = plugins.dispatch(family, notice) if family is not None else None
    if source is not None or repo is not None:
        assert output is not None
        return Wanted(output=output, family=loaded, source=source, repo=repo or "", revision=revision or "main")
    assert loaded is not None
    if not loaded.family.pinned:
        raise UsageError(what=f"family {family}", got="without a pinned checkpoint", remedy="give --repo OWNER/NAME")
    pinned = loaded.family.pinned[0]
    return Wanted(
        output=output or installed_path(loaded.family.name),
        family=loaded,
        repo=pinned.repo,
        revision=pinned.revision,
        index_sha256=pinned.index_sha256,
        licence=pinned.licence,
    )


@click.command("install")
@click.option("--family", help="Family by name; alone: its pinned checkpoint.")
@click.option("--repo", help="Another repository of the hub: OWNER/NAME.")
@click.option("--revision", help="Its branch, tag or commit; main if left out.")
@click.option("--source", type=click.Path(path_type=Path), help="A quantised MLX directory on this machine instead.")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="The .gturbo directory to write; the family's if left out."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing install.")
@click.option("--plan", "plan_only", is_flag=True, help="Say what it would take in bytes, and write nothing.")
@click.option(
    "--connections", type=click.IntRange(1, 32), default=4, show_default=True, help="Ranges downloaded at a time."
)
@click.option("--expert-digests", is_flag=True, help="Add digests of each expert, and list them in the manifest.")
@click.option("--json", "as_json", is_flag=True, help="One JSON event per line.")
def command(
    family: str | None,
    repo: str | None,
    revision: str | None,
    source: Path | None,
    output: Path | None,
    *,
    overwrite: bool,
    plan_only: bool,
    connections: int,
    expert_digests: bool,
    as_json: bool,
) -> None:
    """Install a checkpoint, values byte for byte: the one a family pins, another of the hub, or one that is here.

    Memory stays bounded whatever the size, and nothing appears at OUTPUT before it is complete and on disk. A download
    that was stopped goes on with the same command, or is removed with `mference discard`.
    """
    what = evolve(wanted(family, source, repo, revision, output), expert_digests=expert_digests)
    if plan_only:
        from mference_core.cli.install_plan import show_plan  # noqa: PLC0415

        show_plan(what, as_json=as_json)
        return
    watch = watcher(as_json=as_json)
    with _told(what, watch):
        report = _local(what, watch, overwrite) if what.source else _remote(what, watch, overwrite, connections)
    if expert_digests and not (report.path / DIGESTS_NAME).exists():  # an earlier session's install, finished only
        _add_digests(what.output, watch)
    values = {**asdict(report), "path": str(report.path), "family": what.loaded[0].family.name}
    if as_json:
        emit("installed", **values)
        return
    received = f", {format_bytes(report.downloaded_bytes)} downloaded" if report.downloaded_bytes else ""
    click.echo(
        f"installed {report.path}: {report.files} files, {format_bytes(report.size_bytes)} "
        f"({report.size_bytes} bytes) in {report.seconds:.1f} s{received}"
    )


def _local(what: Wanted, watch: Watcher, overwrite: bool) -> "InstallReport":  # noqa: FBT001
    from mference_core.install import install_local  # noqa: PLC0415

    assert what.source is not None
    reader = what.reader(peek(what.source))
    with watch.context():
        return install_local(
            what.source,
            what.output,
            reader.contract,
            reader.plan_for,
            overwrite=overwrite,
            progress=watch,
            known_ids=reader.known_ids,
            expert_digests=what.expert_digests,
        )


def _remote(what: Wanted, watch: Watcher, overwrite: bool, connections: int) -> "InstallReport":  # noqa: FBT001
    from mference_core.install.hub import hub_from_environment  # noqa: PLC0415
    from mference_core.install.remote import connected, install_remote  # noqa: PLC0415

    hub = hub_from_environment()
    _say_source(what, hub, as_json=watch.as_json)
    with watch.context(), connected(hub, what.repo, what.revision, connections) as client:
        return install_remote(
            client,
            what.revision,
            what.output,
            what.reader,
            overwrite=overwrite,
            progress=watch,
            index_sha256=what.index_sha256,
            expert_digests=what.expert_digests,
        )


def _add_digests(output: Path, watch: Watcher) -> None:
    """Read an install that is there, and add digests of its parts; raises `DigestMismatch`."""
    from mference_core.install.verify import verify_install  # noqa: PLC0415

    with watch.context():
        report = verify_install(output, expert_digests=True, progress=watch)
    for damage in report.damages:
        notice(f"damaged: {damage}")
    if report.damages:
        remedy = f"run 'mference repair {shlex.quote(str(output))}'"
        raise DigestMismatch(what=str(output), got="not as it was written", expected="the same bytes", remedy=remedy)


def licence_of(what: Wanted, hub: "Hub") -> str:
    """Return what is known of a model's licence."""
    return what.licence or f"see {hub.endpoint}/{what.repo}"


def _say_source(what: Wanted, hub: "Hub", *, as_json: bool) -> None:
    licence = licence_of(what, hub)
    if as_json:
        names = {"repo": what.repo, "revision": what.revision, "endpoint": hub.endpoint}
        emit("source", **names, licence=licence, output=str(what.output))
        return
    notice(f"installing {what.repo} at {what.revision} from {hub.endpoint} to {what.output}")
    notice(f"licence of the model: {licence}")
    if hub.token is not None and hub.token_to_send is None:
        notice(f"the token is not sent: {hub.endpoint} is not encrypted")


@contextmanager
def _told(what: Wanted, watch: Watcher) -> Iterator[None]:
    """Say what is kept of a download that stops, and how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        _say_kept(what, watch, "interrupted")
        raise
    except MferenceError as error:
        if watch.as_json:
            emit("error", message=str(error), kind=type(error).__name__)
        _say_kept(what, watch, "")
        raise


def _say_kept(what: Wanted, watch: Watcher, why: str) -> None:
    from mference_core.install.saved import kept_bytes  # noqa: PLC0415

    kept = None if what.source else kept_bytes(what.output, what.repo, what.revision)
    if kept is None:
        return
    done, total = kept
    discard = f"mference discard --output {shlex.quote(str(what.output))}"
    if watch.as_json:
        emit("paused", done_bytes=done, total_bytes=total, reason=why or "error", discard=discard)
        return
    notice(f"{why + ': ' if why else ''}{format_bytes(done)} of {format_bytes(total)} are kept")
    notice(f"the same command goes on from there; '{discard}' removes it")
