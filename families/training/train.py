"""Train the demo: AdamW, cosine schedule, the last part with the stored precision in the loop.

    python train.py --corpus corpus --tokenizer tokenizer --out checkpoint --steps 4000

In the last part of the schedule the forward and backward pass see every matrix as it will be stored (4 bits in groups
of 64, the router 8, vectors BF16), and the gradient goes to the float32 weight behind it.
"""

import argparse
import json
import math
import time
from pathlib import Path

import data
import layout
import model as demo
import quant
import torch
from evaluate import unpack
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SHARD_BYTES = 12 * 2**20
KEEP_EVERY_S = 120


class Stored:
    """Swap every parameter for its stored value and back; what is stored alike is rounded at once."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self.kinds: dict[tuple[int, int], list[Tensor]] = {}
        for name, p in parameters.items():
            for part, bits, group in getattr(layout, "pieces", quant.whole)(name, p.detach()):
                if bits <= 16:
                    self.kinds.setdefault((bits, group), []).append(part)
        self.behind: list[Tensor] = []

    @torch.no_grad()
    def enter(self) -> None:
        """Keep the float32 values and show the stored ones."""
        self.behind = [torch.cat([part.flatten() for part in parts]) for parts in self.kinds.values()]
        for ((bits, group), parts), values in zip(self.kinds.items(), self.behind, strict=True):
            self._show(parts, quant.rounded(values, bits, group))

    @torch.no_grad()
    def leave(self) -> None:
        """Bring the float32 values back, for the optimiser to move."""
        for parts, values in zip(self.kinds.values(), self.behind, strict=True):
            self._show(parts, values)

    @staticmethod
    def _show(parts: list[Tensor], values: Tensor) -> None:
        pieces = values.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)])


def learning_rate(step: int, spent: float, options: argparse.Namespace) -> float:
    """Warm up linearly, then follow a cosine down to 2 % of the peak; `spent` is the share of the seconds allowed."""
    if step < options.warmup:
        return float(options.learning_rate * (step + 1) / options.warmup)
    done = min(1.0, max((step - options.warmup) / max(1, options.steps - options.warmup), spent))
    return float(options.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))))


def save(model: torch.nn.Module, out: Path, log: dict[str, object]) -> None:
    """Write what the model's state is, floats as float32, in files of a bounded size, and the log."""
    out.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, p in model.state_dict().items():
        if name in demo.TIED:
            continue
        value = (p.float() if p.is_floating_point() else p).cpu().contiguous()
        if size + value.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    for i, shard in enumerate(shards):
        save_file(shard, out / f"weights-{i}.safetensors")
    (out / "log.json").write_text(json.dumps(log, indent=1) + "\n")


