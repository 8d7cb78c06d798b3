"""The application: routes, the guard around them, and what every response carries."""

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from attrs import define, field
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mference_core.server import metrics as figures
from mference_core.server import pages
from mference_core.server.bodies import Gone, read_json
from mference_core.server.chat_completions import ChatCompletions
from mference_core.server.completions import Completions
from mference_core.server.errors import ANTHROPIC, OPENAI, ApiError, internal
from mference_core.server.exchange import Dialect, State, respond
from mference_core.server.messages import Messages, count_request
from mference_core.server.models import get_model, list_models
from mference_core.server.openai_fields import new_id
from mference_core.server.openapi import description
from mference_core.server.responses import Responses
from mference_core.server.safety import PREFLIGHT, Policy

Handler = Callable[[Request], Awaitable[Response]]
Log = Callable[[str], None]

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100
ALWAYS = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}


def say(text: str) -> None:
    """Write a line of the log."""
    stamp = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
    print(f"[{stamp}Z] {text}", file=sys.stderr, flush=True)  # noqa: T201  the log of a server


def speaks(scope: Scope) -> str:
    """Return the maker whose errors a request's client reads."""
    headers = Headers(scope=scope)
    return ANTHROPIC if scope["path"].startswith("/v1/messages") or "anthropic-version" in headers else OPENAI


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return an error in its client's dialect."""
    body = error.body(speaks(scope), scope.get("mference.id", ""))
    return JSONResponse(body, error.status, headers=error.headers)


