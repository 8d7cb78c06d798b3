"""Anthropic's Messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from mference_core.chat import Message
from mference_core.server.answers import Track
from mference_core.server.errors import ANTHROPIC, refused
from mference_core.server.exchange import Wanted
from mference_core.server.fields import Record
from mference_core.server.messages_fields import COUNT, REQUEST
from mference_core.server.messages_writer import MessageWriter
from mference_core.server.requests import AUTO, NAMED, NONE, REQUIRED, Ask, OutputFormat, settled
from mference_core.server.served import Prepared, Served, sampling_fields

CHOICES = {"auto": AUTO, "any": REQUIRED, "tool": NAMED, "none": NONE}


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a string or of text blocks."""
    return content if isinstance(content, str) else "\n\n".join(block["text"] for block in content)


def translate(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation in the shape the templates know; turns of one side in a row are one turn.

    Raises `ApiError` for a result without its call, and for a call without its result.
    """
    found: list[Message] = []
    waiting: dict[str, str] = {}  # ids of the last assistant turn's calls -> where they are
    for n, message in enumerate(messages):
        path = f"messages[{n}].content"
        blocks = message["content"]
        if message["role"] == "system":
            found.append({"role": "system", "content": text_of(blocks)})
            continue
        blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
        if message["role"] == "assistant":
            if waiting and not (found and found[-1]["role"] == "assistant"):
                raise _unanswered(waiting)
            turn = _assistant(blocks)
            waiting |= {call["id"]: path for call in turn.get("tool_calls", ())}
            joined = _join(found[-1], turn) if found and found[-1]["role"] == "assistant" else None
            found[-1:] = [joined] if joined is not None else [*found[-1:], turn]
        else:
            _user(found, waiting, path, blocks)
    if waiting:
        raise _unanswered(waiting)
    if messages[-1]["role"] == "assistant":
        raise refused("messages", "the last message is the assistant's; an answer that was begun is not continued here")
    return found


def _unanswered(waiting: Mapping[str, str]) -> Exception:
    identity, path = next(iter(waiting.items()))
    return refused(path, f"the tool_use {identity!r} in {path} has no tool_result in the next message")


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> Message:
    said = "".join(block["text"] for block in blocks if block["type"] == "text")
    thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    calls = [
        {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": block["input"]}}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    message: Message = {"role": "assistant", "content": said}
    message |= {"reasoning_content": thought} if thought else {}
    return message | ({"tool_calls": calls} if calls else {})


def _join(first: Message, second: Message) -> Message:
    joined: Message = {"role": "assistant", "content": first["content"] + second["content"]}
    thought = first.get("reasoning_content", "") + second.get("reasoning_content", "")
    joined |= {"reasoning_content": thought} if thought else {}
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return joined | ({"tool_calls": calls} if calls else {})


def _user(found: list[Message], waiting: dict[str, str], path: str, blocks: Sequence[Mapping[str, Any]]) -> None:
    texts: list[str] = []
    for n, block in enumerate(blocks):
        where = f"{path}[{n}]"
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        identity = block["tool_use_id"]
        if texts:
            raise refused(where, f"{where} is a tool_result after text; results come first")
        if waiting.pop(identity, None) is None:
            raise refused(
                f"{where}.tool_use_id",
                f"{where}.tool_use_id is {identity[:100]!r}; expected a tool_use of the turn before",
            )
        content = text_of(block.get("content", ""))
        content = f"Error: {content}" if block.get("is_error", False) else content
        found.append({"role": "tool", "tool_call_id": identity, "content": content})
    if waiting:
        raise _unanswered(waiting)
    if texts and found and found[-1]["role"] == "user":
        found[-1] = {"role": "user", "content": "\n\n".join([found[-1]["content"], *texts])}
    elif texts:
        found.append({"role": "user", "content": "\n\n".join(texts)})


def conversation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Ask` that decide the prompt. Raises `ApiError`."""
    messages = settled(translate(given["messages"]))
    if "system" in given and text_of(given["system"]):
        messages.insert(0, {"role": "system", "content": text_of(given["system"])})
    tools, choice = given.get("tools", []), given.get("tool_choice", {"type": "auto"})
    named = choice.get("name")
    if named is not None and all(tool["name"] != named for tool in tools):
        raise refused("tool_choice.name", f"tool_choice.name is {named!r}, which is not among tools")
    if choice["type"] == "any" and not tools:
        raise refused("tool_choice", "tool_choice is any without tools")
    thinking, output = given.get("thinking", {"type": "disabled"}), given.get("output_config", {})
    form = output.get("format")
    return {
        "model": given["model"],
        "messages": messages,
        "tools": [{"type": "function", "function": _function(tool)} for tool in tools],
        "choice": CHOICES[choice["type"]],
        "named": named,
        "parallel": not choice.get("disable_parallel_tool_use", False),
        "strict": any(tool.get("strict", False) for tool in tools),
        "think": True if thinking["type"] != "disabled" else None,
        "effort": _effort(output.get("effort"), thinking["type"]),
        "thinking_budget": thinking.get("budget_tokens"),
        "output": None if form is None else OutputFormat(schema=form["schema"], path="output_config.format.schema"),
        "paths": {
            "max_new": "max_tokens",
            "effort": "output_config.effort",
            "enable_thinking": "thinking",
            "tool_choice": "tool_choice",
        },
    }


def _effort(effort: str | None, thinking: str) -> str | None:
    """Return the effort to ask for: only a model that thinks has one."""
    return effort if thinking != "disabled" else None


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    return function | ({"description": tool["description"]} if "description" in tool else {})


def inert_fields(record: Record, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the given fields that change nothing."""
    effortless = "output_config" in given and given.get("thinking", {"type": "disabled"})["type"] == "disabled"
    extra = ["output_config.effort"] if effortless and "effort" in given["output_config"] else []
    return (*record.inert(given), *extra)


class Messages:
    """The dialect."""

    name, family = "messages", ANTHROPIC

    def read(self, body: dict[str, Any]) -> Wanted:
        """Translate a body. Raises `ApiError`."""
        given = REQUEST.read("", body)
        thinking = given.get("thinking", {})
        if thinking.get("budget_tokens", 0) >= given["max_tokens"]:
            raise refused("thinking.budget_tokens", "thinking.budget_tokens is not below max_tokens")
        ask = Ask(
            **conversation(given),
            max_new=given["max_tokens"],
            sampling=sampling_fields(given),
            stop=tuple(given.get("stop_sequences", ())),
        )
        notes = {"omit": thinking.get("display") == "omitted"}
        return Wanted(ask=ask, stream=given.get("stream", False), inert=inert_fields(REQUEST, given), notes=notes)

    def writer(self, wanted: Wanted, prepared: Prepared, tracks: list[Track], served: Served) -> MessageWriter:
        """Return what writes the answer."""
        return MessageWriter(
            track=tracks[0], model=served.model_id, prompt_tokens=len(prepared.prompt), omit=wanted.notes["omit"]
        )


def count_request(body: dict[str, Any]) -> Ask:
    """Translate the body of a count. Raises `ApiError`."""
    return Ask(**conversation(COUNT.read("", body)))
