"""Anthropic's own client against every demo."""

from typing import Any

import anthropic
import pytest

from mference_core.server.messages_writer import signature
from mference_core.testing.serving import Running

MODEL = "default"
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
FORECAST: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


def said(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message(claude: anthropic.Anthropic, running: Running) -> None:
    done = claude.messages.create(model=MODEL, max_tokens=64, messages=ASK, system="Be short.")
    assert "Paris" in said(done)
    assert (done.stop_reason, done.stop_sequence, done.model) == ("end_turn", None, running.state.served.model_id)
    assert done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0) > 0
    assert done.usage.output_tokens > 0


def test_a_stream_is_the_message(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 64, "messages": ASK}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == said(whole) == said(final)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_system_in_blocks_and_turns_in_a_row(claude: anthropic.Anthropic) -> None:
    one = claude.messages.count_tokens(
        model=MODEL,
        system="Be kind.\n\nBe short.",
        messages=[{"role": "user", "content": "Hello.\n\nWhat is the capital of France?"}],
    )
    blocks: Any = [
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be short."},
    ]
    other = claude.messages.count_tokens(
        model=MODEL, system=blocks, messages=[{"role": "user", "content": "Hello."}, *ASK]
    )
    assert one.input_tokens == other.input_tokens > 10


def test_counted_tokens_are_those_of_the_message(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=FORECAST, tools=[WEATHER])
    done = claude.messages.create(model=MODEL, max_tokens=1, messages=FORECAST, tools=[WEATHER])
    assert done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert done.stop_reason == "max_tokens"


def test_a_tool_is_used_and_its_result_told(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 64, "tools": [WEATHER]}
    first = claude.messages.create(messages=FORECAST, **asked)
    assert first.stop_reason == "tool_use"
    use: Any = next(block for block in first.content if block.type == "tool_use")
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"temperature": 21, "condition": "sunny"}'}
    later: list[Any] = [
        *FORECAST,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(messages=later, **asked)
    assert "sunny" in said(second)
    assert second.stop_reason == "end_turn"
    with claude.messages.stream(messages=FORECAST, **asked) as stream:
        streamed: Any = stream.get_final_message().content[-1]
    assert streamed.input == use.input


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_can_be_forced(claude: anthropic.Anthropic, choice: Any) -> None:
    done = claude.messages.create(
        model=MODEL,
        max_tokens=64,
        messages=[{"role": "user", "content": "Hello!"}],
        tools=[WEATHER],
        tool_choice=choice,
    )
    assert done.stop_reason == "tool_use"
    assert done.content[-1].type == "tool_use"


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic) -> None:
    whole = said(claude.messages.create(model=MODEL, max_tokens=64, messages=ASK))
    stop = whole[4:9]
    done = claude.messages.create(model=MODEL, max_tokens=64, messages=ASK, stop_sequences=["zzz", stop])
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", stop)
    assert said(done) == whole[: whole.index(stop)]


def test_reasoning_ends_within_its_budget(claude: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": MODEL,
        "max_tokens": 80,
        "messages": ASK,
        "thinking": {"type": "enabled", "budget_tokens": 6},
    }
    done = claude.messages.create(**asked)
    kinds = [block.type for block in done.content]
    for block in done.content:
        if block.type == "thinking":
            assert block.signature == signature(block.thinking)
    assert kinds in (["thinking", "text"], ["text"], ["thinking"])
    with claude.messages.stream(**asked) as stream:
        assert {block.type for block in stream.get_final_message().content} <= {"thinking", "text"}


def test_an_answer_of_a_shape(claude: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"big": {"type": "boolean"}},
        "required": ["big"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    done = claude.messages.create(model=MODEL, max_tokens=200, messages=ASK, output_config=form)
    assert '"big"' in said(done)
    assert done.stop_reason == "end_turn"


def test_models(claude: anthropic.Anthropic, running: Running) -> None:
    assert [model.id for model in claude.models.list()] == [running.state.served.model_id, MODEL]
    assert claude.models.retrieve(MODEL).max_input_tokens == running.state.served.context - 1


def test_errors_are_the_clients_own(claude: anthropic.Anthropic, running: Running) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude", max_tokens=8, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="container is not supported: no code is run here") as wrong:
        claude.messages.create(model=MODEL, max_tokens=8, messages=ASK, extra_body={"container": "x"})
    body: Any = wrong.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == wrong.value.response.headers["request-id"]
    limit = running.state.served.context
    with pytest.raises(anthropic.BadRequestError, match=f"context of {limit} tokens"):
        claude.messages.create(model=MODEL, max_tokens=limit, messages=ASK)
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type is 'image'"):
        claude.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="not continued here"):
        claude.messages.create(model=MODEL, max_tokens=8, messages=[*ASK, {"role": "assistant", "content": "The"}])
