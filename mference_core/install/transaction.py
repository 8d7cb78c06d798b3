"""One output directory, one writer: lock, staging directory, disk check, atomic promotion (gturbo-format 18)."""

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import frozen

from mference_core.errors import InstallError, InstallLocked, MferenceError
from mference_core.jsondata import standard_path
from mference_core.manifest import MANIFEST_CAP_BYTES, MANIFEST_NAME, read_manifest

GIB, MIB = 1 << 30, 1 << 20
CHUNK_BYTES = 64 * MIB
STAGED = {"model_weights.bin", "packed_experts", "tokenizer", ".range.tmp", ".remote-metadata", ".swap"}
STAGED_FILES = {MANIFEST_NAME, MANIFEST_NAME + ".tmp", "verified-install.json"}


@frozen(kw_only=True)
class Target:
    """An output directory and its siblings. `final` has a resolved parent; `shown` is the path the user gave."""

    shown: Path
    final: Path
    partial: Path
    checkpoint: Path
    lock: Path


def target_of(output: Path) -> Target:
    """Resolve an output path; creates its parent. Raises `InstallError`."""
    shown = Path(standard_path(output))
    name = unicodedata.normalize("NFC", shown.name)
    if not name or name.endswith(".partial"):
        raise InstallError(what="output", got=repr(str(shown)), expected="a directory name not ending in .partial")
    with install_errors(shown.parent):
        shown.parent.mkdir(parents=True, exist_ok=True)
        parent = shown.parent.resolve(strict=True)
    siblings = {kind: parent / f"{name}.{kind}" for kind in ("partial", "resume.json", "install.lock")}
    return Target(
        shown=shown,
        final=parent / name,
        partial=siblings["partial"],
        checkpoint=siblings["resume.json"],
        lock=siblings["install.lock"],
    )


@contextmanager
def install_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a one-line `InstallError` naming the file, else `path`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise InstallError(
            what=f"writing {error.filename or path}",
            got="stopped by a full disk" if full else f"refused ({error.strerror})",
            remedy="free some space and run it again" if full else "",
        ) from error


def _check_kinds(target: Target) -> None:
    kinds = {
        target.final: stat.S_ISDIR,
        target.partial: stat.S_ISDIR,
        target.checkpoint: stat.S_ISREG,
        target.lock: stat.S_ISREG,
    }
    for path, is_kind in kinds.items():
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if not is_kind(mode):
            expected = "a directory" if is_kind is stat.S_ISDIR else "a regular file"
            got = "a symbolic link" if stat.S_ISLNK(mode) else "of another kind"
            raise InstallError(what=str(path), got=got, expected=f"{expected}, or nothing")


