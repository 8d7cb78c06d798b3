"""Install a repository of a hub: planned from its headers, downloaded in ranges, resumable at every moment."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic

from mference_core.checkpoint import Peek, peek
from mference_core.errors import InstallError, ManifestError, SourceError
from mference_core.gturbo.model import read_structure
from mference_core.install.download import DISCARD, Download
from mference_core.install.files import METADATA_DIR
from mference_core.install.http import HubClient
from mference_core.install.hub import Hub, check_repo
from mference_core.install.kept import Kept
from mference_core.install.metadata import RemoteSource, read_head, read_metadata
from mference_core.install.planning import Reader, make_plan
from mference_core.install.report import METADATA, InstallProgress, InstallReport, Progress
from mference_core.install.saved import Saved, read_saved
from mference_core.install.sidecars import finish, finish_promotion, promoted_download
from mference_core.install.transaction import CHUNK_BYTES, Target, check_final, install_errors, locked, remove_staging
from mference_core.manifest import RECEIPT_NAME

CONNECTIONS = 4


@contextmanager
def connected(hub: Hub, repo: str, revision: str, connections: int = CONNECTIONS) -> Iterator[HubClient]:
    """Hold a client of one repository; raises `UsageError` for names that cannot be."""
    check_repo(repo, revision)
    with HubClient(hub=hub, repo=repo, connections=connections) as client:
        yield client


def install_remote(
    client: HubClient,
    revision: str,
    output: Path,
    reader_of: Callable[[Peek], Reader],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    index_sha256: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    expert_digests: bool = False,
) -> InstallReport:
    """Install a client's repository at a branch, tag or commit as `output`; values are moved, never changed.

    An install that was stopped, however it was, goes on where it stopped: what is on disk is verified and kept, the
    rest is fetched, at the commit it began with; if it was stopped after it had got its name, what it left is cleared
    away and the install reported. `reader_of` says who reads a source of this kind; `index_sha256` is the pinned digest
    of the repository's index. With `expert_digests` the install has digests.json, made in the same reading.

    The output appears complete or not at all. Raises `SourceError` for a source that fails or changed, `DigestMismatch`
    for one that is corrupt, `ManifestError` for one that is no model, `InstallError` (`InstallLocked`) for a bad
    output or a full disk; whatever it raises, `KeyboardInterrupt` included, what was durable is kept.
    """
    started, tell = monotonic(), progress or _silent
    with locked(output) as target, install_errors(target.shown):
        report, done = None, promoted_download(target)
        if done is not None and _is_of(done, client.repo, revision, index_sha256):
            report = _report_of(target, done.commit, reader_of, started)
        finish_promotion(target)
        if report is not None:
            return report
        saved = _saved_state(target, client.repo, revision, overwrite=overwrite)
        tell(InstallProgress(stage=METADATA, file=client.repo, done_bytes=0, total_bytes=0))
        commit, kept = saved.commit if saved else None, Kept(folder=target.partial / METADATA_DIR)
        remote = read_metadata(client, revision, commit=commit, index_sha256=index_sha256, kept=kept)
        plan = make_plan(remote, reader_of(remote.seen), chunk_bytes, expert_digests=expert_digests)
        with Download.of(client, target, plan, tell, partial(_check_heads, client, remote, kept)) as download:
            if saved is None:
                download.begin(overwrite=overwrite)
            else:
                download.resume(saved)
            for file, data in remote.parts:
                kept.keep(file, data)
            download.fetch()
            files = download.hashes()
        size = finish(client, target, plan, files, tell, overwrite=overwrite, digests=download.digests)
    return InstallReport(
        path=target.shown,
        model_id=plan.manifest.model_id,
        files=len(files) + 2,
        size_bytes=size,
        resident_tensors=len(plan.outputs.weights),
        routed_layers=len(plan.checkpoint.experts),
        dropped=dict(plan.checkpoint.dropped),
        seconds=monotonic() - started,
        commit=remote.commit,
        downloaded_bytes=client.received_bytes,
        reused_bytes=download.reused_bytes,
        repeated_requests=client.repeated,
        checked_files=len(download.checks.checked),
    )


def _silent(_: InstallProgress) -> None:
    """Tell nobody."""


def _is_of(saved: Saved, repo: str, revision: str, index_sha256: str | None) -> bool:
    """Say whether a download is the one asked for."""
    return (saved.repo, saved.revision) == (repo, revision) and index_sha256 in (None, saved.index_sha256)


def _report_of(
    target: Target, commit: str, reader_of: Callable[[Peek], Reader], started: float
) -> InstallReport | None:
    """Return the report of an install that an earlier session had all but finished; None if it was damaged since.

    What it dropped is not known.
    """
    try:
        seen = peek(target.shown)
        assert seen.manifest is not None
        reader_of(seen)
        index, layout = read_structure(target.shown, seen.manifest)
    except (ManifestError, InstallError):
        return None
    listed, receipt = seen.manifest.files.values(), target.final / RECEIPT_NAME
    return InstallReport(
        path=target.shown,
        model_id=seen.manifest.model_id,
        files=len(listed) + 2,
        size_bytes=seen.manifest.size_bytes + receipt.stat().st_size + sum(entry.size for entry in listed),
        resident_tensors=len(index.entries),
        routed_layers=sum(bool(layer.parts) for layer in layout.layers),
        dropped={},
        seconds=monotonic() - started,
        commit=commit,
    )


def _check_heads(client: HubClient, remote: RemoteSource, kept: Kept, shards: Iterable[str]) -> None:
    """Before ranges of source files are dropped as wrong: raise `SourceError` if it was a header that was wrong."""
    for name in shards:
        if read_head(client, remote.files[name]) != remote.heads[name]:
            kept.forget(remote.files[name])
            raise SourceError(
                what=f"the header of {client.repo} {name}",
                got="unlike when it was first read",
                expected="the same bytes",
                remedy="run it again: what is downloaded is kept",
            )


def _saved_state(target: Target, repo: str, revision: str, *, overwrite: bool) -> Saved | None:
    """Return the download to go on with, after clearing what a killed install left before its first record."""
    check_final(target, overwrite=overwrite)
    saved = read_saved(target)
    if saved is None:
        if target.partial.exists():
            remove_staging(target)
        return None
    if not target.partial.exists():
        raise InstallError(
            what=str(target.partial), got="missing", expected="the files of the saved download", remedy=DISCARD
        )
    if (saved.repo, saved.revision) != (repo, revision):
        raise InstallError(
            what=str(target.shown),
            got=f"half downloaded from {saved.repo} at {saved.revision}",
            expected=f"{repo} at {revision}",
            remedy=f"install that, or {DISCARD}",
        )
    return saved
