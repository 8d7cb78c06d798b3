"""Strict JSON and bounded reads: every surprise in a metadata file becomes a one-line `ManifestError`."""

import json
import os
import unicodedata
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from mference_core.buffers import read_buffer
from mference_core.errors import ManifestError

READ_BYTES = 1 << 20
_NAMES = {int: "an integer", str: "a string", bool: "true or false", dict: "an object", list: "an array"}


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} appears twice")
    return values


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Parse UTF-8 JSON whose root is an object; duplicate keys, NaN and infinities are refused.

    Raises `ManifestError` naming `what`.
    """
    try:
        values = json.loads(data.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_constant)
    except RecursionError as error:
        raise ManifestError(what=what, got="nested too deeply", expected="a JSON object") from error
    except ValueError as error:
        raise ManifestError(what=what, got=f"malformed ({error})", expected="a JSON object") from error
    if not isinstance(values, dict):
        raise ManifestError(what=what, got=f"a JSON {type(values).__name__}", expected="a JSON object")
    return values


def typed(value: Any, kind: type, what: str) -> Any:
    """Return `value` if it is a `kind` (int, str, bool, dict or list), else raise `ManifestError` naming `what`.

    An integral float such as 30.0 counts as an integer; true and false never do.
    """
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ManifestError(what=what, got=_shown(value), expected=_NAMES[kind])
    return value


def member(values: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """Return the required member `key` of an object as a `kind`; `where` names the object in the error."""
    if key not in values:
        raise ManifestError(what=f"{where} {key}", got="missing", expected=_NAMES[kind])
    return typed(values[key], kind, f"{where} {key}")


def size_member(values: Mapping[str, Any], key: str, where: str) -> int:
    """Return the required member `key` as an integer from 0 to 2**63 - 1."""
    value = int(member(values, key, int, where))
    if not 0 <= value < 1 << 63:
        raise ManifestError(what=f"{where} {key}", got=str(value), expected="an integer from 0 to 2**63 - 1")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def encode_object(values: Mapping[str, Any]) -> bytes:
    """Return pretty JSON with sorted keys and unescaped slashes, ending in a newline."""
    return (json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_capped(path: Path, cap_bytes: int, what: str) -> bytes:
    """Read a whole file of at most `cap_bytes`, or raise `ManifestError`."""
    try:
        with path.open("rb") as file:
            data = file.read(cap_bytes + 1)
    except OSError as error:
        raise ManifestError(what=f"{what} {path}", got=f"unreadable ({error.strerror})") from error
    if len(data) > cap_bytes:
        raise ManifestError(what=f"{what} {path}", got=f"above {cap_bytes} bytes", expected="a smaller file")
    return data


def file_size(path: Path) -> int:
    """Return the size of a regular file in bytes, or raise `ManifestError`."""
    try:
        status = path.stat()
    except OSError as error:
        raise ManifestError(what=str(path), got=f"unreadable ({error.strerror})", expected="a file") from error
    if not path.is_file():
        raise ManifestError(what=str(path), got="not a regular file", expected="a file")
    return status.st_size


def read_in_order(descriptor: int) -> None:
    """Tell the system that a file will be read from its first byte to its last: twice as fast for a cold one."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def hash_file(path: Path) -> str:
    """Return the lower-case SHA-256 of a file, read once in 1 MiB pieces; raises `ManifestError` if unreadable."""
    digest, buffer = sha256(), read_buffer(READ_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            read_in_order(file.fileno())
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise ManifestError(what=str(path), got=f"unreadable ({error.strerror})") from error
    return digest.hexdigest()


def is_hex(text: str, digits: int) -> bool:
    """Say whether `text` is exactly `digits` lower-case hexadecimal digits."""
    return len(text) == digits and set(text) <= set("0123456789abcdef")


def is_safe_relative(path: str) -> bool:
    """Say whether `path` stays inside its directory: relative, NFC, plain components, no backslash or NUL."""
    parts = path.split("/")
    plain = all(part not in ("", ".", "..") for part in parts)
    return plain and not {"\\", "\0"} & set(path) and unicodedata.normalize("NFC", path) == path


def standard_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path without `.`, `..` or a trailing slash; symbolic links are kept."""
    return os.path.abspath(path)  # noqa: PTH100 (Path.absolute keeps '..', resolve follows links)
