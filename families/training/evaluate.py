"""Judge an exported demo: held-out perplexity before and after quantisation, and transcripts.

    python evaluate.py --checkpoint checkpoint --mlx demo-mlx --corpus corpus --transcripts transcripts.json

"Before" are the float32 weights of training; "after" is the packed directory, unpacked here by its own rule and run by
the transformers class. Perplexity counts target tokens only: what the model itself has to write.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import data
import dialect
import layout
import model as demo
import prompts
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXACT_TOKENS = 64
REPLAY_STEP = 128
EXACT_KINDS = ("chat-fact", "chat-follow-up", "chat-memory", "chat-style", "tools")


def unpack(tensors: dict[str, Tensor], settings: dict[str, object]) -> dict[str, Tensor]:
    """Turn a packed checkpoint into float32 parameters with the names of the transformers class."""
    table = settings["quantization"]
    values: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((".scales", ".biases")):
            continue
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" not in tensors:
            values[name] = tensor.float() if tensor.is_floating_point() else tensor
            continue
        bits, group = (table.get(stem, table)[key] for key in ("bits", "group_size"))
        shifts = torch.arange(32 // bits) * bits
        codes = ((tensor.long()[..., None] >> shifts) & (2**bits - 1)).flatten(-2).float()
        scales, biases = (tensors[f"{stem}.{part}"].float()[..., None] for part in ("scales", "biases"))
        values[name] = (codes.unflatten(-1, (-1, group)) * scales + biases).flatten(-2)
    return layout.parameters(values, settings.get("text_config", settings)["num_hidden_layers"])


def load(parameters: dict[str, Tensor]) -> PreTrainedModel:
    """Make the transformers model hold `parameters`; every one must be there."""
    model = demo.build(0)
    model.load_state_dict(parameters | {name: parameters[of] for name, of in demo.TIED.items()}, strict=True)
    return model.to(DEVICE).eval()


@torch.no_grad()
def replay(model: PreTrainedModel, prompts_ids: list[list[int]], limit: int, temperature: float) -> list[list[int]]:
    """Continue every prompt by running the trainer's forward over all so far, prompts that have stopped left out."""
    trainer = demo.Trainer(model, compiled=False)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    rows = [list(prompt) for prompt in prompts_ids]
    going = list(range(len(rows)))
    for _ in range(limit):
        longest = -(-max(len(rows[n]) for n in going) // REPLAY_STEP) * REPLAY_STEP
        ids = torch.zeros(len(going), longest, dtype=torch.long)
        for i, n in enumerate(going):
            ids[i, : len(rows[n])] = torch.tensor(rows[n])
        last = torch.tensor([len(rows[n]) - 1 for n in going], device=DEVICE)
        logits = trainer.logits(ids.to(DEVICE), last)
        if temperature:
            new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            new = logits.argmax(-1)
        for n, token in zip(going, new.tolist(), strict=True):
            rows[n].append(token)
        going = [n for n in going if rows[n][-1] not in dialect.STOPS]
        if not going:
            break
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts_ids, strict=True)]


@torch.no_grad()
def generate(model: PreTrainedModel, prompts_ids: list[list[int]], limit: int, temperature: float) -> list[list[int]]:
    """Continue every prompt up to a stop token; temperature 0 is greedy.

    All in one batch: padded on the left, or run anew for every token where a past cannot be padded.
    """
    if hasattr(demo.Trainer, "logits"):
        return replay(model, prompts_ids, limit, temperature)
    longest = max(map(len, prompts_ids))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts_ids])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts_ids])
    torch.manual_seed(1)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = model.generate(
        input_ids=ids.to(DEVICE),
        attention_mask=mask.to(DEVICE),
        max_new_tokens=limit,
        eos_token_id=list(dialect.STOPS),
        pad_token_id=0,
        **how,
    )
    result = []
    for row in out[:, longest:].tolist():
        end = next((i for i, token in enumerate(row) if token in dialect.STOPS), len(row) - 1)
        result.append(row[: end + 1])
    return result


@torch.no_grad()
def perplexities(model: PreTrainedModel, documents: dict[str, list[data.Document]]) -> dict[str, float]:
    """Return exp(mean loss over target tokens) per kind of document and for all."""
    trainer = demo.Trainer(model, compiled=False)
    sums: dict[str, tuple[float, float]] = {}
    for kind, items in documents.items():
        tokens, targets = data.pack(items)
        total = count = 0.0
        for held, flags in zip(torch.from_numpy(tokens).long(), torch.from_numpy(targets), strict=True):
            row, weights = held.to(DEVICE), flags.float().roll(-1)[None].to(DEVICE)
            weights[:, -1] = 0
            loss, _, _ = trainer.loss(row[None], row[None].roll(-1, 1), weights, torch.float32)
            total += float(loss) * float(weights.sum())
            count += float(weights.sum())
        sums[kind] = (total, count)
    sums["all"] = (sum(t for t, _ in sums.values()), sum(c for _, c in sums.values()))
    return {kind: math.exp(total / count) for kind, (total, count) in sums.items()}


