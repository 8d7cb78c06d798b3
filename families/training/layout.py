"""Names of Gemma 4 tensors: those of the transformers class, the published ones, and those of the packed repository."""

from collections.abc import Iterator

import config
import quant
import torch
from torch import Tensor

MLX_PREFIX = "language_model.model."


def published(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the published name of a parameter, and its value."""
    yield name.replace("model.", "model.language_model.", 1), weight


def stored(name: str, weight: Tensor) -> Tensor:
    """Return a parameter as the float checkpoint holds it: what its packed form gives back."""
    return quant.rounded(weight, config.bits_of(name, weight.shape))


def packed(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the packed repository's names and values; the experts' joint gate and up matrix becomes two."""
    renamed = MLX_PREFIX + name.removeprefix("model.")
    if renamed.endswith("experts.gate_up_proj"):
        stem = renamed.removesuffix("gate_up_proj") + "switch_glu."
        gate, up = weight.chunk(2, 1)
        yield from ((f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up))
    elif renamed.endswith("experts.down_proj"):
        yield f"{renamed.removesuffix('down_proj')}switch_glu.down_proj.weight", weight
    else:
        yield renamed, weight


def parameters(values: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the parameters of the transformers class from the packed repository's names and unpacked values."""
    result = {f"model.{n.removeprefix(MLX_PREFIX)}": v for n, v in values.items() if "switch_glu" not in n}
    for layer in range(layers):
        stem = f"{MLX_PREFIX}layers.{layer}.experts.switch_glu."
        gate, up, down = (values[f"{stem}{part}_proj.weight"] for part in ("gate", "up", "down"))
        result[f"model.layers.{layer}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        result[f"model.layers.{layer}.experts.down_proj"] = down
    return result
