"""The page at `/`: static files, read once, under a policy that lets them load nothing from elsewhere."""

import mimetypes
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mference_core.server.errors import ApiError

PREFIX = "/page/"
INDEX = "index.html"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": POLICY, "x-frame-options": "DENY", "cache-control": "no-cache"}


def read_files() -> dict[str, bytes]:
    """Return every file of the page by its path below `page/`."""
    found: dict[str, bytes] = {}

    def visit(folder: Traversable, above: str) -> None:
        for entry in folder.iterdir():
            path = f"{above}{entry.name}"
            if entry.is_dir() and not entry.name.startswith(("_", ".")):
                visit(entry, f"{path}/")
            elif entry.is_file() and not entry.name.startswith((".", "_")) and not entry.name.endswith(".py"):
                found[path] = entry.read_bytes()

    root = files("mference_core.server").joinpath("page")
    if root.is_dir():
        visit(root, "")
    return found


def owns(path: str) -> bool:
    """Say whether a path is the page's: what lies there is the same for everyone and holds no secret."""
    return path == "/" or path.startswith(PREFIX)


def kind_of(name: str) -> str:
    """Return the content type of a file."""
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    kind = "text/javascript" if name.endswith((".js", ".mjs")) else kind
    return f"{kind}; charset=utf-8" if kind.startswith("text/") or kind.endswith(("json", "svg+xml")) else kind


def routes() -> list[Route]:
    """Return the routes of the page."""
    held = read_files()

    async def show(request: Request) -> Response:
        name = request.path_params.get("name", INDEX)
        if name not in held:
            raise ApiError(status=404, message="there is no such file", code="not_found")
        return Response(held[name], headers={**HEADERS, "content-type": kind_of(name)})

    return [Route("/", show, methods=["GET"]), Route(f"{PREFIX}{{name:path}}", show, methods=["GET"])]
