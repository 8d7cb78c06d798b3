"""How configs state an architecture: both published lists, later words, contradictions, and what is not computed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

import mference_deepseekv4
from mference_core.arch import encode_arch
from mference_core.errors import ArchMismatch
from mference_deepseekv4.arch import CSA, HCA, PINNED, SLIDING, DeepseekV4Arch
from mference_deepseekv4.config import arch_from_config

REFERENCE = Path(mference_deepseekv4.__file__).parent / "reference"
CONTRACT = mference_deepseekv4.mference_manifest_contract()
Config = dict[str, Any]

PUBLISHED: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
NAMES = {SLIDING: "sliding_attention", CSA: "compressed_sparse_attention", HCA: "heavily_compressed_attention"}


def read(config: Config) -> DeepseekV4Arch:
    arch = CONTRACT.accept(arch_from_config(config))
    assert isinstance(arch, DeepseekV4Arch)
    return arch


def changed(**changes: Any) -> Config:
    """Return the published config with other values; those of None are left out."""
    return {key: value for key, value in (PUBLISHED | changes).items() if value is not None}


@pytest.mark.parametrize("draft_layers", [[0], [0, 0, 0], []])
def test_published_lists_describe_the_pinned_arch(draft_layers: list[int]) -> None:
    """44 or 46 entries: those after the first 43 belong to draft layers."""
    ratios = [*PUBLISHED["compress_ratios"][:43], *draft_layers]
    assert read(changed(compress_ratios=ratios)) == PINNED
    assert CONTRACT.is_pinned(read(changed(compress_ratios=ratios)))


def test_layers_of_the_pinned_arch() -> None:
    """Family page: two sliding layers, then compressed sparse ones at even places and heavily compressed at odd ones."""
    kinds = [PINNED.kind(layer) for layer in range(PINNED.num_layers)]
    assert [layer for layer, kind in enumerate(kinds) if kind == SLIDING] == [0, 1]
    assert [layer for layer, kind in enumerate(kinds) if kind == CSA] == list(range(2, 43, 2))
    assert [layer for layer, kind in enumerate(kinds) if kind == HCA] == list(range(3, 43, 2))
    assert [PINNED.rate(layer) for layer in (0, 2, 3)] == [0, 4, 128]
    assert [layer for layer in range(43) if PINNED.is_hashed(layer)] == [0, 1, 2]
    assert PINNED.hc_rows == 24


def test_manifest_of_the_pinned_arch() -> None:
    """Format section 8: 21 base keys, 13 that all families but the first write, and 21 of its own."""
    encoded = encode_arch(PINNED)
    assert len(encoded) == 21 + 13 + 21
    assert {key: value for key, value in encoded.items() if key.startswith(("ca", "hc", "num", "rout", "swiglu"))} == {
        "caQLoraRank": 1024,
        "caOLoraRank": 1024,
        "caOGroups": 8,
        "caRopeHeadDim": 64,
        "caIndexNHeads": 64,
        "caIndexHeadDim": 128,
        "caIndexTopK": 512,
        "caCSACompressRate": 4,
        "caHCACompressRate": 128,
        "caCompressRopeTheta": 160000.0,
        "caRopeScalingFactor": 16.0,
        "caRopeScalingOriginalMax": 65536,
        "caRopeScalingBetaFast": 32.0,
        "caRopeScalingBetaSlow": 1.0,
        "hcMult": 4,
        "hcSinkhornIters": 20,
        "hcEps": 1e-06,
        "numHashRoutedLayers": 3,
        "routerScoringFunc": "sqrtsoftplus",
        "routedScalingFactor": 1.5,
        "swigluLimit": 10.0,
        "numHeads": 64,
        "numKVHeads": 1,
        "numFullKVHeads": 1,
        "numLayers": 43,
        "numExperts": 256,
        "routerScaled": False,
    }
    assert (encoded["family"], encoded["attentionScale"]) == ("deepseekV4Flash", 0.044194173824159216)
    assert (encoded["partialRotaryFactor"], encoded["ropeNeoxSubdim"]) == (0.125, False)


@pytest.mark.parametrize("folder", [REFERENCE, REFERENCE / "mlx"])
def test_reference_configs(folder: Path) -> None:
    arch = read(json.loads((folder / "config.json").read_text()))
    assert arch.full_attention_layer_mask == (SLIDING, SLIDING, CSA, HCA, CSA)
    assert (arch.ca_rope_head_dim, arch.partial_rotary_factor, arch.swiglu_limit) == (16, 0.25, 1.0)


def later_words(config: Config) -> Config:
    """Return a config as later releases of transformers write it."""
    new = {k: v for k, v in config.items() if k not in ("compress_ratios", "num_hash_layers", "qk_rope_head_dim")}
    scaling = {**new.pop("rope_scaling"), "rope_type": "yarn", "attention_factor": 1.0}
    turning = {"partial_rotary_factor": 0.125}
    return {
        **new,
        "layer_types": [NAMES[kind] for kind in PINNED.full_attention_layer_mask],
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "compress_rates": {NAMES[CSA]: 4, NAMES[HCA]: 128},
        "partial_rotary_factor": 0.125,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": new.pop("rope_theta"), **turning},
            "compress": {**scaling, "rope_theta": new.pop("compress_rope_theta"), **turning},
        },
    }


def test_later_words_say_the_same() -> None:
    config = later_words(PUBLISHED)
    assert read({key: v for key, v in config.items() if key not in ("rope_theta", "compress_rope_theta")}) == PINNED
    assert read({**PUBLISHED, **config}) == PINNED


def test_unscaled_angles_are_a_factor_of_one() -> None:
    for config in (changed(rope_scaling=None), changed(rope_scaling={"type": "default"})):
        assert read(config).ca_rope_scaling_factor == 1.0


def test_hash_layers_of_a_config_that_does_not_say() -> None:
    assert read(changed(num_hash_layers=None)).num_hash_routed_layers == 3
    assert read(changed(num_hash_layers=0)).num_hash_routed_layers == 0


def scaling(**changes: Any) -> Config:
    values = {**PUBLISHED["rope_scaling"], **changes}
    return changed(rope_scaling={key: value for key, value in values.items() if value is not None})


def layer_types(layer: int, kind: str) -> Config:
    types = [NAMES[kind] for kind in PINNED.full_attention_layer_mask]
    types[layer] = kind
    return changed(layer_types=types)


REFUSED: dict[str, tuple[Config, str]] = {
    "no layer kinds": (changed(compress_ratios=None), "config compress_ratios is None; expected one entry per layer"),
    "too few ratios": (changed(compress_ratios=[0] * 42), "compress_ratios is 42; expected a list of at least 43"),
    "an unknown ratio": (
        changed(compress_ratios=[0] * 42 + [8]),
        "compress_ratios is 8; expected entries of [0, 4, 12",
    ),
    "a ratio of true": (changed(compress_ratios=[True] * 43), "compress_ratios is True"),
    "ratios of no list": (changed(compress_ratios="0,4"), "compress_ratios is '0,4'; expected a list"),
    "kinds that disagree": (
        layer_types(3, "sliding_attention"),
        "config layer_types 3 is 'sliding_attention'; expected what compress_ratios says",
    ),
    "an unknown kind": (layer_types(3, "full_attention"), "layer_types is 'full_attention'; expected entries of ['sli"),
    "hash layers later on": (
        changed(mlp_layer_types=["moe"] * 40 + ["hash_moe"] * 3, num_hash_layers=None),
        "mlp_layer_types is 'mixed'; expected hash_moe in the first layers only",
    ),
    "hash layers that disagree": (
        changed(mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 41),
        "num_hash_layers is 3; expected the 2 of mlp_layer_types",
    ),
    "dims that disagree": (
        changed(partial_rotary_factor=0.25),
        "qk_rope_head_dim is 64; expected partial_rotary_factor 0.25 of head_dim 512",
    ),
    "a share of nothing": (changed(partial_rotary_factor=0), "partial_rotary_factor is 0; expected a number above 0"),
    "no rotary dims": (changed(qk_rope_head_dim=None), "qk_rope_head_dim is None; expected a positive integer"),
    "odd rotary dims": (changed(qk_rope_head_dim=63), "arch.caRopeHeadDim is 63; expected even"),
    "more dims than an indexer's head": (changed(qk_rope_head_dim=256), "arch.caRopeHeadDim is 256; expected even"),
    "linear scaling": (scaling(type="linear"), "config rope_scaling type is 'linear'; expected 'yarn'"),
    "scaling of attention": (scaling(attention_factor=1.2), "rope_scaling attention_factor is 1.2; expected 1.0"),
    "scaling by another rule": (scaling(mscale=1.0), "rope_scaling mscale is 1.0; expected no such member"),
    "scaling without its factor": (scaling(factor=None), "rope_scaling factor is None; expected a value"),
    "scaling of no object": (changed(rope_scaling=16), "config rope_scaling is 16; expected an object"),
    "a factor below one": (scaling(factor=0.5), "arch.caRopeScalingFactor is 0.5; expected at least 1"),
    "betas the wrong way": (scaling(beta_slow=64), "arch.caRopeScalingBetaFast is 32.0; expected above caRope"),
    "no base": (changed(rope_theta=None), "config rope_theta is None; expected a value"),
    "no base for entries": (changed(compress_rope_theta=None), "config compress_rope_theta is None"),
    "other scores": (changed(scoring_func="sigmoid"), "scoring_func is 'sigmoid'; expected 'sqrtsoftplus'"),
    "other weights": (changed(norm_topk_prob=False), "config norm_topk_prob is False; expected True"),
    "two shared experts": (changed(n_shared_experts=2), "config n_shared_experts is 2; expected 1"),
    "groups of experts": (changed(n_group=8), "config n_group is 8; expected 1"),
    "tied embeddings": (changed(tie_word_embeddings=True), "config tie_word_embeddings is True; expected False"),
    "a bias": (changed(attention_bias=True), "config attention_bias is True; expected False"),
    "another activation": (changed(hidden_act="gelu"), "config hidden_act is 'gelu'; expected 'silu'"),
    "another epsilon": (changed(rms_norm_eps=1e-5), "config rms_norm_eps is 1e-05; expected 1e-06"),
    "other rates": (
        changed(compress_rates={NAMES[CSA]: 8, NAMES[HCA]: 128}),
        "config compress_rates is {'compressed_sparse_attention': 8",
    ),
    "two key heads": (changed(num_key_value_heads=2), "arch.numKVHeads is 2; expected 1"),
    "no window": (changed(sliding_window=0), "arch.slidingWindow is 0; expected above 0"),
    "no streams": (changed(hc_mult=0), "arch.hcMult is 0; expected above 0"),
    "groups that do not divide": (changed(o_groups=7), "arch.caOGroups is 7; expected a divisor of numHeads"),
    "a missing width": (changed(q_lora_rank=None), "config q_lora_rank is None; expected a value"),
    "more experts than there are": (changed(num_experts_per_tok=257), "arch.topKExperts is 257; expected from 1 to"),
    "a width of text": (changed(index_topk="512"), "arch.caIndexTopK is '512'; expected int"),
}


@pytest.mark.parametrize(("config", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_is_refused_by_name(config: Config, text: str) -> None:
    with pytest.raises(ArchMismatch) as caught:
        read(config)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


OTHER_MANIFESTS: dict[str, tuple[Callable[[Config], Any], str]] = {
    "another family": (lambda a: a.update(family="qwen36"), "arch.family is 'qwen36'; expected 'deepseekV4Flash'"),
    "a mask of others": (lambda a: a.update(fullAttentionLayerMask=[1] * 43), "expected entries 0 (sliding), 3 (CSA)"),
    "another scale": (
        lambda a: a.update(attentionScale=0.05),
        "arch.attentionScale is 0.05; expected 1 / sqrt(headDim)",
    ),
    "another rate": (lambda a: a.update(caCSACompressRate=8), "arch.caCSACompressRate is 8; expected 4"),
    "a key less": (lambda a: a.pop("hcMult"), "arch.hcMult is missing; expected a value for deepseekv4"),
}


@pytest.mark.parametrize(("change", "text"), OTHER_MANIFESTS.values(), ids=OTHER_MANIFESTS)
def test_manifests_of_something_else_are_refused(change: Callable[[Config], Any], text: str) -> None:
    values = encode_arch(PINNED)
    assert CONTRACT.accept(values) == PINNED
    change(values)
    with pytest.raises(ArchMismatch) as caught:
        CONTRACT.accept(values)
    assert text in str(caught.value)


def test_fewer_layers_than_hash_layers_are_all_hashed() -> None:
    """The first layers alone, as synthetic checkpoints are cut, keep their kinds."""
    two = attrs.evolve(PINNED, num_layers=2, full_attention_layer_mask=(SLIDING, SLIDING))
    assert [two.is_hashed(layer) for layer in range(2)] == [True, True]
