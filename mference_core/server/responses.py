"""OpenAI's Responses."""

import base64
import binascii
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from mference_core.chat import Message, load_json
from mference_core.server import openai_fields as shared
from mference_core.server.answers import Track
from mference_core.server.chat_completions import without
from mference_core.server.errors import OPENAI, refused
from mference_core.server.exchange import Wanted
from mference_core.server.requests import AUTO, NAMED, NONE, REQUIRED, Ask, settled
from mference_core.server.responses_fields import ENCRYPTED, REQUEST, WITH_LOGPROBS
from mference_core.server.responses_writer import ResponseWriter
from mference_core.server.served import Prepared, Served, sampling_fields

SEAL = "mference-reasoning:"
"""Begins what stands for encrypted reasoning: the text itself, in base 64, for it is no secret here."""


def seal(text: str) -> str:
    """Return reasoning as clients carry it from one request to the next."""
    return SEAL + base64.b64encode(text.encode()).decode()


def unseal(path: str, text: str) -> str:
    """Return the reasoning in what a client sends back. Raises `ApiError` for another server's."""
    try:
        if text.startswith(SEAL):
            return base64.b64decode(text.removeprefix(SEAL), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        pass
    raise refused(path, f"{path} was not made by this server")


def joined(namespace: str | None, name: str) -> str:
    """Return the one name that a tool of a namespace has for the model: every dialect can write it."""
    return name if namespace is None else f"{namespace}__{name}"


def flat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return functions, those of namespaces under their joined names, `namespace` and `own` saying what they were."""
    found: list[dict[str, Any]] = []
    for tool in tools:
        if tool["type"] == "function":
            found.append(dict(tool))
            continue
        for inner in tool["tools"]:
            about = " ".join(filter(None, [tool.get("description"), inner.get("description")]))
            name = joined(tool["name"], inner["name"])
            found.append({**inner, "name": name, "description": about, "namespace": tool["name"], "own": inner["name"]})
    return found


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a string or of parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def translate(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation in the shape the templates know: an assistant's items in a row are one turn.

    Raises `ApiError` for a call that is none, and for a result without its call.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[Message] = []
    called, waiting = set[str](), set[str]()
    for n, item in enumerate(given):
        path = f"input[{n}]"
        match item["type"]:
            case "message" if item["role"] != "assistant":
                found.append({"role": item["role"], "content": text_of(item["content"])})
                waiting.clear()
            case "message":
                turn = _turn(found)
                turn["content"] += text_of(item["content"])
            case "function_call":
                if item["call_id"] in called:
                    raise refused(f"{path}.call_id", f"{path}.call_id is {item['call_id'][:100]!r} again")
                called.add(item["call_id"])
                waiting.add(item["call_id"])
                function = {
                    "name": joined(item.get("namespace"), item["name"]),
                    "arguments": _arguments(path, item["arguments"]),
                }
                calls = _turn(found).setdefault("tool_calls", [])
                calls.append({"id": item["call_id"], "type": "function", "function": function})
            case "reasoning":
                turn = _turn(found)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _reasoning(path, item)
            case _:
                if item["call_id"] not in waiting:
                    said = f"{path}.call_id is {item['call_id'][:100]!r}; expected a call before it without a result"
                    raise refused(f"{path}.call_id", said)
                waiting.discard(item["call_id"])
                found.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])})
    return settled(found)


def _arguments(path: str, text: str) -> dict[str, Any]:
    """Return the arguments of a call: JSON text of an object, even encoded twice."""
    value: Any = text or "{}"
    with contextlib.suppress(ValueError):
        value = load_json(value)
        value = load_json(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise refused(f"{path}.arguments", f"{path}.arguments is not the text of a JSON object")
    return value


def _turn(found: list[Message]) -> Message:
    """Return the assistant's turn that is being said."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _reasoning(path: str, item: Mapping[str, Any]) -> str:
    if item.get("content"):
        return text_of(item["content"])
    if "encrypted_content" in item:
        return unseal(f"{path}.encrypted_content", item["encrypted_content"])
    return "\n\n".join(part["text"] for part in item.get("summary", ()))


def read_choice(given: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the tool choice and the name it forces. Raises `ApiError` for one that tools cannot meet."""
    choice, tools = given.get("tool_choice"), given.get("tools", [])
    if choice is None or choice == NONE or (choice == AUTO and tools):
        return choice or AUTO, None
    named = choice["name"] if isinstance(choice, dict) else None
    if choice == AUTO:
        return AUTO, None
    shared.check_tools_path(tools, [tool["name"] for tool in tools], named, "tool_choice")
    return (NAMED, named) if named is not None else (REQUIRED, None)


class Responses:
    """The dialect."""

    name, family = "responses", OPENAI

    def read(self, body: dict[str, Any]) -> Wanted:
        """Translate a body. Raises `ApiError`."""
        given = REQUEST.read("", body)
        include, text = given.get("include", []), given.get("text", {})
        if "top_logprobs" in given and WITH_LOGPROBS not in include:
            raise refused("top_logprobs", f"top_logprobs is set without {WITH_LOGPROBS} in include")
        if "stream_options" in given and not given.get("stream", False):
            raise refused("stream_options", "stream_options is set without stream; leave it out or set stream to true")
        messages = translate(given["input"])
        if given.get("instructions"):
            messages.insert(0, {"role": "system", "content": given["instructions"]})
        choice, named = read_choice(given)
        tools = flat_tools(given.get("tools", []))
        ask = Ask(
            model=given["model"],
            messages=messages,
            tools=[
                {"type": "function", "function": without(tool, "strict", "type", "namespace", "own")} for tool in tools
            ],
            choice=choice,
            named=named,
            parallel=given.get("parallel_tool_calls", True),
            strict=any(tool.get("strict", False) for tool in tools),
            effort=given.get("reasoning", {}).get("effort"),
            output=shared.wanted_format(text.get("format", {}), "text.format", nested=False),
            max_new=given.get("max_output_tokens"),
            sampling=sampling_fields(given),
            logprobs=given.get("top_logprobs", 0) if WITH_LOGPROBS in include else None,
            paths={"messages": "input", "max_new": "max_output_tokens", "effort": "reasoning.effort"},
        )
        return Wanted(
            ask=ask, stream=given.get("stream", False), inert=tuple(REQUEST.inert(given)), notes={"given": given}
        )

    def writer(self, wanted: Wanted, prepared: Prepared, tracks: list[Track], served: Served) -> ResponseWriter:
        """Return what writes the answer."""
        given = wanted.notes["given"]
        sampling = prepared.requests[0].options.sampling
        return ResponseWriter(
            track=tracks[0],
            given=given | {"temperature": sampling.temperature, "top_p": sampling.top_p or 1.0},
            model=served.model_id,
            tokenizer=served.tokenizer,
            prompt_tokens=len(prepared.prompt),
            names={
                tool["name"]: {"name": tool["own"], "namespace": tool["namespace"]}
                for tool in flat_tools(given.get("tools", []))
                if "namespace" in tool
            },
            seal=seal if ENCRYPTED in given.get("include", []) else None,
            with_logprobs=wanted.ask.logprobs is not None,
        )
