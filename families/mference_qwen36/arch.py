"""Pinned facts of Qwen 3.6 35B-A3B: dimensions, constraints, and how a config.json states them.

Unusual: three of four layers are gated delta networks, whose state does not grow and cannot be rewound; the fourth is
attention whose output is gated per element; the shared expert has a gate of its own. The dense sibling of this
generation and multi-token prediction heads are not computed here.

Sources: transformers 5.24.0 `qwen3_5_moe`, mlx-lm 0.32.2 `qwen3_5_moe`, and the checkpoint pinned below.
"""

import math
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from mference_core import Arch, ArchMismatch, Pinned, must

FULL, RECURRENT = 1, 2
RMS_EPS, UNIT_EPS = 1e-6, 1e-6
ACTIVATION = "silu"

CHECKPOINT = Pinned(
    repo="mlx-community/Qwen3.6-35B-A3B-4bit",
    revision="38740b847e4cb78f352aba30aa41c76e08e6eb46",
    index_sha256="0b28df60e33753a14e816d3b31577ae2c93884c58430a4a6de6ae9ea483842ea",
    model_id="qwen3.6-35b-a3b-4bit",
    download_bytes=19_529_025_048,
    installed_bytes=19_546_491_213,
    licence="Apache-2.0",
)


def _fixed(value: Any, key: str | None = None) -> Any:
    """Declare a field with the one value this family computes."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return field(validator=must(shown, lambda _, v: v == value), metadata={"key": key} if key else {})


def _above_zero(key: str | None = None) -> Any:
    return field(validator=must("above 0", lambda _, v: v > 0), metadata={"key": key} if key else {})


def _equals(other: str, shown: str, key: str | None = None) -> Any:
    holds = must(f"equal to {shown}", lambda arch, v: v == getattr(arch, other))
    return field(validator=holds, metadata={"key": key} if key else {})


def rotary_dims(arch: "Qwen36Arch") -> int:
    """Return how many features of a head turn."""
    return int(arch.head_dim * arch.partial_rotary_factor)


def _turning_pairs(arch: "Qwen36Arch", value: float) -> bool:
    return 0 < value <= 1 and rotary_dims(arch) >= 2 and rotary_dims(arch) % 2 == 0


@frozen(kw_only=True)
class Qwen36Arch(Arch):
    """The base keys, narrowed to what this family computes, and the 13 keys it writes besides."""

    num_experts: int = _above_zero()
    top_k_experts: int = field(validator=must("from 1 to numExperts", lambda a, v: 1 <= v <= a.num_experts))
    moe_intermediate_size: int = _above_zero()
    num_full_kv_heads: int = _equals("num_kv_heads", "numKVHeads", "numFullKVHeads")
    full_head_dim: int = _equals("head_dim", "headDim")
    sliding_window: int = _fixed(0)
    final_logit_softcap: float = _fixed(0)
    rope_theta: float = _above_zero()
    full_rope_theta: float = _equals("rope_theta", "ropeTheta")
    partial_rotary_factor: float = field(
        validator=must("a share of the head with whole turning pairs", _turning_pairs),
    )
    tie_word_embeddings: bool = _fixed(value=False)
    attention_k_eq_v: bool = _fixed(value=False, key="attentionKEqV")
    hidden_activation: str = _fixed(ACTIVATION)
    full_attention_layer_mask: tuple[int, ...] = field(
        validator=[
            must("one entry per layer", lambda a, v: len(v) == a.num_layers),
            must("entries 1 (full) or 2 (recurrent)", lambda _, v: set(v) <= {FULL, RECURRENT}),
        ],
    )
    family: str = _fixed("qwen36")
    attn_output_gate: bool = _fixed(value=True)
    attention_scale: float = field(
        validator=must("1 / sqrt(headDim)", lambda a, v: math.isclose(v, a.head_dim**-0.5, rel_tol=1e-12)),
    )
    embedding_scaled_by_sqrt_hidden: bool = _fixed(value=False)
    router_scaled: bool = _fixed(value=False)
    ffn_sandwich_norms: bool = _fixed(value=False)
    shared_expert_gated: bool = _fixed(value=True)
    rope_neox_subdim: bool = _fixed(value=True)
    linear_num_k_heads: int = _above_zero()
    linear_num_v_heads: int = field(
        validator=must(
            "a positive multiple of linearNumKHeads", lambda a, v: v > 0 and v % max(1, a.linear_num_k_heads) == 0
        ),
    )
    linear_key_head_dim: int = _above_zero()
    linear_value_head_dim: int = _above_zero()
    linear_conv_kernel_size: int = field(validator=must("at least 2", lambda _, v: v >= 2))

    def is_full(self, layer: int) -> bool:
        """Say whether a layer attends to the whole past."""
        return self.full_attention_layer_mask[layer] == FULL

    @property
    def key_channels(self) -> int:
        """Width of a recurrent layer's queries, and of its keys."""
        return self.linear_num_k_heads * self.linear_key_head_dim

    @property
    def value_channels(self) -> int:
        """Width of a recurrent layer's values."""
        return self.linear_num_v_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_channels + self.value_channels


