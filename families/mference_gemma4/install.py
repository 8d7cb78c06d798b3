"""Where each tensor of a Gemma 4 checkpoint belongs.

Published names start with `model.language_model.`, those of the quantised repository with `language_model.model.`;
an install keeps the latter. The order inside a layer is that of gturbo-format section 4.
"""

import re

from mference_core import Dropped, InstallPlan, Place, Resident, Routed
from mference_gemma4.arch import Gemma4Arch

TRUNK = "language_model.model."
TRUNKS = ("model.language_model.", TRUNK)
OTHER_TOWERS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
EXPERTS = {
    "experts.gate_up_proj": ("gate", "up"),
    "experts.down_proj": ("down",),
    "experts.switch_glu.gate_proj.weight": ("gate",),
    "experts.switch_glu.up_proj.weight": ("up",),
    "experts.switch_glu.down_proj.weight": ("down",),
}
LAYER_ORDER = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "router.proj.weight",
    "router.scale",
    "router.per_expert_scale",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "pre_feedforward_layernorm_2.weight",
    "post_feedforward_layernorm.weight",
    "post_feedforward_layernorm_1.weight",
    "post_feedforward_layernorm_2.weight",
    "layer_scalar",
)
EMBEDDING, LAYERS, FINAL_NORM = 0, 1, 3


def layer_shapes(arch: Gemma4Arch, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the logical shape of each resident tensor of a layer, in install order."""
    hidden, shared, head = arch.hidden_size, arch.ffn_intermediate, arch.head_size(layer)
    queries, keys = arch.num_heads * head, arch.kv_heads(layer) * head
    special: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "router.proj.weight": (arch.num_experts, hidden),
        "router.per_expert_scale": (arch.num_experts,),
        "mlp.gate_proj.weight": (shared, hidden),
        "mlp.up_proj.weight": (shared, hidden),
        "mlp.down_proj.weight": (hidden, shared),
        "layer_scalar": (1,),
    }
    names = (name for name in LAYER_ORDER if not (arch.is_full(layer) and name == "self_attn.v_proj.weight"))
    return {name: special.get(name, (hidden,)) for name in names}


def _place_in_layer(arch: Gemma4Arch, layer: int, rest: str) -> Place | None:
    if layer >= arch.num_layers:
        return None
    if rest in EXPERTS:
        return Routed(layer=layer, roles=EXPERTS[rest])
    if rest not in layer_shapes(arch, layer):
        return None
    return Resident(name=f"{TRUNK}layers.{layer}.{rest}", order=(LAYERS, layer, LAYER_ORDER.index(rest)))


def place(arch: Gemma4Arch, name: str) -> Place | None:
    """Return the place of a source tensor, or None when this family has no such tensor."""
    if name.removeprefix("model.").startswith(OTHER_TOWERS):
        return Dropped(reason="only the text model is run")
    trunk = next((prefix for prefix in TRUNKS if name.startswith(prefix)), None)
    if trunk is None:
        return None
    rest = name[len(trunk) :]
    if rest == "embed_tokens.weight":
        return Resident(name=TRUNK + rest, order=(EMBEDDING, 0, 0))
    if rest == "norm.weight":
        return Resident(name=TRUNK + rest, order=(FINAL_NORM, 0, 0))
    match = re.fullmatch(r"layers\.(0|[1-9]\d*)\.(.+)", rest)
    return _place_in_layer(arch, int(match[1]), match[2]) if match else None


def install_plan(arch: Gemma4Arch) -> InstallPlan:
    """Return the places, names and shapes of a checkpoint of `arch`."""
    hidden, width = arch.hidden_size, arch.moe_intermediate_size
    residents: dict[str, tuple[int, ...]] = {f"{TRUNK}embed_tokens.weight": (arch.vocab_size, hidden)}
    for layer in range(arch.num_layers):
        residents |= {f"{TRUNK}layers.{layer}.{n}": shape for n, shape in layer_shapes(arch, layer).items()}
    residents[f"{TRUNK}norm.weight"] = (hidden,)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    first = f"{TRUNK}layers.0."
    return InstallPlan(
        place=lambda name: place(arch, name),
        residents=residents,
        experts=dict.fromkeys(range(arch.num_layers), shapes),
        quant_slots={
            "embedding": f"{TRUNK}embed_tokens.weight",
            "attention": f"{first}self_attn.q_proj.weight",
            "router": f"{first}router.proj.weight",
            "sharedExpert": f"{first}mlp.gate_proj.weight",
        },
    )
