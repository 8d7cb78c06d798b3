"""Who may ask: Host, Origin and token checks around every request, and the headers of every response."""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from typing import ClassVar
from urllib.parse import urlsplit

from attrs import field, frozen
from starlette.datastructures import Headers

from mference_core.errors import UsageError
from mference_core.server.errors import ApiError

HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.\-_]+)(?::([0-9]{1,5}))?")
LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
ANY = "*"


def address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host as an IP address, or None if it is a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach an address to listen on."""
    found = address(host)
    return found.is_loopback if found is not None else host.lower() in LOOPBACK_NAMES


def check_token(token: str) -> str:
    """Return a bearer token. Raises `UsageError` for one that no header can carry."""
    if not re.fullmatch(r"[\x21-\x7e]{8,512}", token):
        raise UsageError(
            what="--token", got="not usable", expected="8 to 512 printable ASCII characters without spaces"
        )
    return token


def check_origin(origin: str) -> str:
    """Return an allowed origin as browsers write it. Raises `UsageError` for anything else."""
    if origin == ANY:
        return origin
    parts = urlsplit(origin)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or origin.rstrip("/") != f"{parts.scheme}://{parts.netloc}"
    ):
        raise UsageError(what="--allow-origin", got=repr(origin), expected="one such as https://app.example, or *")
    return f"{parts.scheme}://{parts.netloc.lower()}"


@frozen(kw_only=True)
class Policy:
    """Who may ask.

    On loopback only names of this machine are accepted as Host, so that a page whose name was made to resolve here
    cannot ask. Elsewhere addresses are accepted too, the token being what protects. `hosts` are further names.
    """

    bind: str = "127.0.0.1"
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    token: str | None = field(default=None, repr=False)
    open_paths: ClassVar[tuple[str, ...]] = ("/health", "/openapi.json")

    @classmethod
    def of(cls, bind: str, hosts: Iterable[str], origins: Iterable[str], token: str | None) -> "Policy":
        """Return a policy. Raises `UsageError` for one that would let strangers in."""
        if token is not None:
            check_token(token)
        elif not is_loopback(bind):
            raise UsageError(
                what=f"--bind {bind} without a token",
                remedy="set MFERENCE_TOKEN (or --token), or bind to 127.0.0.1",
            )
        checked = frozenset(map(check_origin, origins))
        if ANY in checked and token is None:
            raise UsageError(what="--allow-origin * without a token", remedy="name the origins, or set MFERENCE_TOKEN")
        return cls(bind=bind, hosts=frozenset(map(str.lower, hosts)), origins=checked, token=token)

    def check(self, method: str, path: str, headers: Headers, *, page: bool) -> None:
        """Raise `ApiError` unless this request may be answered; `page` is a path of the page, which holds no secret."""
        self._check_host(headers)
        self._check_origin(method, headers, page=page)
        if self.token is not None and not page and path not in self.open_paths and method != "OPTIONS":
            self._check_token(self.token, headers)

    def _check_host(self, headers: Headers) -> None:
        found = HOST.fullmatch(headers.get("host", ""))
        name = found[1].lower() if found else ""
        if len(headers.getlist("host")) == 1 and found and self._host_allowed(name):
            return
        raise ApiError(
            status=403,
            message=f"host {name[:100]!r} is not served here; start the server with --allow-host to add a name",
            code="host_not_allowed",
            headers={"connection": "close"},
        )

    def _host_allowed(self, name: str) -> bool:
        found = address(name)
        if name in LOOPBACK_NAMES or name in self.hosts or (found is not None and found.is_loopback):
            return True
        if is_loopback(self.bind):
            return False
        return found is not None or name == self.bind.lower()

    def _check_origin(self, method: str, headers: Headers, *, page: bool) -> None:
        origin = headers.get("origin")
        if origin is None:
            # A browser tells of a foreign page even where it sends no Origin, as for images and scripts.
            foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            navigates = page and method == "GET" and headers.get("sec-fetch-mode") == "navigate"
            if foreign and not navigates:
                raise self._foreign("of another site")
        elif not self.allows(origin) and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            raise self._foreign(repr(origin[:100]))

    def allows(self, origin: str) -> bool:
        """Say whether pages of an origin may ask from afar."""
        return ANY in self.origins or origin.lower() in self.origins

    def _foreign(self, origin: str) -> ApiError:
        return ApiError(
            status=403,
            message=f"a page {origin} may not ask here; start the server with --allow-origin to let it",
            code="origin_not_allowed",
        )

    def _check_token(self, token: str, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        bearer = given.strip() if scheme.lower() == "bearer" else ""
        candidates = [bearer, headers.get("x-api-key", "")]
        wanted = _digest(token)
        matches = [hmac.compare_digest(_digest(candidate), wanted) for candidate in candidates]
        if not any(matches):
            raise ApiError(
                status=401,
                message="the token is missing or wrong; send it as 'Authorization: Bearer TOKEN' or 'x-api-key: TOKEN'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def cors(self, origin: str | None) -> dict[str, str]:
        """Return the headers that let an allowed foreign page read a response."""
        if origin is None or not self.allows(origin):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "x-request-id, request-id, retry-after, mference-without-effect",
            "vary": "Origin",
        }


def _digest(text: str) -> bytes:
    """Return a digest, so that comparing takes the same time for every length."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "authorization, content-type, x-api-key, anthropic-version, anthropic-beta",
    "access-control-max-age": "600",
}
"""What the browser is told of requests it may make; header names the clients add are let through by name."""
