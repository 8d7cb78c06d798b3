"""The scheduler against the bare engine, taking turns in one run, and prompts from nothing and from what was kept; JSON.

    python -m tests.benchmarks.serving [--family gemma4] [--model DIR] [--clients 1 4 8] [--new 64] [--rounds 5]

A step makes a token of every answer. `overhead` is what a step of the scheduler takes beyond one of a loop that does
nothing but call the engine and choose the best tokens; with `text` tokens are also turned into events. `own_ms` is the
processor time of the calling thread alone: what other processes on the machine disturb least. Without `--model` the
family's embedded demo checkpoint runs.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import mlx.core as mx
from attrs import define, field

from mference_core import plugins
from mference_core.chat.format import StreamDecoder
from mference_core.engine import Engine, LoadOptions
from mference_core.generate import GenerateOptions
from mference_core.sampling import SamplingOptions, greedy
from mference_core.scheduler.request import Delivery, Request, Sampled
from mference_core.scheduler.scheduler import Scheduler, SchedulerOptions
from mference_core.testing.asking import Asked
from mference_core.tokens import Tokenizer
from tests.benchmarks.machine import facts, say

PROMPT = 32
CACHE_BYTES = 4 << 30


@define
class Timed(Asked):
    """A request whose tokens are timed."""

    times: list[float] = field(factory=list)
    own: list[float] = field(factory=list)

    def hear(self, delivery: Delivery) -> None:
        """Keep a delivery, and when a token came."""
        if isinstance(delivery, Sampled):
            self.times.append(time.perf_counter())
            self.own.append(time.thread_time())
        super().hear(delivery)


def prompts(count: int, length: int, vocab: int, salt: int = 0) -> list[tuple[int, ...]]:
    """Return prompts that have nothing in common."""
    return [tuple((37 * i + 101 * (n + 13 * salt) + 7) % (vocab - 8) + 4 for i in range(length)) for n in range(count)]


def middle(times: Sequence[float]) -> float:
    """Return the median time from one to the next."""
    return statistics.median(b - a for a, b in pairwise(times))


def bare_step(engine: Engine, wanted: Sequence[tuple[int, ...]], new: int) -> tuple[float, float]:
    """Return the seconds, and those of this thread, of a step that does nothing but what it must."""
    sessions = [engine.session() for _ in wanted]
    logits = engine.forward(sessions, wanted)
    times, own = list[float](), list[float]()
    for _ in range(new):
        assert logits is not None
        tokens: Any = greedy(logits).tolist()
        times.append(time.perf_counter())
        own.append(time.thread_time())
        logits = engine.forward(sessions, [[token] for token in tokens])
    return middle(times), middle(own)


def served(
    scheduler: Scheduler, wanted: Sequence[tuple[int, ...]], new: int, decoders: Sequence[StreamDecoder | None]
) -> tuple[float, float, float]:
    """Return the seconds, and those of its thread, of a step in which all answer, and tokens per second, prompts included."""
    options = GenerateOptions(max_new=new, sampling=SamplingOptions(temperature=0))
    all_here = Event()
    first = Asked()
    gate = Request(prompt=(1,), options=GenerateOptions(max_new=1))
    scheduler.submit(gate, lambda told: (all_here.wait(60), first.hear(told)))  # so that all begin at once
    asked, started = list[Timed](), time.perf_counter()
    for prompt, decoder in zip(wanted, decoders, strict=True):
        one = Timed()
        one.ticket = scheduler.submit(Request(prompt=prompt, options=options, decoder=decoder), one.hear)
        asked.append(one)
    all_here.set()
    for one in asked:
        assert one.outcome(600).error is None
    seconds = time.perf_counter() - started
    return middle(asked[-1].times), middle(asked[-1].own), len(wanted) * new / seconds


def steps(engine: Engine, scheduler: Scheduler, options: argparse.Namespace, decoder: Any) -> list[dict[str, Any]]:
    """Compare steps at each number of clients."""
    rows = []
    for clients in options.clients:
        seen = defaultdict[str, list[float]](list)
        for turn in range(options.rounds):
            wanted = prompts(clients, PROMPT, engine.graph.vocab_size, turn)
            bare, bare_own = bare_step(engine, wanted, options.new)
            plain, plain_own, rate = served(scheduler, wanted, options.new, [None] * clients)
            text, text_own, _ = served(scheduler, wanted, options.new, [decoder(prompt) for prompt in wanted])
            found = {"bare": bare, "plain": plain, "text": text, "rate": rate}
            found |= {"bare_own": bare_own, "plain_own": plain_own, "text_own": text_own}
            found |= {"plain/bare": plain / bare, "text/bare": text / bare}
            for name, value in found.items():
                seen[name].append(value)
        typical = {name: statistics.median(values) for name, values in seen.items()}
        row = {
            "clients": clients,
            "bare_tokens_per_second": round(clients / typical["bare"], 1),
            "tokens_per_second": round(clients / typical["plain"], 1),
            "tokens_per_second_with_prompts": round(typical["rate"], 1),
            "step_ms": {name: round(1000 * typical[name], 3) for name in ("bare", "plain", "text")},
            "own_ms": {name: round(1000 * typical[f"{name}_own"], 3) for name in ("bare", "plain", "text")},
            "overhead": round(typical["plain/bare"] - 1, 4),
            "overhead_with_text": round(typical["text/bare"] - 1, 4),
        }
        say(row, stream=sys.stderr)
        rows.append(row)
    return rows


def first_tokens(engine: Engine, length: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds to the first token of a prompt: computed, kept in memory, kept on disk."""
    seen: dict[str, list[float]] = {"cold": [], "memory": [], "disk": []}
    reused: dict[str, int] = {}
    one = GenerateOptions(max_new=1, sampling=SamplingOptions(temperature=0))
    with tempfile.TemporaryDirectory() as folder:
        limits = SchedulerOptions(cache_bytes=CACHE_BYTES, cache_folder=Path(folder), disk_bytes=CACHE_BYTES)
        for turn in range(rounds):
            (prompt,) = prompts(1, length, engine.graph.vocab_size, turn)
            for names in (("cold", "memory"), ("disk",)):
                with Scheduler(engine=engine, options=limits) as scheduler:
                    for name in names:
                        asked, started = Timed(), time.perf_counter()
                        scheduler.submit(Request(prompt=prompt, options=one), asked.hear)
                        reused[name] = asked.outcome(600).figures.cached_tokens
                        seen[name].append(1000 * (asked.times[0] - started))
    ms = {name: round(statistics.median(values), 1) for name, values in seen.items()}
    return {"prompt_tokens": length, "first_token_ms": ms, "cached_tokens": reused}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="gemma4")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--slots", default="auto")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt that is kept")
    options = parser.parse_args(arguments)
    family = plugins.load(options.family)
    path = options.model or Path(str(import_module(f"mference_{options.family}").__file__)).parent / "demo"
    slots = int(options.slots) if options.slots.isdigit() else options.slots
    context = max(options.prompt, PROMPT + options.new) + 8
    with Engine.load(family, path, LoadOptions(context=context, slots=slots)) as engine:
        decoder: Any = lambda _: None  # noqa: E731
        if engine.checkpoint.tokenizer_dir is not None:
            chat = family.ask("mference_chat_format")
            tokenizer = Tokenizer.load(engine.checkpoint.tokenizer_dir, control=chat.control)
            decoder = lambda prompt: chat.decoder(tokenizer, None, prompt)  # noqa: E731
        with Scheduler(engine=engine, options=SchedulerOptions(max_active=max(options.clients) + 1)) as scheduler:
            mx.eval(engine.session().prefill([1]))
            rows = steps(engine, scheduler, options, decoder)
        report = {
            "machine": facts(),
            "family": options.family,
            "experts": engine.memory.experts_held,
            "steps": rows,
            "prefix": first_tokens(engine, options.prompt, options.rounds),
        }
    say(report, indent=1)


if __name__ == "__main__":
    main()
