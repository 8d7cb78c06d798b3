"""The end of a download: small files, manifest and receipt, promotion, and what a kill in the middle of it left."""

import os
import shutil
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from attrs import evolve

from mference_core.errors import MferenceError
from mference_core.gturbo.digests import DIGESTS_NAME, Digests, encode_digests
from mference_core.gturbo.receipt import RECEIPT_CAP_BYTES, decode_receipt
from mference_core.install.answers import RemoteFile
from mference_core.install.files import METADATA_DIR
from mference_core.install.finish import CONFIG_NAME, write_all, write_manifest, write_small
from mference_core.install.http import HubClient
from mference_core.install.metadata import TOKENIZER_CAP_BYTES
from mference_core.install.planning import RemotePlan
from mference_core.install.report import FINISHING, InstallProgress, Progress
from mference_core.install.saved import Saved, read_saved
from mference_core.install.transaction import Target, forget, install_errors, promote, sync_directory
from mference_core.jsondata import read_capped
from mference_core.manifest import LAYOUT_NAME, MANIFEST_NAME, RECEIPT_NAME, FileEntry

TOKENIZER_DIR = "tokenizer"
RANGE_TEMP = ".range.tmp"


def finish(
    client: HubClient,
    target: Target,
    plan: RemotePlan,
    files: dict[str, FileEntry],
    tell: Progress,
    *,
    overwrite: bool,
    digests: Digests | None = None,
) -> int:
    """Write everything but the payload, promote the staging directory and forget the saved state.

    `files` gets the entries of what is written; returns the bytes of the whole install. Every step may be repeated
    by a later session, so nothing here minds what an earlier one left.
    """
    root = target.partial
    tell(InstallProgress(stage=FINISHING, file=LAYOUT_NAME, done_bytes=0, total_bytes=plan.side_bytes))
    for name in (MANIFEST_NAME, MANIFEST_NAME + ".tmp", RECEIPT_NAME, LAYOUT_NAME, DIGESTS_NAME, RANGE_TEMP):
        (root / name).unlink(missing_ok=True)
    (root / LAYOUT_NAME).parent.mkdir(exist_ok=True)
    write_small(root / LAYOUT_NAME, plan.outputs.layout_image)
    files[LAYOUT_NAME] = _entry(plan.outputs.layout_image)
    if digests is not None:
        data = encode_digests(digests)
        write_small(root / DIGESTS_NAME, data)
        files[DIGESTS_NAME] = _entry(data)
    files |= _write_tokenizer(client, root, plan, tell)
    manifest = evolve(plan.manifest, files=dict(files))
    metadata_bytes = write_manifest(target, manifest, plan.remote.repo, plan.remote.commit)
    promote(target, overwrite=overwrite)
    _remove_metadata(target)
    forget(target)
    return metadata_bytes + sum(entry.size for entry in files.values())


def finish_promotion(target: Target) -> None:
    """Complete a promotion that was killed after its rename; nothing to do otherwise."""
    if not _was_promoted(target):
        return
    with install_errors(target.final):
        if target.partial.exists():
            shutil.rmtree(target.partial)
        _remove_metadata(target)
        forget(target)


def _was_promoted(target: Target) -> bool:
    """Say whether an install got its name, and what made it was not all removed.

    The folder of a download's metadata goes with the staging directory when that takes the final name: where it is says
    which of two directories is the new one. It is removed after the old one, and the saved state after it.
    """
    if (target.final / METADATA_DIR).is_dir():
        return True
    return target.final.exists() and target.checkpoint.exists() and not target.partial.exists()


def promoted_download(target: Target) -> Saved | None:
    """Return the download whose promotion `finish_promotion` would complete, if there is one and it can be known.

    The saved state tells, if it is complete and the install that is there says that it is of that repository and commit.
    """
    if not _was_promoted(target):
        return None
    try:
        saved = read_saved(target)
        receipt = decode_receipt(read_capped(target.final / RECEIPT_NAME, RECEIPT_CAP_BYTES, "receipt"))
    except MferenceError:
        return None
    if saved is None or saved.done_source_bytes != saved.total_source_bytes:
        return None
    same = (receipt.source_repo_id, receipt.source_revision) == (saved.repo, saved.commit)
    return saved if same else None


def _remove_metadata(target: Target) -> None:
    shutil.rmtree(target.final / METADATA_DIR, ignore_errors=True)
    sync_directory(target.final)


def _entry(data: bytes) -> FileEntry:
    return FileEntry(size=len(data), sha256=sha256(data).hexdigest())


def _write_tokenizer(client: HubClient, root: Path, plan: RemotePlan, tell: Progress) -> dict[str, FileEntry]:
    folder, wanted = root / TOKENIZER_DIR, plan.remote.tokenizer
    folder.mkdir(exist_ok=True)
    for odd in sorted({item.name for item in folder.iterdir()} - wanted.keys()):
        (folder / odd).unlink()
    write_small(folder / CONFIG_NAME, plan.remote.seen.config_data)
    entries = {f"{TOKENIZER_DIR}/{CONFIG_NAME}": _entry(plan.remote.seen.config_data)}
    done = len(plan.remote.seen.config_data)
    for name, file in wanted.items():
        entry = _kept(folder / name, file) or _fetch(client, file, folder / name, root / METADATA_DIR)
        entries[f"{TOKENIZER_DIR}/{name}"] = entry
        done += entry.size
        tell(InstallProgress(stage=FINISHING, file=name, done_bytes=done, total_bytes=plan.side_bytes))
    return entries


def _kept(path: Path, file: RemoteFile) -> FileEntry | None:
    """Return the entry of a file that an earlier session wrote, if the hub's digest proves it."""
    if file.digest is None or path.is_symlink() or not path.is_file():
        return None
    stated, digest, size = file.digest.start(), sha256(), 0
    with path.open("rb") as held:
        while data := held.read(1 << 20):
            stated.update(data)
            digest.update(data)
            size += len(data)
    good = stated.hexdigest() == file.digest.value
    return FileEntry(size=size, sha256=digest.hexdigest()) if good else None


def _fetch(client: HubClient, file: RemoteFile, path: Path, temporary: Path) -> FileEntry:
    """Write a small file, durable under its name when this returns; memory holds one piece of it."""
    pending = temporary / path.name
    cap = TOKENIZER_CAP_BYTES[path.name]

    def save(pieces: Iterable[bytes]) -> FileEntry:
        digest, size = sha256(), 0
        pending.unlink(missing_ok=True)
        handle = os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            for data in pieces:
                write_all(handle, memoryview(data))
                digest.update(data)
                size += len(data)
            os.fsync(handle)
        finally:
            os.close(handle)
        return FileEntry(size=size, sha256=digest.hexdigest())

    entry = client.read_whole(file, cap, save)
    path.unlink(missing_ok=True)
    pending.rename(path)
    return entry
