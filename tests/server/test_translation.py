"""Every dialect's stream says what its whole answer says, however the deliveries and the bytes are cut."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_core.chat import Malformed, Reasoning, Text, ToolCall
from mference_core.sampling import LogProbs
from mference_core.scheduler.request import Delivery, Prefilled, Request, Sampled
from mference_core.server.answers import End, Said, Thought, Track, merged
from mference_core.server.app import DIALECTS
from mference_core.server.errors import ApiError
from mference_core.server.exchange import Writer
from mference_core.server.served import Prepared, Served
from mference_core.server.sse import Reader, ServerEvent
from mference_core.testing.scripted import Scripted, outcome
from mference_core.testing.serving import served_demo

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"logprobs": True, "stream_options": {"include_usage": True}, "stream": True},
    "/v1/responses": {"model": "m", "input": "Hi", "include": ["message.output_text.logprobs"]},
    "/v1/messages": CHAT | {"max_tokens": 5},
    "/v1/completions": {"model": "m", "prompt": "Hi", "stream_options": {"include_usage": True}, "stream": True},
}

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
arguments = st.dictionaries(texts, texts | st.integers() | st.booleans(), max_size=3).map(json.dumps)
events = st.one_of(
    texts.map(Text),
    texts.map(Reasoning),
    st.builds(ToolCall, st.uuids().map(str), st.sampled_from(["f", "g"]), arguments),
    st.just(Malformed("unreadable")),
)


@pytest.fixture(scope="module")
def served() -> Served:
    return served_demo("gemma4", Scripted(lambda _: []), context=512, vocab_size=4096)


def deliveries(parts: Sequence[Any], *, reason: str = "end_of_turn") -> Iterator[Delivery]:
    yield Prefilled(3, 9)
    for number, part in enumerate(parts):
        yield Sampled(300 + number, LogProbs(token=300 + number, logprob=-0.5, top=()))
        yield part
    yield outcome(reason, new=len(parts), cached=4)


def writer_of(path: str, served: Served) -> tuple[Writer, Track]:
    dialect, track = DIALECTS[path], Track()
    wanted = dialect.read(BODIES[path])
    request = Request(prompt=tuple(range(9)))
    prepared = Prepared(ask=wanted.ask, requests=(request,), prompt=request.prompt, thinking=False)
    return dialect.writer(wanted, prepared, [track], served), track


def stream(writer: Writer, track: Track, groups: Sequence[Sequence[Delivery]]) -> bytes:
    frames = list(writer.opening())
    for group in groups:
        pieces = [piece for delivery in group if (piece := track.push(delivery)) is not None]
        frames += [frame for piece in merged(pieces) for frame in writer.said(0, piece)]
    frames += list(writer.ended(0, track)) + list(writer.closing())
    return b"".join(frames)


def cut(items: Any, places: Sequence[int]) -> list[Any]:
    edges = [0, *sorted({place % (len(items) + 1) for place in places}), len(items)]
    return [items[a:b] for a, b in pairwise(edges)]


def read(data: bytes, places: Sequence[int]) -> list[ServerEvent]:
    reader = Reader()
    return [event for part in cut(data, places) for event in reader.push(part)]


def rebuilt_chat(found: Sequence[ServerEvent]) -> dict[str, Any]:
    """Put a whole completion together from chunks, as a client does."""
    assert found[-1].data == "[DONE]"
    chunks = [json.loads(event.data) for event in found[:-1]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls: dict[int, dict[str, Any]] = {}
    for part in (call for delta in deltas for call in delta.get("tool_calls", ())):
        call = calls.setdefault(part["index"], {"id": None, "type": None, "function": {"name": "", "arguments": ""}})
        call |= {key: part[key] for key in ("id", "type") if key in part}
        call["function"]["name"] += part["function"].get("name", "")
        call["function"]["arguments"] += part["function"]["arguments"]
    text = "".join(delta.get("content") or "" for delta in deltas)
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    message |= {"reasoning_content": thought} if thought else {}
    message |= {"tool_calls": list(calls.values())} if calls else {}
    finish = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    held = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    logprobs = {"content": [entry for one in held for entry in one["content"]], "refusal": None}
    return {"message": message, "finish_reason": finish, "logprobs": logprobs, "usage": chunks[-1]["usage"]}


def rebuilt_messages(found: Sequence[ServerEvent]) -> dict[str, Any]:
    """Put a whole message together from events."""
    message: dict[str, Any] = {}
    partial = ""
    for event in found:
        data = json.loads(event.data)
        assert data["type"] == event.event
        match data["type"]:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert data["index"] == len(message["content"])
                message["content"].append(data["content_block"])
                partial = ""
            case "content_block_delta":
                delta, block = data["delta"], message["content"][data["index"]]
                if delta["type"] == "input_json_delta":
                    partial += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                block = message["content"][data["index"]]
                if block["type"] == "tool_use":
                    block["input"] = json.loads(partial or "{}")
            case "message_delta":
                message |= data["delta"] | {"usage": data["usage"]}
    assert found[-1].event == "message_stop"
    return message


def rebuilt_response(found: Sequence[ServerEvent]) -> dict[str, Any]:
    """Put the output together from the small events, and check the numbers of all and the last one's sum."""
    told = [json.loads(event.data) for event in found]
    assert [data["sequence_number"] for data in told] == list(range(len(told)))
    output: list[Any] = []
    for data in told:
        match data["type"]:
            case "response.output_item.added":
                assert data["output_index"] == len(output)
                output.append(data["item"])
            case "response.content_part.added":
                output[data["output_index"]]["content"].append(data["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                part = output[data["output_index"]]["content"][data["content_index"]]
                part["text"] += data["delta"]
                if "logprobs" in part:
                    part["logprobs"] += data["logprobs"]
            case "response.function_call_arguments.delta":
                output[data["output_index"]]["arguments"] += data["delta"]
            case "response.output_item.done":
                item = output[data["output_index"]]
                assert item | {"status": data["item"]["status"]} == data["item"]
                output[data["output_index"]] = data["item"]
    final: dict[str, Any] = told[-1]["response"]
    assert final["output"] == output
    return final


def alike(one: Any, other: Any) -> bool:
    """Compare answers but for identities and times."""
    drop = {"id", "created", "created_at", "completed_at"}

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items() if key not in drop}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    return bool(plain(one) == plain(other))


reasons = st.sampled_from(["end_of_turn", "eos", "max_tokens", "tool_calls", "stop_string"])
places = st.lists(st.integers(0, 1 << 16), max_size=8)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(events, max_size=8), reason=reasons, groups=places, bytes_cut=places)
@pytest.mark.parametrize("path", list(BODIES))
def test_a_stream_says_what_the_whole_answer_says(
    served: Served, path: str, parts: list[Any], reason: str, groups: list[int], bytes_cut: list[int]
) -> None:
    told = list(deliveries(parts, reason=reason))
    writer, track = writer_of(path, served)
    found = read(stream(writer, track, cut(told, groups)), bytes_cut)
    other, whole_track = writer_of(path, served)
    for delivery in told:
        whole_track.push(delivery)
    whole = other.whole()
    if path == "/v1/chat/completions":
        rebuilt, choice = rebuilt_chat(found), whole["choices"][0]
        assert rebuilt["message"] == choice["message"]
        assert (rebuilt["finish_reason"], rebuilt["logprobs"]) == ([choice["finish_reason"]], choice["logprobs"])
        assert rebuilt["usage"] == whole["usage"]
    elif path == "/v1/completions":
        chunks = [json.loads(event.data) for event in found[:-1]]
        assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole["choices"][0]["text"]
        assert chunks[-1]["usage"] == whole["usage"]
    elif path == "/v1/messages":
        assert alike(rebuilt_messages(found), whole)
    else:
        assert alike(rebuilt_response(found), whole)


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(events, max_size=8), reason=reasons)
def test_what_is_said_is_what_was_delivered(parts: list[Any], reason: str) -> None:
    """Nothing is lost or moved: texts joined, calls in order, every token with the text that came after it."""
    track = Track()
    for delivery in deliveries(parts, reason=reason):
        track.push(delivery)
    end: End | None = track.end
    assert end is not None
    assert track.text == "".join(part.text for part in parts if isinstance(part, Text))
    assert track.reasoning == "".join(part.text for part in parts if isinstance(part, Reasoning))
    assert track.calls == [part for part in parts if isinstance(part, ToolCall)]
    assert track.malformed == [part.reason for part in parts if isinstance(part, Malformed)]
    assert (end.finish == "tool_calls") == bool(track.calls and reason in ("end_of_turn", "eos", "tool_calls"))
    kinds = [type(piece) for piece in merged(track.pieces)]
    assert all(a is not b or a is ToolCall for a, b in pairwise(kinds))
    after = [next((p for p in parts[n:] if not isinstance(p, Malformed)), None) for n in range(len(parts))]
    assert len(track.logprobs) == sum(isinstance(part, Text) for part in after)


