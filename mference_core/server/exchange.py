"""One request from its body to its answer, the same for every dialect: admit, read, prepare, submit, tell."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from attrs import define, field, frozen
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mference_core.errors import MferenceError
from mference_core.server import sse
from mference_core.server.answers import Answers, Piece, Track
from mference_core.server.bodies import Gone, read_json
from mference_core.server.errors import ApiError, api_error, busy, draining, internal
from mference_core.server.metrics import Metrics
from mference_core.server.requests import Ask
from mference_core.server.served import Prepared, Served
from mference_core.server.shelf import Shelf

PING_SECONDS = 5.0
T = TypeVar("T")


@frozen(kw_only=True)
class Wanted:
    """What a body asks for: the answers, as a stream or whole, and what the dialect must remember to write them."""

    ask: Ask
    stream: bool = False
    inert: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(factory=dict)


class Writer(Protocol):
    """Writes the answers of one request in a dialect."""

    ping: bytes

    def opening(self) -> Iterable[bytes]:
        """Return the events before the first token."""
        ...

    def said(self, index: int, piece: Piece) -> Iterable[bytes]:
        """Return the events of a piece of answer `index`."""
        ...

    def ended(self, index: int, track: Track) -> Iterable[bytes]:
        """Return the events of the end of answer `index`."""
        ...

    def closing(self) -> Iterable[bytes]:
        """Return the events after all answers."""
        ...

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Return the events of a failure after the head was sent."""
        ...

    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        ...


class Dialect(Protocol):
    """A protocol's way to ask and to be told."""

    name: str
    family: str

    def read(self, body: dict[str, Any]) -> Wanted:
        """Translate a body. Raises `ApiError`."""
        ...

    def writer(self, wanted: Wanted, prepared: Prepared, tracks: list[Track], served: Served) -> Writer:
        """Return what writes the answers."""
        ...


@define(kw_only=True, eq=False)
class State:
    """What all requests share: the model, limits and figures, and whether the server is about to end."""

    shelf: Shelf
    metrics: Metrics
    held: int = 32
    draining: bool = False
    running: set[Answers] = field(init=False, factory=set)
    active: int = field(init=False, default=0)

    @property
    def served(self) -> Served:
        """The first model, whether it is in memory or not."""
        return self.shelf.loaded

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold a place from before anything is read or rendered. Raises `ApiError` 429 when all are taken."""
        if self.active >= self.held:
            raise busy(f"{self.active} requests are held already; ask again later")
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def check_open(self) -> None:
        """Raise `ApiError` 503 once the server is about to end."""
        if self.draining:
            raise draining()

    def cancel_all(self) -> None:
        """End every running answer."""
        for answers in list(self.running):
            answers.cancel()


async def submit(served: Served, prepared: Prepared) -> Answers:
    """Start the answers. Raises `ApiError`."""
    try:
        return Answers.start(prepared, served, asyncio.get_running_loop())
    except MferenceError as error:
        raise api_error(error) from error


async def attended(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do what may take long while the client is there; nothing but its leaving is received any more.

    Raises `Gone`, the work cancelled, when it leaves.
    """
    doing, watching = asyncio.create_task(work), asyncio.create_task(left(receive))
    try:
        await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise Gone
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


