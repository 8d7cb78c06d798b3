"""OpenAI's own client against every demo: what it reads is what the model said."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from mference_core.testing.serving import Running, serving_demo

MODEL = "default"
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
STRICT: Any = {
    "type": "function",
    "function": {
        **WEATHER["function"],
        "strict": True,
        "parameters": {**WEATHER["function"]["parameters"], "additionalProperties": False},
    },
}
FORECAST: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


def test_an_answer(client: openai.OpenAI, running: Running) -> None:
    done = client.chat.completions.create(model=MODEL, messages=ASK)
    choice = done.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert done.model == running.state.served.model_id
    assert done.usage is not None
    assert done.usage.prompt_tokens + done.usage.completion_tokens == done.usage.total_tokens


def test_a_stream_is_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASK)
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]


def test_log_probabilities_belong_to_the_text(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model=MODEL, messages=ASK, logprobs=True, top_logprobs=3)
    entries = (done.choices[0].logprobs or pytest.fail("none")).content or []
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == done.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob, "a greedy token is the likeliest"
        assert entry.logprob <= 0


def test_streamed_log_probabilities_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASK, logprobs=True)
    assert whole.choices[0].logprobs is not None
    chunks = client.chat.completions.create(model=MODEL, messages=ASK, logprobs=True, stream=True)
    streamed = [e.token for c in chunks if (held := c.choices[0].logprobs) is not None for e in held.content or ()]
    assert streamed == [entry.token for entry in whole.choices[0].logprobs.content or ()]


def test_a_biased_token_is_all_there_is(client: openai.OpenAI, running: Running) -> None:
    tokenizer = running.state.served.tokenizer
    token = tokenizer.encode("a")[0]
    done = client.chat.completions.create(
        model=MODEL, messages=ASK, logit_bias={str(token): 100}, max_completion_tokens=4
    )
    assert done.choices[0].message.content == tokenizer.decode([token] * 4)
    assert done.choices[0].finish_reason == "length"


def test_a_stop_string_is_not_shown(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASK).choices[0].message.content or ""
    stop = whole[3:8]
    for stream in (False, True):
        got: Any = client.chat.completions.create(model=MODEL, messages=ASK, stop=[stop, "zzz"], stream=stream)
        text = "".join(c.choices[0].delta.content or "" for c in got) if stream else got.choices[0].message.content
        assert text == whole[: whole.index(stop)]


def test_several_answers_differ_by_seed_and_repeat(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        done = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story."}],
            n=3,
            seed=5,
            temperature=1.0,
            max_completion_tokens=16,
            extra_body={"top_k": 0, "top_p": 1},
        )
        assert done.usage is not None
        assert 3 <= done.usage.completion_tokens <= 48
        return [choice.message.content for choice in sorted(done.choices, key=lambda choice: choice.index)]

    first = ask()
    assert ask() == first
    assert len(set(first)) > 1


def test_streams_of_several_answers_stay_apart(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "n": 2, "temperature": 1.0, "seed": 3, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**asked)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}


def test_a_tool_is_called_and_its_result_is_used(client: openai.OpenAI) -> None:
    messages = list(FORECAST)
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert first.choices[0].finish_reason == "tool_calls"
    call: Any = (first.choices[0].message.tool_calls or [pytest.fail("no call")])[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages.append(first.choices[0].message.model_dump())
    messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'})
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert "sunny" in (second.choices[0].message.content or "")
    assert second.choices[0].finish_reason == "stop"


def test_a_streamed_call_is_whole(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=FORECAST, tools=[WEATHER]) as stream:
        final = stream.get_final_completion()
    call: Any = (final.choices[0].message.tool_calls or [pytest.fail("no call")])[0]
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_can_be_forced(client: openai.OpenAI, *, stream: bool) -> None:
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "get_weather"}}]
    for choice in choices:
        got: Any = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello!"}],
            tools=[WEATHER],
            tool_choice=choice,
            stream=stream,
            max_completion_tokens=64,
            seed=1,
        )
        if stream:
            chunks = list(got)
            pieces = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
            name, arguments = pieces[0].function.name, "".join(piece.function.arguments for piece in pieces)
            finish = chunks[-1].choices[0].finish_reason
        else:
            call = got.choices[0].message.tool_calls[0]
            name, arguments, finish = call.function.name, call.function.arguments, got.choices[0].finish_reason
        assert name == "get_weather"
        assert isinstance(json.loads(arguments)["city"], str)
        assert finish == "tool_calls"


def test_no_tool_is_called_when_none_may_be(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model=MODEL, messages=FORECAST, tools=[WEATHER], tool_choice="none")
    assert not done.choices[0].message.tool_calls
    assert done.choices[0].finish_reason == "stop"


def test_a_strict_tool_may_be_left_alone_or_called(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Forecast, name="get_weather", description="Get the weather of a city.")
    asked: Any = {"model": MODEL, "tools": [tool]}
    called = client.chat.completions.parse(messages=FORECAST, **asked).choices[0]
    assert called.finish_reason == "tool_calls"
    assert (called.message.tool_calls or [])[0].function.parsed_arguments == Forecast(city="Paris")
    answered = client.chat.completions.parse(messages=ASK, **asked).choices[0]
    assert (answered.finish_reason, "Paris" in (answered.message.content or "")) == ("stop", True)


def test_an_answer_of_a_shape_may_call_instead(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(
        model=MODEL, messages=FORECAST, tools=[STRICT], response_format=City, max_completion_tokens=300
    )
    assert done.choices[0].finish_reason == "tool_calls"
    assert json.loads((done.choices[0].message.tool_calls or [])[0].function.arguments) == {"city": "Paris"}


def test_one_call_where_only_one_is_wanted(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL,
        messages=FORECAST,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=200,
    )
    assert len(done.choices[0].message.tool_calls or ()) == 1
    assert done.choices[0].finish_reason == "tool_calls"


class Forecast(BaseModel):
    """Arguments of the tool."""

    city: str


class City(BaseModel):
    """What the model must fill in; short, for a demo would fill a free string with stories."""

    name: Literal["Paris", "Rome"]
    big: bool


def test_an_answer_of_a_shape(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=City, max_completion_tokens=300)
    assert isinstance(done.choices[0].message.parsed, City)


def test_an_answer_that_is_an_object(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=ASK, response_format={"type": "json_object"}, max_completion_tokens=200, seed=2
    )
    if done.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(done.choices[0].message.content or ""), dict)
    else:
        assert (done.choices[0].message.content or "").lstrip().startswith("{")


def test_reasoning_is_told_apart(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model=MODEL, messages=ASK, reasoning_effort="high", max_completion_tokens=24)
    message: Any = done.choices[0].message
    assert done.usage is not None
    details = done.usage.completion_tokens_details
    assert details is not None
    assert (details.reasoning_tokens or 0) > 0 or "reasoning_content" not in message.model_extra


def test_completions(client: openai.OpenAI, running: Running) -> None:
    text = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8)
    ids = running.state.served.chat.raw_prompt(running.state.served.tokenizer, "Once upon a time")
    same = client.completions.create(model=MODEL, prompt=ids, max_tokens=8, echo=True, stream=False)
    assert same.choices[0].text.endswith(text.choices[0].text)
    assert "Once upon a time" in same.choices[0].text
    chunks = list(client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text.choices[0].text


def test_completions_with_log_probabilities(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=6, logprobs=2)
    held, text = done.choices[0].logprobs, done.choices[0].text
    assert held is not None
    assert "".join(held.tokens or ()) == text
    assert all(
        text[start:].startswith(token) for start, token in zip(held.text_offset or (), held.tokens or (), strict=True)
    )
    assert all(len(top) == 2 for top in held.top_logprobs or ())


def test_a_response(client: openai.OpenAI) -> None:
    done = client.responses.create(model=MODEL, input="What is the capital of France?", instructions="Be short.")
    assert "Paris" in done.output_text
    assert done.status == "completed"
    with client.responses.stream(
        model=MODEL, input="What is the capital of France?", instructions="Be short."
    ) as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == done.output_text
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))


def test_a_response_that_calls(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": False}
    items: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(model=MODEL, input=items, tools=[tool])
    call: Any = next(item for item in first.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Paris"}
    items += first.output
    items.append(
        {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21, "condition": "sunny"}'}
    )
    assert "sunny" in client.responses.create(model=MODEL, input=items, tools=[tool]).output_text


def test_a_response_of_a_shape(client: openai.OpenAI) -> None:
    done = client.responses.parse(model=MODEL, input="Paris?", text_format=City, max_output_tokens=300)
    assert isinstance(done.output_parsed, City)


def test_models(client: openai.OpenAI, running: Running) -> None:
    assert [model.id for model in client.models.list()] == [running.state.served.model_id, MODEL]
    assert client.models.retrieve(MODEL).owned_by == "mference"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-x", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model=MODEL, messages=ASK, extra_body={"min_p": 0.1}, stream=True)
    assert (unknown.value.param, unknown.value.code) == ("min_p", "unknown_parameter")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_refused_before_anything(client: openai.OpenAI, running: Running, *, stream: bool) -> None:
    limit = running.state.served.context
    with pytest.raises(openai.BadRequestError, match=f"context of {limit} tokens") as long:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "fox " * 2 * limit}], stream=stream
        )
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match=rf"and {limit} of the answer") as much:
        client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=limit, stream=stream)
    assert much.value.param == "max_completion_tokens"


def test_what_was_reused_is_told_and_changes_nothing(client: openai.OpenAI, running: Running) -> None:
    """The second turn of a chat goes on from the first; the answer is that of a server which has seen nothing."""
    long = "Be kind and helpful. " * 30  # states that do not keep rows are kept at few places of a prompt
    turns: list[Any] = [
        {"role": "system", "content": long},
        {"role": "user", "content": "My name is Tom. Who are you?"},
    ]
    first = client.chat.completions.create(model=MODEL, messages=turns)
    turns.append({"role": "assistant", "content": first.choices[0].message.content})
    turns.append({"role": "user", "content": "What is my name?"})
    second = client.chat.completions.create(model=MODEL, messages=turns)
    again = client.chat.completions.create(model=MODEL, messages=turns)
    for done in (second, again):
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        assert 0 < (done.usage.prompt_tokens_details.cached_tokens or 0) < done.usage.prompt_tokens
    with serving_demo(running.state.served.model_id.removesuffix("-demo")) as fresh:
        other = openai.OpenAI(base_url=f"{fresh.url}/v1", api_key="unused", max_retries=0)
        cold = other.chat.completions.create(model=MODEL, messages=turns)
        other.close()
    assert cold.usage is not None
    assert cold.usage.prompt_tokens_details is not None
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert {done.choices[0].message.content for done in (second, again, cold)} == {cold.choices[0].message.content}
