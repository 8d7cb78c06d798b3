"""The list of models, as each maker's clients read it."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mference_core.server.served import Served
from mference_core.server.shelf import Shelf

Handler = Callable[[Request], Awaitable[Response]]


def _entry(shelf: Shelf, name: str) -> dict[str, Any]:
    served = _in_memory(shelf, name)
    length = {} if served is None else {"context_length": served.context}
    return {"id": name, "object": "model", "created": shelf.loaded.created, "owned_by": "mference", **length}


def _anthropic(shelf: Shelf, name: str) -> dict[str, Any]:
    served = _in_memory(shelf, name)
    length = {} if served is None else {"max_input_tokens": served.context - 1, "max_tokens": served.context - 1}
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(shelf.loaded.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        **length,
    }


def _in_memory(shelf: Shelf, name: str) -> Served | None:
    """Return the model of a name if it is loaded: only then is it known how much it can hold."""
    served = shelf.served
    return served if served is not None and served.model_id == shelf.find(name) else None


def _foreign(request: Request) -> bool:
    return "anthropic-version" in request.headers


def list_models(shelf: Shelf) -> Handler:
    """Return the handler of the list."""

    async def models(request: Request) -> Response:
        names = shelf.names
        if _foreign(request):
            entries = [_anthropic(shelf, name) for name in names]
            edges = {"first_id": names[0], "last_id": names[-1], "has_more": False}
            return JSONResponse({"data": entries, **edges})
        return JSONResponse({"object": "list", "data": [_entry(shelf, name) for name in names]})

    return models


def get_model(shelf: Shelf) -> Handler:
    """Return the handler of one model."""

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        shelf.find(name)
        return JSONResponse(_anthropic(shelf, name) if _foreign(request) else _entry(shelf, name))

    return model