async def left(receive: Receive) -> None:
    """Wait until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(http: HttpRequest, state: State, dialect: Dialect) -> Response:
    """Answer one request for text. Raises `ApiError` and `Gone` before anything is sent."""
    place = contextlib.ExitStack()
    with contextlib.ExitStack() as until_told:
        until_told.enter_context(place)
        place.enter_context(state.admitted())
        body = await read_json(http)
        wanted = dialect.read(body)

        async def prepare() -> tuple[Served, Prepared]:
            lease = await state.shelf.take(wanted.ask.model)
            place.callback(lease.give_back)
            return lease.served, await asyncio.to_thread(lease.served.prepare, wanted.ask)

        served, prepared = await attended(http.receive, prepare())
        answers = await submit(served, prepared)
        until_told.pop_all()  # from here on `Told` gives the place back
    headers = {"mference-without-effect": ", ".join(wanted.inert)} if wanted.inert else {}
    writer = dialect.writer(wanted, prepared, answers.tracks, served)
    told = Told(state=state, answers=answers, writer=writer, place=place, name=dialect.name, headers=headers)
    http.scope["mference.told"] = told
    return EventStream(told) if wanted.stream else await told.whole(http.receive)


@define(kw_only=True, eq=False)
class Told:
    """Answers on their way to one client; gives back what they hold when it ends, however it ends."""

    state: State
    answers: Answers
    writer: Writer
    place: contextlib.ExitStack
    name: str
    headers: dict[str, str]
    _started: float = field(init=False, factory=time.perf_counter)
    _first: float | None = field(init=False, default=None)

    @contextlib.asynccontextmanager
    async def _watched(self, receive: Receive) -> AsyncIterator[None]:
        """Cancel the answers when the client goes away, and give everything back at the end."""
        self.state.running.add(self.answers)
        watch = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            self.answers.cancel()
            self.answers.mailbox.close()
            self.state.running.discard(self.answers)
            self.place.close()
            watch.cancel()
            self.state.metrics.told(self.name, self.answers.tracks, self._started, self._first)

    async def _watch(self, receive: Receive) -> None:
        await left(receive)
        self.answers.mailbox.leave()
        self.answers.cancel()

    async def _news(self) -> list[tuple[int, Piece]] | None:
        news = await self.answers.news(PING_SECONDS)
        if self._first is None and any(track.tokens for track in self.answers.tracks):
            self._first = time.perf_counter()
        return news

    @property
    def _failure(self) -> ApiError | None:
        if self.answers.mailbox.overflowed:
            return ApiError(status=408, message="the client does not read its answer", code="client_too_slow")
        return self.answers.error

    async def whole(self, receive: Receive) -> Response:
        """Return the whole response. Raises `ApiError` if an answer failed, `Gone` if nobody waits for it."""
        async with self._watched(receive):
            while not self.answers.done:
                if self.answers.mailbox.gone:
                    raise Gone
                await self._news()
            if self._failure is not None:
                raise self._failure
            return JSONResponse(self.writer.whole(), headers=self.headers)

    async def stream(self, receive: Receive, send: Send, head: list[tuple[bytes, bytes]]) -> None:
        """Send the head and the events as they come. Raises `Gone`."""

        async def emit(frames: Iterable[bytes], *, more: bool = True) -> None:
            data = b"".join(frames)
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        async with self._watched(receive):
            await send({"type": "http.response.start", "status": 200, "headers": head})
            try:
                async for frames in self._frames():
                    await emit(frames)
                await emit(
                    self.writer.closing() if self._failure is None else self.writer.failed(self._failure), more=False
                )
            except Gone:
                raise
            except Exception:
                await emit(self.writer.failed(internal()), more=False)
                raise

    async def _frames(self) -> AsyncIterator[list[bytes]]:
        yield list(self.writer.opening())
        told: set[int] = set()
        while not self.answers.done:
            news = await self._news()
            if self.answers.mailbox.gone:
                raise Gone
            if news is None:
                yield [self.writer.ping]
                continue
            frames = [frame for index, piece in news for frame in self.writer.said(index, piece)]
            for index, track in enumerate(self.answers.tracks):
                if track.end is not None and track.end.error is None and index not in told:
                    told.add(index)
                    frames += self.writer.ended(index, track)
            yield frames


class EventStream(Response):
    """A response of server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, told: Told) -> None:
        self.told = told
        self.status_code, self.background = 200, None
        self.body = b""
        self.init_headers({**sse.HEADERS, **told.headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  the ASGI signature
        """Send the head, then the events; a failure of ours is told as an event."""
        head = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        await self.told.stream(receive, send, head)
