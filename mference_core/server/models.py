"""The list of models, as each maker's clients read it."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mference_core.server.served import Served

Handler = Callable[[Request], Awaitable[Response]]


def _entry(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "mference",
        "context_length": served.context,
    }


def _anthropic(served: Served, name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": served.context - 1,
        "max_tokens": served.context - 1,
    }


def _foreign(request: Request) -> bool:
    return "anthropic-version" in request.headers


def list_models(served: Served) -> Handler:
    """Return the handler of the list."""

    async def models(request: Request) -> Response:
        names = [served.model_id, *served.names]
        if _foreign(request):
            entries = [_anthropic(served, name) for name in names]
            edges = {"first_id": names[0], "last_id": names[-1], "has_more": False}
            return JSONResponse({"data": entries, **edges})
        return JSONResponse({"object": "list", "data": [_entry(served, name) for name in names]})

    return models


def get_model(served: Served) -> Handler:
    """Return the handler of one model."""

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        served.check_model(name)
        return JSONResponse(_anthropic(served, name) if _foreign(request) else _entry(served, name))

    return model
