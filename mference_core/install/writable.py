"""What a repair may not write over, said before anything is touched."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from mference_core.errors import InstallError
from mference_core.manifest import Manifest


def check_writable(path: Path) -> None:
    """Raise `InstallError` unless the install at `path` may be written, and the folder it is in, for lock and state."""
    for folder in (path.resolve(), path.resolve().parent):
        _check_access(folder, os.W_OK | os.X_OK)


def check_folders(path: Path, manifest: Manifest) -> None:
    """Raise `InstallError` unless every folder of a listed file is one, or is missing."""
    for folder in sorted({path / parent for name in manifest.files for parent in Path(name).parents}):
        if not folder.is_dir() and os.path.lexists(folder):
            expected, remedy = "a directory of the install", "remove it and run the repair again"
            raise InstallError(what=str(folder), got=_kind(folder), expected=expected, remedy=remedy)


def check_files(path: Path, names: Iterable[str]) -> None:
    """Raise `InstallError` unless each of these files is a plain one, or is missing, and may be written.

    What a link leads to belongs to somebody else, who may have reasons for what it holds.
    """
    for file in (path / name for name in names):
        if file.parent.is_dir():
            _check_access(file.parent, os.W_OK | os.X_OK)
        if not os.path.lexists(file):
            continue
        if not stat.S_ISREG(file.lstat().st_mode):
            expected, remedy = "a file of the install", "remove it and run the repair again"
            raise InstallError(what=str(file), got=_kind(file), expected=expected, remedy=remedy)
        _check_access(file, os.R_OK | os.W_OK)


def _check_access(path: Path, mode: int) -> None:
    if not os.access(path, mode):
        remedy = "run it as its owner, or change its permissions"
        raise InstallError(what=str(path), got="read-only", expected="writable, to be repaired", remedy=remedy)


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    kinds = {stat.S_ISLNK: "a symbolic link", stat.S_ISDIR: "a directory", stat.S_ISREG: "a file"}
    return next((text for is_kind, text in kinds.items() if is_kind(mode)), "of another kind")
