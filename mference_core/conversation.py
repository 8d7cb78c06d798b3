"""A chat on one session: the history as messages and as the very tokens the model has seen."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import define, field

from mference_core.chat import ChatFormat, Message, check_messages, read_messages, render
from mference_core.chat.format import Event
from mference_core.errors import RequestError
from mference_core.generate import GenerateOptions, Generation
from mference_core.session import Session
from mference_core.tokens import Tokenizer


@define(kw_only=True, eq=False)
class Conversation:
    """Turns of user and model. What a turn has computed is never computed again.

    A further turn goes on from the exact tokens of the last answer rather than from its re-rendered text; where the
    template does not allow that, the session keeps the longest prefix it can.
    """

    session: Session
    tokenizer: Tokenizer
    chat: ChatFormat
    options: GenerateOptions
    system: str | None = None
    messages: list[Message] = field(factory=list, init=False)
    dropped: int = field(default=0, init=False)
    last: Generation | None = field(default=None, init=False)
    _tokens: list[int] = field(factory=list, init=False)
    _stops: dict[int, str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._stops = self.chat.stop_ids(self.tokenizer)
        self.clear()

    def clear(self) -> None:
        """Go back to the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self._tokens = []

    def ask(self, text: str) -> Iterator[Event]:
        """Add a user turn and yield the events of the answer; the history keeps what was shown of it.

        Closing the iterator early (Ctrl-C) keeps the partial answer; an answer without text takes the turn back.
        Raises `RequestError`, the history unchanged, if the newest turn alone does not fit the context.
        """
        self.dropped = 0
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt, messages = self._fit(messages)
        generation = Generation(
            session=self.session,
            prompt=prompt,
            options=self.options,
            stop_ids=self._stops,
            decoder=self.chat.decoder(self.tokenizer, None, prompt),
        )
        self.last = generation
        try:
            yield from generation
        finally:
            if generation.text.strip():
                self.messages = [*messages, {"role": "assistant", "content": generation.text}]
                said = [token for token in generation.token_ids if token not in self._stops]
                self._tokens = [*prompt, *said]

    def _fit(self, messages: list[Message]) -> tuple[list[int], list[Message]]:
        """Return the prompt, the oldest turns left out while it does not fit."""
        prompt = self._bridged(messages) or self._render(messages)
        limit = self.session.engine.context
        while len(prompt) >= limit:
            first = 1 if self.system else 0
            if len(messages) <= first + 1:
                raise RequestError(
                    what=f"this turn of {len(prompt)} tokens",
                    got=f"too long for a context of {limit}",
                    remedy="shorten it or raise --max-context",
                )
            messages = [*messages[:first], *messages[first + 1 :]]
            self.dropped += 1
            prompt = self._render(messages)
        return prompt, messages

    def _render(self, messages: list[Message]) -> list[int]:
        return render(self.tokenizer, self.chat, messages)

    def _bridged(self, messages: list[Message]) -> list[int] | None:
        """Return the tokens so far, the end of their turn and the new turn, or None where the template forbids it.

        A template may write the last answer otherwise once it is past, without its thoughts; it may change nothing
        before it.
        """
        if not self._tokens:
            return None
        before = render(self.tokenizer, self.chat, messages[:-1], add_generation_prompt=False)
        after = self._render(messages)
        ends, later = self._ends(before), self._ends(after)
        if not ends or len(later) < len(ends):
            return None
        asked, said = (ends[-2] + 1 if len(ends) > 1 else 0), later[len(ends) - 1]
        close = before[ends[-1] :]
        if after[:asked] != before[:asked] or after[said : said + len(close)] != close:
            return None
        return [*self._tokens, *after[said:]]

    def _ends(self, ids: list[int]) -> list[int]:
        return [at for at, token in enumerate(ids) if token in self._stops]

    def save(self, path: Path) -> None:
        """Write the messages as JSON, whole or not at all. Raises `RequestError`."""
        staged = path.with_name(f".{path.name}.part")
        try:
            staged.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", "utf-8")
            staged.replace(path)
        except OSError as error:
            staged.unlink(missing_ok=True)
            raise RequestError(what=f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Take over saved messages. Raises `RequestError`, the history unchanged, for anything else."""
        messages: list[dict[str, Any]] = check_messages(read_messages(path))
        self.system = next((m["content"] for m in messages if m["role"] == "system"), None)
        self.messages, self._tokens = messages, []
