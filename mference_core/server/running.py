"""Running the server: the socket, the signals, and an end that lets answers finish."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

from attrs import field, frozen
from starlette.types import ASGIApp
from uvicorn import Config, Server

from mference_core.errors import MferenceError, UsageError
from mference_core.server.exchange import State
from mference_core.server.protocol import PatientProtocol

MAX_UNFINISHED_BYTES = 32 << 10
KEEP_ALIVE_SECONDS = 15
GRACE_SECONDS = 5.0


@frozen(kw_only=True)
class Address:
    """Where to listen; port 0 is any free one."""

    bind: str = "127.0.0.1"
    port: int = field(default=8080)

    @port.validator
    def _in_range(self, _: object, value: int) -> None:
        if not 0 <= value <= 65535:
            raise UsageError(what="--port", got=str(value), expected="0 to 65535")

    def listen(self) -> socket.socket:
        """Return a listening socket. Raises `UsageError` for a name that is none, `MferenceError` if it is taken."""
        try:
            found = socket.getaddrinfo(self.bind, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise UsageError(what="--bind", got=repr(self.bind), expected="an address of this machine") from error
        family, kind, _, _, where = found[0]
        listening = socket.socket(family, kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(where)
            listening.listen(128)
        except OSError as error:
            listening.close()
            remedy = "give another --port" if self.port else ""
            raise MferenceError(what=f"{self.url()} cannot be served: {error.strerror}", remedy=remedy) from error
        return listening

    def url(self, port: int | None = None) -> str:
        """Return where clients find it."""
        host = f"[{self.bind}]" if ":" in self.bind else self.bind
        return f"http://{host}:{self.port if port is None else port}"


class Draining(Server):
    """The library's server with an end of our own: answers may finish, for `drain_seconds`, then they are told."""

    def __init__(self, app: ASGIApp, state: State, drain_seconds: float) -> None:
        super().__init__(
            Config(
                app,
                http=PatientProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_UNFINISHED_BYTES,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(drain_seconds + GRACE_SECONDS) + 1,
            )
        )
        self.state, self.drain_seconds = state, drain_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone; `serve_on` takes them."""
        yield

    def drain(self) -> None:
        """Begin to end: no new requests, and those that run have so long. Asked again, they end at once."""
        if self.should_exit:
            self.state.cancel_all()
            return
        self.should_exit = self.state.draining = True
        asyncio.get_running_loop().call_later(self.drain_seconds, self.state.cancel_all)


async def serve_on(server: Draining, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until a signal, then drain."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # only the main thread has signals
        for number in signals:
            loop.add_signal_handler(number, server.drain)
    loop.call_soon(ready)
    try:
        await server.serve(sockets=[listening])
    finally:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            for number in signals:
                loop.remove_signal_handler(number)
