"""Where each tensor of a Qwen 3.6 checkpoint belongs.

Published names start with `model.language_model.`, those of the quantised repository with `language_model.model.`;
an install keeps the latter. The names also decide how two kinds of tensor are stated: published norm weights (but the
delta network's own) are stored less 1, and published convolutions have their taps on the last axis.
"""

import re

from mference_core import Dropped, InstallPlan, Place, Resident, Routed, Transform
from mference_qwen36.arch import Qwen36Arch

TRUNK, HEAD = "language_model.model.", "language_model.lm_head.weight"
PUBLISHED_TRUNK, PUBLISHED_HEAD = "model.language_model.", "lm_head.weight"
OTHER_TOWERS = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
DRAFT_HEADS = ("mtp.", "model.mtp.", "language_model.mtp.")
EXPERTS = {
    "mlp.experts.gate_up_proj": ("gate", "up"),
    "mlp.experts.down_proj": ("down",),
    "mlp.switch_mlp.gate_proj.weight": ("gate",),
    "mlp.switch_mlp.up_proj.weight": ("up",),
    "mlp.switch_mlp.down_proj.weight": ("down",),
}
LAYER_ORDER = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "linear_attn.in_proj_qkv.weight",
    "linear_attn.in_proj_z.weight",
    "linear_attn.in_proj_a.weight",
    "linear_attn.in_proj_b.weight",
    "linear_attn.conv1d.weight",
    "linear_attn.A_log",
    "linear_attn.dt_bias",
    "linear_attn.norm.weight",
    "linear_attn.out_proj.weight",
    "mlp.gate.weight",
    "mlp.shared_expert_gate.weight",
    "mlp.shared_expert.gate_proj.weight",
    "mlp.shared_expert.up_proj.weight",
    "mlp.shared_expert.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
STORED_LESS_ONE = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "norm")
LAYERS, HEAD_GROUP = 1, 4
ENDS = {"embed_tokens.weight": 0, "norm.weight": 3}
"""Groups of the order outside layers; 2 holds what this family has none of."""


def layer_shapes(arch: Qwen36Arch, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the logical shape of each resident tensor of a layer, in install order."""
    hidden, shared, head = arch.hidden_size, arch.ffn_intermediate, arch.head_dim
    queries, keys = arch.num_heads * head, arch.num_kv_heads * head
    values, heads = arch.value_channels, arch.linear_num_v_heads
    mixer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (2 * queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }
    if not arch.is_full(layer):
        mixer = {
            "linear_attn.in_proj_qkv.weight": (arch.conv_channels, hidden),
            "linear_attn.in_proj_z.weight": (values, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.conv1d.weight": (arch.conv_channels, arch.linear_conv_kernel_size, 1),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (arch.linear_value_head_dim,),
            "linear_attn.out_proj.weight": (hidden, values),
        }
    return {
        **mixer,
        "mlp.gate.weight": (arch.num_experts, hidden),
        "mlp.shared_expert_gate.weight": (1, hidden),
        "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "mlp.shared_expert.up_proj.weight": (shared, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, shared),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def _transform(arch: Qwen36Arch, rest: str, *, published: bool) -> Transform:
    """Return how a tensor, named without its trunk and layer, is stated."""
    if not published:
        return Transform()
    if rest.endswith("conv1d.weight"):
        return Transform(stored=(arch.conv_channels, 1, arch.linear_conv_kernel_size))
    return Transform(add=1.0 if rest.removesuffix(".weight") in STORED_LESS_ONE else 0.0)


def _place_in_layer(arch: Qwen36Arch, layer: int, rest: str, *, published: bool) -> Place | None:
    if layer >= arch.num_layers:
        return None
    if rest in EXPERTS:
        return Routed(layer=layer, roles=EXPERTS[rest])
    if rest not in layer_shapes(arch, layer):
        return None
    return Resident(
        name=f"{TRUNK}layers.{layer}.{rest}",
        order=(LAYERS, layer, LAYER_ORDER.index(rest)),
        transform=_transform(arch, rest, published=published),
    )


def place(arch: Qwen36Arch, name: str) -> Place | None:
    """Return the place of a source tensor, or None when this family has no such tensor."""
    if name.startswith(OTHER_TOWERS):
        return Dropped(reason="only the text model is run")
    if name.startswith(DRAFT_HEADS):
        return Dropped(reason="heads that predict several tokens are not run")
    if name in (HEAD, PUBLISHED_HEAD):
        return Resident(name=HEAD, order=(HEAD_GROUP, 0, 0))
    published = name.startswith(PUBLISHED_TRUNK)
    prefix = PUBLISHED_TRUNK if published else TRUNK
    return _place_in_trunk(arch, name.removeprefix(prefix), published=published) if name.startswith(prefix) else None


def _place_in_trunk(arch: Qwen36Arch, rest: str, *, published: bool) -> Place | None:
    if rest in ENDS:
        return Resident(
            name=TRUNK + rest, order=(ENDS[rest], 0, 0), transform=_transform(arch, rest, published=published)
        )
    match = re.fullmatch(r"layers\.(0|[1-9]\d*)\.(.+)", rest)
    return _place_in_layer(arch, int(match[1]), match[2], published=published) if match else None


def install_plan(arch: Qwen36Arch) -> InstallPlan:
    """Return the places, names and shapes of a checkpoint of `arch`."""
    hidden, width = arch.hidden_size, arch.moe_intermediate_size
    residents: dict[str, tuple[int, ...]] = {f"{TRUNK}embed_tokens.weight": (arch.vocab_size, hidden)}
    for layer in range(arch.num_layers):
        residents |= {f"{TRUNK}layers.{layer}.{n}": shape for n, shape in layer_shapes(arch, layer).items()}
    residents |= {f"{TRUNK}norm.weight": (hidden,), HEAD: (arch.vocab_size, hidden)}
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    first = f"{TRUNK}layers.0."
    return InstallPlan(
        place=lambda name: place(arch, name),
        residents=residents,
        experts=dict.fromkeys(range(arch.num_layers), shapes),
        quant_slots={
            "embedding": f"{TRUNK}embed_tokens.weight",
            "attention": first + ("self_attn.q_proj.weight" if arch.is_full(0) else "linear_attn.in_proj_qkv.weight"),
            "router": f"{first}mlp.gate.weight",
            "sharedExpert": f"{first}mlp.shared_expert.gate_proj.weight",
        },
    )
