"""The server on the wire: limits, abuse, clients that vanish or do not read, errors without internals, and the end."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mference_core.chat import Reasoning, Text, ToolCall
from mference_core.errors import Busy, NumericError, RequestError, StreamError
from mference_core.scheduler.request import Delivery, Request, Sampled
from mference_core.server import bodies, exchange
from mference_core.server.protocol import PatientProtocol
from mference_core.server.requests import Ask
from mference_core.server.safety import Policy
from mference_core.server.served import Prepared, Served
from mference_core.testing.scripted import Scripted, outcome, serving_script
from mference_core.testing.serving import Running

USER = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "default", "messages": USER}
MESSAGE: dict[str, Any] = CHAT | {"max_tokens": 5}
POSTS = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGE,
    "/v1/completions": {"model": "default", "prompt": "Hi"},
    "/v1/responses": {"model": "default", "input": "Hi"},
}
TOKEN = "correct-horse"  # noqa: S105  a test's own


def short(_: Request) -> Iterable[Delivery]:
    return [Sampled(1), Text("Hello."), outcome()]


def endless(_: Request) -> Iterator[Delivery]:
    """Speak until nobody listens."""
    while True:
        time.sleep(0.002)
        yield Sampled(1)
        yield Text("word ")


def until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    """A server that says hello to all."""
    with serving_script(short, "gemma4") as (running, _):
        yield running


@pytest.fixture
def http(plain: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=plain.url, timeout=10) as client:
        yield client


@contextmanager
def wire(running: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as raw:
        yield raw


def answers(running: Running) -> bool:
    """Say whether a new connection is answered."""
    try:
        return httpx.get(f"{running.url}/health").status_code == 200
    except httpx.TransportError:
        return False


def head(path: str, length: int, *, host: str = "localhost", more: str = "") -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", f"Content-Length: {length}"]
    return ("\r\n".join([*lines, *([more] if more else [])]) + "\r\n\r\n").encode()


def ask_raw(raw: socket.socket, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
    data = json.dumps(body).encode()
    raw.sendall(head(path, len(data)) + data)


def read_all(raw: socket.socket) -> bytes:
    found = b""
    try:
        while part := raw.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("path", list(POSTS))
def test_errors_have_the_shape_of_their_dialect(http: httpx.Client, path: str) -> None:
    answers = [
        (http.post(path, content=b"{", headers={"content-type": "application/json"}), 400),
        (http.post(path, json=POSTS[path] | {"model": "x"}), 404),
        (http.get(path), 405),
        (http.post(path, content=b"{}", headers={"content-type": "text/plain"}), 415),
        (http.post(path, content=b"{}"), 415),
        (http.post(path, json=POSTS[path], headers={"content-encoding": "gzip"}), 415),
        (http.post(path, json=POSTS[path] | {"nothing": 1}), 400),
        (
            http.post(path, content=b" " * (bodies.MAX_BODY_BYTES + 1), headers={"content-type": "application/json"}),
            413,
        ),
    ]
    for answer, status in answers:
        assert answer.status_code == status, answer.text
        body = answer.json()
        assert answer.headers["x-request-id"] == answer.headers["request-id"]
        if path == "/v1/messages":
            assert (body["type"], body["request_id"]) == ("error", answer.headers["request-id"])
            assert set(body["error"]) == {"type", "message"}
        else:
            assert set(body["error"]) == {"message", "type", "param", "code"}
    assert answers[2][0].headers["allow"] == "POST"


def test_what_is_not_there(http: httpx.Client) -> None:
    for path in (
        "/v1/nothing",
        "/v1/chat/completions/",
        "/.env",
        "/page/../conftest.py",
        "/page/%2e%2e/app.py",
        "/page/x",
    ):
        assert http.get(path).status_code == 404, path
    assert http.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"}).json()["type"] == "error"


def test_every_response_is_guarded(http: httpx.Client) -> None:
    for answer in (http.get("/health"), http.post("/v1/messages", json=MESSAGE), http.get("/nothing")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
        assert "server" not in answer.headers
    assert "default-src 'none'" in http.get("/").headers.get("content-security-policy", "")


def test_fields_without_effect_are_told(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=CHAT | {"user": "u", "metadata": {"a": "b"}})
    assert answer.headers["mference-without-effect"] == "user, metadata"
    assert "mference-without-effect" not in http.post("/v1/chat/completions", json=CHAT).headers


def test_health_and_figures(http: httpx.Client, plain: Running) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    before = http.get("/figures").json()
    http.post("/v1/chat/completions", json=CHAT)
    after = http.get("/figures").json()
    assert after["completion_tokens_total"] == before["completion_tokens_total"] + 1
    assert after["prompt_tokens_total"] == before["prompt_tokens_total"] + 9
    assert after["requests_active"] == 0
    text = http.get("/metrics").text
    assert f"mference_completion_tokens_total {after['completion_tokens_total']:g}\n" in text
    assert 'mference_time_to_first_token_seconds_bucket{le="+Inf"}' in text
    for line in text.splitlines():
        assert line.startswith("#") or len(line.rsplit(" ", 1)) == 2
        assert line.startswith("#") or float(line.rsplit(" ", 1)[1]) >= 0
    assert plain.state.active == 0


@pytest.mark.parametrize("path", list(POSTS))
def test_failures_tell_no_internals(path: str) -> None:
    """Before the head they are a status, after it an event; the log alone has the rest."""

    def broken(request: Request) -> Iterator[Delivery]:
        raise RuntimeError(f"secret at /home/{len(request.prompt)}")

    def failing(error: Any) -> Callable[[Request], Iterable[Delivery]]:
        return lambda _: [Sampled(1), Text("He"), outcome("error", error=error)]

    with (
        serving_script(lambda r: list(broken(r)), "gemma4") as (running, _),
        httpx.Client(base_url=running.url) as client,
    ):
        answer = client.post(path, json=POSTS[path])
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
        assert "secret" not in answer.text
        assert "Traceback" not in answer.text
        until(lambda: any("secret" in line for line in running.log))
    shown = [
        (StreamError(what="/home/secret/layer.bin cannot be read"), 500, "secret", False),
        (NumericError(what="output of layer 3", got="not finite"), 500, "layer 3", True),
        (RequestError(what="the schema", got="too large to follow"), 400, "too large to follow", True),
    ]
    for error, status, word, told in shown:
        with serving_script(failing(error), "gemma4") as (running, _), httpx.Client(base_url=running.url) as client:
            whole = client.post(path, json=POSTS[path])
            assert whole.status_code == status
            assert (word in whole.text) == told
            streamed = client.post(path, json=POSTS[path] | {"stream": True})
            assert streamed.status_code == 200
            assert (word in streamed.text) == told
            assert '"error"' in streamed.text
            assert "He" in streamed.text
            until(lambda log=running.log, word=word: sum(word in line for line in log) == 2)  # type: ignore[misc]


@pytest.mark.parametrize("path", list(POSTS))
def test_a_full_queue_says_when_to_come_again(path: str) -> None:
    def full(_: Request) -> Iterable[Delivery]:
        raise Busy(what="the queue", got="full", retry_after_seconds=7)

    with serving_script(full, "gemma4") as (running, _), httpx.Client(base_url=running.url) as client:
        for stream in (False, True):
            answer = client.post(path, json=POSTS[path] | {"stream": stream})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
            assert answer.json()["error"]["type"] == "rate_limit_error"
        until(lambda: running.state.active == 0)


def test_places_are_given_before_anything_is_read_and_given_back() -> None:
    with serving_script(endless, "gemma4", held=2) as (running, scripted), httpx.Client(base_url=running.url) as client:
        with wire(running) as one, wire(running) as two:
            ask_raw(one, CHAT | {"stream": True})
            ask_raw(two, CHAT)
            until(lambda: running.state.active == 2 and len(scripted.played) == 2)
            answer = client.post("/v1/chat/completions", json={"never": "read"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        until(lambda: running.state.active == 0)
        assert all(played.cancelled.is_set() for played in scripted.played)
        assert client.post("/v1/chat/completions", json={"never": "read"}).status_code == 400


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", list(POSTS))
def test_a_client_that_vanishes_ends_its_answer(path: str, *, stream: bool) -> None:
    with serving_script(endless, "gemma4") as (running, scripted):
        with wire(running) as raw:
            ask_raw(raw, POSTS[path] | {"stream": stream}, path)
            until(lambda: bool(scripted.played))
            if stream:
                raw.recv(100)
        until(scripted.played[0].cancelled.is_set)
        until(lambda: running.state.active == 0 and not running.state.running)
        until(lambda: not running.server.server_state.tasks)


def test_a_client_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientProtocol, "stall_seconds", 0.3)

    def flood(_: Request) -> Iterator[Delivery]:
        while True:
            yield Sampled(1)
            yield Text("x" * 20_000)
            time.sleep(0.001)

    with serving_script(flood, "gemma4") as (running, scripted), wire(running) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ask_raw(raw, CHAT | {"stream": True})
        until(lambda: bool(scripted.played) and scripted.played[0].cancelled.is_set(), 20)
        until(lambda: not running.server.server_state.connections and running.state.active == 0)


def test_what_waits_for_a_client_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads too slowly for the model is told so, and its answer ends."""

    def burst(_: Request) -> Iterator[Delivery]:
        for _number in range(200_000):
            yield Text("x")

    monkeypatch.setattr(PatientProtocol, "stall_seconds", 20.0)
    with serving_script(burst, "gemma4") as (running, scripted), wire(running) as raw:
        ask_raw(raw, CHAT | {"stream": True})
        time.sleep(0.2)
        until(lambda: scripted.played[0].done, 20)
        raw.settimeout(5)
        found = raw.recv(1 << 20)
        assert found
    until(lambda: running.state.active == 0)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc"])