PINNED = Qwen36Arch(
    hidden_size=2048,
    ffn_intermediate=512,
    moe_intermediate_size=512,
    num_heads=16,
    num_kv_heads=2,
    num_full_kv_heads=2,
    head_dim=256,
    full_head_dim=256,
    vocab_size=248_320,
    sliding_window=0,
    final_logit_softcap=0.0,
    rope_theta=1e7,
    full_rope_theta=1e7,
    partial_rotary_factor=0.25,
    num_layers=40,
    num_experts=256,
    top_k_experts=8,
    tie_word_embeddings=False,
    attention_k_eq_v=False,
    hidden_activation=ACTIVATION,
    full_attention_layer_mask=(RECURRENT, RECURRENT, RECURRENT, FULL) * 10,
    family="qwen36",
    attn_output_gate=True,
    attention_scale=0.0625,
    embedding_scaled_by_sqrt_hidden=False,
    router_scaled=False,
    ffn_sandwich_norms=False,
    shared_expert_gated=True,
    rope_neox_subdim=True,
    linear_num_k_heads=16,
    linear_num_v_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_size=4,
)

ARCH_KEYS = {
    "hiddenSize": "hidden_size",
    "ffnIntermediate": "shared_expert_intermediate_size",
    "moeIntermediateSize": "moe_intermediate_size",
    "numHeads": "num_attention_heads",
    "numKVHeads": "num_key_value_heads",
    "numFullKVHeads": "num_key_value_heads",
    "headDim": "head_dim",
    "fullHeadDim": "head_dim",
    "vocabSize": "vocab_size",
    "numLayers": "num_hidden_layers",
    "numExperts": "num_experts",
    "topKExperts": "num_experts_per_tok",
    "hiddenActivation": "hidden_act",
    "linearNumKHeads": "linear_num_key_heads",
    "linearNumVHeads": "linear_num_value_heads",
    "linearKeyHeadDim": "linear_key_head_dim",
    "linearValueHeadDim": "linear_value_head_dim",
    "linearConvKernelSize": "linear_conv_kernel_dim",
}
"""`arch` key -> key of config.json's text_config."""

FIXED = {
    "rms_norm_eps": RMS_EPS,
    "attention_bias": False,
    "attn_output_gate": True,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""text_config keys that must have one value when present: the others describe siblings this family does not compute."""

KINDS = {"linear_attention": RECURRENT, "full_attention": FULL}


def _refuse(key: str, got: object, expected: object) -> ArchMismatch:
    return ArchMismatch(what=f"config text_config.{key}", got=repr(got), expected=f"{expected!r} for qwen36")


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = text.get("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("rope_type", "default") != "default":
        raise _refuse("rope_parameters", rope, {"rope_type": "default"})
    return rope


def arch_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `arch` object that a config.json describes.

    Raises `ArchMismatch` naming the key of a missing entry or of a feature that this family does not compute.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise _refuse("", text, "an object")
    for key, value in FIXED.items():
        if key in text and text[key] != value and not (text[key] is None and not value):
            raise _refuse(key, text[key], value)
    missing = [key for key in (*ARCH_KEYS.values(), "layer_types") if key not in text]
    if missing:
        raise _refuse(missing[0], None, "a value")
    layers, heads = text["layer_types"], text["head_dim"]
    if not isinstance(layers, list) or any(not isinstance(kind, str) or kind not in KINDS for kind in layers):
        raise _refuse("layer_types", layers, list(KINDS))
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise _refuse("head_dim", heads, "a positive integer")
    theta = _rope(text).get("rope_theta", 1e7)
    return {
        **{key: text[source] for key, source in ARCH_KEYS.items()},
        "slidingWindow": 0,
        "finalLogitSoftcap": 0.0,
        "ropeTheta": theta,
        "fullRopeTheta": theta,
        "partialRotaryFactor": _rope(text).get("partial_rotary_factor", 0.25),
        "tieWordEmbeddings": text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)),
        "attentionKEqV": False,
        "fullAttentionLayerMask": [KINDS[kind] for kind in layers],
        "family": "qwen36",
        "attnOutputGate": True,
        "attentionScale": heads**-0.5,
        "embeddingScaledBySqrtHidden": False,
        "routerScaled": False,
        "ffnSandwichNorms": False,
        "sharedExpertGated": True,
        "ropeNeoxSubdim": True,
    }


__all__ = ["CHECKPOINT", "PINNED", "RMS_EPS", "UNIT_EPS", "Qwen36Arch", "arch_from_config", "rotary_dims"]
