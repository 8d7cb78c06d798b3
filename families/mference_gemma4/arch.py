"""Pinned facts of Gemma 4 26B-A4B: dimensions, constraints, and how a config.json states them.

Unusual: full-attention layers have no value projection (values are the raw keys), their rotary frequencies are
"proportional", and the shared branch runs beside the routed one. Smaller siblings of this generation carry per-layer
input embeddings, shared KV or double-wide branches; those are refused, not ignored.

Sources: transformers 5.24.0 `gemma4`, mlx-lm 0.32.2 `gemma4_text`, and the checkpoint pinned below.
"""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from mference_core import Arch, ArchMismatch, Pinned, must

SLIDING, FULL = 0, 1
RMS_EPS = 1e-6

CHECKPOINT = Pinned(
    repo="mlx-community/gemma-4-26b-a4b-it-4bit",
    revision="0d77464eeb233a2da68ebf9d7dc4edaac7db956d",
    index_sha256="bf198c9f5ea6462addca1966e5dd669c407537a876e82cf06db9084c5c850b13",
    model_id="mlx-community/gemma-4-26b-a4b-it-4bit",
    download_bytes=14_620_479_420,
    installed_bytes=14_291_921_884,
    licence="Gemma terms of use, https://ai.google.dev/gemma/terms",
)


def _above_zero(key: str | None = None) -> Any:
    return field(validator=must("above 0", lambda _, v: v > 0), metadata={"key": key} if key else {})


def _even_head(_arch: "Gemma4Arch", value: int) -> bool:
    return value > 0 and value % 2 == 0


def _turning_pairs(arch: "Gemma4Arch", value: float) -> bool:
    return 0 < value <= 1 and int(value * arch.full_head_dim // 2) >= 1


@frozen(kw_only=True)
class Gemma4Arch(Arch):
    """The base keys, narrowed to what this family computes; it writes no key of its own."""

    num_experts: int = _above_zero()
    top_k_experts: int = field(validator=must("from 1 to numExperts", lambda a, v: 1 <= v <= a.num_experts))
    moe_intermediate_size: int = _above_zero()
    head_dim: int = field(validator=must("a positive even number", _even_head))
    full_head_dim: int = field(validator=must("a positive even number", _even_head))
    sliding_window: int = _above_zero()
    final_logit_softcap: float = _above_zero()
    rope_theta: float = _above_zero()
    full_rope_theta: float = _above_zero()
    partial_rotary_factor: float = field(validator=must("a share of the head with a turning pair", _turning_pairs))
    tie_word_embeddings: bool = field(validator=must("true", lambda _, v: v))
    attention_k_eq_v: bool = field(validator=must("true", lambda _, v: v), metadata={"key": "attentionKEqV"})
    hidden_activation: str = field(validator=must("'gelu_pytorch_tanh'", lambda _, v: v == "gelu_pytorch_tanh"))
    full_attention_layer_mask: tuple[int, ...] = field(
        validator=[
            must("one entry per layer", lambda a, v: len(v) == a.num_layers),
            must("entries 0 (sliding) or 1 (full)", lambda _, v: set(v) <= {SLIDING, FULL}),
        ],
    )

    def is_full(self, layer: int) -> bool:
        """Say whether a layer attends to the whole past."""
        return self.full_attention_layer_mask[layer] == FULL

    def kv_heads(self, layer: int) -> int:
        """Return the number of key heads of a layer."""
        return self.num_full_kv_heads if self.is_full(layer) else self.num_kv_heads

    def head_size(self, layer: int) -> int:
        """Return the head dim of a layer."""
        return self.full_head_dim if self.is_full(layer) else self.head_dim


PINNED = Gemma4Arch(
    hidden_size=2816,
    ffn_intermediate=2112,
    moe_intermediate_size=704,
    num_heads=16,
    num_kv_heads=8,
    num_full_kv_heads=2,
    head_dim=256,
    full_head_dim=512,
    vocab_size=262_144,
    sliding_window=1024,
    final_logit_softcap=30.0,
    rope_theta=1e4,
    full_rope_theta=1e6,
    partial_rotary_factor=0.25,
    num_layers=30,
    num_experts=128,
    top_k_experts=8,
    tie_word_embeddings=True,
    attention_k_eq_v=True,
    hidden_activation="gelu_pytorch_tanh",
    full_attention_layer_mask=(SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL) * 5,
)

ARCH_KEYS = {
    "hiddenSize": "hidden_size",
    "ffnIntermediate": "intermediate_size",
    "moeIntermediateSize": "moe_intermediate_size",
    "numHeads": "num_attention_heads",
    "numKVHeads": "num_key_value_heads",
    "numFullKVHeads": "num_global_key_value_heads",
    "headDim": "head_dim",
    "fullHeadDim": "global_head_dim",
    "vocabSize": "vocab_size",
    "slidingWindow": "sliding_window",
    "finalLogitSoftcap": "final_logit_softcapping",
    "numLayers": "num_hidden_layers",
    "numExperts": "num_experts",
    "topKExperts": "top_k_experts",
    "tieWordEmbeddings": "tie_word_embeddings",
    "attentionKEqV": "attention_k_eq_v",
    "hiddenActivation": "hidden_activation",
}
"""`arch` key -> key of config.json's text_config."""

FIXED = {
    "rms_norm_eps": RMS_EPS,
    "enable_moe_block": True,
    "attention_bias": False,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
"""text_config keys that must have one value when present: the others describe siblings this family does not compute."""


def _refuse(key: str, got: object, expected: object) -> ArchMismatch:
    return ArchMismatch(what=f"config text_config.{key}", got=repr(got), expected=f"{expected!r} for gemma4")


def _rope(text: Mapping[str, Any], kind: str, rope_type: str) -> Mapping[str, Any]:
    table = text.get("rope_parameters", {})
    entry = table.get(f"{kind}_attention") if isinstance(table, Mapping) else None
    if not isinstance(entry, Mapping) or entry.get("rope_type", rope_type) != rope_type:
        raise _refuse(f"rope_parameters.{kind}_attention", entry, {"rope_type": rope_type})
    return entry


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
    missing = [key for key in (*ARCH_KEYS.values(), "layer_types") if key not in text and key != "tie_word_embeddings"]
    if missing:
        raise _refuse(missing[0], None, "a value")
    kinds = {"sliding_attention": SLIDING, "full_attention": FULL}
    layers = text["layer_types"]
    if not isinstance(layers, list) or any(kind not in kinds for kind in layers):
        raise _refuse("layer_types", layers, list(kinds))
    sliding, full = _rope(text, "sliding", "default"), _rope(text, "full", "proportional")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))
    return {
        **{key: text[source] for key, source in ARCH_KEYS.items() if source in text},
        "tieWordEmbeddings": tied,
        "ropeTheta": sliding.get("rope_theta", 1e4),
        "fullRopeTheta": full.get("rope_theta", 1e6),
        "partialRotaryFactor": full.get("partial_rotary_factor", 0.25),
        "fullAttentionLayerMask": [kinds[kind] for kind in layers],
    }


__all__ = ["CHECKPOINT", "PINNED", "RMS_EPS", "Gemma4Arch", "arch_from_config"]