def test_a_slow_head_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(PatientProtocol, "head_seconds", 0.2)
    with serving_script(short, "gemma4") as (running, _), wire(running) as raw:
        raw.sendall(sent)
        started = time.monotonic()
        assert read_all(raw) == b""
        assert time.monotonic() - started < 3
        until(lambda: not running.server.server_state.connections)


def test_a_slow_second_head_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientProtocol, "head_seconds", 0.3)
    with serving_script(short, "gemma4") as (running, _), wire(running) as raw:
        ask_raw(raw, CHAT)
        until(lambda: running.state.metrics.requests["/v1/chat/completions", 200] == 1)
        raw.sendall(b"GET /health HTTP/1.1\r\nHo")
        assert b"200 OK" in read_all(raw)


def test_a_slow_body_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies.read_json, "__defaults__", (bodies.MAX_BODY_BYTES, 0.3))
    with serving_script(short, "gemma4") as (running, _), wire(running) as raw:
        raw.sendall(head("/v1/messages", 500) + b'{"mod')
        said = read_all(raw)
        assert b"408" in said.split(b"\r\n")[0]
        assert b"did not arrive" in said
        until(lambda: running.state.active == 0)


def test_a_long_answer_is_not_cut_by_the_clock_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientProtocol, "head_seconds", 0.2)

    def slow(_: Request) -> Iterator[Delivery]:
        for _number in range(5):
            time.sleep(0.15)
            yield Text("x")
        yield outcome()

    with serving_script(slow, "gemma4") as (running, _):
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "xxxxx"


