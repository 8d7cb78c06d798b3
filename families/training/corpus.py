"""Write the training corpus: documents as JSON lines, each a list of (text, is target) parts.

    python corpus.py --out corpus --documents 1000000 --workers 16

Everything follows from the seed. One document in 200 goes to held-out.jsonl, chosen by a checksum of its text, so
that no held-out document is ever trained on. Chat documents are rendered with the family's own chat template.
"""

import argparse
import json
import multiprocessing
import zlib
from pathlib import Path
from random import Random

from dialect import Parts
from lessons import KINDS

HELD_OUT_ONE_IN = 200


def document(rng: Random) -> tuple[str, Parts]:
    """Draw one document and its kind."""
    kind = rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    return kind, KINDS[kind][0](rng)


def write_shard(job: tuple[int, int, int, Path]) -> int:
    """Write one worker's share: shard-NNN.jsonl and held-out-NNN.jsonl."""
    index, seed, count, out = job
    rng = Random(f"{seed}/{index}")
    with (out / f"shard-{index:03d}.jsonl").open("w") as kept, (out / f"held-out-{index:03d}.jsonl").open("w") as held:
        for _ in range(count):
            kind, parts = document(rng)
            text = "".join(piece for piece, _ in parts)
            is_held = zlib.crc32(text.encode()) % HELD_OUT_ONE_IN == 0
            line = json.dumps({"kind": kind, "parts": parts}, ensure_ascii=False, separators=(",", ":"))
            (held if is_held else kept).write(line + "\n")
    return count


def main() -> None:
    """Write the corpus with several processes."""
    parser = argparse.ArgumentParser(description="Write the training corpus.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=16, help="also the number of shards, so part of the seed")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    share = -(-options.documents // options.workers)
    with multiprocessing.Pool(min(options.workers, multiprocessing.cpu_count())) as pool:
        done = sum(
            pool.imap_unordered(write_shard, [(i, options.seed, share, options.out) for i in range(options.workers)])
        )
    print(f"{done} documents in {options.out}")


if __name__ == "__main__":
    main()
