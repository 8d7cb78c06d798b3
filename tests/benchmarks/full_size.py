"""A model of real size, run in a process of its own, with and without a cap on its memory; figures as JSON.

    python -m tests.benchmarks.full_size --model DIR --slots 16 96 --cap 2.5GiB none [--cold] [--busy 1]

DIR is an install; with --write a synthetic one of --family is written there first. Tokens are seeded and fed whatever
the model answers, so that runs are alike; a synthetic router picks experts evenly, which is the worst case for slots.
Every run must give the same logits, bit for bit, or the exit code is 1.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any, cast

import attrs

from tests.benchmarks.machine import Group, company, drop_cache, facts, memory_bytes, memory_group, read_bandwidth, say

NONE = "none"


def child(options: argparse.Namespace) -> dict[str, Any]:
    """Run one configuration in this process."""
    import mlx.core as mx  # noqa: PLC0415

    from mference_core import plugins  # noqa: PLC0415
    from mference_core.engine import Engine, LoadOptions  # noqa: PLC0415
    from mference_core.experts.plan import parse_bytes, parse_slots  # noqa: PLC0415
    from mference_kernels import levels  # noqa: PLC0415

    load = LoadOptions(
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        memory_bytes=parse_bytes(options.memory) if options.memory else None,
        context=options.context,
        chunk=options.chunk,
        slots=parse_slots(options.slots[0]),
        verify="trusted-receipt",
        lookahead=options.lookahead,
    )
    started = time.perf_counter()
    with Engine.load(plugins.load(options.family), options.model, load) as engine:
        loaded = time.perf_counter() - started
        draw = Random(options.seed)  # noqa: S311 (test data)
        tokens = [draw.randrange(engine.graph.vocab_size) for _ in range(options.prompt + options.new)]
        session, digest, chosen = engine.session(), hashlib.sha256(), list[int]()
        _hold(session, options.held)

        def take(part: list[int]) -> None:
            logits = session.prefill(part)
            chosen.append(int(mx.argmax(logits)))
            digest.update(memoryview(cast("Any", logits)))

        parts = {"prefill": [tokens[: options.prompt]], "decode": [[token] for token in tokens[options.prompt :]]}
        phases = {}
        for name, calls in parts.items():
            before, start = engine.stats, time.perf_counter()
            for call in calls:
                take(call)
            phases[name] = _figures(before, engine.stats, sum(map(len, calls)), time.perf_counter() - start)
        return {
            "kernels": levels.level().variant or "mlx operations",
            "experts": engine.memory.experts_held,
            "plan": str(engine.memory),
            "plan_bytes": engine.memory.total_bytes,
            "load_seconds": loaded,
            **phases,
            "memory": memory_bytes(),
            "token_ids": chosen,
            "logits_sha256": digest.hexdigest(),
        }


def _hold(session: Any, tokens: int) -> None:
    """Let a timeline hold `tokens` that nobody computed, as zeros: its memory and its attention are as if."""
    from mference_core.state import RecurrentState, RowState  # noqa: PLC0415

    for state in session.states if tokens else ():
        if isinstance(state, RecurrentState):
            state.advance(tokens)
            continue
        assert isinstance(state, RowState), "only rows and fixed arrays can be held without computing them"
        while state.length < tokens:
            state.extend(min(session.engine.chunk, tokens - state.length))
    session.tokens.extend([0] * tokens)


def _figures(before: Any, after: Any, tokens: int, seconds: float) -> dict[str, float]:
    spent = {
        field.name: getattr(after, field.name) - getattr(before, field.name) for field in attrs.fields(type(after))
    }
    uses = spent["hits"] + spent["misses"]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "hit_rate": spent["hits"] / uses if uses else 1.0,
        "bytes_read_per_token": spent["bytes_read"] / tokens,
        "waiting_share": spent["stall_seconds"] / seconds,
    }


def run(options: argparse.Namespace, slots: str, cap: str) -> dict[str, Any]:
    """Run one configuration in a process of its own, capped if asked."""
    from mference_core.experts.plan import parse_bytes  # noqa: PLC0415

    if options.cold:
        drop_cache(path for path in options.model.rglob("*") if path.is_file())
    facts_of = {"slots": slots, "cap": cap}
    with company(options.busy):
        if cap == NONE:
            return {**facts_of, **_spawn(options, slots, None)}
        with memory_group(parse_bytes(cap)) as group:
            if group is None:
                return {**facts_of, "error": "no control group can be made here"}
            return {**facts_of, **_spawn(options, slots, group), "group_peak_bytes": group.peak_bytes}


def _spawn(options: argparse.Namespace, slots: str, group: Group | None) -> dict[str, Any]:
    names = ("family", "model", "context", "chunk", "prompt", "new", "seed", "dtype", "kv_dtype", "held", "lookahead")
    arguments = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    arguments += [f"--memory={options.memory}"] if options.memory else []
    command = [sys.executable, "-m", "tests.benchmarks.full_size", "--child", "--slots", slots, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=group.join if group else None
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        killed = done.returncode < 0
        return {"error": f"killed by signal {-done.returncode}" if killed else last[0]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.full_size", description=__doc__)
    parser.add_argument("--family", default="gemma4")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help="write a synthetic install at --model first")
    parser.add_argument("--layers", type=int, help="with --write: the first N layers only")
    parser.add_argument("--slots", nargs="+", default=["16", "96"], help="numbers, resident, mapped or auto")
    parser.add_argument("--cap", nargs="+", default=[NONE], help="memory of the process, page cache included, or none")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--lookahead", default="auto", choices=["off", "on", "auto"])
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--memory", help="budget of the memory plan, with --slots auto or to be kept by a number")
    parser.add_argument("--held", type=int, default=0, help="tokens the timeline holds before, rows of zeros")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of prefill")
    parser.add_argument("--new", type=int, default=32, help="tokens of decode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--probe-bytes", type=int, default=1 << 30, help="memory read to learn its speed; 0: none")
    parser.add_argument("--cold", action="store_true", help="drop the model's pages before each run")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep other cores computing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Run every configuration and print one JSON object."""
    options = parse()
    if options.child:
        say(child(options))
        return 0
    if options.write:
        from mference_core import plugins  # noqa: PLC0415
        from mference_core.testing.synthetic import write_synthetic  # noqa: PLC0415

        write_synthetic(plugins.load(options.family), options.model, layers=options.layers, seed=options.seed)
    report: dict[str, Any] = {"machine": facts(), "read_gb_per_second": read_bandwidth(options.probe_bytes), "runs": []}
    for cap in options.cap:
        for slots in options.slots:
            report["runs"].append(run(options, slots, cap))
            say(report["runs"][-1], stream=sys.stderr)
    digests = {(made["kernels"], made["logits_sha256"]) for made in report["runs"] if "error" not in made}
    report["identical"] = len(digests) == 1
    say(report, indent=1)
    return 0 if report["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
