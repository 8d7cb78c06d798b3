"""The generation loop: prefill, sample, stop; tokens and text as they come, figures at the end."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import mlx.core as mx
from attrs import define, field, frozen

from mference_core.chat.format import Event, StreamDecoder, Text, ToolCall
from mference_core.engine import Engine
from mference_core.errors import MferenceError, NumericError, RequestError
from mference_core.rows import Row, make_tokens, take_tokens
from mference_core.sampling import Sampler, SamplingOptions
from mference_core.session import Session
from mference_core.stops import StopMatcher, check_stops

STOP_STRING, MAX_TOKENS, CANCELLED, DEADLINE = "stop_string", "max_tokens", "cancelled", "deadline"
FINISH = {
    "eos": "stop",
    "end_of_turn": "stop",
    STOP_STRING: "stop",
    MAX_TOKENS: "length",
    DEADLINE: "length",
    "tool_calls": "tool_calls",
}
"""Why generation ended -> the usual `finish_reason`."""

ENDED = ("eos", "end_of_turn")
"""Reasons that mean a tool result is waited for, if calls were made: not every dialect has a stop token for it."""


@frozen(kw_only=True)
class GenerateOptions:
    """One request: at most `max_new` tokens, sampling, and stop strings."""

    max_new: int = field(default=1024)
    sampling: SamplingOptions = field(factory=SamplingOptions)
    stop: tuple[str, ...] = field(default=(), converter=check_stops)

    @max_new.validator
    def _positive(self, _: object, value: int) -> None:
        if value < 1:
            raise RequestError(what="--max-new", got=str(value), expected="at least 1")


@define(kw_only=True)
class Figures:
    """Counts in tokens, times in seconds; decode excludes prefill and its first token."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second, cached ones not counted."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens after the first one per second."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds and self.new_tokens > 1 else 0.0


@define(kw_only=True, eq=False)
class Answer:
    """One answer as it grows: tokens in, events out; then `reason`, `token_ids`, `text` and `calls` say what it was.

    `stop_ids` maps ids to reasons; a stop token counts but has no text. Stop strings are looked for in visible text.
    Without a `decoder` there are no events, only `token_ids`. It has at most `limit` tokens.
    """

    options: GenerateOptions
    stop_ids: Mapping[int, str] = field(factory=dict)
    decoder: StreamDecoder | None = None
    limit: int = field(init=False)
    token_ids: list[int] = field(factory=list, init=False)
    text: str = field(default="", init=False)
    calls: list[ToolCall] = field(factory=list, init=False)
    reason: str = field(default=CANCELLED, init=False)
    ended: bool = field(default=False, init=False)
    _matcher: StopMatcher = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self.limit = self.options.max_new
        self._matcher = StopMatcher(stops=self.options.stop)

    @property
    def finish_reason(self) -> str:
        """Return stop, length, tool_calls or cancelled."""
        if self.calls and self.reason in ENDED:
            return "tool_calls"
        return FINISH.get(self.reason, self.reason)

    def push(self, token: int) -> list[Event]:
        """Take the next token and return what it completes; `ended` says whether it was the last."""
        self.token_ids.append(token)
        if token in self.stop_ids:
            return self.end(self.stop_ids[token])
        events = self._shown(self.decoder.push(token) if self.decoder else [])
        if self._matcher.stopped:
            self.reason, self.ended = STOP_STRING, True
        elif len(self.token_ids) >= self.limit:
            events += self.end(MAX_TOKENS)
        return events

    def end(self, reason: str) -> list[Event]:
        """End the answer for `reason` and return what was held back; a stop string in that is the reason instead."""
        self.reason, self.ended = reason, True
        known = MAX_TOKENS if reason == DEADLINE else reason
        events = self._shown(self.decoder.finish(known) if self.decoder else [])
        if self._matcher.stopped:
            self.reason = STOP_STRING
        return events + self._release()

    def _shown(self, events: Sequence[Event]) -> list[Event]:
        shown: list[Event] = []
        for event in events:
            if isinstance(event, Text):
                text = self._matcher.push(event.text)
                self.text += text
                if text:
                    shown.append(Text(text))
                if self._matcher.stopped:
                    break
                continue
            shown += self._release()
            if isinstance(event, ToolCall):
                self.calls.append(event)
            shown.append(event)
        return shown

    def _release(self) -> list[Event]:
        """Return text that was held back as the start of a stop string and is none."""
        text = self._matcher.finish()
        self.text += text
        return [Text(text)] if text else []


@define(kw_only=True, eq=False)
class Generation(Answer):
    """An answer that makes its own tokens; iterate it for events, then read what it was, and `figures`.

    `prompt` is the whole token history wanted; what the session already holds of it is not computed again.
    Closing the iterator early keeps the session usable.
    """

    session: Session
    prompt: Sequence[int]
    progress: Callable[[int], None] | None = None
    figures: Figures = field(factory=Figures, init=False)

    def __iter__(self) -> Iterator[Event]:
        for events in self.steps():
            yield from events

    def steps(self) -> Iterator[list[Event]]:
        """Yield what each token completes, token by token."""
        session, figures = self.session, self.figures
        self.limit = min(self.options.max_new, check_prompt(session.engine, self.prompt))
        cached = session.reuse(self.prompt)
        figures.prompt_tokens, figures.cached_tokens = len(self.prompt), cached
        sampler = Sampler(options=self.options.sampling, vocab_size=session.engine.graph.vocab_size, prompt=self.prompt)
        started = time.perf_counter()
        logits = session.prefill(self.prompt[cached:], self.progress)
        mx.eval(logits)
        figures.prefill_seconds = time.perf_counter() - started
        row = Row(session=session, sampler=sampler, left=self.limit)
        row.place(logits[None], 0)
        started = 0.0
        while not self.ended:
            (token,) = make_tokens(session.engine, [row])
            if isinstance(token, NumericError):
                session.recover()
                raise session.engine.locate_nonfinite(session.tokens) from token
            if isinstance(token, MferenceError):
                raise token
            figures.new_tokens += 1
            started = started or time.perf_counter()
            figures.decode_seconds = time.perf_counter() - started
            last = token in self.stop_ids or not row.left
            if not last:
                take_tokens(session.engine, [row])
            yield self.push(token)


def check_prompt(engine: Engine, prompt: Sequence[int]) -> int:
    """Return how many tokens an answer to `prompt` can have; raises `RequestError` for one that cannot be answered."""
    limit = engine.context
    if not prompt:
        raise RequestError(what="prompt", got="empty", expected="at least one token")
    if len(prompt) >= limit:
        raise RequestError(
            what="prompt",
            got=f"{len(prompt)} tokens",
            expected=f"at most {limit - 1} in a context of {limit}",
            remedy="shorten it or raise --max-context",
        )
    engine.check_ids(prompt)
    return limit - len(prompt)
