"""How Qwen 3.6 writes documents: conversations as at run time, with and without thoughts, and plain text.

Every document ends in <|endoftext|>, which is how training knows where the next one begins.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import chats
import tools
from jinja2.sandbox import ImmutableSandboxedEnvironment

Parts = list[tuple[str, bool]]
TEMPLATE = Path(__file__).parents[2] / "mference_qwen36" / "chat_template.jinja"
OPEN = "<|im_start|>assistant\n<think>\n"
SHUT = OPEN + "\n</think>\n\n"
OPENING, END = "", "<|endoftext|>"
STOPS = (2, 0)
THINKING = 0.3
"""Share of documents in which the model thinks before it answers."""


def _raise(text: str) -> None:
    raise ValueError(text)


_ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.globals["raise_exception"] = _raise
_ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
_TEMPLATE = _ENVIRONMENT.from_string(TEMPLATE.read_text("utf-8"))


def render(
    messages: Sequence[chats.Message], declared: list[tools.Schema] | None, *, generate: bool, thinking: bool = False
) -> str:
    """Render a conversation exactly as at run time; tool results that are objects are JSON."""
    plain = [m if isinstance(m.get("content"), str) else {**m, "content": json.dumps(m["content"])} for m in messages]
    return _TEMPLATE.render(messages=plain, tools=declared, add_generation_prompt=generate, enable_thinking=thinking)


def last_reply(rng: Random, messages: list[chats.Message], declared: list[tools.Schema] | None, end: int) -> Parts:
    """Make the assistant message at `end` the target, after a fresh rendering of everything before it."""
    thinking = rng.random() < THINKING
    shown = [
        {**m, "reasoning_content": chats.thought(messages[: i + 1])} if thinking and m["role"] == "assistant" else m
        for i, m in enumerate(messages[: end + 1])
    ]
    prompt = render(shown[:end], declared, generate=True, thinking=thinking)
    whole = render(shown, declared, generate=False)
    if not whole.startswith(prompt):
        raise ValueError(f"the template does not go on from its own opening: {whole!r}")
    return [(prompt, False), (whole[len(prompt) :].removesuffix("\n"), True), (END, False)]


def whole_timeline(messages: list[chats.Message], declared: list[tools.Schema] | None) -> Parts:
    """Make every reply a target, in the form a running session has them: with the opening's empty thought."""
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    parts: Parts = [(render(messages[:first], declared, generate=True), False)]
    ask = [{"role": "user", "content": "x"}]
    for i in range(first, len(messages)):
        message = messages[i]
        if message["role"] == "assistant":
            reply = render([*ask, message], None, generate=False)
            parts.append((reply[reply.index(SHUT) + len(SHUT) :].removesuffix("\n"), True))
        elif i + 1 < len(messages) and messages[i + 1]["role"] == "assistant":
            run = i
            while messages[run]["role"] == "tool" and messages[run - 1]["role"] == "tool":
                run -= 1
            parts.append(("\n" + render(messages[run : i + 1], None, generate=True), False))
    return [*parts, (END, False)]


def plain(text: str) -> Parts:
    """Return a document of plain text, all of it a target."""
    return [(f"{text}{END}", True)]
