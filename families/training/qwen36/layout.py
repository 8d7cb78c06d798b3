"""Names of Qwen 3.6 tensors: those of the transformers class, the published ones, and those of the packed repository.

Norm weights but the delta network's own are held less 1 by the class and in published files, whole in packed ones;
convolutions are [channels, 1, taps] there and [channels, taps, 1] here.
"""

from collections.abc import Iterator

import config
import quant
import torch
from torch import Tensor

MLX_PREFIX, HEAD = "language_model.model.", "lm_head.weight"
LESS_ONE = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")


def _less_one(name: str) -> bool:
    return name.endswith(LESS_ONE) or name.endswith("model.norm.weight")


def published(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the published name of a parameter, and its value."""
    yield name if name == HEAD else name.replace("model.", "model.language_model.", 1), weight


def stored(name: str, weight: Tensor) -> Tensor:
    """Return a parameter as the float checkpoint holds it: what its packed form gives back."""
    if _less_one(name):
        return (weight + 1).bfloat16().float() - 1
    return quant.rounded(weight, config.bits_of(name, weight.shape))


def packed(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the packed repository's names and values; the experts' joint gate and up matrix becomes two."""
    renamed = f"language_model.{HEAD}" if name == HEAD else MLX_PREFIX + name.removeprefix("model.")
    if renamed.endswith("experts.gate_up_proj"):
        stem = renamed.removesuffix("experts.gate_up_proj") + "switch_mlp."
        gate, up = weight.chunk(2, 1)
        yield from ((f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up))
    elif renamed.endswith("experts.down_proj"):
        yield f"{renamed.removesuffix('experts.down_proj')}switch_mlp.down_proj.weight", weight
    elif renamed.endswith("conv1d.weight"):
        yield renamed, weight.transpose(1, 2)
    else:
        yield renamed, weight + 1 if _less_one(name) else weight


def parameters(values: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the parameters of the transformers class from the packed repository's names and unpacked values."""
    result: dict[str, Tensor] = {}
    for packed_name, value in values.items():
        name = packed_name.removeprefix("language_model.")
        if name.endswith("conv1d.weight"):
            result[name] = value.transpose(1, 2)
        elif "switch_mlp" not in name:
            result[name] = value - 1 if _less_one(name) else value
    for layer in range(layers):
        stem = f"{MLX_PREFIX}layers.{layer}.mlp.switch_mlp."
        gate, up, down = (values[f"{stem}{part}_proj.weight"] for part in ("gate", "up", "down"))
        result[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        result[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    return result
