"""A hub and its storage on this machine, which answer as published ones do, or misbehave when they are told to.

The hub knows repositories as folders, says commits, sizes and digests, and sends large files' readers to the storage:
another port, so another origin, whose addresses are signed and expire. Every request is written down.
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import parse_qs, unquote, urlsplit

from attrs import define, field, frozen

REPO = "owner/toy"
_ONE_MORE = bytes(min(count + 1, 255) for count in range(256))
LARGE_BYTES = 40_000
"""Files from this size on are kept in the storage."""


def commit_of(folder: Path) -> str:
    """Return a commit id that changes with a folder's content."""
    return sha1(b"".join(p.name.encode() + p.read_bytes() for p in sorted(folder.iterdir()))).hexdigest()  # noqa: S324


@frozen(kw_only=True)
class Asked:
    """A request as it came, and how many bytes of the file were sent for it."""

    method: str
    host: str
    name: str
    first: int | None
    last: int | None
    authorization: str | None
    status: int
    sent: int


@define
class Answer:
    """What is about to be sent for a GET or HEAD; faults change it."""

    method: str
    storage: bool
    name: str
    status: int
    headers: dict[str, str]
    body: bytes
    first: int
    stop_after: int | None = None
    reset: bool = False
    stall_seconds: float = 0.0


Fault = Callable[[Answer], None]


@define
class FakeHub:
    """A hub of one repository; `older` are commits that it still knows. `faults` see every answer in turn."""

    folder: Path
    commit: str = ""
    revision: str = "main"
    older: set[str] = field(factory=set)
    token: str | None = None
    digests: bool = True
    faults: list[Fault] = field(factory=list)
    asked: list[Asked] = field(factory=list)
    stated: dict[str, str] = field(factory=dict)
    signature: int = 0
    connections: int = 0
    endpoint: str = ""
    storage: str = ""
    lock: threading.Lock = field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        self.commit = self.commit or commit_of(self.folder)

    def expire(self) -> None:
        """Make every storage address handed out so far invalid."""
        self.signature += 1

    def digest(self, name: str) -> str:
        """Return the digest that the hub states, of the file as it was when first asked for."""
        if name not in self.stated:
            path = self.folder / name
            size = path.stat().st_size
            digest = sha256() if size >= LARGE_BYTES else sha1(f"blob {size}\0".encode())  # noqa: S324
            with path.open("rb") as file:
                while data := file.read(1 << 20):
                    digest.update(data)
            self.stated[name] = digest.hexdigest()
        return self.stated[name]

    def sent(self, name: str) -> list[tuple[int, int]]:
        """Return (first byte, count) of every body sent of a file, in order."""
        with self.lock:
            found = [a for a in self.asked if a.name == name and a.method == "GET" and a.sent]
        return [(a.first or 0, a.sent) for a in found]

    def coverage(self, name: str) -> bytes:
        """Return how often each byte of a file was sent."""
        counts = bytearray((self.folder / name).stat().st_size)
        for first, size in self.sent(name):
            counts[first : first + size] = counts[first : first + size].translate(_ONE_MORE)
        return bytes(counts)

    def settle(self) -> None:
        """Wait until every connection has ended, as they do soon after their readers."""
        deadline = monotonic() + 5
        while self.connections and monotonic() < deadline:
            sleep(0.001)

    def clear(self) -> None:
        """Forget what was asked, when all of it was answered."""
        self.settle()
        with self.lock:
            self.asked.clear()


