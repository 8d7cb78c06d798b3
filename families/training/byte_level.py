"""Train a byte-level BPE tokenizer with a family's own marks.

Every byte has a token, words carry their leading space, digits stand alone; nothing is added at either end. Special marks
take the first ids, others the last and are no words of the model, as in published files; every id means something.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PIECES = r" ?[^\W\d_]+|\d| ?[^\w\s]|_|\n|\s"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A family's vocabulary: `special` marks are hidden when decoding, `added` ones are not."""

    size: int
    special: tuple[str, ...]
    added: tuple[str, ...]
    pieces: str = PIECES
    settings: Mapping[str, object]
    sample: str

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        return self.special + self.added


def _texts(scheme: Scheme, corpus: Path, limit: int) -> Iterator[str]:
    """Yield the ordinary text of the first `limit` documents of every shard."""
    for shard in sorted(corpus.glob("shard-*.jsonl")):
        with shard.open() as lines:
            for _, line in zip(range(limit), lines, strict=False):
                text = "".join(piece for piece, _ in json.loads(line)["parts"])
                for mark in scheme.marks:
                    text = text.replace(mark, "\n")
                yield text


def train(scheme: Scheme, corpus: Path, limit: int) -> Tokenizer:
    """Learn the merges and return the tokenizer."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(scheme.pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=scheme.size - len(scheme.added),
        min_frequency=1,
        special_tokens=[AddedToken(mark, special=True, normalized=False) for mark in scheme.special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(_texts(scheme, corpus, limit), trainer)
    learner.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in scheme.added])
    return learner


def main(scheme: Scheme) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    parser = argparse.ArgumentParser(description="Train the demo tokenizer.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=10_000, help="documents read from every shard")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made = train(scheme, options.corpus, options.documents)
    text = json.dumps(json.loads(made.to_str()), ensure_ascii=False, separators=(",", ":"))
    (options.out / "tokenizer.json").write_text(text, "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **scheme.settings,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (options.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    loaded = Tokenizer.from_str(text)
    ids = loaded.encode(scheme.sample, add_special_tokens=False).ids
    apart = all(loaded.token_to_id(loaded.id_to_token(i)) == i for i in range(scheme.size))
    if not apart or loaded.get_vocab_size() != scheme.size:
        raise ValueError(f"the tokenizer must give each of {scheme.size} tokens an id of its own")
    if loaded.decode(ids, skip_special_tokens=False) != scheme.sample:
        raise ValueError(
            f"the tokenizer does not give back its input: {loaded.decode(ids, skip_special_tokens=False)!r}"
        )
    print(f"{len(text.encode())} bytes, {ids}")
