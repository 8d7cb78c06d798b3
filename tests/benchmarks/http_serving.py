"""The HTTP server: time to the first token, tokens per second, what it costs beyond the scheduler, requests held; JSON.

    python -m tests.benchmarks.http_serving [--family gemma4] [--clients 1 4 8] [--new 384] [--rounds 5] [--held 128]

Clients are one process of their own and stream chat completions. `direct` asks the scheduler in the server's process, in
turns with them. `loop_us_per_token` is the processor time, beyond that of a request of one token, of the thread that does
all of HTTP, which other processes on the machine disturb least; `overhead` sets it against the time of a direct token:
what HTTP would cost a machine whose every core is busy with the model.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mference_core.engine import LoadOptions
from mference_core.generate import GenerateOptions
from mference_core.sampling import SamplingOptions
from mference_core.scheduler.request import Request
from mference_core.scheduler.scheduler import Scheduler, SchedulerOptions
from mference_core.server.metrics import resident_bytes
from mference_core.testing.asking import Asked
from mference_core.testing.serving import ALIAS, Running, serving_demo
from tests.benchmarks.machine import facts, say

ROOT = Path(__file__).parents[2]
QUESTION = "Tell me a story about a fox."


def stream(port: int, fields: dict[str, Any], seen: list[dict[str, float]]) -> None:
    """Ask once and note when the first and the last text came."""
    chat = {"model": ALIAS, "messages": [{"role": "user", "content": QUESTION}], "stream": True, "temperature": 0}
    body = json.dumps(chat | fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=600) as raw:
        started = time.perf_counter()
        raw.sendall(head.encode() + body)
        found, first, last = b"", 0.0, 0.0
        while b"data: [DONE]" not in found[-64:]:
            part = raw.recv(1 << 16)
            if not part:
                raise ConnectionError(found[-500:].decode("utf-8", "replace"))
            if b'"content":"' in part and b'"role"' not in part:
                last = time.perf_counter()
                first = first or last
            found += part
        usage = json.loads(found.split(b"data: ")[-2].split(b"\n", 1)[0])["usage"]
        seen.append(
            {
                "first_token_ms": 1000 * (first - started),
                "seconds": (last - first) or (last - started),
                "tokens": usage["completion_tokens"],
            }
        )


def ask_all(port: int, clients: int, fields: dict[str, Any]) -> list[dict[str, float]]:
    """Let so many ask at once; this runs in the process of the clients."""
    seen: list[dict[str, float]] = []
    threads = [threading.Thread(target=stream, args=(port, fields, seen)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(seen) != clients:
        raise SystemExit(f"only {len(seen)} of {clients} were answered")
    return seen


def from_outside(running: Running, clients: int, fields: dict[str, Any]) -> list[dict[str, float]]:
    """Run `ask_all` in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.http_serving", "--ask", str(running.port), str(clients)]
    done = subprocess.run([*command, json.dumps(fields)], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: list[dict[str, float]] = json.loads(done.stdout)
    return found


def loop_seconds(running: Running) -> float:
    """Return the processor time that the server's thread has had."""

    async def look() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(look(), running.loop).result(60)


def direct(running: Running, clients: int, new: int, bias: dict[int, float]) -> float:
    """Return the tokens per second of the scheduler alone, from all first tokens on."""
    served = running.state.served
    options = GenerateOptions(max_new=new, sampling=SamplingOptions(temperature=0, logit_bias=bias))
    prompt = served.chat.raw_prompt(served.tokenizer, QUESTION)
    asked = [
        Asked.of(
            served.scheduler,
            Request(prompt=tuple(prompt), options=options, decoder=served.chat.decoder(served.tokenizer, None, prompt)),
        )
        for _ in range(clients)
    ]
    figures = [one.outcome(600).figures for one in asked]
    return sum((f.new_tokens - 1) / f.decode_seconds for f in figures)


def measure(running: Running, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """Compare asking over HTTP with asking the scheduler, in turns."""
    bias = dict.fromkeys(running.state.served.stop_ids, -100.0)
    fields = {
        "max_completion_tokens": options.new,
        "logit_bias": {str(token): value for token, value in bias.items()},
        "stream_options": {"include_usage": True},
    }
    firsts, rates, alone, loops, fixed = (list[float]() for _ in range(5))
    for _ in range(options.rounds):
        alone.append(direct(running, clients, options.new, bias))
        before = loop_seconds(running)
        from_outside(running, clients, fields | {"max_completion_tokens": 1})
        between = loop_seconds(running)
        seen = from_outside(running, clients, fields)
        fixed.append((between - before) / clients)
        spent = loop_seconds(running) - between - (between - before)
        firsts += [one["first_token_ms"] for one in seen]
        rates.append(sum((one["tokens"] - 1) / one["seconds"] for one in seen))
        loops.append(spent / sum(one["tokens"] for one in seen))
    step = 1 / statistics.median(alone)
    return {
        "clients": clients,
        "first_token_ms": {"median": round(statistics.median(firsts), 1), "worst": round(max(firsts), 1)},
        "tokens_per_second": round(statistics.median(rates), 1),
        "direct_tokens_per_second": round(statistics.median(alone), 1),
        "loop_ms_per_request": round(1e3 * statistics.median(fixed), 2),
        "loop_us_per_token": round(1e6 * statistics.median(loops), 1),
        "overhead": round(statistics.median(loops) / step, 4),
    }


def hold(running: Running, count: int) -> dict[str, Any]:
    """Hold so many requests at once: all but a few wait, none is lost."""
    before = resident_bytes() or 0
    most = [0, 0]

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], running.state.active)
            most[1] = max(most[1], resident_bytes() or 0)

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    fields = {"max_completion_tokens": 8, "stream_options": {"include_usage": True}}
    seen = from_outside(running, count, fields)
    done.set()
    watcher.join()
    return {
        "asked": count,
        "answered": len(seen),
        "held_at_once": most[0],
        "kib_each": round(max(0, most[1] - before) / 1024 / max(1, most[0]), 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="gemma4")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--new", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--held", type=int, default=128)
    parser.add_argument("--ask", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.ask:
        print(json.dumps(ask_all(int(options.ask[0]), int(options.ask[1]), json.loads(options.ask[2]))))  # noqa: T201
        return
    limits = SchedulerOptions(max_active=max(options.clients), max_waiting=options.held)
    with serving_demo(options.family, LoadOptions(context=1024), limits) as running:
        assert isinstance(running.state.served.scheduler, Scheduler)
        direct(running, 1, 8, {})
        rows = []
        for clients in options.clients:
            rows.append(measure(running, clients, options))
            say(rows[-1], stream=sys.stderr)
        say({"machine": facts(), "family": options.family, "rows": rows, "held": hold(running, options.held)}, indent=1)


if __name__ == "__main__":
    main()