def forward(trainer: demo.Trainer, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the balancing loss and the experts' shares of one batch, in BF16 where that is safe."""
    with (
        torch.autocast(ids.device.type, torch.bfloat16),
        sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
    ):
        return trainer.loss(ids, ids.roll(-1, 1), weights, torch.bfloat16)


def make_trainer(model: torch.nn.Module, ids: Tensor, *, compiled: bool) -> demo.Trainer:
    """Return a trainer that has run once both ways, so that compiling is done; without a compiler it goes without."""
    trainer = demo.Trainer(model, compiled=compiled)
    began = time.monotonic()
    try:
        loss, balance, _ = forward(trainer, ids, torch.ones(ids.shape, device=ids.device))
        (loss + balance).backward()
    except Exception as problem:
        if not compiled or isinstance(problem, torch.OutOfMemoryError):
            raise
        print(f"not compiled: {type(problem).__name__}: {str(problem)[:400]}", flush=True)
        trainer = demo.Trainer(model, compiled=False)
    model.zero_grad(set_to_none=True)
    print(f"first pass: {time.monotonic() - began:.1f} s", flush=True)
    return trainer


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a folder: those of a checkpoint, or what an exported packed directory dequantises to."""
    if (folder / "config.json").exists():
        return unpack(load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text()))
    return {name: w for path in sorted(folder.glob("weights-*.safetensors")) for name, w in load_file(path).items()}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=128, help="rows of 1024 tokens in a batch")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--stored-share", type=float, default=0.2, help="part of the steps with the stored precision")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load balancing loss, per layer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument(
        "--init", type=Path, help="go on from the weights in this folder: a checkpoint or a packed export"
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="a schedule shorter in time ends then, decay and all"
    )
    return parser.parse_args()


def main() -> None:
    """Train and save."""
    options = parse()
    began = time.monotonic()
    tokens, targets = data.load(options.corpus, options.tokenizer)
    print(
        f"{tokens.shape[0]} rows, {(tokens > 0).mean():.3f} full, {targets.mean():.3f} targets, {time.monotonic() - began:.1f} s",
        flush=True,
    )
    device = torch.device(options.device)
    model = demo.build(options.seed)
    if options.init:
        weights = weights_of(options.init)
        model.load_state_dict(weights | {name: weights[of] for name, of in demo.TIED.items()})
    model = model.to(device)
    print(f"difference from the transformers class: {demo.check(model):.2e}", flush=True)
    torch.set_float32_matmul_precision("high")
    parameters = {n: p for n, p in model.named_parameters() if n not in demo.TIED}
    wide = [p for p in parameters.values() if p.ndim >= 2]
    narrow = [p for p in parameters.values() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.05}, {"params": narrow, "weight_decay": 0.0}],
        lr=options.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=device.type == "cuda",
    )  # fmt: skip
    stored = Stored(parameters)
    stored_from = int(options.steps * (1 - options.stored_share))
    all_tokens = torch.from_numpy(tokens).to(device)
    all_targets = torch.from_numpy(targets).to(device)
    started = time.monotonic()
    trainer = make_trainer(model, all_tokens[: options.rows].long(), compiled=options.compile)
    generator = torch.Generator(device=device).manual_seed(options.seed)
    order = torch.randperm(len(tokens), generator=generator, device=device)
    cursor = 0
    history: list[dict[str, float]] = []
    shares = torch.zeros(())
    ran = 0
    kept = 0.0

    def log() -> dict[str, object]:
        return {
            "steps": ran, "tokens_seen": ran * options.rows * data.ROW_TOKENS, "rows": len(tokens), "seconds": time.monotonic() - started,
            "parameters": sum(p.numel() for p in parameters.values()), "expert_shares_last_batch": shares.tolist(),
            "options": {k: str(v) for k, v in vars(options).items()}, "history": history,
        }  # fmt: skip

    for step in range(options.steps):
        spent = (time.monotonic() - started) / options.seconds
        late = step >= stored_from or spent >= 1 - options.stored_share
        if cursor + options.rows > len(order):
            order = torch.randperm(len(tokens), generator=generator, device=device)
            cursor = 0
        pick = order[cursor : cursor + options.rows]
        cursor += options.rows
        ids = all_tokens[pick].long()
        weights = all_targets[pick].float().roll(-1, 1)
        weights[:, -1] = 0
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, spent, options)
        trainer.late = late
        if late:
            stored.enter()
        loss, balance, shares = forward(trainer, ids, weights)
        (loss + options.balance * balance).backward()
        if late:
            stored.leave()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ran = step + 1
        if step % 50 == 0 or step in (1, 2, 5, 10, 20) or ran == options.steps:
            seconds = time.monotonic() - started
            row = {
                "step": step,
                "loss": loss.item(),
                "balance": balance.item() / len(shares),
                "norm": float(norm),
                "seconds": seconds,
                "tokens_per_s": ran * options.rows * data.ROW_TOKENS / seconds,
            }
            history.append(row)
            print(
                " ".join(f"{k} {v:.4g}" for k, v in row.items()),
                f"least used expert {float(shares.min()):.4f}",
                flush=True,
            )
            if seconds - kept > KEEP_EVERY_S:
                kept = seconds
                save(model, options.out, log())
        if spent >= 1:
            break
    save(model, options.out, log())


if __name__ == "__main__":
    main()
