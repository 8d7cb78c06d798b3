"""Reading a request body: bounded in bytes, time and depth, strict JSON without repeated keys."""

import asyncio
import json
from typing import Any

from starlette.requests import Request

from mference_core.chat.values import check_value, exact_number
from mference_core.errors import RequestError
from mference_core.server.errors import ApiError

MAX_BODY_BYTES = 8 << 20
BODY_SECONDS = 30.0
DISCARD_BYTES = 64 << 20
"""What is read of a body that is too large, so that its sender hears why before the connection ends."""
PARSE_HERE_BYTES = 32 << 10
"""Larger bodies are parsed beside the event loop."""


class Gone(Exception):
    """The client went away; nobody is there to be answered."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ApiError(
            message=f"the key {twice[:100]!r} is repeated in one object", param=twice[:100], code="invalid_json"
        )
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def parse(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises `ApiError` for anything else."""
    try:
        value = json.loads(
            data.decode("utf-8"), parse_float=exact_number, parse_constant=_no_constant, object_pairs_hook=_unique
        )
    except UnicodeDecodeError as error:
        raise ApiError(message=f"the body is not UTF-8 at byte {error.start}", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(message="the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(message=f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(message="the body is not a JSON object", code="invalid_json")
    try:
        check_value("the body", value)
    except RequestError as error:
        raise ApiError(message=str(error), code="invalid_json") from error
    return value


def check_type(request: Request) -> None:
    """Raise `ApiError` unless a body is declared to be plain JSON in UTF-8."""
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8"):
        raise ApiError(
            status=415, message="content-type is not application/json in UTF-8", code="unsupported_media_type"
        )
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(status=415, message="content-encoding is not supported", code="unsupported_media_type")


async def read_json(request: Request, most: int = MAX_BODY_BYTES, seconds: float = BODY_SECONDS) -> dict[str, Any]:
    """Return a request's JSON object.

    Raises `ApiError` 415 for another content type, 413 over `most` bytes, 408 after `seconds`, 400 for bad JSON, and
    `Gone`.
    """
    check_type(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > DISCARD_BYTES:
        raise _too_large(most)
    try:
        async with asyncio.timeout(seconds):
            data = await _collect(request, most)
    except TimeoutError as error:
        raise ApiError(
            status=408,
            message=f"the body did not arrive within {seconds:g} seconds",
            code="request_timeout",
            headers={"connection": "close"},
        ) from error
    return parse(data) if len(data) <= PARSE_HERE_BYTES else await asyncio.to_thread(parse, data)


async def _collect(request: Request, most: int) -> bytes:
    data, size = bytearray(), 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Gone
        part = message.get("body", b"")
        size += len(part)
        if size <= most:
            data += part
        elif size > DISCARD_BYTES:
            raise _too_large(most)
        if not message.get("more_body", False):
            break
    if size > most:
        raise _too_large(most)
    return bytes(data)


def _too_large(most: int) -> ApiError:
    return ApiError(
        status=413,
        message=f"the body is larger than {most} bytes",
        code="request_too_large",
        headers={"connection": "close"},
    )