class Handler(BaseHTTPRequestHandler):
    """Answers for the hub or, on the other port, for its storage."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: FakeHub
    is_storage = False

    def setup(self) -> None:
        """Count a connection."""
        super().setup()
        with self.hub.lock:
            self.hub.connections += 1

    def finish(self) -> None:
        """Count it no more."""
        with self.hub.lock:
            self.hub.connections -= 1
        super().finish()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Say what a file is."""
        self._answer("HEAD")

    def do_GET(self) -> None:
        """Send a file, or part of one."""
        self._answer("GET")

    def _answer(self, method: str) -> None:
        hub = self.hub
        answer = self._stored(method) if self.is_storage else self._from_hub(method)
        for fault in list(hub.faults):
            fault(answer)
        wanted = self.headers.get("range")
        first, _, last = wanted.removeprefix("bytes=").partition("-") if wanted else ("", "", "")
        asked = Asked(
            method=method,
            host=self.headers["host"],
            name=answer.name,
            first=int(first) if first else None,
            last=int(last) if last else None,
            authorization=self.headers.get("authorization"),
            status=answer.status,
            sent=_count(answer) if method == "GET" and answer.status == (206 if wanted else 200) else 0,
        )
        with hub.lock:
            hub.asked.append(asked)
        with suppress(OSError):
            self._send(answer)

    def _from_hub(self, method: str) -> Answer:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        head = f"/{REPO}/resolve/"
        revision, _, name = path.removeprefix(head).partition("/")
        if hub.token is not None and self.headers.get("authorization") != f"Bearer {hub.token}":
            return self._error(method, name, 401, "GatedRepo")
        if not path.startswith(head):
            return self._error(method, name, 404, "RepoNotFound")
        commit = revision if revision in hub.older else hub.commit
        if revision not in (hub.revision, commit):
            return self._error(method, name, 404, "RevisionNotFound")
        file = hub.folder / name
        if not file.is_file():
            return self._error(method, name, 404, "EntryNotFound")
        size = file.stat().st_size
        digest = hub.digest(name) if hub.digests else ""
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if size < LARGE_BYTES:
            headers["ETag"] = f'"{digest}"' if hub.digests else 'W/"weak"'
            return self._file(method, name, headers)
        headers |= {
            "X-Linked-Size": str(size),
            "Location": f"{hub.storage}/{name}?signature={hub.signature}",
            "ETag": f'"{"0" * 40}"',
        }
        if hub.digests:
            headers["X-Linked-ETag"] = f'"{digest}"'
        return Answer(method=method, storage=False, name=name, status=302, headers=headers, body=b"moved", first=0)

    def _stored(self, method: str) -> Answer:
        parts = urlsplit(self.path)
        name = unquote(parts.path).lstrip("/")
        if parse_qs(parts.query).get("signature") != [str(self.hub.signature)]:
            return self._error(method, name, 403, "")
        return self._file(method, name, {"Accept-Ranges": "bytes"})

    def _file(self, method: str, name: str, headers: dict[str, str]) -> Answer:
        path = self.hub.folder / name
        size = path.stat().st_size
        first, last, status = 0, size - 1, 200
        if (wanted := self.headers.get("range")) is not None:
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
            status = 206
        headers["Content-Length"] = str(last + 1 - first)
        with path.open("rb") as file:
            file.seek(first)
            body = file.read(last + 1 - first) if method == "GET" else b""
        return Answer(
            method=method,
            storage=self.is_storage,
            name=name,
            status=status,
            headers=headers,
            body=body,
            first=first,
        )

    def _error(self, method: str, name: str, status: int, code: str) -> Answer:
        headers = {"X-Error-Code": code} if code else {}
        return Answer(
            method=method, storage=self.is_storage, name=name, status=status, headers=headers, body=b"no", first=0
        )

    def _send(self, answer: Answer) -> None:
        answer.headers.setdefault("Content-Length", str(len(answer.body)))
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        self.end_headers()
        if answer.method == "HEAD":
            return
        self.wfile.write(answer.body[: _count(answer)])
        sleep(answer.stall_seconds)
        if answer.reset:
            # Nothing lingers: the reader gets a reset instead of an end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if _count(answer) < int(answer.headers["Content-Length"]):
            self.close_connection = True


def _count(answer: Answer) -> int:
    """Return how many bytes of the body are sent."""
    return len(answer.body) if answer.stop_after is None else min(answer.stop_after, len(answer.body))


class Server(ThreadingHTTPServer):
    """A server that does not mind readers who go away."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """Say nothing of readers that went away."""


@contextmanager
def serving(hub: FakeHub, handler: type[Handler] = Handler, server: type[Server] = Server) -> Iterator[FakeHub]:
    """Serve a hub and its storage while the block runs."""
    kinds = [type("Own", (handler,), {"hub": hub, "is_storage": storage}) for storage in (False, True)]
    servers = [server(("127.0.0.1", 0), kind) for kind in kinds]
    hub.endpoint, hub.storage = (f"http://127.0.0.1:{one.server_address[1]}" for one in servers)
    threads = [threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True) for one in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for one in servers:
            one.shutdown()
            one.server_close()
