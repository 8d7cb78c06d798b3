"""The OpenAPI description, made from the very declarations that check requests."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mference_core.server import chat_completions, completions, messages_fields, responses_fields
from mference_core.server.errors import ANTHROPIC, OPENAI
from mference_core.server.fields import Record

Schema = dict[str, Any]

OPENAI_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
EVERYWHERE = {401: "The token is missing or wrong.", 403: "The host or the origin may not ask.", 503: "Shutting down."}
POSTED = {
    400: "A field is wrong; the error names it.",
    404: "There is no such model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full.",
    500: "The server failed.",
    504: "The deadline is over.",
}
OBJECT: Schema = {"type": "object"}
EVENT: Schema = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}


def _is(kind: str, *required: str, **properties: Any) -> Schema:
    """Return the schema of an object whose field `object` or `type` is `kind`."""
    return {
        "type": "object",
        "required": list(required),
        "properties": properties | {kind.split("=", maxsplit=1)[0]: {"const": kind.split("=")[1]}},
    }


COUNT_ANSWER = {"type": "object", "required": ["input_tokens"], "properties": {"input_tokens": {"type": "integer"}}}
POSTS: dict[str, tuple[Record, str, str, Schema]] = {
    "/v1/chat/completions": (
        chat_completions.REQUEST,
        OPENAI,
        "Answer a conversation (OpenAI Chat Completions).",
        _is("object=chat.completion", "id", "object", "created", "model", "choices", "usage"),
    ),
    "/v1/completions": (
        completions.REQUEST,
        OPENAI,
        "Continue a text (OpenAI Completions).",
        _is("object=text_completion", "id", "object", "created", "model", "choices", "usage"),
    ),
    "/v1/responses": (
        responses_fields.REQUEST,
        OPENAI,
        "Answer a conversation (OpenAI Responses).",
        _is("object=response", "id", "object", "created_at", "model", "status", "output", "usage"),
    ),
    "/v1/messages": (
        messages_fields.REQUEST,
        ANTHROPIC,
        "Answer a conversation (Anthropic Messages).",
        _is("type=message", "id", "type", "role", "model", "content", "stop_reason", "usage"),
    ),
    "/v1/messages/count_tokens": (
        messages_fields.COUNT,
        ANTHROPIC,
        "Count the tokens of a conversation.",
        COUNT_ANSWER,
    ),
}


def _error(dialect: str, meaning: str) -> Schema:
    schema = "AnthropicError" if dialect == ANTHROPIC else "OpenAIError"
    return {
        "description": meaning,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }


def _errors(dialect: str, statuses: dict[int, str]) -> Schema:
    return {str(status): _error(dialect, meaning) for status, meaning in sorted(statuses.items())}


def _post(record: Record, dialect: str, summary: str, answer: Schema, models: Sequence[str]) -> Schema:
    asked = record.schema()
    asked["properties"]["model"] = {"type": "string", "enum": list(models)}
    content: Schema = {"application/json": {"schema": answer}}
    if "stream" in record.fields:
        content["text/event-stream"] = {"schema": EVENT}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": asked}}},
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **_errors(dialect, EVERYWHERE | POSTED),
        },
    }


def _get(summary: str, content_type: str, schema: Schema, *more: int) -> Schema:
    known = {status: POSTED[status] for status in more}
    answer = {"description": "It.", "content": {content_type: {"schema": schema}}}
    return {"summary": summary, "responses": {"200": answer, **_errors(OPENAI, EVERYWHERE | known)}}


def description(models: Sequence[str]) -> Schema:
    """Return the OpenAPI 3.1 document of a server that serves these names."""
    try:
        release = version("mference")
    except PackageNotFoundError:
        release = "0"
    names = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": list(models)}}]
    listed = {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": OBJECT}},
    }
    gets: dict[str, Schema] = {
        "/v1/models": _get("List the models.", "application/json", listed),
        "/v1/models/{model}": {**_get("Describe a model.", "application/json", OBJECT, 404), "parameters": names},
        "/health": _get("Say whether the server serves.", "application/json", OBJECT),
        "/metrics": _get("Figures for Prometheus.", "text/plain", {"type": "string"}),
        "/figures": _get("The same figures for a page.", "application/json", OBJECT),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "mference", "version": release},
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": {path: {"post": _post(*entry, models)} for path, entry in POSTS.items()}
        | {path: {"get": entry} for path, entry in gets.items()},
        "components": {
            "schemas": {"OpenAIError": OPENAI_ERROR, "AnthropicError": ANTHROPIC_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
