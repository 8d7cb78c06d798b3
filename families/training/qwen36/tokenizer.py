"""Train the demo tokenizer: byte-level BPE with the marks of Qwen 3.6.

    python tokenizer.py --corpus corpus --out tokenizer

The scheme is the family's: every byte has a token, words carry their leading space, digits stand alone; nothing is
added at either end. The marks take the first ids, so that all 2048 ids mean something.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PIECES = r" ?[^\W\d_]+|\d| ?[^\w\s]|_|\n|\s"


def _texts(corpus: Path, limit: int) -> Iterator[str]:
    """Yield the ordinary text of the first `limit` documents of every shard."""
    for shard in sorted(corpus.glob("shard-*.jsonl")):
        with shard.open() as lines:
            for _, line in zip(range(limit), lines, strict=False):
                text = "".join(piece for piece, _ in json.loads(line)["parts"])
                for mark in (*SPECIAL, *ADDED):
                    text = text.replace(mark, "\n")
                yield text


def train(corpus: Path, limit: int) -> Tokenizer:
    """Learn the merges and return the tokenizer."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learner.decoder = decoders.ByteLevel()
    marks = [AddedToken(mark, special=mark in SPECIAL, normalized=False) for mark in (*SPECIAL, *ADDED)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=marks,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(_texts(corpus, limit), trainer)
    value = json.loads(learner.to_str())
    for added in value["added_tokens"]:
        added["special"] = added["content"] in SPECIAL
    for mark in ADDED:  # as in the published file, marks that are not special are no words of the model
        value["model"]["vocab"].pop(mark, None)
    return Tokenizer.from_str(json.dumps(value))


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    parser = argparse.ArgumentParser(description="Train the demo tokenizer.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=10_000, help="documents read from every shard")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made = train(options.corpus, options.documents)
    text = json.dumps(json.loads(made.to_str()), ensure_ascii=False, separators=(",", ":"))
    (options.out / "tokenizer.json").write_text(text, "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (options.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    loaded = Tokenizer.from_str(text)
    sample = "<|im_start|>user\nHi, 27 + 45 is caf\u00e9 \u732b?<|im_end|>\n<think>"
    ids = loaded.encode(sample, add_special_tokens=False).ids
    if loaded.decode(ids, skip_special_tokens=False) != sample or loaded.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the tokenizer does not give back its input: {loaded.decode(ids, skip_special_tokens=False)!r}"
        )
    print(f"{len(text.encode())} bytes, {ids}")


if __name__ == "__main__":
    main()
