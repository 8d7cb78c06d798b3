"""Where each tensor of a DeepSeek V4 checkpoint belongs.

Three spellings are read: the published ones (`layers.0.attn.wq_a.weight`, each expert alone), those of quantised
conversions (`model.` in front, experts stacked as `switch_mlp`), and what an install keeps, which are the latter.
Tables of experts by token id stay integers, router matrices stay unquantised. The release's own files hold FP8 and
FP4 values; no tensor of such a dtype is read.
"""

import re

from mference_core import Dropped, InstallPlan, Place, Resident, Routed
from mference_deepseekv4.arch import CSA, SLIDING, DeepseekV4Arch

TRUNK, HEAD = "model.", "lm_head.weight"
DRAFT_LAYERS = ("mtp.", "model.mtp.")
ENDS = {"embed_tokens.weight": 0, "norm.weight": 3}
PUBLISHED_ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": HEAD,
    "hc_head_fn": "model.hc_head.fn",
    "hc_head_base": "model.hc_head.base",
    "hc_head_scale": "model.hc_head.scale",
}
PUBLISHED_PARTS = (
    (r"ffn\.gate\.bias", "ffn.gate.e_score_correction_bias"),
    (r"hc_(attn|ffn)_(fn|base|scale)", r"\1_hc.\2"),
    (r"ffn\.shared_experts\.w1\.weight", "ffn.shared_experts.gate_proj.weight"),
    (r"ffn\.shared_experts\.w2\.weight", "ffn.shared_experts.down_proj.weight"),
    (r"ffn\.shared_experts\.w3\.weight", "ffn.shared_experts.up_proj.weight"),
)
"""Names inside a layer that conversions spell otherwise."""
PUBLISHED_EXPERT = re.compile(r"ffn\.experts\.(0|[1-9]\d*)\.w([123])\.weight")
WS = {"1": "gate", "2": "down", "3": "up"}
STACKS = {f"ffn.switch_mlp.{role}_proj.weight": role for role in ("gate", "up", "down")}
LAYER = re.compile(r"layers\.(0|[1-9]\d*)\.(.+)")
LAYERS, OTHERS, HEAD_GROUP = 1, 2, 4
"""Groups of the order between embedding (0) and head."""

LAYER_ORDER = (
    "attn.wq_a.weight",
    "attn.q_norm.weight",
    "attn.wq_b.weight",
    "attn.wkv.weight",
    "attn.kv_norm.weight",
    "attn.attn_sink",
    "attn.wo_a.weight",
    "attn.wo_b.weight",
    "attn.compressor.wkv.weight",
    "attn.compressor.wgate.weight",
    "attn.compressor.norm.weight",
    "attn.compressor.ape",
    "attn.indexer.compressor.wkv.weight",
    "attn.indexer.compressor.wgate.weight",
    "attn.indexer.compressor.norm.weight",
    "attn.indexer.compressor.ape",
    "attn.indexer.wq_b.weight",
    "attn.indexer.weights_proj.weight",
    "ffn.gate.weight",
    "ffn.gate.e_score_correction_bias",
    "ffn.gate.tid2eid",
    "ffn.shared_experts.gate_proj.weight",
    "ffn.shared_experts.up_proj.weight",
    "ffn.shared_experts.down_proj.weight",
    "attn_norm.weight",
    "ffn_norm.weight",
    "attn_hc.fn",
    "attn_hc.base",
    "attn_hc.scale",
    "ffn_hc.fn",
    "ffn_hc.base",
    "ffn_hc.scale",
)

Shapes = dict[str, tuple[int, ...]]


def _compressor(arch: DeepseekV4Arch, layer: int, head: int, name: str) -> Shapes:
    """Return what makes entries of `head` values: two series of them where windows overlap, else one."""
    width = 2 * head if arch.kind(layer) == CSA else head
    return {
        f"{name}.wkv.weight": (width, arch.hidden_size),
        f"{name}.wgate.weight": (width, arch.hidden_size),
        f"{name}.norm.weight": (head,),
        f"{name}.ape": (arch.rate(layer), width),
    }


