"""Conversations as checked values: one shape for every template, whatever way a client wrote it.

A checked message is a dict of `role` and `content` (always a string), for assistants also `tool_calls` (a list, each
`{"id", "type": "function", "function": {"name", "arguments": dict}}`) and `reasoning_content` if there is any, for
tool results `tool_call_id` and `name`. Guidance (system, developer) comes before all else.
"""

import re
from pathlib import Path
from typing import Any

from mference_core.chat.values import check_value, load_json
from mference_core.errors import RequestError

Message = dict[str, Any]
GUIDANCE = ("system", "developer")
ROLES = (*GUIDANCE, "user", "assistant", "tool")
KEYS = {
    "assistant": {"role", "content", "name", "tool_calls", "reasoning_content"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _object(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(what=what, got=_kind(value), expected="an object")
    return value


def _kind(value: Any) -> str:
    names = {type(None): "missing", list: "a list", dict: "an object", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _content(what: str, value: Any, *, optional: bool) -> str:
    """Return content as text: a string, text parts joined, or nothing where that is allowed."""
    if value is None and optional:
        return ""
    if isinstance(value, list):
        parts = [_object(f"{what}[{n}]", part) for n, part in enumerate(value)]
        for n, part in enumerate(parts):
            if part.get("type", "text") != "text":
                raise RequestError(what=f"{what}[{n}].type", got=repr(part.get("type")), expected="'text'")
            if not isinstance(part.get("text"), str):
                raise RequestError(what=f"{what}[{n}].text", got=_kind(part.get("text")), expected="a string")
        value = "".join(part["text"] for part in parts)
    if not isinstance(value, str):
        raise RequestError(what=what, got=_kind(value), expected="a string or a list of text parts")
    check_value(what, value)
    return value


def _name(what: str, value: Any) -> str:
    if not isinstance(value, str) or not TOOL_NAME.fullmatch(value):
        raise RequestError(what=what, got=repr(value), expected="1 to 64 letters, digits, '_', '-' or '.'")
    return value


def _arguments(what: str, value: Any) -> dict[str, Any]:
    """Return the arguments of a past call: an object, or JSON text of one, even encoded twice."""
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = load_json(value or "{}")
            except ValueError as error:
                raise RequestError(what=what, got="not JSON", expected="a JSON object") from error
    check_value(what, value)
    return _object(what, {} if value is None else value)


def _call(what: str, value: Any, number: int) -> dict[str, Any]:
    call = _object(what, value)
    if call.get("type", "function") != "function":
        raise RequestError(what=f"{what}.type", got=repr(call["type"]), expected="'function'")
    function = _object(f"{what}.function", call.get("function"))
    name = _name(f"{what}.function.name", function.get("name"))
    identity = call.get("id") or f"call_{number}"
    if not isinstance(identity, str):
        raise RequestError(what=f"{what}.id", got=_kind(identity), expected="a string")
    check_value(f"{what}.id", identity)
    arguments = _arguments(f"{what}.function.arguments", function.get("arguments"))
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def check_messages(value: Any) -> list[Message]:
    """Return a conversation in the checked shape. Raises `RequestError` naming the first thing that is wrong."""
    if not isinstance(value, list | tuple) or not value:
        raise RequestError(
            what="messages", got="empty" if value in ([], ()) else _kind(value), expected="a list of messages"
        )
    messages: list[Message] = []
    open_calls: dict[str, str] = {}  # id to name, of calls without a result
    used: set[str] = set()
    for n, entry in enumerate(value):
        what = f"messages[{n}]"
        source = _object(what, entry)
        role = source.get("role")
        if role not in ROLES:
            raise RequestError(what=f"{what}.role", got=repr(role), expected=", ".join(ROLES))
        unknown = [
            k
            for k, v in source.items()
            if v not in (None, [], {}) and k not in KEYS.get(role, {"role", "content", "name"})
        ]
        if unknown:
            raise RequestError(what=f"{what}.{unknown[0]}", got="set", expected=f"no such field in a {role} message")
        if role in GUIDANCE and any(m["role"] not in GUIDANCE for m in messages):
            raise RequestError(what=f"{what}.role", got=repr(role), expected="guidance before all other messages")
        content = _content(f"{what}.content", source.get("content"), optional=role in ("assistant", "tool"))
        message: Message = {"role": role, "content": content}
        if role == "assistant":
            message |= _assistant(what, source, len(used))
            open_calls = {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
            _unique(what, [call["id"] for call in message.get("tool_calls", ())], used)
        elif role == "tool":
            message |= _result(what, source, open_calls)
        elif role == "user":
            open_calls = {}
        messages.append(message)
    return messages


def _unique(what: str, identities: list[str], used: set[str]) -> None:
    for identity in identities:
        if identity in used:
            raise RequestError(
                what=f"{what}.tool_calls id", got=f"{identity!r} again", expected="a new id for each call"
            )
        used.add(identity)


def _assistant(what: str, source: dict[str, Any], first: int) -> Message:
    extra: Message = {}
    calls = source.get("tool_calls")
    if calls is not None and not isinstance(calls, list | tuple):
        raise RequestError(what=f"{what}.tool_calls", got=_kind(calls), expected="a list of calls")
    if calls:
        extra["tool_calls"] = [_call(f"{what}.tool_calls[{n}]", call, first + n) for n, call in enumerate(calls)]
    if source.get("reasoning_content"):
        extra["reasoning_content"] = _content(f"{what}.reasoning_content", source["reasoning_content"], optional=False)
    return extra


def _result(what: str, source: dict[str, Any], open_calls: dict[str, str]) -> Message:
    """Match a tool result with its call: by id, or the oldest call without a result."""
    identity = source.get("tool_call_id") or next(iter(open_calls), None)
    if not isinstance(identity, str) or identity not in open_calls:
        got = "missing" if identity is None else repr(identity)
        raise RequestError(
            what=f"{what}.tool_call_id", got=got, expected="the id of a call before it that has no result yet"
        )
    return {"tool_call_id": identity, "name": open_calls.pop(identity)}


def check_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return tool declarations as `{"type": "function", "function": {name, description, parameters}}`, or None."""
    if value is None or value in ([], ()):
        return None
    if not isinstance(value, list | tuple):
        raise RequestError(what="tools", got=_kind(value), expected="a list of tools")
    tools = [_tool(f"tools[{n}]", tool) for n, tool in enumerate(value)]
    names = [tool["function"]["name"] for tool in tools]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise RequestError(what="a tool name", got=f"{repeated!r} twice", expected="a different name for each tool")
    return tools


def _tool(what: str, value: Any) -> dict[str, Any]:
    tool = _object(what, value)
    if tool.get("type", "function") != "function":
        raise RequestError(what=f"{what}.type", got=repr(tool["type"]), expected="'function'")
    function = _object(f"{what}.function", tool.get("function"))
    checked: dict[str, Any] = {"name": _name(f"{what}.function.name", function.get("name"))}
    checked["description"] = _content(f"{what}.function.description", function.get("description"), optional=True)
    parameters = function.get("parameters")
    if parameters is not None:
        schema = _object(f"{what}.function.parameters", parameters)
        check_value(f"{what}.function.parameters", schema)
        if not isinstance(schema.get("properties", {}), dict):
            raise RequestError(
                what=f"{what}.function.parameters.properties", got=_kind(schema["properties"]), expected="an object"
            )
        checked["parameters"] = schema
    return {"type": "function", "function": checked}


def read_messages(path: Path) -> list[Message]:
    """Read a conversation from a JSON file. Raises `RequestError` if it is missing, not UTF-8, not JSON or misshapen."""
    return check_messages(_read_json(path, "a JSON list of messages"))


def read_tools(path: Path) -> list[dict[str, Any]] | None:
    """Read tool declarations from a JSON file; raises as `read_messages`."""
    return check_tools(_read_json(path, "a JSON list of tools"))


def _read_json(path: Path, expected: str) -> Any:
    try:
        return load_json(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise RequestError(what=f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(what=f"{path}", got="not UTF-8", expected=expected) from error
    except ValueError as error:
        raise RequestError(what=f"{path} is not JSON: {error}") from error
