"""OpenAI's older Completions: raw prompts, text or token ids."""

import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from attrs import define, field

from mference_core.sampling import MAX_LOGPROBS, LogProbs
from mference_core.server import openai_fields as shared
from mference_core.server import sse
from mference_core.server.answers import Piece, Said, Track
from mference_core.server.errors import OPENAI, ApiError, refused
from mference_core.server.exchange import Wanted
from mference_core.server.fields import Either, Field, ListOf, Record, Text, Truth, Whole
from mference_core.server.requests import Ask
from mference_core.server.served import Prepared, Served, sampling_fields
from mference_core.tokens import Tokenizer

TOKEN_IDS = ListOf(kind=Whole(low=0), least=1)
PROMPT = Either(
    kinds=(
        Text(least=1),
        TOKEN_IDS,
        ListOf(kind=Text(least=1), least=1, most=1),
        ListOf(kind=TOKEN_IDS, least=1, most=1),
    ),
    what="a string or a list of token ids, or a list of one of these",
)
REQUEST = Record(
    fields={
        "model": Field(kind=Text(least=1), required=True),
        "prompt": Field(kind=PROMPT, required=True, note="One prompt, as it is: no template is put around it."),
        **shared.SAMPLING,
        **shared.STREAMING,
        "n": Field(kind=Whole(low=1, high=shared.MAX_ANSWERS)),
        "max_tokens": Field(kind=Whole(low=1)),
        "logprobs": Field(kind=Whole(low=0, high=MAX_LOGPROBS)),
        "echo": Field(kind=Truth()),
        "user": Field(kind=Text(), inert=True),
    },
    refuses={
        "best_of": "ask for n answers and choose",
        "suffix": "the models here do not fill in the middle",
    },
)


class Completions:
    """The dialect."""

    name, family = "completions", OPENAI

    def read(self, body: dict[str, Any]) -> Wanted:
        """Translate a body. Raises `ApiError`."""
        given = REQUEST.read("", body)
        prompt = given["prompt"]
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if given.get("echo", False) and "logprobs" in given:
            raise refused("echo", "echo beside logprobs is not supported: a prompt's tokens are not scored here")
        ask = Ask(
            model=given["model"],
            prompt=prompt,
            max_new=given.get("max_tokens"),
            sampling=sampling_fields(given),
            stop=shared.stops_of(given.get("stop")),
            n=given.get("n", 1),
            logprobs=given.get("logprobs"),
            paths={"messages": "prompt", "max_new": "max_tokens"},
        )
        with_usage = shared.check_stream_options(given)
        notes = {"usage": with_usage, "echo": given.get("echo", False)}
        return Wanted(ask=ask, stream=given.get("stream", False), inert=tuple(REQUEST.inert(given)), notes=notes)

    def writer(self, wanted: Wanted, prepared: Prepared, tracks: list[Track], served: Served) -> "CompletionWriter":
        """Return what writes the answers."""
        prompt = wanted.ask.prompt
        echo = prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt or (), spell_control=True)
        return CompletionWriter(
            tracks=tracks,
            model=served.model_id,
            tokenizer=served.tokenizer,
            prompt_tokens=len(prepared.prompt),
            with_usage=wanted.notes["usage"],
            with_logprobs=wanted.ask.logprobs is not None,
            echo=echo if wanted.notes["echo"] else "",
        )


@define(kw_only=True, eq=False)
class CompletionWriter:
    """Writes text completions, whole or in chunks."""

    tracks: list[Track]
    model: str
    tokenizer: Tokenizer
    prompt_tokens: int
    with_usage: bool
    with_logprobs: bool
    echo: str
    ping: bytes = sse.PING
    _id: str = field(init=False, factory=lambda: shared.new_id("cmpl-"))
    _created: int = field(init=False, factory=lambda: int(time.time()))
    _offsets: dict[int, int] = field(init=False, factory=dict)

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self.model}

    def _logprobs(self, index: int, said: Said) -> dict[str, Any]:
        """Return four aligned lists; an offset is where the text of a token begins in the answer, in characters."""
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(said.text)
        names = [self._spell(entry.token) for entry in said.tokens]
        starts = list(accumulate(map(len, names), initial=offset))[:-1]
        return {
            "tokens": names,
            "token_logprobs": [entry.logprob for entry in said.tokens],
            "top_logprobs": [self._top(entry) for entry in said.tokens],
            "text_offset": [min(start, self._offsets[index]) for start in starts],
        }

    def _top(self, entry: LogProbs) -> dict[str, float]:
        return {self._spell(token): value for token, value in reversed(entry.top)}

    def _spell(self, token: int) -> str:
        data = self.tokenizer.spelling(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _chunk(self, index: int, text: str, finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self.with_usage else {}
        return sse.encode(self._head() | {"choices": [choice]} | usage)

    def opening(self) -> Iterator[bytes]:
        """Yield the prompt where it is wanted back."""
        for index in range(len(self.tracks)) if self.echo else ():
            yield self._chunk(index, self.echo)

    def said(self, index: int, piece: Piece) -> Iterator[bytes]:
        """Yield a piece of text; raw answers have no other."""
        if isinstance(piece, Said):
            yield self._chunk(index, piece.text, logprobs=self._logprobs(index, piece) if self.with_logprobs else None)

    def ended(self, index: int, track: Track) -> Iterator[bytes]:
        """Yield the finish reason."""
        assert track.end is not None
        yield self._chunk(index, "", track.end.finish)

    def closing(self) -> Iterator[bytes]:
        """Yield the usage if it was asked for, and the mark of the end."""
        if self.with_usage:
            usage = shared.usage(self.tracks, self.prompt_tokens)
            yield sse.encode(self._head() | {"choices": [], "usage": usage})
        yield sse.DONE

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Yield the error as an event, and the mark of the end."""
        yield sse.encode(error.body(OPENAI, ""))
        yield sse.DONE

    def whole(self) -> dict[str, Any]:
        """Return the completion."""
        choices = [self._choice(index, track) for index, track in enumerate(self.tracks)]
        return self._head() | {"choices": choices, "usage": shared.usage(self.tracks, self.prompt_tokens)}

    def _choice(self, index: int, track: Track) -> dict[str, Any]:
        assert track.end is not None
        said = Said(track.text, track.logprobs)
        logprobs = self._logprobs(index, said) if self.with_logprobs else None
        return {
            "index": index,
            "text": self.echo + track.text,
            "logprobs": logprobs,
            "finish_reason": track.end.finish,
        }
