"""Fields that the OpenAI dialects share."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from mference_core.generate import Figures
from mference_core.sampling import MAX_TOP_K, LogProbs
from mference_core.server.answers import Track
from mference_core.server.errors import refused
from mference_core.server.fields import Either, Field, Json, ListOf, MapOf, Number, Record, Tagged, Text, Truth, Whole
from mference_core.server.requests import AUTO, NONE, REQUIRED, OutputFormat
from mference_core.tokens import Tokenizer

MAX_ANSWERS = 8
MAX_STOPS = 16
NAME = r"[A-Za-z0-9_.\-]{1,64}"

STOP = Either(kinds=(Text(least=1), ListOf(kind=Text(least=1), most=MAX_STOPS)), what="a string or a list of strings")

SAMPLING: dict[str, Field] = {
    "temperature": Field(kind=Number(low=0.0, high=2.0), note="0 is greedy."),
    "top_p": Field(kind=Number(low=0.0, high=1.0, above=True), note="1 is off."),
    "top_k": Field(kind=Whole(low=0, high=MAX_TOP_K), note="0 is off."),
    "presence_penalty": Field(kind=Number(low=-2.0, high=2.0)),
    "frequency_penalty": Field(kind=Number(low=-2.0, high=2.0)),
    "repetition_penalty": Field(kind=Number(low=0.0, high=10.0, above=True), note="1 is off."),
    "seed": Field(kind=Whole(low=-(1 << 63), high=(1 << 64) - 1)),
    "logit_bias": Field(
        kind=MapOf(kind=Number(low=-100.0, high=100.0), pattern=r"[0-9]{1,9}", what="a token id"),
    ),
    "stop": Field(kind=STOP),
}

STREAMING: dict[str, Field] = {
    "stream": Field(kind=Truth()),
    "stream_options": Field(
        kind=Record(fields={"include_usage": Field(kind=Truth()), "include_obfuscation": Field(kind=Truth(only=False))})
    ),
}

METADATA = MapOf(kind=Text(most=512), pattern=r"[\s\S]{1,64}", what="1 to 64 characters", most=16)

IDENTITY: dict[str, Field] = {
    "user": Field(kind=Text(), inert=True),
    "safety_identifier": Field(kind=Text(), inert=True),
    "prompt_cache_key": Field(kind=Text(), inert=True, note="Every prompt is looked up in the cache."),
    "prompt_cache_retention": Field(kind=Text(choices=("in_memory", "24h")), inert=True),
    "service_tier": Field(kind=Text(choices=("auto", "default")), inert=True),
    "store": Field(kind=Truth(only=False), note="Nothing is kept here."),
    "metadata": Field(kind=METADATA, inert=True),
}

NOT_HERE = {
    "audio": "the models here write text",
    "background": "answers are made while the client waits",
    "moderation": "there is no moderation model here",
    "prediction": "there is no speculation on a predicted answer",
    "prompt_cache_options": "the cache decides itself what it keeps",
    "web_search_options": "the server reaches no other machine",
}

FUNCTION = {
    "name": Field(kind=Text(pattern=NAME), required=True),
    "description": Field(kind=Text()),
    "parameters": Field(kind=Json(), note="A JSON Schema."),
    "strict": Field(kind=Truth(), note="Whether calls must fit the schema."),
}

JSON_SCHEMA = {
    "name": Field(kind=Text(pattern=NAME), required=True, inert=True),
    "description": Field(kind=Text(), inert=True),
    "schema": Field(kind=Json()),
    "strict": Field(kind=Truth(), inert=True, note="The answer fits the schema either way."),
}

EFFORT = Text(choices=("none", "minimal", "low", "medium", "high", "xhigh"))

RESPONSE_FORMAT = Tagged(
    records={
        "text": Record(fields={}),
        "json_object": Record(fields={}),
        "json_schema": Record(fields={"json_schema": Field(kind=Record(fields=JSON_SCHEMA), required=True)}),
    }
)

CHOICE_WORDS = Text(choices=(AUTO, NONE, REQUIRED))


def new_id(prefix: str) -> str:
    """Return a fresh identity."""
    return prefix + secrets.token_hex(16)


def stops_of(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return stop strings as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def check_stream_options(given: Mapping[str, Any]) -> bool:
    """Return whether a usage chunk is wanted. Raises `ApiError` for stream options without a stream."""
    options = given.get("stream_options")
    if options is not None and not given.get("stream", False):
        raise refused("stream_options", "stream_options is set without stream; leave it out or set stream to true")
    return bool((options or {}).get("include_usage", False))


def check_tools_path(tools: Sequence[Mapping[str, Any]], names: Sequence[str], named: str | None, path: str) -> None:
    """Raise `ApiError` unless a forced tool is among those offered, and there are any for a choice that needs one."""
    if named is not None and named not in names:
        raise refused(path, f"{path} names {named!r}, which is not among tools")
    if not tools:
        raise refused(path, f"{path} is set without tools; leave it out or give tools")


def wanted_format(given: Mapping[str, Any], path: str, *, nested: bool) -> OutputFormat | None:
    """Return what the text must be; the schema of `json_schema` lies one level deeper in chat completions."""
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputFormat(path=path)
    inner = given["json_schema"] if nested else given
    where = f"{path}.json_schema" if nested else path
    return OutputFormat(schema=inner.get("schema", {}), path=f"{where}.schema")


def logprob_entry(tokenizer: Tokenizer, entry: LogProbs) -> dict[str, Any]:
    """Return a token's log-probability with its bytes and alternatives."""
    return _token(tokenizer, entry.token, entry.logprob) | {
        "top_logprobs": [_token(tokenizer, token, value) for token, value in entry.top]
    }


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.spelling(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


def total(tracks: Sequence[Track]) -> tuple[Figures, int]:
    """Return the figures of all answers to one prompt, which counts once, and the tokens of reasoning."""
    figures = [track.end.figures for track in tracks if track.end is not None]
    joined = Figures(
        prompt_tokens=max((f.prompt_tokens for f in figures), default=0),
        cached_tokens=min((f.cached_tokens for f in figures), default=0),
        new_tokens=sum(f.new_tokens for f in figures),
    )
    return joined, sum(track.reasoning_tokens for track in tracks)


def usage(tracks: Sequence[Track], prompt: int) -> dict[str, Any]:
    """Return the usage object of chat and text completions."""
    figures, reasoning = total(tracks)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": figures.new_tokens,
        "total_tokens": prompt + figures.new_tokens,
        "prompt_tokens_details": {"cached_tokens": figures.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
