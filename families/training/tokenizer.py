"""Train the demo tokenizer: BPE with the special tokens of Gemma 4 at their real ids.

    python tokenizer.py --corpus corpus --out tokenizer

The scheme is the family's: spaces become U+2581, unknown characters fall back to byte tokens, nothing adds <bos>.
Ids without a special token are filled with the byte tokens and then with pieces, so that all 4096 ids mean something.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 4096
SPECIAL = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>"}
SPECIAL |= {48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>'}
SPECIAL |= {98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>"}
NEWLINE_ID = 107
SPACE = "\u2581"
MAX_LENGTH_TOKENS = 4096


def _texts(corpus: Path, limit: int) -> Iterator[str]:
    """Yield the ordinary text of the first `limit` documents of every shard."""
    marks = sorted(SPECIAL.values(), key=len, reverse=True)
    for shard in sorted(corpus.glob("shard-*.jsonl")):
        with shard.open() as lines:
            for _, line in zip(range(limit), lines, strict=False):
                text = "".join(piece for piece, _ in json.loads(line)["parts"])
                for mark in marks:
                    text = text.replace(mark, "\n")
                yield text


def _splitter() -> pre_tokenizers.PreTokenizer:
    """Words carry their leading space; digits, punctuation and newlines stand alone."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPACE, "merged_with_next"),
            pre_tokenizers.Split(Regex(r"\n|\d|[^\w\s" + SPACE + r"]"), "isolated"),
        ]
    )


def train(corpus: Path, limit: int) -> dict[str, object]:
    """Learn the merges and return the whole tokenizer.json as a value."""
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.normalizer = normalizers.Replace(" ", SPACE)
    learner.pre_tokenizer = _splitter()
    fixed = len(SPECIAL) + 256
    alphabet = [
        *(chr(i) for i in range(33, 127)),
        *"\u00b0\u00e9\u00e8\u00fc\u00f6\u00e4\u2019\u201c\u201d\u2014",
        SPACE,
        "\n",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - fixed,
        min_frequency=1,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner.train_from_iterator(_texts(corpus, limit), trainer)
    learned = json.loads(learner.to_str())
    model = learned["model"]
    pieces = [piece for piece, _ in sorted(model["vocab"].items(), key=lambda item: item[1]) if piece != "\n"]
    queue = iter([*(f"<0x{i:02X}>" for i in range(256)), *pieces])
    vocab = {(SPECIAL.get(i) or ("\n" if i == NEWLINE_ID else next(queue))): i for i in range(VOCAB_SIZE)}
    if next(queue, None) is not None:
        raise ValueError(f"the vocabulary has more than {VOCAB_SIZE} entries")
    model |= {"vocab": vocab, "byte_fallback": True, "fuse_unk": True}
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, text in SPECIAL.items()
    ]
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return learned | {"added_tokens": added, "decoder": {"type": "Sequence", "decoders": decoders}}


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    parser = argparse.ArgumentParser(description="Train the demo tokenizer.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=10_000, help="documents read from every shard")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    value = train(options.corpus, options.documents)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    (options.out / "tokenizer.json").write_text(text, "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH_TOKENS,
    }
    (options.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    loaded = Tokenizer.from_str(text)
    sample = "<bos><|turn>user\nHi, 27 + 45 is caf\u00e9 \u732b?<turn|>\n"
    ids = loaded.encode(sample, add_special_tokens=False).ids
    if loaded.decode(ids, skip_special_tokens=False) != sample or loaded.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the tokenizer does not give back its input: {loaded.decode(ids, skip_special_tokens=False)!r}"
        )
    print(f"{len(text.encode())} bytes, {ids}")


if __name__ == "__main__":
    main()
