"""Which hub a repository is on, and who asks: endpoint, token and limits, from the environment that its tools share."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit

from attrs import field, frozen

from mference_core.errors import InstallError, UsageError

DEFAULT_ENDPOINT = "https://huggingface.co"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TRUE = {"1", "true", "yes", "on"}
Origin = tuple[str, str, int]


@frozen(kw_only=True)
class Retry:
    """How often and how patiently a request is made again; seconds.

    `attempts` count failures in a row: a request that moved at least `progress_bytes` starts the count again.
    """

    attempts: int = 4
    first_seconds: float = 1.0
    most_seconds: float = 16.0
    jitter_seconds: float = 0.25
    longest_wait_seconds: float = 3600.0
    progress_bytes: int = 1 << 20


@frozen(kw_only=True)
class Hub:
    """A hub: `endpoint` without a trailing slash, the token that goes to it and nowhere else, time limits in seconds."""

    endpoint: str = DEFAULT_ENDPOINT
    token: str | None = field(default=None, repr=False)
    retry: Retry = Retry()
    connect_seconds: float = 30.0
    read_seconds: float = 60.0

    @property
    def token_to_send(self) -> str | None:
        """The token, unless it would travel in the clear to another machine."""
        scheme, host, _ = origin_of(self.endpoint)
        return self.token if scheme == "https" or host in ("localhost", "127.0.0.1", "::1") else None

    def file_url(self, repo: str, revision: str, name: str) -> str:
        """Return where a file of a repository is asked for."""
        return f"{self.endpoint}/{repo}/resolve/{quote(revision, safe='')}/{quote(name)}"


def origin_of(url: str) -> Origin:
    """Return scheme, host and port of a URL: what a token belongs to. Raises `ValueError` for a malformed port."""
    parts = urlsplit(url)
    port = parts.port or {"https": 443, "http": 80}.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


def hub_from_environment(environ: Mapping[str, str] = os.environ) -> Hub:
    """Return the hub that `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH` and `HF_HOME` name.

    Raises `UsageError` for an endpoint that is no web address, `InstallError` under `HF_HUB_OFFLINE`.
    """
    if environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        raise InstallError(
            what="HF_HUB_OFFLINE", got="set", expected="a network", remedy="unset it, or install with --source DIR"
        )
    endpoint = environ.get("HF_ENDPOINT", "").strip().rstrip("/") or DEFAULT_ENDPOINT
    try:
        scheme, host, _ = origin_of(endpoint)
    except ValueError:
        scheme, host = "", ""
    if scheme not in ("http", "https") or not host or "@" in endpoint or "?" in endpoint:
        raise UsageError(what="HF_ENDPOINT", got=f"'{endpoint}'", expected=f"an address such as {DEFAULT_ENDPOINT}")
    return Hub(endpoint=endpoint, token=_token(environ))


def _token(environ: Mapping[str, str]) -> str | None:
    token = environ.get("HF_TOKEN", "").strip()
    if not token and environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").lower() not in _TRUE:
        try:
            token = _token_path(environ).read_text("utf-8").strip()
        except (OSError, ValueError):
            token = ""
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise UsageError(what="HF_TOKEN", got="not a token", expected="one word of ASCII characters")
    return token or None


def _token_path(environ: Mapping[str, str]) -> Path:
    if path := environ.get("HF_TOKEN_PATH"):
        return Path(path).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(home).expanduser() / "token"


def check_repo(repo: str, revision: str) -> None:
    """Raise `UsageError` unless `repo` is owner/name and `revision` a branch, tag or commit."""
    if not _REPO.fullmatch(repo) or ".." in repo:
        raise UsageError(what="--repo", got=f"'{repo}'", expected="owner/name")
    if not revision or not revision.isprintable() or ".." in revision or revision.startswith("/"):
        raise UsageError(what="--revision", got=f"'{revision}'", expected="a branch, a tag or a commit")
