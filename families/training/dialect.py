"""How Gemma 4 writes documents: conversations as at run time, and plain text."""

import re
from pathlib import Path
from random import Random

import chats
import tools
from jinja2.sandbox import ImmutableSandboxedEnvironment

Parts = list[tuple[str, bool]]
TEMPLATE = Path(__file__).parents[1] / "mference_gemma4" / "chat_template.jinja"
THOUGHT = "<|channel>thought\n<channel|>"
MODEL = "<|turn>model\n"
OPENING = "<bos>"
STOPS = (1, 106, 50)
THINKING = 0.0
"""Share of documents in which the model thinks before it answers."""
_RESPONSE = re.compile(r"(response:.*?<tool_response\|>)", re.DOTALL)


def _raise(text: str) -> None:
    raise ValueError(text)


_ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.globals["raise_exception"] = _raise
_TEMPLATE = _ENVIRONMENT.from_string(TEMPLATE.read_text("utf-8"))


def render(messages: list[chats.Message], declared: list[tools.Schema] | None, *, generate: bool) -> str:
    """Render a conversation exactly as at run time, thinking off."""
    return _TEMPLATE.render(messages=messages, tools=declared, add_generation_prompt=generate, enable_thinking=False)


def last_reply(rng: Random, messages: list[chats.Message], declared: list[tools.Schema] | None, end: int) -> Parts:
    """Make the assistant message at `end` the target, after a fresh rendering of everything before it."""
    del rng
    message = messages[end]
    prompt = render(messages[:end], declared, generate=True)
    if not message.get("tool_calls"):
        return [(prompt, False), (f"{str(message['content']).strip()}<turn|>", True)]
    shown = render(messages[: end + 1], declared, generate=False)
    base = prompt.removesuffix(THOUGHT)
    return [(prompt, False), (shown[len(base) :].removesuffix("<turn|>\n") + "<|tool_response>", True)]


def whole_timeline(messages: list[chats.Message], declared: list[tools.Schema] | None) -> Parts:
    """Make every reply a target, in the form a running session has them: with the opening's empty thought."""
    first, *turns = render(messages, declared, generate=False).split(MODEL)
    parts: Parts = [(first, False)]
    for turn in turns:
        reply, mark, rest = turn.partition("<turn|>")
        parts.append((MODEL + THOUGHT, False))
        parts += [(piece, not piece.startswith("response:")) for piece in _RESPONSE.split(reply + mark) if piece]
        parts.append((rest, False))
    return parts[:-1]


def plain(text: str) -> Parts:
    """Return a document of plain text, all of it a target."""
    return [(f"{OPENING}{text}<eos>", True)]
