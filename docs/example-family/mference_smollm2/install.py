"""Where each tensor of a SmolLM2 checkpoint belongs: all of them stay in memory, under their published names."""

import re

from mference_core import Dropped, InstallPlan, Place, Resident
from mference_smollm2.arch import Smollm2Arch

TRUNK = "model."
EMBEDDING, LAYERS, FINAL_NORM = 0, 1, 3
UNUSED = {
    "lm_head.weight": "the embedding table is the head",
    "rotary_emb.inv_freq": "angles are computed",
}


def layer_shapes(arch: Smollm2Arch) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a layer, in install order."""
    hidden, wide = arch.hidden_size, arch.ffn_intermediate
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def place(arch: Smollm2Arch, name: str) -> Place | None:
    """Return the place of a source tensor, or None when this family has no such tensor."""
    reason = next((why for tail, why in UNUSED.items() if name.endswith(tail)), None)
    if reason is not None:
        return Dropped(reason=reason)
    if name == f"{TRUNK}embed_tokens.weight":
        return Resident(name=name, order=(EMBEDDING, 0, 0))
    if name == f"{TRUNK}norm.weight":
        return Resident(name=name, order=(FINAL_NORM, 0, 0))
    match = re.fullmatch(r"model\.layers\.(0|[1-9]\d*)\.(.+)", name)
    ranks = list(layer_shapes(arch))
    if match is None or int(match[1]) >= arch.num_layers or match[2] not in ranks:
        return None
    return Resident(name=name, order=(LAYERS, int(match[1]), ranks.index(match[2])))


def install_plan(arch: Smollm2Arch) -> InstallPlan:
    """Return the places, names and shapes of a checkpoint of `arch`."""
    residents: dict[str, tuple[int, ...]] = {f"{TRUNK}embed_tokens.weight": (arch.vocab_size, arch.hidden_size)}
    for layer in range(arch.num_layers):
        residents |= {f"{TRUNK}layers.{layer}.{name}": shape for name, shape in layer_shapes(arch).items()}
    residents[f"{TRUNK}norm.weight"] = (arch.hidden_size,)
    return InstallPlan(
        place=lambda name: place(arch, name),
        residents=residents,
        experts={},
        quant_slots={
            "embedding": f"{TRUNK}embed_tokens.weight",
            "attention": f"{TRUNK}layers.0.self_attn.q_proj.weight",
            "sharedExpert": f"{TRUNK}layers.0.mlp.gate_proj.weight",
        },
    )