def test_silence_is_filled_with_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PING_SECONDS", 0.1)

    def silent(_: Request) -> Iterator[Delivery]:
        time.sleep(0.5)
        yield outcome()

    with serving_script(silent, "gemma4") as (running, _), httpx.Client(base_url=running.url) as client:
        assert client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text.count(": ping\n\n") >= 2
        assert client.post("/v1/messages", json=MESSAGE | {"stream": True}).text.count("event: ping") >= 2


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 30_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: 1\r\n" * 100 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000, b"400"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.0\r\n\r\n", b"403"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"403"),
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (
            b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"400",
        ),
        (b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", b"400"),
        (head("/v1/messages", 1 << 40), b"413"),
    ],
)
def test_bad_heads_are_refused(plain: Running, sent: bytes, status: bytes) -> None:
    with wire(plain) as raw:
        raw.sendall(sent)
        assert read_all(raw).split(b"\r\n")[0].split(b" ")[1] == status


def test_a_body_without_a_length_is_bounded_too(plain: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies.read_json, "__defaults__", (1000, 5.0))
    with wire(plain) as raw:
        raw.sendall(
            b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b" " * 1024 + b"\r\n0\r\n\r\n"
        )
        assert b" 413 " in read_all(raw).split(b"\r\n")[0]


