"""The ChatML dialect as SmolLM2 135M speaks it: two stop tokens, one system message, no thinking, no tool calls."""

from importlib.resources import files
from typing import Any

from mference_core.chat import ChatFormat, Message, TextDecoder
from mference_core.errors import RequestError

STOPS = {"<|im_end|>": "end_of_turn", "<|endoftext|>": "eos"}
GUIDANCE = ("system", "developer")


def normalize(
    messages: list[Message], tools: list[dict[str, Any]] | None
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Join all guidance into one system message; refuse tools, which this model was not trained to call."""
    if tools:
        raise RequestError(what="tools", got="given", expected="none: smollm2 does not call tools")
    for number, message in enumerate(messages):
        if message["role"] == "tool" or message.get("tool_calls"):
            raise RequestError(what=f"messages[{number}]", got="a tool call", expected="text: smollm2 calls no tools")
    guidance = [message["content"] for message in messages if message["role"] in GUIDANCE]
    rest = [message for message in messages if message["role"] not in GUIDANCE]
    start: list[Message] = [{"role": "system", "content": "\n".join(guidance)}] if guidance else []
    return start + rest, None


def chat_format() -> ChatFormat:
    """Return the dialect."""
    return ChatFormat(
        stops=STOPS,
        template=files("mference_smollm2").joinpath("chat_template.jinja").read_text(encoding="utf-8"),
        normalize=normalize,
        decoder=lambda tokenizer, tools, prompt: TextDecoder(tokenizer, None, prompt),  # noqa: ARG005
    )
