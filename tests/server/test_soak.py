"""Clients that come, wait, read slowly and vanish, many at once: at the end nothing of them is left.

A few seconds here; `MFERENCE_SOAK_SECONDS=600 pytest tests/server/test_soak.py` goes on for longer and `-s` shows the
figures.
"""

import gc
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import mlx.core as mx

from mference_core.engine import LoadOptions
from mference_core.scheduler.scheduler import Scheduler, SchedulerOptions
from mference_core.scheduler.task import Task
from mference_core.server.answers import Answers, Mailbox, Track
from mference_core.server.exchange import Told
from mference_core.server.protocol import PatientProtocol
from mference_core.testing.serving import Running, serving_demo

SECONDS = float(os.environ.get("MFERENCE_SOAK_SECONDS", "3"))
CLIENTS = 12
CACHE_BYTES = 4 << 20
HELD = (Answers, Mailbox, Track, Told, Task, PatientProtocol)
LAST = (Task, Mailbox)
"""A scheduler's thread, those of other tests' servers too, holds the last of these until the next one comes."""

Mood = Callable[[Running, random.Random], str]


def body(rng: random.Random, *, stream: bool) -> tuple[str, dict[str, Any]]:
    text = rng.choice(
        ["Tell me a story.", "Hi", "What is the capital of France?", "Tell me a story about a fox. " * 20]
    )
    messages = [{"role": "user", "content": text}]
    tokens = rng.randrange(1, 40)
    chats: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": tokens, "n": rng.randrange(1, 3)}),
        ("/v1/messages", {"messages": messages, "max_tokens": tokens}),
    ]
    others: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"input": text, "max_output_tokens": tokens}),
        ("/v1/completions", {"prompt": text, "max_tokens": tokens, "temperature": 1.0}),
    ]
    path, fields = rng.choice(chats if stream else chats + others)
    return path, fields | ({"stream": True} if stream else {})


def ask(running: Running, path: str, fields: dict[str, Any]) -> socket.socket:
    data = json.dumps({"model": "default"} | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    raw = socket.create_connection(("127.0.0.1", running.port), timeout=30)
    raw.sendall(head.encode() + data)
    return raw


def post(running: Running, path: str, fields: dict[str, Any]) -> tuple[int, str]:
    """Ask with the standard library, whose own memory is small beside what is measured."""
    connection = HTTPConnection("127.0.0.1", running.port, timeout=60)
    try:
        connection.request(
            "POST", path, json.dumps({"model": "default"} | fields), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def patient(running: Running, rng: random.Random) -> str:
    path, fields = body(rng, stream=rng.random() < 0.5)
    status, text = post(running, path, fields)
    if status == 200 and fields.get("stream"):
        assert text.rstrip().endswith(("[DONE]", '{"type":"message_stop"}'))
    return str(status)


def vanishing(running: Running, rng: random.Random) -> str:
    path, fields = body(rng, stream=rng.random() < 0.7)
    with ask(running, path, fields) as raw:
        time.sleep(rng.random() * 0.05)
        if rng.random() < 0.5:
            raw.recv(rng.randrange(1, 400))
        if rng.random() < 0.3:  # reset rather than close
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    return "vanished"


def slow(running: Running, rng: random.Random) -> str:
    path, fields = body(rng, stream=True)
    with ask(running, path, fields) as raw:
        for _ in range(rng.randrange(5, 30)):
            raw.recv(1)
            time.sleep(0.01)
    return "slow"


def silent(running: Running, rng: random.Random) -> str:
    with socket.create_connection(("127.0.0.1", running.port)) as raw:
        raw.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Le"[: rng.randrange(58)])
        time.sleep(rng.random() * 0.1)
    return "silent"


def wrong(running: Running, rng: random.Random) -> str:
    fields = rng.choice([{"nothing": 1}, {"max_tokens": 10**6}, {"messages": "x" * 5000}, {"temperature": -1}])
    chat = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    return f"wrong {post(running, '/v1/messages', chat | fields)[0]}"


MOODS: list[Mood] = [patient, patient, patient, vanishing, vanishing, slow, silent, wrong]


def storm(running: Running, seconds: float, seed: int) -> Counter[str]:
    """Let all clients do what they like for a while; return what came of it."""
    seen: Counter[str] = Counter()
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        rng = random.Random(seed * 1000 + number)  # noqa: S311  a repeatable choice
        while time.monotonic() < end:
            mood = rng.choice(MOODS)
            try:
                seen[mood(running, rng)] += 1
            except Exception as error:  # noqa: BLE001  it is looked at in the test
                seen[f"{mood.__name__}: {type(error).__name__}: {error}"] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def settle(running: Running) -> dict[str, float]:
    """Wait until nobody is served, and return what is still held."""
    scheduler = running.state.served.scheduler
    assert isinstance(scheduler, Scheduler)
    end = time.monotonic() + 20
    while True:
        load = scheduler.load()
        busy = load.waiting + load.prefilling + load.decoding + running.state.active + len(running.state.running)
        state = running.server.server_state
        if not busy and not state.connections and not state.tasks:
            break
        assert time.monotonic() < end, (load, running.state.active, state.connections, state.tasks)
        time.sleep(0.02)
    time.sleep(0.1)
    gc.collect()
    assert load.state_bytes == 0
    assert load.cache.nbytes <= CACHE_BYTES
    return {
        "threads": sum(not thread.name.startswith("asyncio") for thread in threading.enumerate()),  # a pool of few
        "files": len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0,
        "array MiB": (mx.get_active_memory() - load.cache.nbytes) / 2**20,
        "array cache MiB": mx.get_cache_memory() / 2**20,
        "other MiB": (anonymous_bytes() - mx.get_active_memory() - mx.get_cache_memory()) / 2**20,
        **{kind.__name__: sum(isinstance(one, kind) for one in gc.get_objects()) for kind in HELD},
    }


def anonymous_bytes() -> int:
    """Return the memory the process has that is no file's, where the system says so."""
    status = Path("/proc/self/status")
    lines = status.read_text("ascii").splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def test_nothing_is_left_of_clients_that_came_and_went() -> None:
    options = SchedulerOptions(max_active=4, max_waiting=6, cache_bytes=CACHE_BYTES)
    with serving_demo("gemma4", LoadOptions(context=512), options) as running:
        settle(running)  # looking at all objects takes memory of its own, once
        storm(running, min(2.0, SECONDS), seed=1)
        before = settle(running)
        seen = storm(running, SECONDS, seed=2)
        after = settle(running)
        print(f"\n{dict(seen)}\nbefore {before}\nafter {after}")  # noqa: T201  the figures
        expected = {"200", "429", "vanished", "slow", "silent", "wrong 400", "wrong 429"}
        assert set(seen) <= expected, seen
        assert seen["200"] > 2
        assert seen["vanished"] > 2
        for kind in HELD:
            assert after[kind.__name__] <= (before[kind.__name__] + 1 if kind in LAST else 0), kind
        assert after["threads"] <= before["threads"]
        assert after["files"] <= before["files"]
        assert after["array MiB"] <= before["array MiB"] + 1
        assert after["other MiB"] <= before["other MiB"] + 8
        assert not [line for line in running.log if "Traceback" in line or "internal error" in line]
