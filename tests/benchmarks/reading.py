"""Reading experts from a cold disk: the reader into slots, and the mapping, against plain `pread` of the same blobs.

    python -m tests.benchmarks.reading --model DIR [--rounds 5] [--at-once 8] [--warm]

Experts of one layer are read in random order, some at a time as a token's misses are; ways take turns, each on another
layer's file, dropped from the page cache before. Figures are GB/s; ratios are to plain `pread` on as many threads.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from mference_core import plugins
from mference_core.engine import open_model
from mference_core.experts.mapped_files import MappedFiles
from mference_core.experts.mapping import MappedExperts
from mference_core.experts.pool import ExpertPool
from mference_core.experts.reader import WORKERS, ExpertReader
from mference_core.tensors import ExpertLayer
from tests.benchmarks.machine import drop_cache, facts, say, timed

Way = Callable[[ExpertLayer, Sequence[Sequence[int]]], float]
THREADS = (1, 2, WORKERS)


def plain(threads: int) -> Way:
    """Return a way that reads whole experts with `pread` into buffers used before."""

    def read(layer: ExpertLayer, groups: Sequence[Sequence[int]]) -> float:
        buffers = [bytearray(b"\1") * layer.expert_bytes for _ in range(max(map(len, groups)))]
        spans = [[extent.span for extent in layer.extents(expert)] for expert in range(layer.count)]
        handles = {path: os.open(path, os.O_RDONLY) for path in {span.path for found in spans for span in found}}

        def one(expert: int, buffer: bytearray) -> None:
            view, at = memoryview(buffer), 0
            for span in spans[expert]:
                got = os.preadv(handles[span.path], [view[at : at + span.size]], span.offset)
                assert got == span.size
                at += span.size

        with ThreadPoolExecutor(threads) as pool:
            seconds = timed(lambda: [list(pool.map(one, group, buffers)) for group in groups])
        for handle in handles.values():
            os.close(handle)
        return seconds

    return read


def slots(layer: ExpertLayer, groups: Sequence[Sequence[int]]) -> float:
    """Read into the slots of a pool that were used before, as decode does."""
    with ExpertReader() as reader:
        pool = ExpertPool(layer, reader, slots=max(map(len, groups)))
        pool.slab  # noqa: B018  allocated and touched here, before the clock starts

        def run() -> None:
            for group in groups:
                lease = pool.acquire(group)
                assert lease is not None
                lease.wait()

        return timed(run)


def mapping(layer: ExpertLayer, groups: Sequence[Sequence[int]]) -> float:
    """Make the pages of a mapping present; nothing is copied."""
    files = MappedFiles()
    source = MappedExperts(layer, files)

    def run() -> None:
        for group in groups:
            source.acquire(group).wait()

    seconds = timed(run)
    files.close()
    return seconds


def main() -> None:
    """Measure every way and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.reading", description=__doc__)
    parser.add_argument("--family", default="gemma4")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=8, help="experts asked for together")
    parser.add_argument("--warm", action="store_true", help="leave the page cache as it is")
    options = parser.parse_args()
    checkpoint = open_model(plugins.load(options.family), options.model, "trusted-receipt")
    layers = list(checkpoint.experts.values())
    ways: dict[str, Way] = {f"pread_{n}_threads": plain(n) for n in THREADS} | {"slots": slots, "mapping": mapping}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    turn, draw = 0, Random(0)  # noqa: S311 (test data)
    for _ in range(options.rounds):
        for name, way in ways.items():
            layer = layers[turn % len(layers)]
            turn += 1
            order = draw.sample(range(layer.count), layer.count)
            groups = [order[start : start + options.at_once] for start in range(0, len(order), options.at_once)]
            if not options.warm:
                drop_cache({extent.span.path for extent in layer.extents(0)})
            rates[name].append(layer.count * layer.expert_bytes / way(layer, groups) / 1e9)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    best = max(medians[f"pread_{n}_threads"] for n in THREADS)
    say(
        {
            "machine": facts(),
            "gb_per_second": {name: {"median": medians[name], "all": found} for name, found in rates.items()},
            "ratio_to_pread_on_as_many_threads": medians["slots"] / medians[f"pread_{WORKERS}_threads"],
            "ratio_to_best_pread": {name: medians[name] / best for name in ("slots", "mapping")},
        },
        indent=1,
    )


if __name__ == "__main__":
    main()
