"""Our speed as ratios to mlx-lm and llama.cpp, taking turns in one run, and to the machine's read bandwidth; JSON.

    python -m tests.benchmarks.compare --work DIR [--mlx-python PY] [--llama-python PY] [--layers 6] [--rounds 5]

PY are interpreters of throw-away environments: `pip install mlx-lm 'mlx[cpu]'`, and `pip install --no-binary :all:
llama-cpp-python`, which builds for this very machine. The models are written below DIR and left there for the next
run: the same 4-bit checkpoint for mlx-lm and for us, and one of the same shapes in Q4_0 for llama.cpp.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from mference_core import plugins
from mference_core.testing.synthetic import plan_synthetic, write_synthetic_mlx
from tests.benchmarks.gemma4_gguf import write_gguf
from tests.benchmarks.machine import company, facts, read_bandwidth, say, spread

FAMILY = "gemma4"
PROMPT = 32
"""Tokens before those of a decode request."""
WORKER = Path(__file__).with_name("worker.py")


@frozen(kw_only=True)
class Worker:
    """A runtime in its own process."""

    process: "subprocess.Popen[str]"

    def ask(self, request: dict[str, int]) -> float:
        """Return the seconds a request took."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return float(self.answer()["seconds"])

    def answer(self) -> dict[str, Any]:
        """Return the next line; raises RuntimeError when the process ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended; see its log")  # type: ignore[str-bytes-safe]
        found: dict[str, Any] = json.loads(line)
        return found


def start(python: str, kind: str, model: Path, options: argparse.Namespace) -> Worker:
    """Start a runtime and wait until its model is loaded."""
    arguments = [python, str(WORKER), kind, str(model), f"--threads={options.threads}"]
    with (options.work / f"{kind}.log").open("w") as log:
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    made = Worker(process=process)
    made.answer()
    return made


def models(options: argparse.Namespace) -> tuple[Path, Path, int, int]:
    """Write the models where they are not yet; return both paths, and bytes per token of layers and of the head."""
    family = plugins.load(FAMILY)
    made = plan_synthetic(family, layers=options.layers)
    arch = evolve(made.arch, vocab_size=options.vocab)
    made = plan_synthetic(family, arch=arch)
    name = f"{FAMILY}-{options.layers}-{options.vocab}"
    mlx, gguf = options.work / f"{name}-mlx", options.work / f"{name}.gguf"
    options.work.mkdir(parents=True, exist_ok=True)
    if not mlx.exists():
        write_synthetic_mlx(family, mlx, arch=arch)
    if options.llama_python and not gguf.exists():
        write_gguf(gguf, arch, context=4096)
    spans = [(w.name, (w.data, w.scales, w.biases)) for w in made.checkpoint.weights.values() if w.quant]
    residents = sum(span.size for _, found in spans for span in found if span is not None)
    routed = sum(layer.expert_bytes for layer in made.checkpoint.experts.values()) * arch.top_k_experts
    return mlx, gguf, residents + routed, made.outputs.total_bytes


def requests(options: argparse.Namespace) -> list[tuple[str, dict[str, int]]]:
    """Return what is asked for, by name."""
    rows = [(f"prefill_{n}", {"prefill": n}) for n in options.rows]
    return [("decode", {"prefill": PROMPT, "decode": options.new}), *rows]


def measure(workers: dict[str, Worker], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Take turns over runtimes and rounds; return seconds per token of each, and our speed over theirs."""
    found: dict[str, dict[str, Any]] = {}
    for name, request in requests(options):
        asked = dict.fromkeys(workers, request)
        if "mlx-lm" in workers:  # asked for little, and once: it takes seconds per layer and token
            asked["mlx-lm"] = {"prefill": 1, "decode": 2} if "decode" in request else {"prefill": options.mlx_rows}
        seconds: dict[str, list[float]] = {kind: [] for kind in workers}
        for turn in range(options.rounds + 1):
            for kind, worker in workers.items():
                if kind == "mlx-lm" and turn != 1:
                    continue
                took = worker.ask(asked[kind]) / list(asked[kind].values())[-1]
                if turn:  # the first one warms up
                    seconds[kind].append(took)
        rates = {kind: spread(values) for kind, values in seconds.items()}
        mine = rates["ours"]
        found[name] = {
            "seconds_per_token": rates,
            "tokens_per_second": {kind: 1 / rate["median"] for kind, rate in rates.items()},
            "times_as_fast_as": {
                kind: {which: rate[which] / mine[which] for which in rate}
                for kind, rate in rates.items()
                if kind != "ours"
            },
        }
        say({name: found[name]}, stream=sys.stderr)
    return found


def main() -> None:
    """Compare and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compare", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where models are kept")
    parser.add_argument("--mlx-python", help="a Python with mlx-lm")
    parser.add_argument("--llama-python", help="a Python with llama-cpp-python")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--new", type=int, default=32, help="tokens of a decode request")
    parser.add_argument("--mlx-rows", type=int, default=8, help="rows of prefill asked of mlx-lm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, default=0, help="processes that keep other cores computing")
    options = parser.parse_args()
    mlx, gguf, token_bytes, _ = models(options)
    bandwidth = [read_bandwidth()]
    workers = {"ours": start(sys.executable, "ours", mlx, options)}
    if options.llama_python:
        workers["llama.cpp"] = start(options.llama_python, "llama.cpp", gguf, options)
    if options.mlx_python:
        workers["mlx-lm"] = start(options.mlx_python, "mlx-lm", mlx, options)
    with company(options.busy):
        found = measure(workers, options)
    for worker in workers.values():
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.process.wait()
    bandwidth.append(read_bandwidth())
    best = max((rate for rate in bandwidth if rate), default=None)
    rate = token_bytes / found["decode"]["seconds_per_token"]["ours"]["median"] / 1e9
    report = {
        "machine": facts(),
        "read_gb_per_second": bandwidth,
        "weight_bytes_per_token": token_bytes,
        "decode_gb_per_second": rate,
        "decode_share_of_read_bandwidth": rate / best if best else None,
        **found,
    }
    say(report, indent=1)


if __name__ == "__main__":
    main()
