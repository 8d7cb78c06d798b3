"""Write the trained weights twice: float32 under the published names, and packed as the pinned 4-bit repository is.

    python export.py --checkpoint checkpoint --tokenizer tokenizer --hf demo-hf --mlx demo-mlx

The float directory holds exactly what the packed one dequantises to, so both describe the same function.
"""

import argparse
import json
import shutil
from pathlib import Path

import config
import quant
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TEMPLATE = Path(__file__).parents[1] / "mference_gemma4" / "chat_template.jinja"
MLX_PREFIX = "language_model.model."


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into little-endian 32-bit words along the last axis, the first code in the lowest bits."""
    words = codes.long().unflatten(-1, (-1, 32 // bits))
    shifts = torch.arange(32 // bits) * bits
    return (words << shifts).sum(-1).to(torch.uint32)


def packed(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the stored tensors of one parameter: a triple, or a BF16 vector."""
    bits = quant.bits_of(name, weight.shape)
    if bits == 16:
        return {name: weight.bfloat16()}
    codes, scales, biases = quant.affine(weight, bits)
    stem = name.removesuffix(".weight")
    return {
        f"{stem}.weight": pack(codes, bits),
        f"{stem}.scales": scales.bfloat16(),
        f"{stem}.biases": biases.bfloat16(),
    }


def mlx_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename to the packed repository's names; the experts' joint gate and up matrix becomes two."""
    result: dict[str, Tensor] = {}
    for name, weight in weights.items():
        renamed = MLX_PREFIX + name.removeprefix("model.")
        if renamed.endswith("experts.gate_up_proj"):
            stem = renamed.removesuffix("gate_up_proj") + "switch_glu."
            gate, up = weight.chunk(2, 1)
            result |= packed(f"{stem}gate_proj.weight", gate) | packed(f"{stem}up_proj.weight", up)
        elif renamed.endswith("experts.down_proj"):
            result |= packed(f"{renamed.removesuffix('down_proj')}switch_glu.down_proj.weight", weight)
        else:
            result |= packed(renamed, weight)
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
        name.replace("model.", "model.language_model.", 1): quant.rounded(w, quant.bits_of(name, w.shape)).contiguous()
        for name, w in weights.items()
    }
    settings = config.published_config()
    write(options.hf, stored, settings, options.tokenizer)
    write(options.mlx, mlx_tensors(weights), settings | {"quantization": config.quantization()}, options.tokenizer)
    print(f"{sum(w.numel() for w in weights.values())} parameters")


if __name__ == "__main__":
    main()