def test_there_are_only_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientProtocol, "connections_most", 3)
    with serving_script(short, "gemma4") as (running, _):
        held = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(3)]
        until(lambda: len(running.server.server_state.connections) == 3)
        with wire(running) as raw:
            assert read_all(raw) == b""
        for raw in held:
            raw.close()
        until(lambda: not running.server.server_state.connections)
        assert httpx.get(f"{running.url}/health").status_code == 200


def test_a_token_is_asked_for_in_the_dialect() -> None:
    policy = Policy.of("127.0.0.1", [], ["https://app.example"], TOKEN)
    with serving_script(short, "gemma4", policy=policy) as (running, _), httpx.Client(base_url=running.url) as client:
        assert client.post("/v1/messages", json=MESSAGE).json()["error"]["type"] == "authentication_error"
        refused = client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert TOKEN not in refused.text
        assert client.post("/v1/messages", json=MESSAGE, headers={"x-api-key": TOKEN}).status_code == 200
        headers = {"authorization": f"Bearer {TOKEN}", "origin": "https://app.example"}
        allowed = client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
        names = {"access-control-request-headers": "authorization,x-stainless-os"}
        preflight = client.options("/v1/chat/completions", headers=asked | names)
        assert (preflight.status_code, preflight.headers["access-control-allow-headers"]) == (204, names.popitem()[1])
        assert client.options("/v1/messages", headers=asked | {"origin": "https://evil.example"}).status_code == 403
        assert TOKEN not in "".join(running.log)


def test_the_log_says_what_happened_and_nothing_of_what_was_said(http: httpx.Client, plain: Running) -> None:
    plain.log.clear()
    answer = http.post("/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": "a secret"}]})
    until(lambda: bool(plain.log))
    assert plain.log[0].startswith(f"{answer.headers['x-request-id']} POST '/v1/chat/completions' 200 in ")
    assert "prompt=9 cached=0 completion=1 finish=stop" in plain.log[0]
    assert "secret" not in plain.log[0]
    assert "Hello" not in plain.log[0]


def test_answers_finish_when_the_server_ends_and_nothing_new_begins() -> None:
    go = threading.Event()

    def waiting(_: Request) -> Iterator[Delivery]:
        yield Text("first ")
        go.wait(10)
        yield Text("last")
        yield outcome()

    with serving_script(waiting, "gemma4") as (running, scripted), wire(running) as raw, wire(running) as other:
        ask_raw(raw, CHAT | {"stream": True})
        other.sendall(head("/v1/messages", 50))
        until(lambda: bool(scripted.played) and running.state.active == 2)
        running.drain()
        until(lambda: running.state.draining)
        until(lambda: not answers(running))
        go.set()
        said = read_all(raw)
        assert b"last" in said
        assert said.rstrip().endswith(b"0")
        other.close()
        running.thread.join(10)
        assert not running.thread.is_alive()


