"""Requests to a hub: redirects without leaking the token, strict ranges, patient repetition (gturbo-format 17)."""

import random
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Event, Lock
from typing import Self, TypeVar
from urllib.parse import urljoin

import httpx
from attrs import define, field, frozen
from httpcore import HTTP11Connection

from mference_core.errors import MferenceError, SourceError
from mference_core.install.answers import RemoteFile, reason, seconds_until, stated_digest, strong_tag
from mference_core.install.hub import Hub, Origin, origin_of
from mference_core.jsondata import is_hex

MAX_REDIRECTS = 5
RETRIED = {408, 429, 500, 502, 503, 504}
EXPIRED = {401, 403, 404, 410}
# Left alone it asks the socket for 64 KiB at a time; each piece then costs more in Python than its bytes do.
HTTP11Connection.READ_NUM_BYTES = 512 << 10
_NETWORK = "check the network, proxies and HF_ENDPOINT, then run the same command again"
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_COMMIT, _SIZE, _LINKED_SIZE = "x-repo-commit", "content-length", "x-linked-size"
T = TypeVar("T")


class Stopped(Exception):
    """The transfer was told to stop."""


@frozen(kw_only=True)
class Failed(Exception):
    """One attempt failed; `error` is what a user reads when no other attempt is made."""

    error: MferenceError
    retried: bool = True
    retry_after_seconds: float = 0.0


