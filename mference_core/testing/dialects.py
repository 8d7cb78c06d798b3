"""What tests of a chat dialect need: tool declarations, past calls, and the events of a whole answer."""

from collections.abc import Sequence
from typing import Any

from mference_core.chat import ChatFormat, Event, Reasoning, Text
from mference_core.tokens import Tokenizer


def function(name: str = "get", **properties: Any) -> dict[str, Any]:
    """Return the declaration of a tool whose parameters have these schemas."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "Gets it.", "parameters": parameters}}


def call(arguments: Any, name: str = "get", identity: str = "c1") -> dict[str, Any]:
    """Return a past call as an assistant message holds it."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer_events(
    chat: ChatFormat,
    tokenizer: Tokenizer,
    answer: str | Sequence[int],
    *,
    prompt: str,
    tools: list[dict[str, Any]] | None = None,
    reason: str = "end_of_turn",
) -> list[Event]:
    """Decode an answer, given as ids or as text whose control tokens are meant; neighbouring texts are joined."""
    ids = tokenizer.encode(answer, control=True) if isinstance(answer, str) else answer
    decoder = chat.decoder(tokenizer, tools, tokenizer.encode(prompt, control=True))
    joined: list[Event] = []
    for event in [event for token in ids for event in decoder.push(token)] + decoder.finish(reason):
        last = joined[-1] if joined else None
        if isinstance(event, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
        else:
            joined.append(event)
    return joined