def build(state: State, policy: Policy, log: Log = say) -> ASGIApp:
    """Return the application."""

    def answering(dialect: Dialect) -> Handler:
        async def answer(request: Request) -> Response:
            return await respond(request, state, dialect)

        return answer

    async def count(request: Request) -> Response:
        with state.admitted():
            ask = count_request(await read_json(request))
            lease = await state.shelf.take(ask.model)
            try:
                prompt, _ = await asyncio.to_thread(lease.served.prompt_of, ask)
            finally:
                lease.give_back()
        return JSONResponse({"input_tokens": len(prompt)})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def prometheus(_: Request) -> Response:
        return Response(state.metrics.text(state.active), headers={"content-type": figures.CONTENT_TYPE})

    async def live(_: Request) -> Response:
        return JSONResponse(state.metrics.figures(state.active))

    async def openapi(_: Request) -> Response:
        return JSONResponse(described)

    described = description(state.shelf.names)
    routes = [
        *(Route(path, answering(dialect), methods=["POST"]) for path, dialect in DIALECTS.items()),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
        Route("/v1/models", list_models(state.shelf), methods=["GET"]),
        Route("/v1/models/{model:path}", get_model(state.shelf), methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", prometheus, methods=["GET"]),
        Route("/figures", live, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        *pages.routes(),
    ]
    handlers: Any = {ApiError: _told, HTTPException: _http, Exception: _broken}
    inner = Starlette(routes=routes, exception_handlers=handlers)
    inner.router.redirect_slashes = False
    return Guard(app=inner, state=state, policy=policy, log=log)


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if error.status >= 500 and error.__cause__ is not None:
        request.scope["mference.cause"] = str(error.__cause__)
    return error_response(request.scope, error)


async def _broken(request: Request, _: Exception) -> Response:
    """Return what a client is told of a fault of ours; the guard logs it."""
    return error_response(request.scope, internal())


async def _http(request: Request, error: Exception) -> Response:
    """Return what the router says in the client's dialect."""
    assert isinstance(error, HTTPException)
    codes = {
        404: ("not_found", f"nothing at {request.url.path[:100]}"),
        405: ("method_not_allowed", "another method is needed"),
    }
    code, message = codes.get(error.status_code, ("invalid_request", str(error.detail)))
    if error.status_code == 405:
        message = f"{request.method} is not possible at {request.url.path[:100]}"
    told = ApiError(status=error.status_code, message=message, code=code, headers=dict(error.headers or {}))
    return error_response(request.scope, told)


def check_head(scope: Scope) -> None:
    """Raise `ApiError` for a head that is too large, or that says two things about where its body ends."""
    headers = scope["headers"]
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES or len(headers) > MAX_HEADERS:
        raise ApiError(
            status=431,
            message=f"the headers are more than {MAX_HEADERS} or {MAX_HEAD_BYTES} bytes",
            code="headers_too_large",
            headers={"connection": "close"},
        )
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise ApiError(
            message="content-length is set beside transfer-encoding",
            code="invalid_request",
            headers={"connection": "close"},
        )


@define(kw_only=True, eq=False)
class Guard:
    """Stands before every request: checks who asks, gives it an identity, logs it, and lets nothing of us leak."""

    app: ASGIApp
    state: State
    policy: Policy
    log: Log = field(repr=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["mference.id"] = new_id("req_")
        started, told = time.perf_counter(), _Told()
        headers = Headers(scope=scope)
        extra = {**ALWAYS, "x-request-id": scope["mference.id"], "request-id": scope["mference.id"]}
        extra |= self.policy.cors(headers.get("origin"))

        async def passing(message: Message) -> None:
            if message["type"] == "http.response.start":
                told.status = message["status"]
                present = {name for name, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in extra.items() if k.encode() not in present]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        try:
            await self._answer(scope, headers, receive, passing, told)
        finally:
            self._log(scope, told, time.perf_counter() - started)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send, told: "_Told") -> None:
        try:
            check_head(scope)
            self.policy.check(scope["method"], scope["path"], headers, page=pages.owns(scope["path"]))
            self.state.check_open()
            if scope["method"] == "OPTIONS" and self.policy.cors(headers.get("origin")):
                asked = headers.get("access-control-request-headers", "")
                allowed = {"access-control-allow-headers": asked} if _names(asked) else {}
                await Response(status_code=204, headers=PREFLIGHT | allowed)(scope, receive, send)
                return
            await self.app(scope, receive, send)
        except ApiError as error:
            await error_response(scope, error)(scope, receive, send)
        except Gone:
            told.reason = "the client went away"
        except Exception:  # noqa: BLE001  the last line: whatever it is, the client learns nothing of it
            told.reason = "internal error"
            for line in traceback.format_exc().splitlines():
                self.log(f"{scope['mference.id']} {line}")
            if told.status is None:
                await error_response(scope, internal())(scope, receive, send)

    def _log(self, scope: Scope, told: "_Told", seconds: float) -> None:
        route = scope["path"] if scope["path"] in DIALECTS else "other"
        self.state.metrics.answered(route, told.status or 499)
        if route == "other" and told.reason is None and (told.status or 500) < 400:
            return
        parts = [
            f"{scope['mference.id']} {scope['method']} {scope['path'][:100]!r} {told.status or 499} in {seconds:.2f}s"
        ]
        running = scope.get("mference.told")
        ends = [] if running is None else [track.end for track in running.answers.tracks if track.end is not None]
        for end in ends:
            made = end.figures
            parts.append(
                f"prompt={made.prompt_tokens} cached={made.cached_tokens} completion={made.new_tokens} finish={end.finish}"
            )
            if end.error is not None:
                parts.append(f"error={end.error.code}" + (f" ({end.cause})" if end.cause else ""))
        reasons = [] if running is None else [r for track in running.answers.tracks for r in track.malformed]
        parts += [f"unreadable call: {reason[:200]}" for reason in reasons]
        parts += [reason for reason in (told.reason, scope.get("mference.cause")) if reason is not None]
        self.log("; ".join(parts))


@define
class _Told:
    """What was told of one request."""

    status: int | None = None
    reason: str | None = None


def _names(asked: str) -> bool:
    """Say whether a preflight asks for header names and nothing stranger."""
    return (
        bool(asked) and len(asked) < 2000 and all(part.strip().replace("-", "").isalnum() for part in asked.split(","))
    )
