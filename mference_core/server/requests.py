"""The one internal request: what every dialect is translated into."""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from mference_core.chat import Message
from mference_core.chat.messages import GUIDANCE

AUTO, NONE, REQUIRED, NAMED = "auto", "none", "required", "named"


def settled(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in which guidance comes first: later guidance is told in its place, marked, by the user.

    Templates know guidance at the beginning alone, and moving it there would change what came before.
    """
    first = next((n for n, message in enumerate(messages) if message["role"] not in GUIDANCE), len(messages))
    return [*messages[:first], *map(_told_later, messages[first:])]


def _told_later(message: Message) -> Message:
    if message["role"] not in GUIDANCE:
        return message
    content = message["content"]
    text = content if isinstance(content, str) else "\n\n".join(part["text"] for part in content)
    return {"role": "user", "content": f"<system>\n{text}\n</system>"}


@frozen(kw_only=True)
class OutputFormat:
    """What the answer's text must be: a JSON object, or JSON that fits `schema`. `path` is where the client wrote it."""

    schema: Mapping[str, Any] | None = None
    path: str = "response_format"


@frozen(kw_only=True)
class Ask:
    """Answers wanted of the model, in no dialect.

    `messages` are in the shape that `chat.check_messages` reads; or there is a raw `prompt`, text or ids. `sampling`
    holds the fields of `SamplingOptions` that were given. `effort` and `think` are wishes for `ChatFormat.thinking`;
    `thinking_budget` is the most tokens of reasoning. `paths` maps our words to the client's, for errors.
    """

    model: str
    messages: list[Message] = field(factory=list)
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] = field(factory=list)
    choice: str = AUTO
    named: str | None = None
    parallel: bool = True
    strict: bool = False
    effort: str | None = None
    think: bool | None = None
    thinking_budget: int | None = None
    output: OutputFormat | None = None
    max_new: int | None = None
    sampling: Mapping[str, Any] = field(factory=dict)
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    paths: Mapping[str, str] = field(factory=dict)

    def path(self, ours: str) -> str:
        """Return what the client calls a field of ours."""
        return self.paths.get(ours, ours)
