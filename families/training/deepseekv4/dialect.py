"""How DeepSeek V4 writes documents: conversations as at run time, with and without thoughts, and plain text.

Conversations come in two forms that differ where nothing is thought and no tool declared: rendered anew, a past answer
begins with a second `</think>`; in a session that goes on, it does not. The family's `normalize` is written again here,
because training runs without the project; a test compares the two.
"""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import chats
import tools
from jinja2.sandbox import ImmutableSandboxedEnvironment

Parts = list[tuple[str, bool]]
TEMPLATE = Path(__file__).parents[2] / "mference_deepseekv4" / "chat_template.jinja"
OPENING, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, THINK, NO_THINK = "<｜User｜>", "<｜Assistant｜><think>", "<｜Assistant｜></think>"
STOPS = (1,)
THINKING = 0.3
"""Share of documents in which the model thinks before it answers."""

_TEMPLATE = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE.read_text("utf-8"))


def compact(value: object) -> str:
    """Return JSON without spaces, keys in order."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _line(schema: tools.Schema) -> str:
    """Declare a tool: name, description and parameters, in this order."""
    function: dict[str, Any] = schema["function"]  # type: ignore[assignment]
    members = (f"{json.dumps(key)}:{compact(function[key])}" for key in ("name", "description", "parameters"))
    return "{" + ",".join(members) + "}"


def _calls(message: chats.Message) -> list[dict[str, object]]:
    calls: Any = message.get("tool_calls") or ()
    return [
        {
            "name": call["function"]["name"],
            "parameters": [
                {
                    "key": key,
                    "string": str(isinstance(value, str)).lower(),
                    "value": value if isinstance(value, str) else compact(value),
                }
                for key, value in sorted(call["function"]["arguments"].items())
            ],
        }
        for call in calls
    ]


def normalized(messages: Sequence[chats.Message], declared: list[tools.Schema] | None) -> list[dict[str, Any]]:
    """Return the turns as the template wants them: a system text where tools are declared, results in user turns."""
    turns: list[dict[str, Any]] = []
    if declared and messages[0]["role"] != "system":
        turns.append({"role": "system", "content": ""})
    for message in messages:
        content = message["content"] if isinstance(message["content"], str) else json.dumps(message["content"])
        role = message["role"]
        if role == "tool":
            role, content = "user", f"<tool_result>{content}</tool_result>"
        if role == "user" and turns and turns[-1]["role"] == "user":
            turns[-1]["content"] += f"\n\n{content}"
        else:
            turns.append({**message, "role": role, "content": content, "calls": _calls(message)})
    return turns


def render(
    messages: Sequence[chats.Message], declared: list[tools.Schema] | None, *, generate: bool, thinking: bool = False
) -> str:
    """Render a conversation exactly as at run time; tool results that are objects are JSON."""
    return _TEMPLATE.render(
        messages=normalized(messages, declared),
        tools=[{"line": _line(schema)} for schema in declared or ()] or None,
        add_generation_prompt=generate,
        enable_thinking=thinking,
    )


def _answered(
    messages: Sequence[chats.Message], declared: list[tools.Schema] | None, *, thinking: bool
) -> tuple[str, str]:
    """Return the prompt of the last message and what the model writes then."""
    prompt = render(messages[:-1], declared, generate=True, thinking=thinking)
    whole = render(messages, declared, generate=False, thinking=thinking)
    if not whole.startswith(prompt):
        raise ValueError(f"the template does not go on from its own opening: {whole!r}")
    answer = whole[len(prompt) :]
    return prompt, answer if thinking else answer.removeprefix("</think>")


def _with_thoughts(messages: Sequence[chats.Message]) -> list[chats.Message]:
    return [
        {**m, "reasoning_content": chats.thought(messages[: i + 1])} if m["role"] == "assistant" else m
        for i, m in enumerate(messages)
    ]


def last_reply(rng: Random, messages: list[chats.Message], declared: list[tools.Schema] | None, end: int) -> Parts:
    """Make the assistant message at `end` the target, after a fresh rendering of everything before it."""
    thinking = rng.random() < THINKING
    shown = messages[: end + 1]
    prompt, answer = _answered(_with_thoughts(shown) if thinking else shown, declared, thinking=thinking)
    return [(prompt, False), (answer, True)]


def whole_timeline(messages: list[chats.Message], declared: list[tools.Schema] | None) -> Parts:
    """Make every reply a target, in the form a running session has them: each as it was written."""
    thinking = zlib.crc32(str(messages).encode()) % 1000 < 1000 * THINKING
    shown = _with_thoughts(messages) if thinking else messages
    parts: Parts = []
    done = 0
    for end, message in enumerate(shown):
        if message["role"] != "assistant":
            continue
        if not parts:
            prompt, answer = _answered(shown[: end + 1], declared, thinking=thinking)
        else:  # what stands before this turn is as it was written; only the turn itself is rendered
            (asked,) = normalized(shown[done:end], None)
            prompt = f"{USER}{asked['content']}{THINK if thinking else NO_THINK}"
            _, answer = _answered([{"role": "user", "content": "x"}, message], declared, thinking=thinking)
        parts += [(prompt, False), (answer, True)]
        done = end + 1
    return parts


def plain(text: str) -> Parts:
    """Return a document of plain text, all of it a target but the token that begins it."""
    return [(OPENING, False), (f"{text}{EOS}", True)]
