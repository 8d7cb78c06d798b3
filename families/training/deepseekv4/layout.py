"""Names of DeepSeek V4 tensors: those of the transformers class, the published ones, and those of the packed repository.

The class and the packed repository hold the experts of a layer in one tensor, published files each expert alone. The
class joins the experts' gate and up matrices; the packed repository stores them apart, in groups of different sizes.
"""

import re
from collections.abc import Iterator

import config
import model as demo
import quant
import torch
from quant import Piece
from torch import Tensor

TO_PACKED = (
    ("self_attn.compressor.indexer.scorer.weights_proj.", "attn.indexer.weights_proj."),
    ("self_attn.compressor.indexer.q_b_proj.", "attn.indexer.wq_b."),
    ("self_attn.compressor.indexer.", "attn.indexer.compressor."),
    ("compressor.kv_norm.", "compressor.norm."),
    ("self_attn.q_a_norm.", "attn.q_norm."),
    ("self_attn.sinks", "attn.attn_sink"),
    ("self_attn.", "attn."),
    (".mlp.", ".ffn."),
    ("input_layernorm.", "attn_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    (".q_a_proj.", ".wq_a."),
    (".q_b_proj.", ".wq_b."),
    (".kv_proj.", ".wkv."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    ("compressor.gate_proj.", "compressor.wgate."),
    ("compressor.position_bias", "compressor.ape"),
    ("hc_head.hc_", "hc_head."),
)
TO_PUBLISHED = (
    ("embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("attn_hc.", "hc_attn_"),
    ("ffn_hc.", "hc_ffn_"),
    ("hc_head.", "hc_head_"),
    (".e_score_correction_bias", ".bias"),
    ("shared_experts.gate_proj", "shared_experts.w1"),
    ("shared_experts.down_proj", "shared_experts.w2"),
    ("shared_experts.up_proj", "shared_experts.w3"),
)
GATE_UP, DOWN, STACKED = "experts.gate_up_proj", "experts.down_proj", "switch_mlp."
PUBLISHED_ROLES = {"gate": "w1", "down": "w2", "up": "w3"}


def _renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        name = name.replace(old, new)
    return name


def _layer(name: str) -> int:
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def pieces(name: str, weight: Tensor) -> list[Piece]:
    """Return the parts of a parameter that are stored in different ways, views of it."""
    bits = config.bits_of(name, weight.shape)
    if not name.endswith(GATE_UP):
        return [(weight, bits, config.GROUP_SIZE)]
    gate, up = weight.chunk(2, 1)
    return [(gate, bits, config.gate_group(_layer(name))), (up, bits, config.GROUP_SIZE)]


def stored(name: str, weight: Tensor) -> Tensor:
    """Return a parameter as the float checkpoint holds it: what its packed form gives back."""
    result = weight.clone()
    for part, bits, group in pieces(name, result):
        part.copy_(quant.rounded(part, bits, group))
    return result


def packed(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the packed repository's names and values; the experts' joint gate and up matrix becomes two."""
    renamed = _renamed(name, TO_PACKED)
    if renamed.endswith(GATE_UP):
        stem = renamed.removesuffix(GATE_UP) + STACKED
        gate, up = weight.chunk(2, 1)
        yield from ((f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up))
    elif renamed.endswith(DOWN):
        yield f"{renamed.removesuffix(DOWN)}{STACKED}down_proj.weight", weight
    else:
        yield renamed, weight


def published(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the published names and values: every expert alone."""
    for renamed, part in packed(name, weight):
        short = renamed.removeprefix("model.")
        stem, found, rest = short.partition(STACKED)
        if not found:
            yield _renamed(short, TO_PUBLISHED), part
            continue
        role = PUBLISHED_ROLES[rest.partition("_")[0]]
        yield from ((f"{stem}experts.{n}.{role}.weight", expert) for n, expert in enumerate(part))


def parameters(values: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the state of the transformers class from the packed repository's names and unpacked values."""
    result: dict[str, Tensor] = {}
    del layers
    for name in demo.build(0).state_dict():
        if name.endswith(GATE_UP):
            stem = _renamed(name, TO_PACKED).removesuffix(GATE_UP) + STACKED
            result[name] = torch.cat([values[f"{stem}{part}_proj.weight"] for part in ("gate", "up")], 1)
        else:
            ((renamed, _),) = packed(name, torch.empty(0))
            result[name] = values[renamed]
    return result