def _attention(arch: DeepseekV4Arch, layer: int) -> Shapes:
    hidden, head, low = arch.hidden_size, arch.head_dim, arch.ca_q_lora_rank
    grouped = arch.ca_o_groups * arch.ca_o_lora_rank
    shapes: Shapes = {
        "attn.wq_a.weight": (low, hidden),
        "attn.q_norm.weight": (low,),
        "attn.wq_b.weight": (arch.num_heads * head, low),
        "attn.wkv.weight": (head, hidden),
        "attn.kv_norm.weight": (head,),
        "attn.attn_sink": (arch.num_heads,),
        "attn.wo_a.weight": (grouped, arch.num_heads * head // arch.ca_o_groups),
        "attn.wo_b.weight": (hidden, grouped),
    }
    if arch.kind(layer) != SLIDING:
        shapes |= _compressor(arch, layer, head, "attn.compressor")
    if arch.kind(layer) == CSA:
        shapes |= _compressor(arch, layer, arch.ca_index_head_dim, "attn.indexer.compressor")
        shapes["attn.indexer.wq_b.weight"] = (arch.ca_index_n_heads * arch.ca_index_head_dim, low)
        shapes["attn.indexer.weights_proj.weight"] = (arch.ca_index_n_heads, hidden)
    return shapes


def layer_shapes(arch: DeepseekV4Arch, layer: int) -> Shapes:
    """Return the logical shape of each resident tensor of a layer, in install order."""
    hidden, shared = arch.hidden_size, arch.ffn_intermediate
    shapes = {**_attention(arch, layer), "ffn.gate.weight": (arch.num_experts, hidden)}
    if arch.is_hashed(layer):
        shapes["ffn.gate.tid2eid"] = (arch.vocab_size, arch.top_k_experts)
    else:
        shapes["ffn.gate.e_score_correction_bias"] = (arch.num_experts,)
    shapes |= {
        "ffn.shared_experts.gate_proj.weight": (shared, hidden),
        "ffn.shared_experts.up_proj.weight": (shared, hidden),
        "ffn.shared_experts.down_proj.weight": (hidden, shared),
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
    }
    for site in ("attn_hc", "ffn_hc"):
        rows = arch.hc_rows
        shapes |= {f"{site}.fn": (rows, arch.hc_mult * hidden), f"{site}.base": (rows,), f"{site}.scale": (3,)}
    return shapes


def _end_shapes(arch: DeepseekV4Arch) -> Shapes:
    streams = arch.hc_mult
    return {
        "model.hc_head.base": (streams,),
        "model.hc_head.fn": (streams, streams * arch.hidden_size),
        "model.hc_head.scale": (1,),
        "model.norm.weight": (arch.hidden_size,),
        HEAD: (arch.vocab_size, arch.hidden_size),
    }


def _installed(rest: str) -> str:
    """Return the name an install has for a published one inside a layer; other names stay."""
    for published, name in PUBLISHED_PARTS:
        if found := re.fullmatch(published, rest):
            return found.expand(name)
    return rest


def _place_in_layer(arch: DeepseekV4Arch, layer: int, rest: str, *, published: bool) -> Place | None:
    if layer >= arch.num_layers:
        return None
    alone = PUBLISHED_EXPERT.fullmatch(rest) if published else None
    if alone:
        return Routed(layer=layer, roles=(WS[alone[2]],), expert=int(alone[1]))
    if not published and rest in STACKS:
        return Routed(layer=layer, roles=(STACKS[rest],))
    rest = _installed(rest) if published else rest
    if rest not in layer_shapes(arch, layer):
        return None
    return Resident(name=f"{TRUNK}layers.{layer}.{rest}", order=(LAYERS, layer, LAYER_ORDER.index(rest)))


def place(arch: DeepseekV4Arch, name: str) -> Place | None:
    """Return the place of a source tensor, or None when this family has no such tensor."""
    if name.startswith(DRAFT_LAYERS):
        return Dropped(reason="layers that draft further tokens are not run")
    name = PUBLISHED_ENDS.get(name, name)
    if name == HEAD:
        return Resident(name=HEAD, order=(HEAD_GROUP, 0, 0))
    rest = name.removeprefix(TRUNK)
    published = rest == name
    if found := LAYER.fullmatch(rest):
        return _place_in_layer(arch, int(found[1]), found[2], published=published)
    if published or (rest not in ENDS and name not in _end_shapes(arch)):
        return None
    return Resident(name=name, order=(ENDS.get(rest, OTHERS), 0, 0))


def install_plan(arch: DeepseekV4Arch) -> InstallPlan:
    """Return the places, names and shapes of a checkpoint of `arch`."""
    hidden, width = arch.hidden_size, arch.moe_intermediate_size
    residents: Shapes = {f"{TRUNK}embed_tokens.weight": (arch.vocab_size, hidden)}
    for layer in range(arch.num_layers):
        residents |= {f"{TRUNK}layers.{layer}.{n}": shape for n, shape in layer_shapes(arch, layer).items()}
    residents |= _end_shapes(arch)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    first = f"{TRUNK}layers.0."
    return InstallPlan(
        place=lambda name: place(arch, name),
        residents=residents,
        experts=dict.fromkeys(range(arch.num_layers), shapes),
        quant_slots={
            "embedding": f"{TRUNK}embed_tokens.weight",
            "attention": f"{first}attn.wq_a.weight",
            "router": f"{first}ffn.gate.weight",
            "sharedExpert": f"{first}ffn.shared_experts.gate_proj.weight",
        },
        integers=frozenset(name for name in residents if name.endswith("tid2eid")),
    )
