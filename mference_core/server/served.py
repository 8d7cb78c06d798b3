"""The served model: from an internal request to the scheduler's requests, every check made before any work."""

import time
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import define, field, frozen

from mference_core.chat import ChatFormat, StreamDecoder, TextDecoder, check_messages, check_tools, render
from mference_core.errors import MferenceError, RequestError
from mference_core.generate import GenerateOptions
from mference_core.sampling import SamplingOptions
from mference_core.scheduler.request import Request, Scheduling
from mference_core.server.constraints import constraint_of
from mference_core.server.errors import ApiError, api_error, refused
from mference_core.server.requests import NONE, Ask
from mference_core.tokens import Tokenizer

SEED_STEP = 0x9E3779B97F4A7C15


@frozen(kw_only=True)
class Prepared:
    """What to submit: one request for each answer, all of the same prompt."""

    ask: Ask
    requests: tuple[Request, ...]
    prompt: tuple[int, ...]
    thinking: bool


@define(kw_only=True, eq=False)
class Served:
    """One loaded model as the server sees it. Everything here may be called from any thread.

    `defaults` stand in for what a request leaves out.
    """

    model_id: str
    tokenizer: Tokenizer
    chat: ChatFormat
    context: int
    vocab_size: int
    scheduler: Scheduling
    defaults: GenerateOptions = field(factory=GenerateOptions)
    deadline_seconds: float | None = None
    created: int = field(factory=lambda: int(time.time()))
    stop_ids: Mapping[int, str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.stop_ids = self.chat.stop_ids(self.tokenizer)

    def prompt_of(self, ask: Ask) -> tuple[list[int], bool]:
        """Return the prompt's ids and whether the model reasons. Raises `ApiError`."""
        try:
            if ask.prompt is not None:
                return self._raw(ask), False
            thinking = self.chat.thinking(effort=ask.effort, enable_thinking=ask.think)
        except RequestError as error:
            said = error.what
            raise api_error(error, ask.path("effort" if said == "reasoning_effort" else said)) from error
        try:
            messages, tools = check_messages(ask.messages), check_tools(ask.tools)
            offered = None if ask.choice == NONE else tools
            effort: dict[str, Any] = {} if ask.effort is None else {"reasoning_effort": ask.effort}
            prompt = render(self.tokenizer, self.chat, messages, tools=offered, enable_thinking=thinking, **effort)
        except MferenceError as error:
            named = next((name for name in ("messages", "tools") if error.what.startswith(name)), "messages")
            path = error.what if error.what.startswith(named) and " " not in error.what else ask.path(named)
            raise api_error(error, path) from error
        return prompt, thinking

    def _raw(self, ask: Ask) -> list[int]:
        assert ask.prompt is not None
        if isinstance(ask.prompt, str):
            return self.chat.raw_prompt(self.tokenizer, ask.prompt)
        bad = next((token for token in ask.prompt if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise RequestError(what="prompt", got=f"token id {bad}", expected=f"ids from 0 to {self.vocab_size - 1}")
        if not ask.prompt:
            raise RequestError(what="prompt", got="empty", expected="at least one token")
        return ask.prompt

    def prepare(self, ask: Ask) -> Prepared:
        """Return what to submit. Raises `ApiError` for a request that cannot be served; takes the time of rendering."""
        prompt, thinking = self.prompt_of(ask)
        limit = self._limit(ask, len(prompt))
        options = self._options(ask, limit)
        requests = tuple(self._request(ask, prompt, options, n, thinking=thinking) for n in range(ask.n))
        return Prepared(ask=ask, requests=requests, prompt=tuple(prompt), thinking=thinking)

    def _limit(self, ask: Ask, prompt: int) -> int:
        """Return the most new tokens."""
        room = self.context - prompt
        asked = ask.max_new
        if room < 1 or (asked is not None and asked > room):
            wish = "" if asked is None else f" and {asked} of the answer"
            raise ApiError(
                message=f"the prompt of {prompt} tokens{wish} is more than this server's context of {self.context} tokens;"
                " shorten it, ask for fewer, or serve with a larger --max-context",
                param=ask.path("messages" if room < 1 else "max_new"),
                code="context_length_exceeded",
            )
        return asked if asked is not None else min(self.defaults.max_new, room)

    def _options(self, ask: Ask, limit: int) -> GenerateOptions:
        try:
            sampling = attrs.evolve(self.defaults.sampling, **ask.sampling)
            worst = max(sampling.logit_bias, default=0)
            if worst >= self.vocab_size:
                raise refused(
                    "logit_bias", f"a key of logit_bias is {worst}; expected a token id below {self.vocab_size}"
                )
            return GenerateOptions(max_new=limit, sampling=sampling, stop=ask.stop)
        except RequestError as error:
            raise api_error(error) from error

    def _request(self, ask: Ask, prompt: list[int], options: GenerateOptions, n: int, *, thinking: bool) -> Request:
        seed = options.sampling.seed
        if n and seed is not None:
            sampling: SamplingOptions = attrs.evolve(options.sampling, seed=(seed + n * SEED_STEP) % (1 << 64))
            options = attrs.evolve(options, sampling=sampling)
        decoder: StreamDecoder = TextDecoder(self.tokenizer, None)
        if ask.prompt is None:
            offered = None if ask.choice == NONE else check_tools(ask.tools)
            decoder = self.chat.decoder(self.tokenizer, offered, prompt)
        return Request(
            prompt=tuple(prompt),
            options=options,
            stop_ids=self.stop_ids,
            decoder=decoder,
            logprobs=ask.logprobs,
            constraint=constraint_of(ask, self.tokenizer, self.chat, self.vocab_size, prompt, thinking=thinking),
            deadline_seconds=self.deadline_seconds,
        )


def sampling_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `SamplingOptions` in a checked body of an OpenAI dialect."""
    names = ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty")
    found = {name: given[name] for name in names if name in given}
    if "top_p" in given:
        found["top_p"] = None if given["top_p"] == 1 else given["top_p"]
    if "top_k" in given:
        found["top_k"] = given["top_k"] or None
    if "seed" in given:
        found["seed"] = given["seed"] % (1 << 64)
    if "logit_bias" in given:
        found["logit_bias"] = given["logit_bias"]
    return found
