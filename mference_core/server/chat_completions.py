"""OpenAI's Chat Completions."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import define, field

from mference_core.chat import ToolCall
from mference_core.sampling import MAX_LOGPROBS, LogProbs
from mference_core.server import openai_fields as shared
from mference_core.server import sse
from mference_core.server.answers import Piece, Said, Thought, Track
from mference_core.server.errors import OPENAI, ApiError, refused
from mference_core.server.exchange import Wanted
from mference_core.server.fields import Either, Field, Json, ListOf, Record, Tagged, Text, Truth, Whole
from mference_core.server.openai_fields import EFFORT, FUNCTION, NAME, RESPONSE_FORMAT
from mference_core.server.requests import AUTO, NAMED, NONE, REQUIRED, Ask, settled
from mference_core.server.served import Prepared, Served, sampling_fields
from mference_core.tokens import Tokenizer

FRAGMENT_CHARACTERS = 1024

PART = Tagged(records={"text": Record(fields={"text": Field(kind=Text(), required=True)})})
CONTENT = Either(kinds=(Text(), ListOf(kind=PART)), what="a string or a list of text parts")
CALL = Tagged(
    records={
        "function": Record(
            fields={
                "id": Field(kind=Text(least=1), required=True),
                "function": Field(
                    kind=Record(
                        fields={
                            "name": Field(kind=Text(pattern=NAME), required=True),
                            "arguments": Field(
                                kind=Either(kinds=(Text(), Json()), what="JSON text or an object"), required=True
                            ),
                        }
                    ),
                    required=True,
                ),
                "index": Field(kind=Whole(low=0), inert=True),
            }
        )
    },
    usual="function",
)
GUIDANCE = Record(fields={"content": Field(kind=CONTENT, required=True), "name": Field(kind=Text(), inert=True)})
MESSAGE = Tagged(
    tag="role",
    records={
        "system": GUIDANCE,
        "developer": GUIDANCE,
        "user": GUIDANCE,
        "assistant": Record(
            fields={
                "content": Field(kind=CONTENT),
                "name": Field(kind=Text(), inert=True),
                "reasoning_content": Field(kind=Text()),
                "tool_calls": Field(kind=ListOf(kind=CALL)),
            },
            refuses={
                "refusal": "the models here do not mark refusals",
                "audio": "the models here write text",
                "annotations": "the models here cite nothing",
                "function_call": "use tool_calls",
                "parsed": "it is what a client made of the content",
            },
        ),
        "tool": Record(
            fields={
                "content": Field(kind=CONTENT, required=True),
                "tool_call_id": Field(kind=Text(least=1), required=True),
                "name": Field(kind=Text(), inert=True),
            }
        ),
    },
    refuses={"function": "use the role tool"},
)
TOOL = Tagged(
    records={"function": Record(fields={"function": Field(kind=Record(fields=FUNCTION), required=True)})},
    refuses={"custom": "tools here are functions"},
)
CHOICE = Either(
    kinds=(
        shared.CHOICE_WORDS,
        Tagged(
            records={
                "function": Record(
                    fields={
                        "function": Field(
                            kind=Record(fields={"name": Field(kind=Text(pattern=NAME), required=True)}), required=True
                        )
                    }
                )
            }
        ),
    ),
    what="'auto', 'none', 'required' or a named function",
)

REQUEST = Record(
    fields={
        "model": Field(kind=Text(least=1), required=True),
        "messages": Field(kind=ListOf(kind=MESSAGE, least=1), required=True),
        **shared.SAMPLING,
        **shared.STREAMING,
        "n": Field(kind=Whole(low=1, high=shared.MAX_ANSWERS)),
        "max_completion_tokens": Field(kind=Whole(low=1)),
        "max_tokens": Field(kind=Whole(low=1), note="The older name of max_completion_tokens."),
        "logprobs": Field(kind=Truth()),
        "top_logprobs": Field(kind=Whole(low=0, high=MAX_LOGPROBS)),
        "tools": Field(kind=ListOf(kind=TOOL)),
        "tool_choice": Field(kind=CHOICE),
        "parallel_tool_calls": Field(kind=Truth()),
        "response_format": Field(kind=RESPONSE_FORMAT),
        "reasoning_effort": Field(kind=EFFORT),
        "chat_template_kwargs": Field(kind=Record(fields={"enable_thinking": Field(kind=Truth())})),
        "verbosity": Field(kind=Text(choices=("medium",))),
        "modalities": Field(kind=ListOf(kind=Text(choices=("text",)))),
        **shared.IDENTITY,
    },
    refuses=shared.NOT_HERE | {"functions": "use tools", "function_call": "use tool_choice"},
)


def read_tools(given: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the tool choice and the name it forces. Raises `ApiError` for one that tools cannot meet."""
    choice, tools = given.get("tool_choice"), given.get("tools", [])
    if choice is None:
        return AUTO, None
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    if choice != NONE and (named is not None or choice == REQUIRED or not tools):
        shared.check_tools_path(tools, [tool["function"]["name"] for tool in tools], named, "tool_choice")
    return (NAMED, named) if named is not None else (choice, None)


