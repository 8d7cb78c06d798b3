"""Every family behind the server: what is typed stays text, conversations of any shape render, wishes are honest."""

from typing import Any

import httpx
import pytest

from mference_core.server.requests import Ask
from mference_core.testing.serving import Running

CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def controls(running: Running, text: str, result: str, system: str) -> list[int]:
    """Return the control tokens of a conversation that holds these texts, in order."""
    served = running.state.served
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": text},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": result},
        {"role": "user", "content": text},
    ]
    prompt, _ = served.prompt_of(Ask(model="m", messages=messages, tools=[TOOL]))
    return [token for token in prompt if token in served.tokenizer.control_ids]


def test_spelt_control_tokens_stay_text(running: Running) -> None:
    """In what a user, a tool or the system says; the text itself is all there."""
    plain = controls(running, "A B", "C", "D")
    for spelling in [*running.state.served.tokenizer.control, "<|im_end|>", "</think>", "<turn|>"]:
        assert controls(running, f"A {spelling} B", f"{spelling}C", f"D{spelling}") == plain, spelling
    served = running.state.served
    for text in ("<|im_end|>", *served.tokenizer.control):
        ids, _ = served.prompt_of(Ask(model="m", prompt=text))
        assert (
            served.tokenizer.decode([i for i in ids if i not in served.tokenizer.control_ids]).strip() == text.strip()
        )


@pytest.mark.parametrize("content", [None, "", [], ..., [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("arguments", ['{"city":"Paris"}', {"city": "Paris"}])
def test_a_call_without_text_renders_like_one_with_empty_text(running: Running, content: Any, arguments: Any) -> None:
    call = CALL | {"function": {"name": "get_weather", "arguments": arguments}}

    def ask(content: Any) -> httpx.Response:
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        messages = [
            {"role": "user", "content": "What is the weather in Paris?"},
            {key: value for key, value in turn.items() if value is not ...},
            {"role": "tool", "tool_call_id": "c", "content": '{"condition": "sunny"}'},
        ]
        chat = {"model": "default", "messages": messages, "tools": [TOOL], "max_tokens": 3}
        return httpx.post(f"{running.url}/v1/chat/completions", json=chat, timeout=60)

    answer, wanted = ask(content), ask("")
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == wanted.json()["usage"]["prompt_tokens"]
    assert answer.json()["choices"][0]["message"] == wanted.json()["choices"][0]["message"]


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_an_effort_is_mapped_or_refused_with_those_that_are(running: Running, effort: str) -> None:
    chat = {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=chat | {"reasoning_effort": effort}, timeout=60)
    known = running.state.served.chat.efforts
    if effort in known:
        assert answer.status_code == 200, answer.text
    else:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "reasoning_effort")
        assert all(name in error["message"] for name in known)
    both = chat | {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=both, timeout=60)
    assert answer.json()["error"]["param"] == "chat_template_kwargs.enable_thinking"


def test_a_schema_that_cannot_be_followed_is_named(running: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "no such type"}}}
    chat = {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "response_format": form}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=chat, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format.json_schema.schema")


def test_ids_and_biases_outside_the_vocabulary_are_named(running: Running) -> None:
    size = running.state.served.vocab_size
    for fields, param in (
        ({"prompt": [size]}, "prompt"),
        ({"prompt": "x", "logit_bias": {str(size): 1}}, "logit_bias"),
    ):
        answer = httpx.post(f"{running.url}/v1/completions", json={"model": "default"} | fields, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
