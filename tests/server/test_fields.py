"""Bodies: whatever is wrong in one is named, nothing is ignored, and nothing but an `ApiError` comes out."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_core.chat import check_tools
from mference_core.server.app import DIALECTS
from mference_core.server.bodies import parse
from mference_core.server.errors import ApiError
from mference_core.server.messages import count_request

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
        USER,
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "temperature": 0.5,
    "top_p": 1,
    "top_k": 0,
    "seed": 1,
    "stop": ["x"],
    "logit_bias": {"5": -100},
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "max_completion_tokens": 5,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "reasoning_effort": "low",
    "stream": True,
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
    "user": "u",
}
TEXT: dict[str, Any] = {"model": "m", "prompt": ["Hi"], "logprobs": 1, "n": 2, "stop": "x", "max_tokens": 3}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 50,
    "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Yes."},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1", "is_error": True}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "required",
    "text": {"format": {"type": "json_object"}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "instructions": "Be short.",
    "store": False,
}
BODIES = dict(zip(DIALECTS, (CHAT, TEXT, RESPONSES, MESSAGES), strict=True))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in inner for place in ((*path, key), *places(child, (*path, key)))]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize("path", list(BODIES))
def test_the_examples_are_taken(path: str) -> None:
    wanted = DIALECTS[path].read(copy.deepcopy(BODIES[path]))
    assert wanted.ask.model == "m"
    assert set(wanted.inert) <= {"metadata", "user"}


def test_dialects_agree_on_a_conversation() -> None:
    chat = DIALECTS["/v1/chat/completions"].read(copy.deepcopy(CHAT)).ask
    response = DIALECTS["/v1/responses"].read(copy.deepcopy(RESPONSES)).ask
    message = DIALECTS["/v1/messages"].read(copy.deepcopy(MESSAGES)).ask
    assert [m["role"] for m in chat.messages] == [m["role"] for m in response.messages]
    assert [m["role"] for m in chat.messages] == [m["role"] for m in message.messages]
    assert response.messages[2] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    assert message.messages[3]["content"] == "Error: 1"
    assert chat.tools == [{"type": "function", "function": {k: v for k, v in FUNCTION.items() if k != "strict"}}]
    assert chat.tools == response.tools


@pytest.mark.parametrize("path", list(BODIES))
def test_an_unknown_field_is_named_at_every_level(path: str) -> None:
    """Schemas and arguments aside, whose inside is not ours."""
    free = ("parameters", "schema", "input_schema", "metadata", "input", "logit_bias", "json_schema")
    for place in [(), *places(BODIES[path])]:
        body = copy.deepcopy(BODIES[path])
        target = at(body, place)
        if not isinstance(target, dict) or (place and place[-1] in free and place[-1] != "json_schema"):
            continue
        target["surprise"] = 1
        with pytest.raises(ApiError, match="surprise") as error:
            DIALECTS[path].read(body)
        assert (error.value.param or "").endswith("surprise"), place
        target["surprise"] = None
        DIALECTS[path].read(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("path", list(BODIES))
def test_nothing_but_an_api_error_comes_out(path: str, data: st.DataObject) -> None:
    """Any value in any place is either understood or refused with its name."""
    body = copy.deepcopy(BODIES[path])
    for _ in range(data.draw(st.integers(1, 3))):
        known = places(body)
        place = data.draw(st.sampled_from(known)) if known else ()
        if place:
            at(body, place[:-1])[place[-1]] = data.draw(json_values)
    error = error_of(lambda: DIALECTS[path].read(body))
    if error is not None:
        assert 400 <= error.status < 500
        assert error.message
        assert "\n" not in error.message


def error_of(call: Callable[[], Any]) -> ApiError | None:
    try:
        call()
    except ApiError as error:
        return error
    return None


@given(st.binary(max_size=60))
def test_bytes_are_json_objects_or_refused(data: bytes) -> None:
    error = error_of(lambda: parse(data))
    if error is None:
        assert isinstance(parse(data), dict)
        assert json.loads(data) == parse(data)
    else:
        assert error.code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a":1,"a":2}', "key 'a' is repeated"),
        (b'{"a":{"b":1,"b":2}}', "key 'b' is repeated"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":1e999999999999999999999}', "out of range"),
        (b'{"a":"\\ud800"}', "half surrogate"),
        (b'{"a":"\xff"}', "not UTF-8 at byte 6"),
        (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "64 levels"),
        (b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}", "too deep"),
        (b'{"a":' + b"1" * 5000 + b"}", "not JSON"),
    ],
)
def test_bad_json_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=said):
        parse(body)


def changed(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {k: v for k, v in (copy.deepcopy(body) | fields).items() if v is not ...}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 257}, "top_k"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias.5"),
        ({"logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream": False}, "stream_options"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": []}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"model": ...}, "model"),
        ({"model": None}, "model"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        DIALECTS["/v1/chat/completions"].read(changed(CHAT, **fields))
    assert error.value.param == param
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "z"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [*MESSAGES["messages"][:2], USER]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {
                "messages": [
                    *MESSAGES["messages"][:2],
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "c"}],
                    },
                ]
            },
            "messages[2].content[1]",
        ),
    ],
)
def test_a_wrong_field_of_a_message_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        DIALECTS["/v1/messages"].read(changed(MESSAGES, **fields))
    assert error.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]}, "input[0].encrypted_content"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"tools": [{"type": "namespace", "name": "b", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "z", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "z", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [RESPONSES["input"][3], RESPONSES["input"][3]]}, "input[1].call_id"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_a_wrong_field_of_a_response_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        DIALECTS["/v1/responses"].read(changed(RESPONSES, **fields))
    assert error.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        DIALECTS["/v1/completions"].read(changed(TEXT, **fields))
    assert error.value.param == param


def test_what_coding_agents_send_is_taken() -> None:
    """The fields that three agents set, as seen on the wire in November 2026; only bookkeeping is without effect."""
    item = {"type": "message", "id": "x", "role": "developer", "content": [{"type": "input_text", "text": "Be safe."}]}
    codex = {
        "input": [item, item | {"role": "user"}],
        "tools": RESPONSES["tools"],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "key",
        "client_metadata": {"a": "b"},
    }
    marked = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    claude = {
        "system": [{"type": "text", "text": "Be safe."}, marked],
        "messages": [{"role": "user", "content": [marked]}, {"role": "system", "content": "Agents: none."}],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "metadata": {"user_id": "u"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    opencode = {
        "messages": [{"role": "system", "content": "Be safe."}, USER],
        "max_tokens": 4096,
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = {
        "/v1/responses": (codex, {"prompt_cache_key", "client_metadata"}),
        "/v1/messages": (claude, {"metadata", "context_management"}),
        "/v1/chat/completions": (opencode, set()),
    }
    for path, (body, inert) in asked.items():
        wanted = DIALECTS[path].read({"model": "m"} | body)
        assert wanted.stream
        assert set(wanted.inert) == inert
        assert wanted.ask.messages[0]["role"] in ("system", "developer")


def test_guidance_in_the_middle_is_told_in_its_place() -> None:
    """In every dialect alike; guidance at the beginning stays what it is."""
    turns = [USER, {"role": "assistant", "content": "Yes."}, {"role": "system", "content": "Now be short."}, USER]
    told = [USER, turns[1], {"role": "user", "content": "<system>\nNow be short.\n</system>"}, USER]
    first = {"role": "system", "content": "Be kind."}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [first, *turns]},
        "/v1/responses": {"input": [first, *turns]},
        "/v1/messages": {"max_tokens": 5, "system": "Be kind.", "messages": turns},
    }
    for path, body in bodies.items():
        assert DIALECTS[path].read({"model": "m"} | body).ask.messages[:3] == [first, *told[:2]], path
        assert DIALECTS[path].read({"model": "m"} | body).ask.messages[3]["content"].startswith(told[2]["content"]), (
            path
        )


def test_tools_of_a_namespace_have_one_name_each() -> None:
    """Flat for the model, in their namespace for the client."""
    space = {"type": "namespace", "name": "box", "description": "Things.", "tools": [{"type": "function", **FUNCTION}]}
    past = {"type": "function_call", "call_id": "c", "namespace": "box", "name": "f", "arguments": "{}"}
    body = changed(
        RESPONSES, tools=[*RESPONSES["tools"], space], input=[*RESPONSES["input"][:3], past, RESPONSES["input"][4]]
    )
    ask = DIALECTS["/v1/responses"].read(body).ask
    assert [tool["function"]["name"] for tool in ask.tools] == ["f", "box__f"]
    assert ask.tools[1]["function"] == {"name": "box__f", "description": "Things. d", "parameters": {"type": "object"}}
    assert ask.messages[2]["tool_calls"][0]["function"]["name"] == "box__f"
    assert check_tools(ask.tools) is not None


def test_a_count_takes_what_decides_the_prompt() -> None:
    keep = ("model", "system", "messages", "tools", "tool_choice", "thinking")
    assert count_request({key: MESSAGES[key] for key in keep}).messages[0]["role"] == "system"
    with pytest.raises(ApiError, match="max_tokens is no field"):
        count_request(copy.deepcopy(MESSAGES))


@pytest.mark.parametrize("name", ["\n", "a\r\nb", "\x1b[31m", "x" * 5000])
def test_an_unknown_fields_name_is_told_in_one_short_line(name: str) -> None:
    error = error_of(lambda: DIALECTS["/v1/chat/completions"].read({**copy.deepcopy(CHAT), name: 1}))
    assert error is not None
    assert error.message.isprintable()
    assert len(error.message) < 200
