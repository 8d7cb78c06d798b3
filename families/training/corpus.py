"""Write the training corpus: documents as JSON lines, each a list of (text, is target) parts.

    python corpus.py --out corpus --documents 1000000 --workers 16

Everything follows from the seed. One document in 200 goes to held-out.jsonl, chosen by a checksum of its text, so
that no held-out document is ever trained on. Chat documents are rendered with the family's own chat template.
"""

import argparse
import json
import multiprocessing
import re
import zlib
from pathlib import Path
from random import Random

import chats
import facts
import stories
import tools
from dialect import Parts, last_reply, plain, whole_timeline

HELD_OUT_ONE_IN = 200


def chat(rng: Random, messages: list[chats.Message], declared: list[tools.Schema] | None = None) -> Parts:
    """Turn a conversation into a document, in one of the two forms that occur at run time."""
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if rng.random() < 0.5 and len(replies) > 1:
        return whole_timeline(messages, declared)
    return last_reply(rng, messages, declared, replies[-1] if rng.random() < 0.5 else rng.choice(replies))


def raw_story(rng: Random) -> Parts:
    """A story as plain text; some begin in the middle, so that any opening reads well."""
    told = stories.story(rng)
    text = told.text
    if rng.random() < 0.05:
        text = f"{stories.request(rng, told)}\n\n{text}"
    elif rng.random() < 0.15:
        sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
        text = " ".join(sentences[rng.randrange(min(4, len(sentences))) :])
    return plain(text)


def raw_facts(rng: Random) -> Parts:
    """Plain statements, and questions with answers, as text without chat marks."""
    pairs = [facts.fact(rng) for _ in range(rng.randrange(1, 5))]
    pairs = [pair for pair in pairs if pair[1] != facts.UNKNOWN] or [facts.capital(rng)]
    form = rng.randrange(3)
    if form == 0:
        text = " ".join(answer for _, answer in pairs if not answer.startswith(("Yes", "No"))) or pairs[0][1]
    elif form == 1:
        text = "\n".join(f"Question: {question}\nAnswer: {answer}" for question, answer in pairs)
    else:
        text = "\n".join(chats.talk(rng) if rng.random() < 0.4 else pairs[0])
    return plain(text)


def tool_chat(rng: Random) -> Parts:
    """A conversation with tools."""
    messages, declared = tools.conversation(rng)
    return chat(rng, messages, declared)


KINDS = {
    "story": (raw_story, 30),
    "statement": (raw_facts, 6),
    "chat-story": (lambda rng: chat(rng, chats.tale(rng)), 12),
    "chat-fact": (lambda rng: chat(rng, chats.single(rng)), 24),
    "chat-memory": (lambda rng: chat(rng, chats.memory(rng)), 8),
    "chat-follow-up": (lambda rng: chat(rng, chats.follow_up(rng)), 4),
    "chat-style": (lambda rng: chat(rng, chats.styled(rng)), 5),
    "chat-mixed": (lambda rng: chat(rng, chats.mixed(rng)), 7),
    "tools": (tool_chat, 18),
}


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
