"""How a config.json states an `arch` of DeepSeek V4: as published, as converted, or in transformers' later words.

Layer kinds come from `compress_ratios` (one entry per layer, and further ones for draft layers: 44 or 46 published) or
from `layer_types`; one of the two must be there, because the pattern that transformers invents without them is that of
another model. What is said twice must agree.
"""

import math
from collections.abc import Mapping
from typing import Any

from mference_core import ArchMismatch
from mference_deepseekv4.arch import ACTIVATION, CSA, CSA_RATE, HCA, HCA_RATE, RMS_EPS, SCORING, SLIDING

ARCH_KEYS = {
    "hiddenSize": "hidden_size",
    "ffnIntermediate": "moe_intermediate_size",
    "moeIntermediateSize": "moe_intermediate_size",
    "numHeads": "num_attention_heads",
    "numKVHeads": "num_key_value_heads",
    "numFullKVHeads": "num_key_value_heads",
    "headDim": "head_dim",
    "fullHeadDim": "head_dim",
    "vocabSize": "vocab_size",
    "slidingWindow": "sliding_window",
    "numLayers": "num_hidden_layers",
    "numExperts": "n_routed_experts",
    "topKExperts": "num_experts_per_tok",
    "caQLoraRank": "q_lora_rank",
    "caOLoraRank": "o_lora_rank",
    "caOGroups": "o_groups",
    "caIndexNHeads": "index_n_heads",
    "caIndexHeadDim": "index_head_dim",
    "caIndexTopK": "index_topk",
    "hcMult": "hc_mult",
    "hcSinkhornIters": "hc_sinkhorn_iters",
    "hcEps": "hc_eps",
    "routedScalingFactor": "routed_scaling_factor",
    "swigluLimit": "swiglu_limit",
}
"""`arch` key -> key of config.json, which must be there."""

FIXED = {
    "rms_norm_eps": RMS_EPS,
    "hidden_act": ACTIVATION,
    "scoring_func": SCORING,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "compress_rates": {"compressed_sparse_attention": CSA_RATE, "heavily_compressed_attention": HCA_RATE},
}
"""Keys that must have one value when present: nothing else is computed here."""

RATIOS = {0: SLIDING, CSA_RATE: CSA, HCA_RATE: HCA}
TYPES = {"sliding_attention": SLIDING, "compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA}
HASHED, SCORED = "hash_moe", "moe"
HASH_LAYERS = 3
"""How many layers are hash-routed where a config does not say."""

UNSCALED = {"factor": 1.0, "original_max_position_embeddings": 65_536, "beta_fast": 32.0, "beta_slow": 1.0}
"""Frequencies that a factor of 1 leaves as they are."""
SCALED_BESIDES = {"rope_theta", "partial_rotary_factor", "type", "rope_type"}
AS_COMPUTED = {"attention_factor": 1.0, "truncate": True}
"""Members of a scaling that must have one value when present."""


def _refuse(key: str, got: object, expected: str) -> ArchMismatch:
    return ArchMismatch(what=f"config {key}", got=repr(got), expected=f"{expected} for deepseekv4")


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refuse(key, value, "a positive integer")
    return value


def _listed(config: Mapping[str, Any], key: str, kinds: Mapping[Any, int], layers: int) -> list[int] | None:
    """Return the first `layers` entries of a list as kinds; None without the list."""
    entries = config.get(key)
    if entries is None:
        return None
    if not isinstance(entries, list) or len(entries) < layers:
        got = len(entries) if isinstance(entries, list) else entries
        raise _refuse(key, got, f"a list of at least {layers} entries")
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int | str) or entry not in kinds:
            raise _refuse(key, entry, f"entries of {list(kinds)}")
    return [kinds[entry] for entry in entries[:layers]]


def _mask(config: Mapping[str, Any], layers: int) -> list[int]:
    ratios = _listed(config, "compress_ratios", RATIOS, layers)
    types = _listed(config, "layer_types", TYPES, layers)
    mask = types if ratios is None else ratios
    if mask is None:
        raise _refuse("compress_ratios", None, "one entry per layer, here or in layer_types,")
    if types is not None and types != mask:
        layer = next(i for i, kind in enumerate(mask) if types[i] != kind)
        raise _refuse(f"layer_types {layer}", config["layer_types"][layer], "what compress_ratios says")
    return mask


