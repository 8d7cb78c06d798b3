"""Give four pieces of the first run's tokenizer ids of their own: they had those of four marks.

    python renumber.py --mlx demo-mlx --corpus corpus --out demo-mlx-2

Tokenizers made before commit f17023f left the ids 3 to 6 empty and numbered the marks that are not special from 2044 on,
where pieces already were. Here those pieces move to 3 to 6 with copies of their rows, so that every text is computed as it
was. As answers, three of the marks never occur: the head forgets them. The fourth, </think>, shared its row of the head
with a piece; the two are told apart by what differs in the states before them and least changes other answers, as seen in
documents of the corpus.
"""

import argparse
import json
import shutil
from pathlib import Path

import data
import evaluate
import export
import model as demo
import quant
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

FREE, TAKEN, NEVER = (3, 4, 5, 6), (2044, 2045, 2046, 2047), 2
"""Ids without a token, ids with two, and one that is never an answer."""
APART = 8.0
"""How far each of the two logits of one row is to move, in both directions; elsewhere they are to stay."""
TABLES = ("ffn.gate.tid2eid",)


def renumbered(path: Path) -> Tokenizer:
    """Return the tokenizer with the pieces moved and the marks as words of the model."""
    value = json.loads(path.read_text("utf-8"))
    vocab = value["model"]["vocab"]
    for piece in [piece for piece, number in vocab.items() if number in TAKEN]:
        vocab[piece] = FREE[TAKEN.index(vocab[piece])]
    vocab |= {added["content"]: added["id"] for added in value["added_tokens"]}
    return Tokenizer.from_str(json.dumps(value, ensure_ascii=False))


def signed(tensor: Tensor) -> Tensor:
    """Return the same memory in a type that torch can index."""
    return tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor


@torch.no_grad()
def states_before(model: torch.nn.Module, tokenizer: Tokenizer, corpus: Path, wanted: int | None, limit: int) -> Tensor:
    """Return the head's inputs (N, D) where `wanted` (or anything) is the next token and a target, in `limit` documents.

    Without `wanted`, the first target of a document counts as often as all others together.
    """
    trainer = demo.Trainer(model, compiled=False)
    found: list[Tensor] = []
    for line in next(iter(sorted(corpus.glob("shard-*.jsonl")))).open():
        ((ids, flags),) = data.encode(tokenizer, [json.loads(line)["parts"]])
        targets = [n for n in range(1, len(ids)) if flags[n]]
        at = [n - 1 for n in targets if wanted is None or ids[n] == wanted]
        if not at:
            continue
        row = torch.zeros(1, -(-len(ids) // 128) * 128, dtype=torch.long)
        row[0, : len(ids)] = torch.tensor(ids)
        states = trainer.final(row)[0, at]
        found.append(states if wanted is not None else torch.cat((states, states[:1].expand(len(at), -1))))
        if len(found) == limit:
            break
    return torch.cat(found)


@torch.no_grad()
def main() -> None:
    """Write the repaired directory, and print how far apart the two answers are."""
    parser = argparse.ArgumentParser(description="Give pieces and marks ids of their own.")
    parser.add_argument("--mlx", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shutil.copytree(options.mlx, options.out)
    tokenizer = renumbered(options.mlx / "tokenizer.json")
    text = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (options.out / "tokenizer.json").write_text(text, "utf-8")
    tensors = load_file(options.mlx / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith(("model.embed_tokens.", "lm_head.")) or name.endswith(TABLES):
            rows = signed(tensor)
            rows[list(FREE)] = rows[list(TAKEN)].clone()
            if name.startswith("lm_head."):
                rows[list(TAKEN[:-1])] = rows[NEVER].clone()
    settings = json.loads((options.mlx / "config.json").read_text("utf-8"))
    model = evaluate.load(evaluate.unpack(tensors, settings))
    piece, mark = (states_before(model, tokenizer, options.corpus, i, 40) for i in (FREE[-1], TAKEN[-1]))
    others = states_before(model, tokenizer, options.corpus, None, 200)
    spread = others.T @ others / len(others) + sum(10 * t.T @ t / len(t) for t in (piece, mark))
    small = 1e-4 * spread.trace() / len(spread) * torch.eye(len(spread))
    apart = torch.linalg.solve(spread + small, 10 * APART * (piece.mean(0) - mark.mean(0)))
    print(f"elsewhere {(others @ apart).abs().mean():.2f} on average, {(others @ apart).abs().max():.2f} at most")
    head = model.lm_head.weight
    for number, row in ((FREE[-1], head[FREE[-1]] + apart), (TAKEN[-1], head[TAKEN[-1]] - apart)):
        codes, scales, biases = quant.affine(row[None], 4)
        parts = {"weight": export.pack(codes, 4), "scales": scales.bfloat16(), "biases": biases.bfloat16()}
        for part, value in parts.items():
            signed(tensors[f"lm_head.{part}"])[number] = signed(value)[0]
        head.data[number] = quant.rounded(row[None], 4)[0]
    for name, states in (("piece", piece), ("mark", mark)):
        logits = states @ head.T
        margin = logits[:, FREE[-1]] - logits[:, TAKEN[-1]]
        best = logits.argmax(-1)
        print(name, len(states), f"{margin.min():.1f} to {margin.max():.1f}", best.unique(return_counts=True))
    save_file(tensors, options.out / "model.safetensors", metadata={"format": "mlx"})


if __name__ == "__main__":
    main()
