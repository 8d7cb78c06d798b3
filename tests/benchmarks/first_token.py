"""What verifying costs: `mference verify` against `cat`, and the first token of a cold load per way of verifying, as JSON.

    python -m tests.benchmarks.first_token --model DIR --digests DIR [--prompt 1] [--slots 32] [--rounds 1]

DIR is one install twice: as it was written, and a copy after `mference verify --expert-digests`. Their files are dropped
from the page cache before each run, and each run is a process of its own. `in_turn` is how it would be without threads:
each layer's file is hashed by who touches it. `busy` is the load average, since a machine with company measures that too.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.machine import drop_cache, say

CHILD = """
import json, sys, time
from pathlib import Path
import mlx.core as mx
from mference_core import plugins
from mference_core.checkpoint import peek
from mference_core.engine import Engine, LoadOptions
from mference_core.gturbo import model
path, way, slots, prompt = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
class InTurn:
    def __init__(self, layers, check, verification, size):
        self.check, self.verification, self.good = check, verification, set()
    def begin(self): pass
    def stop(self): pass
    def touch(self, layer):
        start = time.perf_counter()
        if layer not in self.good:
            self.check(layer)
            self.good.add(layer)
        self.verification.count_wait(time.perf_counter() - start)
if way == "in_turn":
    model.LayerFiles = InTurn
seen = peek(path)
family = plugins.load(plugins.name_for(seen.spelling, seen.model_type, on_disk=seen.kind))
verify = "trusted-receipt" if way == "trusted_receipt" else "full-sha256"
start = time.perf_counter()
options = LoadOptions(verify=verify, slots=int(slots) if slots.isdigit() else slots)
with Engine.load(family, path, options) as engine:
    loaded = time.perf_counter()
    logits = engine.session().prefill([(7 * at) % (engine.graph.vocab_size - 8) + 4 for at in range(prompt)])
    token = int(mx.argmax(logits))
    done, verified = time.perf_counter(), engine.checkpoint.verification
    print(json.dumps({
        "load_seconds": loaded - start, "first_token_seconds": done - start, "token": token,
        "verified_bytes": verified.bytes, "hashing_seconds": verified.seconds, "waited_seconds": verified.waited_seconds,
    }))
"""


def first_token(path: Path, way: str, slots: str, prompt: int) -> dict[str, Any]:
    """Return the figures of a cold load."""
    drop_cache(set(path.rglob("*.bin")))
    command = [sys.executable, "-c", CHILD, str(path), way, slots, str(prompt)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"way": way, "busy": os.getloadavg()[0], **json.loads(done.stdout)}


def seconds_of(command: list[str], *, cold: bool, path: Path) -> float:
    """Return how long a command takes on the files of an install."""
    if cold:
        drop_cache(set(path.rglob("*.bin")))
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description="What verifying costs.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--digests", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=1)
    parser.add_argument("--slots", default="32")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    files = sorted(map(str, options.model.rglob("*.bin")))
    verify = [sys.executable, "-c", "from mference_core.cli import main; main()", "verify", str(options.model)]
    verifying = [
        {
            "cold": cold,
            "bytes": sum(Path(name).stat().st_size for name in files),
            "cat_seconds": seconds_of(["cat", *files], cold=cold, path=options.model),
            "verify_seconds": seconds_of(verify, cold=cold, path=options.model),
            "busy": os.getloadavg()[0],
        }
        for cold in (True, False)
    ]
    ways = (
        (options.model, "in_turn"),
        (options.model, "ahead"),
        (options.digests, "expert_digests"),
        (options.model, "trusted_receipt"),
    )
    runs = [first_token(path, way, options.slots, options.prompt) for _ in range(options.rounds) for path, way in ways]
    report = {"verify": verifying, "first_token": runs, "identical": len({run["token"] for run in runs}) == 1}
    say(report, 1)


if __name__ == "__main__":
    main()