@contextmanager
def locked(output: Path) -> Iterator[Target]:
    """Hold the output's lock while the block runs.

    Raises `InstallLocked` at once when another process holds it, `InstallError` for unsafe kinds of entries.
    """
    target = target_of(output)
    _check_kinds(target)
    with install_errors(target.lock):
        handle = os.open(target.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy(target) from error
        _check_kinds(target)
        held = os.fstat(handle)
        with install_errors(target.lock):
            now = target.lock.stat()
        if (held.st_dev, held.st_ino) != (now.st_dev, now.st_ino):
            raise _busy(target)
        yield target
    finally:
        os.close(handle)


@contextmanager
def undisturbed(directory: Path) -> Iterator[None]:
    """Keep writers out of a finished install while the block reads it; needs no right to write there.

    Raises `InstallLocked` at once when a process is writing.
    """
    lock = directory.with_name(directory.name + ".install.lock")
    try:
        handle = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # nobody writes here, or this user may not ask
        yield
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what = str(directory)
            raise InstallLocked(what=what, got="being written by another process", remedy="wait for it") from error
        yield
    finally:
        os.close(handle)


def _busy(target: Target) -> InstallLocked:
    return InstallLocked(what=str(target.shown), got="being installed by another process", remedy="wait for it")


def disk_bytes_needed(output_bytes: int, durable_bytes: int = 0, reserve_bytes: int | None = None) -> int:
    """Return the free bytes that `check_disk` asks for."""
    if reserve_bytes is None:
        reserve_bytes = GIB if output_bytes > GIB else 0
    return output_bytes - durable_bytes + CHUNK_BYTES + reserve_bytes


def check_disk(target: Target, output_bytes: int, durable_bytes: int = 0, reserve_bytes: int | None = None) -> None:
    """Raise `InstallError` with both numbers unless the parent's file system has room.

    Needed: bytes still to be written, one chunk of 64 MiB, and a reserve (by default 1 GiB, for outputs above that).
    """
    needed = disk_bytes_needed(output_bytes, durable_bytes, reserve_bytes)
    available = shutil.disk_usage(target.final.parent).free
    if needed > available:
        raise InstallError(
            what=f"free space at {target.final.parent}",
            got=f"{available} bytes",
            expected=f"at least {needed}",
            remedy="free some space or choose another output",
        )


def prepare(target: Target, *, overwrite: bool) -> None:
    """Check what is there and make an empty staging directory; call it under the lock.

    An existing output needs `overwrite` and must be an install. A staging directory without a saved download is
    what a killed install left: it is removed if it holds only what an install writes.
    """
    check_final(target, overwrite=overwrite)
    if target.checkpoint.exists():
        raise InstallError(
            what=str(target.shown), got="half downloaded", expected="no saved download", remedy="resume or discard it"
        )
    if target.partial.exists():
        remove_staging(target)
    with install_errors(target.partial):
        target.partial.mkdir(mode=0o755)


def check_final(target: Target, *, overwrite: bool) -> None:
    """Raise `InstallError` if there is an output already, unless it is an install to be overwritten."""
    if target.final.exists():
        if not overwrite:
            raise InstallError(
                what=str(target.shown), got="already there", expected="a new path", remedy="or give --overwrite"
            )
        _check_replaceable(target)


def pending_path(path: Path) -> Path:
    """Return where a file is written before it takes its name."""
    return path.with_name(path.name + ".tmp")


def _check_replaceable(target: Target) -> None:
    manifest = target.final / MANIFEST_NAME
    if not any(target.final.iterdir()):
        return
    try:
        if manifest.stat().st_size <= MANIFEST_CAP_BYTES:
            read_manifest(manifest)
            return
    except (OSError, MferenceError):
        pass
    raise InstallError(
        what=str(target.shown), got="not an install", expected="one, to be overwritten", remedy="remove it yourself"
    )


def remove_staging(target: Target) -> None:
    """Remove the staging directory; raises `InstallError` if it holds anything an install does not write."""
    with install_errors(target.partial):
        odd = sorted({item.name for item in target.partial.iterdir()} - STAGED - STAGED_FILES)
        if odd:
            raise InstallError(what=str(target.partial / odd[0]), got="not from an install", remedy="move it away")
        shutil.rmtree(target.partial)


def discard(output: Path) -> None:
    """Remove what an unfinished install left: staging directory and saved download.

    Raises `InstallError` when there is neither, `InstallLocked` while an install runs.
    """
    if not Path(standard_path(output)).parent.is_dir():
        raise _nothing(output)
    beside = target_of(output)
    if not any(path.exists() for path in (beside.partial, beside.checkpoint, beside.lock)):
        raise _nothing(output)  # without leaving a lock file behind
    with locked(output) as target:
        if not target.partial.exists() and not target.checkpoint.exists():
            raise _nothing(output)
        if target.partial.exists():
            remove_staging(target)
        forget(target)


def forget(target: Target) -> None:
    """Remove the saved state of a download, if there is one."""
    with install_errors(target.checkpoint):
        pending_path(target.checkpoint).unlink(missing_ok=True)
        target.checkpoint.unlink(missing_ok=True)
        sync_directory(target.final.parent)


def _nothing(output: Path) -> InstallError:
    return InstallError(what=str(output), got="without a partial install", expected="something to discard")


def abandon(target: Target) -> None:
    """Remove the staging directory after a failure; never raises, as another error is on its way."""
    shutil.rmtree(target.partial, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make a directory's entries durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def promote(target: Target, *, overwrite: bool) -> None:
    """Give the staging directory its final name in one step; the old install, if any, goes afterwards."""
    with install_errors(target.final):
        if overwrite and target.final.exists():
            swap(target.partial, target.final)
            sync_directory(target.final.parent)
            shutil.rmtree(target.partial)
        elif target.final.exists():
            raise InstallError(what=str(target.shown), got="there since a moment ago", expected="a new path")
        else:
            target.partial.rename(target.final)
        sync_directory(target.final.parent)


def check_swap(target: Target) -> None:
    """Raise `InstallError` now, before hours of copying, if the file system cannot swap two directories."""
    pair = [target.partial / ".swap" / name for name in "ab"]
    with install_errors(target.partial):
        for path in pair:
            path.mkdir(parents=True)
        try:
            swap(*pair)
        finally:
            with suppress(OSError):
                shutil.rmtree(target.partial / ".swap")


def swap(first: Path, second: Path) -> None:
    """Exchange two directories atomically; raises `InstallError` where the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(first), os.fsencode(second)
    at_cwd, exchange = -100, 2
    if sys.platform == "darwin":
        call = getattr(library, "renamex_np", None)
        failed = call is None or call(*paths, ctypes.c_uint(exchange)) != 0
    else:
        call = getattr(library, "renameat2", None)
        failed = call is None or call(at_cwd, paths[0], at_cwd, paths[1], ctypes.c_uint(exchange)) != 0
    if failed:
        reason = os.strerror(ctypes.get_errno()) if call else "no such system call"
        raise InstallError(
            what=f"swapping {second.name}", got=f"impossible here ({reason})", remedy="remove the old install first"
        )