class ChatCompletions:
    """The dialect."""

    name, family = "chat_completions", OPENAI

    def read(self, body: dict[str, Any]) -> Wanted:
        """Translate a body. Raises `ApiError`."""
        given = REQUEST.read("", body)
        if "max_tokens" in given and "max_completion_tokens" in given:
            raise refused("max_tokens", "max_tokens is set beside max_completion_tokens; give one of them")
        if "top_logprobs" in given and not given.get("logprobs", False):
            raise refused("top_logprobs", "top_logprobs is set without logprobs; set logprobs to true")
        choice, named = read_tools(given)
        tools = given.get("tools", [])
        limit = "max_tokens" if "max_tokens" in given else "max_completion_tokens"
        ask = Ask(
            model=given["model"],
            messages=settled([without(message, "name") for message in given["messages"]]),
            tools=[{"type": "function", "function": without(tool["function"], "strict")} for tool in tools],
            choice=choice,
            named=named,
            parallel=given.get("parallel_tool_calls", True),
            strict=any(tool["function"].get("strict", False) for tool in tools),
            effort=given.get("reasoning_effort"),
            think=given.get("chat_template_kwargs", {}).get("enable_thinking"),
            output=shared.wanted_format(given.get("response_format", {}), "response_format", nested=True),
            max_new=given.get(limit),
            sampling=sampling_fields(given),
            stop=shared.stops_of(given.get("stop")),
            n=given.get("n", 1),
            logprobs=given.get("top_logprobs", 0) if given.get("logprobs", False) else None,
            paths={
                "max_new": limit,
                "effort": "reasoning_effort",
                "enable_thinking": "chat_template_kwargs.enable_thinking",
            },
        )
        with_usage = shared.check_stream_options(given)
        return Wanted(
            ask=ask,
            stream=given.get("stream", False),
            inert=tuple(REQUEST.inert(given)),
            notes={"usage": with_usage},
        )

    def writer(self, wanted: Wanted, prepared: Prepared, tracks: list[Track], served: Served) -> "ChatWriter":
        """Return what writes the answers."""
        return ChatWriter(
            tracks=tracks,
            model=served.model_id,
            tokenizer=served.tokenizer,
            prompt_tokens=len(prepared.prompt),
            with_usage=wanted.notes["usage"],
            with_logprobs=wanted.ask.logprobs is not None,
        )


def without(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a record without some of its fields."""
    return {name: value for name, value in given.items() if name not in names}


@define(kw_only=True, eq=False)
class ChatWriter:
    """Writes chat completions, whole or in chunks."""

    tracks: list[Track]
    model: str
    tokenizer: Tokenizer
    prompt_tokens: int
    with_usage: bool
    with_logprobs: bool
    ping: bytes = sse.PING
    _id: str = field(init=False, factory=lambda: shared.new_id("chatcmpl-"))
    _created: int = field(init=False, factory=lambda: int(time.time()))
    _calls: dict[int, int] = field(init=False, factory=dict)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}

    def _logprobs(self, tokens: Iterable[LogProbs]) -> dict[str, Any]:
        return {"content": [shared.logprob_entry(self.tokenizer, entry) for entry in tokens], "refusal": None}

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self.with_usage else {}
        return sse.encode(self._head("chat.completion.chunk") | {"choices": [choice]} | usage)

    def opening(self) -> Iterator[bytes]:
        """Yield the role of every answer."""
        for index in range(len(self.tracks)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def said(self, index: int, piece: Piece) -> Iterator[bytes]:
        """Yield a piece as one chunk, a call as several."""
        match piece:
            case Said(text, tokens):
                logprobs = self._logprobs(tokens) if self.with_logprobs else None
                yield self._chunk(index, {"content": text}, logprobs=logprobs)
            case Thought(text):
                yield self._chunk(index, {"reasoning_content": text})
            case ToolCall(identity, name, arguments):
                number = self._calls.get(index, 0)
                self._calls[index] = number + 1
                parts = [
                    arguments[at : at + FRAGMENT_CHARACTERS] for at in range(0, len(arguments), FRAGMENT_CHARACTERS)
                ]
                first = {"id": identity, "type": "function"}
                for part in parts:
                    function = {"name": name, "arguments": part} if first else {"arguments": part}
                    yield self._chunk(index, {"tool_calls": [{"index": number, **first, "function": function}]})
                    first = {}

    def ended(self, index: int, track: Track) -> Iterator[bytes]:
        """Yield the finish reason."""
        assert track.end is not None
        yield self._chunk(index, {}, track.end.finish)

    def closing(self) -> Iterator[bytes]:
        """Yield the usage if it was asked for, and the mark of the end."""
        if self.with_usage:
            usage = shared.usage(self.tracks, self.prompt_tokens)
            yield sse.encode(self._head("chat.completion.chunk") | {"choices": [], "usage": usage})
        yield sse.DONE

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Yield the error as an event, and the mark of the end."""
        yield sse.encode(error.body(OPENAI, ""))
        yield sse.DONE

    def whole(self) -> dict[str, Any]:
        """Return the completion."""
        choices = [self._choice(index, track) for index, track in enumerate(self.tracks)]
        usage = shared.usage(self.tracks, self.prompt_tokens)
        return self._head("chat.completion") | {"choices": choices, "usage": usage}

    def _choice(self, index: int, track: Track) -> dict[str, Any]:
        assert track.end is not None
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in track.calls
        ]
        text, thought = track.text, track.reasoning
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        message |= {"reasoning_content": thought} if thought else {}
        message |= {"tool_calls": calls} if calls else {}
        logprobs = self._logprobs(track.logprobs) if self.with_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": track.end.finish}