def test_with_one_call_wanted_nothing_follows_it() -> None:
    track = Track(single=True)
    calls = [ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}"), Text("more")]
    pieces = [track.push(delivery) for delivery in deliveries(calls, reason="cancelled")]
    assert [piece for piece in pieces if piece is not None] == calls[:1]
    assert track.end is not None
    assert (track.end.finish, track.end.error) == ("tool_calls", None)


@pytest.mark.parametrize(("stops", "found"), [(("b c", "zz"), "b c"), (("zz", "c"), "c"), (("only",), "only")])
def test_the_stop_string_is_named(stops: tuple[str, ...], found: str) -> None:
    letters = {1: "a ", 2: "b", 3: " c"}
    track = Track(stops=stops, decode=lambda ids: "".join(letters[i] for i in ids))
    told: list[Delivery] = [Sampled(1), Text("a "), Sampled(2), Sampled(3), outcome("stop_string")]
    for delivery in told:
        track.push(delivery)
    assert track.end is not None
    assert track.end.stop == found


def test_a_failure_after_the_head_is_an_event(served: Served) -> None:
    error = ApiError(status=500, message="it broke", code="internal_error")
    for path in BODIES:
        writer, _ = writer_of(path, served)
        found = read(b"".join(writer.failed(error)), [])
        last = json.loads(found[0].data)
        if path == "/v1/messages":
            assert (found[0].event, last["error"]["type"]) == ("error", "api_error")
        elif path == "/v1/responses":
            assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "it broke")
        else:
            assert last["error"]["message"] == "it broke"
            assert found[-1].data == "[DONE]"


def test_pieces_of_one_kind_are_joined() -> None:
    one, other = LogProbs(token=1, logprob=0.0, top=()), LogProbs(token=2, logprob=0.0, top=())
    assert merged([Said("a", (one,)), Said("b", (other,)), Thought("c"), Thought("d"), Said("e")]) == [
        Said("ab", (one, other)),
        Thought("cd"),
        Said("e"),
    ]
