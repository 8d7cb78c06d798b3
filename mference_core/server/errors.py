"""What a client is told when something is wrong: one error value, and its body in each dialect."""

from typing import Any, ClassVar

from attrs import field, frozen

from mference_core.errors import Busy, MferenceError, NumericError, RequestError

OPENAI, ANTHROPIC = "openai", "anthropic"

OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
BUSY_SECONDS = 1


@frozen(kw_only=True, str=False)
class ApiError(Exception):
    """An answer other than 200: `param` names the field that is wrong, `code` is for programs."""

    status: int = 400
    message: str
    param: str | None = None
    code: str = "invalid_value"
    headers: dict[str, str] = field(factory=dict)
    slug: ClassVar[str] = "api"

    def __str__(self) -> str:
        return self.message

    def body(self, dialect: str, request_id: str) -> dict[str, Any]:
        """Return the error as a dialect writes it."""
        if dialect == ANTHROPIC:
            fallback = "api_error" if self.status >= 500 else "invalid_request_error"
            kind = ANTHROPIC_TYPES.get(self.status, fallback)
            return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = OPENAI_TYPES.get(self.status, fallback)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Return a 400 about one field."""
    return ApiError(message=message, param=param or None, code=code)


def busy(message: str, seconds: int = BUSY_SECONDS) -> ApiError:
    """Return the 429 of a full queue; clients of both makers wait as told and try again."""
    return ApiError(status=429, message=message, code="queue_full", headers={"retry-after": str(seconds)})


def internal() -> ApiError:
    """Return a 500 that says nothing of the inside; the log has the rest."""
    return ApiError(
        status=500,
        message="the request failed inside the server; its log says why",
        code="internal_error",
        headers={"x-should-retry": "false"},
    )


def draining() -> ApiError:
    """Return the 503 of a server that is about to end."""
    return ApiError(
        status=503,
        message="the server is shutting down",
        code="shutting_down",
        headers={"retry-after": str(BUSY_SECONDS), "connection": "close"},
    )


def late() -> ApiError:
    """Return the 504 of a request that ran into its deadline."""
    return ApiError(
        status=504,
        message="the request ran into the server's deadline",
        code="deadline_exceeded",
        headers={"x-should-retry": "false"},
    )


def api_error(error: MferenceError, param: str | None = None) -> ApiError:
    """Return what a client is told of one of our errors: the line itself where it is about the request."""
    if isinstance(error, RequestError):
        return ApiError(message=str(error), param=param or named(error.what))
    if isinstance(error, Busy):
        return busy(str(error), error.retry_after_seconds)
    if isinstance(error, NumericError):
        return ApiError(status=500, message=str(error), code="not_finite", headers={"x-should-retry": "false"})
    return internal()


def named(what: str) -> str | None:
    """Return the field an error is about where its subject is spelt like one."""
    subject = what.removeprefix("a key of ").split(" ")[0]
    plain = subject.replace(".", "").replace("_", "").replace("[", "").replace("]", "")
    return subject if plain.isalnum() and plain.isascii() and subject == what.removeprefix("a key of ") else None
