"""Write mference_smollm2/reference: a tiny checkpoint of random weights, and what transformers makes of it.

The float weights are exactly the values of the packed ones, so one set of goldens serves both. Scales and biases are
numbers that bfloat16 and float16 both hold and that are equal in neighbouring groups of 32, so the same values can
also be written as GGUF blocks. All reference arithmetic is float32 on the CPU, one thread.

Needs numpy, torch, transformers 5.24, safetensors:  python scripts/make_reference.py mference_smollm2/reference
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from transformers import LlamaConfig, LlamaForCausalLM

SEED, PROMPTS, DECODED, LEAST_GAP = 135, (5, 33, 80), 32, 2e-3
GROUP, BITS = 64, 4
SPREAD = 0.25
"""Wide enough that attention and branches, not the embedding alone, decide what comes next."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Cut float32 values to the digits of bfloat16."""
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def matrix(rng: np.random.Generator, rows: int, columns: int) -> dict[str, np.ndarray]:
    """Return one quantised matrix and its float values."""
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint32)
    scale = as_bfloat16(rng.uniform(0.5, 1.5, (rows, columns // GROUP)) * SPREAD / columns**0.5)
    bias = as_bfloat16(-scale * rng.uniform(7, 8, scale.shape))
    for part in (scale, bias):
        assert np.array_equal(part.astype(np.float16).astype(np.float32), part)
    values = codes.astype(np.float32) * np.repeat(scale, GROUP, 1) + np.repeat(bias, GROUP, 1)
    shifts = np.arange(8, dtype=np.uint32) * BITS
    packed = (codes.reshape(rows, -1, 8) << shifts).sum(-1, dtype=np.uint32)
    return {"packed": packed, "scales": scale, "biases": bias, "values": values}


def make_weights(rng: np.random.Generator) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    """Return the float checkpoint and the quantised one."""
    shapes = {n: p.shape for n, p in LlamaForCausalLM(LlamaConfig(**CONFIG)).named_parameters()}
    floats, packed = dict[str, np.ndarray](), dict[str, torch.Tensor]()
    for name, shape in shapes.items():
        if len(shape) == 1:
            floats[name] = as_bfloat16(rng.uniform(0.5, 1.5, shape))
            packed[name] = torch.from_numpy(floats[name]).bfloat16()
            continue
        made, stem = matrix(rng, *shape), name.removesuffix(".weight")
        floats[name] = made["values"]
        packed[name] = torch.from_numpy(made["packed"].astype(np.int32)).view(torch.uint32)
        for part in ("scales", "biases"):
            packed[f"{stem}.{part}"] = torch.from_numpy(made[part]).bfloat16()
    return floats, packed


def golden(model: LlamaForCausalLM, ids: list[int]) -> tuple[dict[str, np.ndarray], float]:
    """Return every layer's rows of a prompt and its greedy continuation, and the smallest lead of a greedy token."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:
            seen[name] = (out[0] if isinstance(out, tuple) else out).detach()[0]

        return hook

    trunk = model.model
    parts = {"embeddings": trunk.embed_tokens, "final_norm": trunk.norm}
    parts |= {f"layer.{index}": layer for index, layer in enumerate(trunk.layers)}
    hooks = [part.register_forward_hook(keep(name)) for name, part in parts.items()]
    out = model(torch.tensor([ids]), use_cache=True)
    arrays = {name: rows.numpy().copy() for name, rows in seen.items()}
    for hook in hooks:
        hook.remove()
    arrays |= {"input_ids": np.array(ids, np.int32), "logits": out.logits[0].numpy()}
    tokens, rows, gap, logits, past = [], [], float("inf"), out.logits[0, -1], out.past_key_values
    for _ in range(DECODED):
        best = torch.topk(logits, 2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        rows.append(logits.numpy())
        out = model(torch.tensor([[tokens[-1]]]), past_key_values=past, use_cache=True)
        logits, past = out.logits[0, -1], out.past_key_values
    arrays |= {"decode.tokens": np.array(tokens, np.int32), "decode.logits": np.stack(rows)}
    return arrays, gap


def main(folder: Path) -> None:
    """Draw weights until every greedy token leads by more than rounding, and write all of it."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for seed in range(SEED, SEED + 100):
        rng = np.random.default_rng(seed)
        floats, packed = make_weights(rng)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
        model.load_state_dict({n: torch.from_numpy(v) for n, v in floats.items()}, strict=False)
        model.tie_weights()
        prompts = {f"len{n}": rng.integers(0, CONFIG["vocab_size"], n).tolist() for n in PROMPTS}
        goldens = {name: golden(model, ids) for name, ids in prompts.items()}
        if min(gap for _, gap in goldens.values()) > LEAST_GAP:
            break
    (folder / "mlx").mkdir(parents=True, exist_ok=True)
    (folder / "goldens").mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    quantised = {**CONFIG, "quantization": {"group_size": GROUP, "bits": BITS, "mode": "affine"}}
    (folder / "mlx" / "config.json").write_text(json.dumps(quantised, indent=1) + "\n")
    save_file(floats, folder / "model.safetensors", {"format": "pt"})
    save_torch(packed, folder / "mlx" / "model.safetensors", {"format": "mlx"})
    for name, (arrays, _) in goldens.items():
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, folder / "goldens" / f"{name}.safetensors")
    gaps = {name: {"least_greedy_gap": gap} for name, (_, gap) in goldens.items()}
    meta = {"seed": seed, "torch": torch.__version__, "prompts": gaps}
    (folder / "goldens" / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