def _hash_layers(config: Mapping[str, Any], layers: int) -> Any:
    stated = config.get("num_hash_layers")
    kinds = _listed(config, "mlp_layer_types", {SCORED: 0, HASHED: 1}, layers)
    if kinds is None:
        return min(HASH_LAYERS, layers) if stated is None else stated
    hashed = sum(kinds)
    if kinds != sorted(kinds, reverse=True):
        raise _refuse("mlp_layer_types", "mixed", f"{HASHED} in the first layers only")
    if stated not in (None, hashed):
        raise _refuse("num_hash_layers", stated, f"the {hashed} of mlp_layer_types")
    return hashed


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary keys: a base for windows, another for entries, and how the second one's angles are scaled."""
    given = config.get("rope_parameters")
    nested = given if isinstance(given, Mapping) and "compress" in given else {}
    main, compress = nested.get("main") or {}, nested.get("compress")
    scaling = config.get("rope_scaling")
    scaling = (compress if nested else given) if scaling is None else scaling
    theta = config.get("rope_theta", main.get("rope_theta"))
    beyond = config.get("compress_rope_theta", (compress or {}).get("rope_theta"))
    for key, value in (("rope_theta", theta), ("compress_rope_theta", beyond)):
        if value is None:
            raise _refuse(key, None, "a value")
    if main.get("rope_type", "default") != "default":
        raise _refuse("rope_parameters.main.rope_type", main["rope_type"], "'default'")
    return {"ropeTheta": theta, "fullRopeTheta": theta, "caCompressRopeTheta": beyond, **_scaling(scaling)}


def _scaling(values: Any) -> dict[str, Any]:
    if values is None:
        values = {"type": "default"}
    if not isinstance(values, Mapping):
        raise _refuse("rope_scaling", values, "an object")
    kind = values.get("rope_type", values.get("type"))
    if kind not in ("yarn", "default"):
        raise _refuse("rope_scaling type", kind, "'yarn'")
    for key, value in values.items():
        if key in AS_COMPUTED and value not in (None, AS_COMPUTED[key]):
            raise _refuse(f"rope_scaling {key}", value, repr(AS_COMPUTED[key]))
        if key not in {*SCALED_BESIDES, *AS_COMPUTED, *(UNSCALED if kind == "yarn" else ())}:
            raise _refuse(f"rope_scaling {key}", value, "no such member")
    if kind == "yarn":
        for key in ("factor", "original_max_position_embeddings"):
            if key not in values:
                raise _refuse(f"rope_scaling {key}", None, "a value")
    stated = {**UNSCALED, **{key: value for key, value in values.items() if key in UNSCALED}}
    return {
        "caRopeScalingFactor": stated["factor"],
        "caRopeScalingOriginalMax": stated["original_max_position_embeddings"],
        "caRopeScalingBetaFast": stated["beta_fast"],
        "caRopeScalingBetaSlow": stated["beta_slow"],
    }


def _rope_dims(config: Mapping[str, Any], head_dim: int) -> int:
    """Return how many features of a head turn, said as their count or as their share."""
    share, dims = config.get("partial_rotary_factor"), config.get("qk_rope_head_dim")
    if share is None:
        return _integer(config, "qk_rope_head_dim")
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise _refuse("partial_rotary_factor", share, "a number above 0 and at most 1")
    if dims not in (None, round(share * head_dim)):
        raise _refuse("qk_rope_head_dim", dims, f"partial_rotary_factor {share} of head_dim {head_dim}")
    return round(share * head_dim)


def arch_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `arch` object that a config.json describes.

    Raises `ArchMismatch` naming the key of a missing entry, of a contradiction, or of a feature that this family does
    not compute.
    """
    for key, value in FIXED.items():
        if key in config and config[key] not in (None, value):
            raise _refuse(key, config[key], repr(value))
    for key in ARCH_KEYS.values():
        if key not in config:
            raise _refuse(key, None, "a value")
    layers, heads = _integer(config, "num_hidden_layers"), _integer(config, "head_dim")
    dims = _rope_dims(config, heads)
    return {
        **{key: config[source] for key, source in ARCH_KEYS.items()},
        **_rope(config),
        "finalLogitSoftcap": 0.0,
        "partialRotaryFactor": dims / heads,
        "tieWordEmbeddings": False,
        "attentionKEqV": True,
        "hiddenActivation": ACTIVATION,
        "fullAttentionLayerMask": _mask(config, layers),
        "family": "deepseekV4Flash",
        "attnOutputGate": False,
        "attentionScale": 1 / math.sqrt(heads),
        "embeddingScaledBySqrtHidden": False,
        "routerScaled": False,
        "ffnSandwichNorms": False,
        "sharedExpertGated": False,
        "ropeNeoxSubdim": False,
        "linearNumKHeads": 0,
        "linearNumVHeads": 0,
        "linearKeyHeadDim": 0,
        "linearValueHeadDim": 0,
        "linearConvKernelSize": 0,
        "caRopeHeadDim": dims,
        "caCSACompressRate": CSA_RATE,
        "caHCACompressRate": HCA_RATE,
        "numHashRoutedLayers": _hash_layers(config, layers),
        "routerScoringFunc": SCORING,
    }