@define
class HubClient:
    """Requests to one repository. Safe for several threads; `stop` ends all of them at once."""

    hub: Hub
    repo: str
    connections: int = 4
    stopped: Event = field(factory=Event, init=False)
    received_bytes: int = field(default=0, init=False)
    repeated: int = field(default=0, init=False)
    _client: httpx.Client = field(init=False)
    _places: dict[str, str] = field(factory=dict, init=False)
    _tags: dict[str, str] = field(factory=dict, init=False)
    _open: dict[int, httpx.Response] = field(factory=dict, init=False)
    _lock: Lock = field(factory=Lock, init=False)

    def __attrs_post_init__(self) -> None:
        # HTTP/2 costs more than twice the processor time per byte here, and a few connections of long ranges gain
        # nothing from multiplexing. See docs/installing.md for the figures.
        self._client = httpx.Client(
            verify=_trust(),
            http2=False,
            follow_redirects=False,
            timeout=httpx.Timeout(self.hub.read_seconds, connect=self.hub.connect_seconds, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=2 * self.connections),
            headers={"accept-encoding": "identity", "user-agent": "mference"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._client.close()

    def stop(self) -> None:
        """End every request under way: their threads see `Stopped`."""
        self.stopped.set()
        with self._lock:
            for response in self._open.values():
                stream = response.extensions.get("network_stream")
                held = stream.get_extra_info("socket") if stream is not None else None
                if held is not None:
                    with suppress(OSError):
                        held.shutdown(socket.SHUT_RDWR)

    # --- one file

    def head(self, name: str, revision: str) -> RemoteFile | None:
        """Return what the hub says of a file at a branch, tag or commit, or None where there is no such file."""
        url = self.hub.file_url(self.repo, revision, name)
        return self._patiently(lambda: self._head_once(url, name))

    def _head_once(self, url: str, name: str) -> RemoteFile | None:
        with self._following("HEAD", url, {}, metadata=True) as response:
            headers = response.headers
            code = headers.get("x-error-code", "EntryNotFound")
            if response.status_code == 404 and code == "EntryNotFound":
                return None
            if not (response.is_success or response.has_redirect_location):
                raise self._refused(response, name)
            commit = headers.get(_COMMIT, "")
            if not is_hex(commit, 40):
                raise Failed(error=self._bad(name, f"without a commit ({commit[:40]!r})", "the header X-Repo-Commit"))
            stated = headers.get(_LINKED_SIZE) or (headers.get(_SIZE) if response.is_success else None)
            if stated is not None and not stated.isdigit():
                raise Failed(error=self._bad(name, f"of size {stated!r}", "a number of bytes"))
            size = None if stated is None else int(stated)
            own = headers.get("etag") if response.is_success else None  # a redirect's is not the file's
            tag = strong_tag(headers.get("x-linked-etag") or own)
            return RemoteFile(
                name=name,
                commit=commit,
                url=self.hub.file_url(self.repo, commit, name),
                size=size,
                digest=stated_digest(tag, size),
                xet_hash=headers.get("x-xet-hash"),
            )

    def read_small(self, file: RemoteFile, cap_bytes: int) -> bytes:
        """Return a whole file of at most `cap_bytes`, held against the digest that the hub states."""
        return self.read_whole(file, cap_bytes, b"".join)

    def read_whole(self, file: RemoteFile, cap_bytes: int, use: Callable[[Iterator[bytes]], T]) -> T:
        """Give a whole file in pieces to `use` and return what that returns; after a failure, all of it again.

        Size and digest are checked after the last piece. Raises `SourceError`, and `Stopped`.
        """
        return self._patiently(lambda: use(self._whole_once(file, cap_bytes)))

    def _whole_once(self, file: RemoteFile, cap_bytes: int) -> Iterator[bytes]:
        if file.size is not None and file.size > cap_bytes:
            raise Failed(error=self._bad(file.name, f"{file.size} bytes", f"at most {cap_bytes}"), retried=False)
        size, digest = 0, file.digest.start() if file.digest else None
        with self._following("GET", file.url, {}) as response:
            if response.status_code != 200:
                raise self._refused(response, file.name)
            self._check_encoding(response, file.name)
            for piece in self._pieces(response, file.name):
                size += len(piece)
                if size > cap_bytes:
                    got = f"above {cap_bytes} bytes"
                    raise Failed(error=self._bad(file.name, got, "a smaller file"), retried=False)
                if digest is not None:
                    digest.update(piece)
                yield piece
        if file.size is not None and size != file.size:
            raise Failed(error=self._bad(file.name, f"cut short at {size} bytes", f"{file.size}"))
        if digest is not None and file.digest is not None and digest.hexdigest() != file.digest.value:
            raise Failed(error=self._bad(file.name, f"of digest {digest.hexdigest()}", file.digest.value))

    def read_range(self, file: RemoteFile, offset: int, size: int) -> Iterator[bytes]:
        """Yield bytes `[offset, offset + size)` of a file in small pieces.

        A broken answer is asked for again from where it broke. Raises `SourceError` after the last attempt, and
        `Stopped`.
        """
        done = failures = 0
        while done < size:
            before = done
            try:
                for piece in self._range_once(file, offset + done, size - done):
                    done += len(piece)
                    yield piece
            except Failed as failure:
                failures = 1 if done - before >= self.hub.retry.progress_bytes else failures + 1
                self._wait(failure, failures)

    def _range_once(self, file: RemoteFile, offset: int, size: int) -> Iterator[bytes]:
        asked = {"range": f"bytes={offset}-{offset + size - 1}"}
        with self._lock:
            place = self._places.get(file.name)
        if place is not None:
            with self._following("GET", place, asked, with_token=False) as response:
                if response.status_code not in EXPIRED:
                    yield from self._range_body(response, file, offset, size)
                    return
            # What a redirect pointed to is good for a while only: ask the hub for another.
            with self._lock:
                self._places.pop(file.name, None)
        with self._following("GET", file.url, asked) as response:
            if response.is_success and origin_of(str(response.url)) != origin_of(file.url):
                with self._lock:
                    self._places[file.name] = str(response.url)
            yield from self._range_body(response, file, offset, size)

    def _range_body(self, response: httpx.Response, file: RemoteFile, offset: int, size: int) -> Iterator[bytes]:
        name, headers = file.name, response.headers
        if response.status_code != 206:
            raise self._refused(response, name)
        self._check_encoding(response, name)
        expected = f"bytes {offset}-{offset + size - 1}/{file.size}"
        if not _CONTENT_RANGE.fullmatch(stated := headers.get("content-range", "")) or stated != expected:
            raise Failed(error=self._bad(name, f"answered with range {stated[:80]!r}", expected))
        if headers.get(_SIZE, str(size)) != str(size):
            raise Failed(error=self._bad(name, f"answered with {headers[_SIZE]} bytes", str(size)))
        self._check_tag(response, file)
        done = 0
        for piece in self._pieces(response, name):
            done += len(piece)
            if done > size:
                raise Failed(error=self._bad(name, "answered with more bytes than asked for", str(size)))
            yield piece
        if done < size:
            raise Failed(error=self._bad(name, f"cut short after {done} bytes", str(size)))

    def _check_tag(self, response: httpx.Response, file: RemoteFile) -> None:
        tag = strong_tag(response.headers.get("etag"))
        if tag is None:
            return
        with self._lock:
            # A stated digest is the better witness: storage may tag one object differently on two machines.
            first = self._tags.setdefault(file.name, tag) if file.digest is None else tag
        wanted = file.xet_hash if file.xet_hash is not None else first
        if tag != wanted:
            raise Failed(error=self._bad(file.name, f"tagged {tag[:80]!r}", f"{wanted!r}, as before"))

    # --- answers

    @contextmanager
    def _following(
        self, method: str, url: str, headers: dict[str, str], *, metadata: bool = False, with_token: bool = True
    ) -> Iterator[httpx.Response]:
        """Send a request and follow redirects; the token goes to the hub's own origin, until one leaves it."""
        home, token = origin_of(self.hub.endpoint), self.hub.token_to_send if with_token else None
        for _ in range(MAX_REDIRECTS + 1):
            if self.stopped.is_set():
                raise Stopped
            here = origin_of(url)
            if here != home:
                token = None
            own = {"authorization": f"Bearer {token}"} if token else {}
            with self._sent(method, url, {**headers, **own}) as response:
                if not response.has_redirect_location:
                    yield response
                    return
                try:
                    target = urljoin(str(response.url), response.headers["location"])
                    there = origin_of(target)
                except ValueError as error:
                    raise Failed(error=self._bad("redirect", "malformed", "a web address"), retried=False) from error
                if metadata and there != home:
                    yield response  # what a hub says of a file stands in the redirect itself
                    return
                self._check_redirect(home, there)
            url = target
        raise Failed(error=self._bad("redirect", f"one of more than {MAX_REDIRECTS}", "fewer"), retried=False)

    def _check_redirect(self, home: Origin, there: Origin) -> None:
        if there[0] != "https" and (home[0] == "https" or there[0] != "http"):
            got = f"to {there[0] or 'nothing'}://{there[1]}"
            raise Failed(error=self._bad("redirect", got, "https"), retried=False)

    @contextmanager
    def _sent(self, method: str, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        try:
            with self._client.stream(method, url, headers=headers) as response:
                with self._lock:
                    self._open[id(response)] = response
                try:
                    if self.stopped.is_set():  # between the request and now, when `stop` could not find it
                        raise Stopped
                    yield response
                finally:
                    with self._lock:
                        self._open.pop(id(response), None)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            if self.stopped.is_set():
                raise Stopped from error
            raise Failed(error=self._unreachable(url, error)) from error

    def _pieces(self, response: httpx.Response, name: str) -> Iterator[bytes]:
        try:
            for piece in response.iter_raw():
                if self.stopped.is_set():
                    raise Stopped
                with self._lock:
                    self.received_bytes += len(piece)
                yield piece
        except httpx.HTTPError as error:
            if self.stopped.is_set():
                raise Stopped from error
            raise Failed(error=self._bad(name, f"broken off ({reason(error)})", "the whole answer")) from error

    def _check_encoding(self, response: httpx.Response, name: str) -> None:
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise Failed(error=self._bad(name, f"encoded with {encoding[:40]}", "plain bytes"))

    def _refused(self, response: httpx.Response, name: str) -> Failed:
        status, code = response.status_code, response.headers.get("x-error-code", "")
        got, remedy = f"answered with status {status}" + (f" {code}" if code else ""), ""
        if status == 200:
            got = "answered with the whole file"
        elif code == "RepoNotFound":
            remedy = "check the repository's name, and HF_TOKEN if it is private"
        elif code == "GatedRepo" or status in (401, 403):
            terms = f"accept the model's terms at {self.hub.endpoint}/{self.repo} and " if code == "GatedRepo" else ""
            if self.hub.token is None:
                remedy = terms + "set HF_TOKEN"
            else:
                sent = self.hub.token_to_send is not None
                remedy = terms + ("check the token" if sent else "use https for HF_ENDPOINT, or no token is sent")
        elif status == 404:
            remedy = "check repository and revision"
        wait = 0.0
        if status in RETRIED and "retry-after" in response.headers:
            wait = self._retry_after(response.headers["retry-after"], name)
        error = SourceError(what=f"{self.repo} {name}", got=got, expected="the file", remedy=remedy)
        away = origin_of(str(response.url)) != origin_of(self.hub.endpoint)
        retried = status in RETRIED or status == 200 or (away and status in EXPIRED)
        return Failed(error=error, retried=retried, retry_after_seconds=wait)

    def _retry_after(self, text: str, name: str) -> float:
        seconds = float(text) if text.strip().isdigit() else seconds_until(text)
        if seconds is None or seconds > self.hub.retry.longest_wait_seconds:
            got = f"to be asked again after {text[:40]!r}"
            expected = f"at most {self.hub.retry.longest_wait_seconds:.0f} seconds"
            raise Failed(error=self._bad(name, got, expected), retried=False)
        return seconds

    def _bad(self, name: str, got: str, expected: str) -> SourceError:
        return SourceError(what=f"{self.repo} {name}", got=got, expected=expected)

    def _unreachable(self, url: str, error: Exception) -> SourceError:
        host = origin_of(url)[1] if not isinstance(error, httpx.InvalidURL) else "the address"
        return SourceError(what=host, got=f"unreachable ({reason(error)})", expected="an answer", remedy=_NETWORK)

    # --- patience

    def _patiently(self, attempt: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                return attempt()
            except Failed as failure:
                failures += 1
                self._wait(failure, failures)

    def _wait(self, failure: Failed, failures: int) -> None:
        """Wait before the next attempt, or raise the failure's error if there is none."""
        retry = self.hub.retry
        if not failure.retried or failures >= retry.attempts:
            raise failure.error from failure
        with self._lock:
            self.repeated += 1
        delay = min(retry.most_seconds, retry.first_seconds * 2 ** (failures - 1))
        delay = max(delay, failure.retry_after_seconds) + random.uniform(0, retry.jitter_seconds)  # noqa: S311
        if self.stopped.wait(delay):
            raise Stopped


@cache
def _trust() -> ssl.SSLContext:
    """Return the certificates that are trusted, read once."""
    return httpx.create_ssl_context()
