"""What a hub says of a file, read out of the headers of its answers."""

import json
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from hashlib import sha1, sha256
from typing import Any

import httpx
from attrs import frozen

from mference_core.jsondata import is_hex


@frozen(kw_only=True)
class Digest:
    """What a hub says of a whole file: `kind` is sha256 (large files) or git (SHA-1 of the file as a git object)."""

    kind: str
    value: str
    size: int

    def start(self) -> Any:
        """Return a hash object that has been fed what comes before the file."""
        if self.kind == "sha256":
            return sha256()
        return sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)


@frozen(kw_only=True)
class RemoteFile:
    """A file at a commit; `size` in bytes, None where the hub does not say."""

    name: str
    commit: str
    url: str
    size: int | None
    digest: Digest | None = None
    xet_hash: str | None = None


def strong_tag(header: str | None) -> str | None:
    """Return what a strong entity tag says, None for a weak one or none."""
    if header is None or header.startswith("W/"):
        return None
    return header.strip().strip('"') or None


def stated_digest(tag: str | None, size: int | None) -> Digest | None:
    """Return the digest that a hub's entity tag is: SHA-256 of a large file, git object id of a small one."""
    if tag is None or size is None:
        return None
    kind = {64: "sha256", 40: "git"}.get(len(tag))
    return Digest(kind=kind, value=tag, size=size) if kind and is_hex(tag, len(tag)) else None


def seconds_until(text: str) -> float | None:
    """Return the seconds until an HTTP date, at least 0; None if it is none."""
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def reason(error: Exception) -> str:
    """Say what went wrong, without an address: its query may hold a signature."""
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    text = str(error)
    return json.dumps(text[:120])[1:-1] if text and "://" not in text else type(error).__name__