def test_answers_that_take_too_long_at_the_end_are_told_so() -> None:
    with (
        serving_script(endless, "gemma4", drain_seconds=0.3) as (running, scripted),
        wire(running) as raw,
        wire(running) as whole,
    ):
        ask_raw(raw, MESSAGE | {"stream": True}, "/v1/messages")
        ask_raw(whole, CHAT)
        until(lambda: len(scripted.played) == 2)
        running.drain()
        assert b"overloaded_error" in read_all(raw)
        assert b" 503 " in read_all(whole).split(b"\r\n")[0]
        running.thread.join(10)
        assert not running.thread.is_alive()


def test_pipelined_requests_are_answered_in_order(plain: Running) -> None:
    data = json.dumps(CHAT).encode()
    with wire(plain) as raw:
        raw.sendall((head("/v1/chat/completions", len(data)) + data) * 3)
        found = b""
        while found.count(b'"finish_reason"') < 3:
            found += raw.recv(65536)
        assert found.count(b"HTTP/1.1 200 OK") == 3


def test_every_kind_of_piece_reaches_every_client() -> None:
    def all_kinds(_: Request) -> Iterable[Delivery]:
        return [Reasoning("Hm."), Text("Yes."), ToolCall("call_1", "f", '{"a":"é"}'), outcome(new=3, cached=4)]

    with serving_script(all_kinds, "gemma4") as (running, _), httpx.Client(base_url=running.url) as client:
        message = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":"é"}'}
        blocks = client.post("/v1/messages", json=MESSAGE).json()
        assert [block["type"] for block in blocks["content"]] == ["thinking", "text", "tool_use"]
        assert blocks["usage"]["cache_read_input_tokens"] == 4
        items = client.post("/v1/responses", json=POSTS["/v1/responses"]).json()["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
        assert client.post("/v1/completions", json=POSTS["/v1/completions"]).json()["choices"][0]["text"] == "Yes."


def test_a_call_of_a_namespace_comes_back_in_it() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    body = POSTS["/v1/responses"] | {"tools": [{"type": "namespace", "name": "box", "tools": [tool]}]}
    script = [ToolCall("call_1", "box__f", "{}"), outcome()]
    with serving_script(lambda _: script, "gemma4") as (running, _), httpx.Client(base_url=running.url) as client:
        (item,) = client.post("/v1/responses", json=body).json()["output"]
        assert (item["name"], item["namespace"], item["call_id"]) == ("f", "box", "call_1")
        assert "box__f" not in client.post("/v1/responses", json=body | {"stream": True}).text


@pytest.mark.parametrize("path", list(POSTS))
def test_a_request_past_its_deadline_is_told_so(path: str) -> None:
    def late(_: Request) -> Iterable[Delivery]:
        return [Sampled(1), Text("He"), outcome("deadline")]

    with serving_script(late, "gemma4") as (running, _), httpx.Client(base_url=running.url) as client:
        assert client.post(path, json=POSTS[path]).status_code == 504
        assert "deadline" in client.post(path, json=POSTS[path] | {"stream": True}).text


def test_a_client_that_leaves_while_its_request_is_prepared_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, go = threading.Event(), threading.Event()
    prepare = Served.prepare

    def slow(served: Served, ask: Ask) -> Prepared:
        began.set()
        go.wait(10)
        return prepare(served, ask)

    monkeypatch.setattr(Served, "prepare", slow)
    with serving_script(short, "gemma4") as (running, scripted):
        with wire(running) as raw:
            ask_raw(raw, CHAT)
            assert began.wait(5)
        until(lambda: running.state.active == 0)
        go.set()
        assert not scripted.played


def test_a_scheduler_that_is_closed_refuses(plain: Running) -> None:
    scheduler = plain.state.served.scheduler
    assert isinstance(scheduler, Scripted)
    scheduler.closed = True
    try:
        assert httpx.post(f"{plain.url}/v1/messages", json=MESSAGE).status_code == 429
    finally:
        scheduler.closed = False
