"""The generation loop: prefill, sample, stop; tokens and text as they come, figures at the end."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import mlx.core as mx
from attrs import define, field, frozen

from mference_core.chat.format import Event, StreamDecoder, Text, ToolCall
from mference_core.errors import NumericError, RequestError
from mference_core.sampling import Sampler, SamplingOptions, greedy
from mference_core.session import Session
from mference_core.stops import StopMatcher, check_stops

STOP_STRING, MAX_TOKENS, CANCELLED = "stop_string", "max_tokens", "cancelled"
FINISH = {"eos": "stop", "end_of_turn": "stop", STOP_STRING: "stop", MAX_TOKENS: "length", "tool_calls": "tool_calls"}
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
class Generation:
    """One answer; iterate it for events, then read `reason`, `token_ids`, `text`, `calls` and `figures`.

    `prompt` is the whole token history wanted; what the session already holds of it is not computed again.
    `stop_ids` maps ids to reasons; a stop token counts but has no text. Stop strings are looked for in visible text.
    Without a `decoder` there are no events, only `token_ids`.
    Closing the iterator early keeps the session usable.
    """

    session: Session
    prompt: Sequence[int]
    options: GenerateOptions
    stop_ids: Mapping[int, str] = field(factory=dict)
    decoder: StreamDecoder | None = None
    progress: Callable[[int], None] | None = None
    token_ids: list[int] = field(factory=list, init=False)
    text: str = field(default="", init=False)
    calls: list[ToolCall] = field(factory=list, init=False)
    reason: str = field(default=CANCELLED, init=False)
    figures: Figures = field(factory=Figures, init=False)

    def __iter__(self) -> Iterator[Event]:
        matcher = StopMatcher(stops=self.options.stop)
        for token in self._tokens():
            self.token_ids.append(token)
            if token in self.stop_ids:
                self.reason = self.stop_ids[token]
                break
            yield from self._shown(self.decoder.push(token) if self.decoder else [], matcher)
            if matcher.stopped:
                self.reason = STOP_STRING
                break
        else:
            self.reason = MAX_TOKENS
        if not matcher.stopped:
            yield from self._shown(self.decoder.finish(self.reason) if self.decoder else [], matcher)
            if matcher.stopped:
                self.reason = STOP_STRING
            yield from self._release(matcher)

    def _shown(self, events: Sequence[Event], matcher: StopMatcher) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Text):
                text = matcher.push(event.text)
                self.text += text
                if text:
                    yield Text(text)
                if matcher.stopped:
                    return
                continue
            yield from self._release(matcher)
            if isinstance(event, ToolCall):
                self.calls.append(event)
            yield event

    def _release(self, matcher: StopMatcher) -> Iterator[Event]:
        """Yield text that was held back as the start of a stop string and is none."""
        text = matcher.finish()
        self.text += text
        if text:
            yield Text(text)

    @property
    def finish_reason(self) -> str:
        """Return stop, length, tool_calls or cancelled."""
        if self.calls and self.reason in ENDED:
            return "tool_calls"
        return FINISH.get(self.reason, self.reason)

    def _tokens(self) -> Iterator[int]:
        """Yield sampled tokens, at most as many as asked for and as fit the context."""
        session, options = self.session, self.options
        room = session.engine.context - len(self.prompt)
        if room < 1:
            limit = session.engine.context
            raise RequestError(
                what="prompt",
                got=f"{len(self.prompt)} tokens",
                expected=f"at most {limit - 1} in a context of {limit}",
                remedy="shorten it or raise --max-context",
            )
        if not self.prompt:
            raise RequestError(what="prompt", got="empty", expected="at least one token")
        cached = session.reuse(self.prompt)
        self.figures.prompt_tokens, self.figures.cached_tokens = len(self.prompt), cached
        sampler = Sampler(options=options.sampling, vocab_size=session.engine.graph.vocab_size, prompt=self.prompt)
        started = time.perf_counter()
        logits = session.prefill(self.prompt[cached:], self.progress)
        mx.eval(logits)
        self.figures.prefill_seconds = time.perf_counter() - started
        limit = min(options.max_new, room)
        resident = all(held is None or held.source.full for held in session.engine.experts)
        run = self._ahead if options.sampling.plain_greedy and resident else self._in_step
        started, first = time.perf_counter(), True
        for token in run(sampler, logits, limit):
            self.figures.new_tokens += 1
            if first:
                started, first = time.perf_counter(), False
            self.figures.decode_seconds = time.perf_counter() - started
            yield token

    def _in_step(self, sampler: Sampler, logits: mx.array, limit: int) -> Iterator[int]:
        for made in range(1, limit + 1):
            try:
                token = sampler.sample(logits)
            except NumericError as error:
                raise self.session.engine.locate_nonfinite(self.session.tokens) from error
            yield token
            if made < limit:
                logits = self.session.decode(token)

    def _ahead(self, sampler: Sampler, logits: mx.array, limit: int) -> Iterator[int]:
        """Greedy with everything in memory: the next token's graph is queued before this one is read."""
        session, none = self.session, sampler.vocab_size
        coming = _checked_greedy(logits)
        mx.async_eval(coming)
        for made in range(1, limit + 1):
            now = coming
            if made < limit:
                coming = _checked_greedy(session.engine.forward_array(session, now))
                mx.async_eval(coming)
            token = cast("int", now.item())
            if token == none:
                session.recover()
                raise session.engine.locate_nonfinite(session.tokens)
            if made < limit:
                session.settle([token])
            sampler.accept(token)
            yield token


def _checked_greedy(logits: mx.array) -> mx.array:
    """Return the best id (lowest on ties), or V where a logit is NaN or plus infinity."""
    bad = mx.isnan(logits).any() | (logits == mx.inf).any()
    return mx.where(bad, mx.array(logits.shape[-1], mx.uint32), greedy(logits))