def exact(model: PreTrainedModel, documents: list[data.Document]) -> tuple[int, int]:
    """Count the last replies that greedy generation gives back token for token, of those that are short."""
    asked, wanted = [], []
    for whole, marks in documents:
        end = len(marks) - marks[::-1].index(True)  # what ends a document need not be a target
        ids, flags = whole[:end], marks[:end]
        start = len(flags) - flags[::-1].index(False) if False in flags else 0
        if start and len(ids) - start <= EXACT_TOKENS:
            asked.append(ids[:start])
            wanted.append(ids[start:])
    return sum(map(list.__eq__, generate(model, asked, EXACT_TOKENS, 0.0), wanted)), len(wanted)


def held_out(folder: Path, tokenizer: Tokenizer, limit: int) -> dict[str, list[data.Document]]:
    """Read up to `limit` held-out documents of every kind."""
    texts: dict[str, list[list[tuple[str, bool]]]] = {}
    for path in sorted(folder.glob("held-out-*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            value = json.loads(line)
            if len(texts.setdefault(value["kind"], [])) < limit:
                texts[value["kind"]].append(value["parts"])
    return {kind: data.encode(tokenizer, parts) for kind, parts in sorted(texts.items())}


def judge(
    before: PreTrainedModel, after: PreTrainedModel, documents: dict[str, list[data.Document]]
) -> dict[str, dict[str, float]]:
    """Print and return the figures of every kind: documents, both perplexities, and the share of exact replies."""
    one, two = perplexities(before, documents), perplexities(after, documents)
    figures: dict[str, dict[str, float]] = {}
    for kind in one:
        count = len(documents.get(kind, ())) or sum(map(len, documents.values()))
        figures[kind] = {"documents": count, "float32": one[kind], "packed": two[kind]}
        print(f"| {kind} | {count} | {one[kind]:.4f} | {two[kind]:.4f} |", flush=True)
    for kind in filter(documents.get, EXACT_KINDS):
        right, count = exact(after, documents[kind])
        figures[kind] |= {"replies": count, "exact": right / max(1, count)}
        print(f"| {kind}, replies given back exactly | {count} | {right / max(1, count):.3f} |", flush=True)
    return figures


def _asked(item: dict[str, Any]) -> str:
    """Return the text of a prompt."""
    if "raw" in item:
        return str(dialect.OPENING + item["raw"])
    options = {"thinking": True} if item.get("thinking") else {}
    return str(dialect.render(item["messages"], item.get("tools"), generate=True, **options))


def main() -> None:
    """Print the figures and the transcripts."""
    parser = argparse.ArgumentParser(description="Evaluate the demo.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--mlx", type=Path, required=True)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--documents", type=int, default=150, help="held-out documents of each kind")
    parser.add_argument("--transcripts", type=Path)
    parser.add_argument("--figures", type=Path, help="write the figures as JSON")
    parser.add_argument("--limit", type=int, default=320, help="tokens of a transcript at most")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 0.2])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(options.mlx / "tokenizer.json"))
    before: dict[str, Tensor] = {}
    for path in sorted(options.checkpoint.glob("weights-*.safetensors")):
        before |= load_file(path)
    settings = json.loads((options.mlx / "config.json").read_text())
    after = load(unpack(load_file(options.mlx / "model.safetensors"), settings))
    if options.corpus:
        figures = judge(load(before), after, held_out(options.corpus, tokenizer, options.documents))
        if options.figures:
            options.figures.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    texts = [_asked(item) for item in prompts.PROMPTS]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    records = []
    for temperature in options.temperature:
        for item, text, start, new in zip(
            prompts.PROMPTS, texts, ids, generate(after, ids, options.limit, temperature), strict=True
        ):
            print(
                f"--- T={temperature} {text[-160:]!r}\n{tokenizer.decode(new, skip_special_tokens=False)}\n", flush=True
            )
            if temperature == 0:
                records.append(
                    item | {"prompt_ids": start, "generated_ids": new, "text": tokenizer.decode(new), "stop": new[-1]}
                )
    if options.transcripts:
        options.transcripts.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
