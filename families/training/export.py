"""Write the trained weights twice: float32 under the published names, and packed as the pinned 4-bit repository is.

    python export.py --checkpoint checkpoint --tokenizer tokenizer --hf demo-hf --mlx demo-mlx

The float directory holds exactly what the packed one dequantises to, so both describe the same function.
"""

import argparse
import json
import shutil
from pathlib import Path

import config
import layout
import quant
import torch
from dialect import TEMPLATE
from safetensors.torch import load_file, save_file
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into little-endian 32-bit words along the last axis, the first code in the lowest bits."""
    words = codes.long().unflatten(-1, (-1, 32 // bits))
    shifts = torch.arange(32 // bits) * bits
    return (words << shifts).sum(-1).to(torch.uint32)


def packed(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the stored tensors of one parameter: a triple, a BF16 tensor, or what is kept as it is."""
    bits = config.bits_of(name, weight.shape)
    if bits >= 16:
        return {name: weight.bfloat16() if bits == 16 else weight}
    stem = name.removesuffix(".weight")
    table = config.quantization()
    codes, scales, biases = quant.affine(weight, bits, table.get(stem, table)["group_size"])
    return {
        f"{stem}.weight": pack(codes, bits),
        f"{stem}.scales": scales.bfloat16(),
        f"{stem}.biases": biases.bfloat16(),
    }


def mlx_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the packed repository's tensors by name."""
    result: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for renamed, part in layout.packed(name, weight):
            result |= packed(renamed, part)
    return {name: tensor.contiguous() for name, tensor in sorted(result.items())}


def write(folder: Path, tensors: dict[str, Tensor], settings: dict[str, object], tokenizer: Path) -> None:
    """Write one checkpoint directory."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx" if "quantization" in settings else "pt"})
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    for path in (tokenizer / "tokenizer.json", tokenizer / "tokenizer_config.json", TEMPLATE):
        shutil.copyfile(path, folder / path.name)


def main() -> None:
    """Read the checkpoint and write both directories."""
    parser = argparse.ArgumentParser(description="Export the trained demo.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--hf", type=Path, required=True)
    parser.add_argument("--mlx", type=Path, required=True)
    options = parser.parse_args()
    weights: dict[str, Tensor] = {}
    for path in sorted(options.checkpoint.glob("weights-*.safetensors")):
        weights |= load_file(path)
    stored = {
        renamed: part.contiguous()
        for name, w in weights.items()
        for renamed, part in layout.published(name, layout.stored(name, w))
    }
    settings = config.published_config()
    write(options.hf, stored, settings, options.tokenizer)
    write(options.mlx, mlx_tensors(weights), settings | {"quantization": config.quantization()}, options.tokenizer)
    print(f"{sum(w.numel() for w in weights.values())} parameters")


if __name__ == "__main__":
    main()
