"""A config found by trial: the contract reads the arch wanted from it, and nothing else was changed."""

from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from mference_core.arch import ManifestContract, encode_arch
from mference_core.errors import ManifestError, UsageError
from mference_core.testing.config_fit import fit_config
from mference_core.testing.toys import toy_arch, toy_config, toy_contract

KINDS = ("near", "far")


def nested_config() -> dict[str, Any]:
    """Return a config that states width and vocabulary in one object, and layers by name in another."""
    arch = encode_arch(toy_arch())
    moved = ("hiddenSize", "vocabSize", "fullAttentionLayerMask", "numLayers")
    return {
        "model_type": "toy",
        "note": 64,
        "vocab": 96,
        "width": {"hidden": 64, "vocab": 96},
        "kinds": {"names": ["near", "far", "near"], "count": 3},
        "rest": {key: value for key, value in arch.items() if key not in moved},
    }


def read_nested(config: Mapping[str, Any]) -> dict[str, Any]:
    names = config["kinds"]["names"]
    if len(names) != config["kinds"]["count"]:
        raise ManifestError(what="kinds", got=str(len(names)), expected=str(config["kinds"]["count"]))
    return {
        **config["rest"],
        "hiddenSize": config["width"]["hidden"],
        "vocabSize": config["width"]["vocab"],
        "numLayers": len(names),
        "fullAttentionLayerMask": [KINDS.index(name) for name in names],
    }


NESTED = ManifestContract(family="toy", arch=type(toy_arch()), pinned=(), from_config=read_nested)


def test_a_flat_config() -> None:
    arch = toy_arch(hidden_size=128, num_layers=2, full_attention_layer_mask=(1, 0), rope_theta=5e5)
    template = toy_config(toy_arch(), quantised=False)
    assert fit_config(template, toy_contract(), arch) == {**template, "toy": encode_arch(arch)}
    assert template == toy_config(toy_arch(), quantised=False)


def test_a_nested_config_with_named_layers() -> None:
    """The contract refuses a config whose number of layers and list of layers disagree: both change together."""
    arch = toy_arch(hidden_size=128, vocab_size=64, num_layers=5, full_attention_layer_mask=(1, 0, 0, 1, 0))
    config = fit_config(nested_config(), NESTED, arch)
    assert NESTED.accept(NESTED.from_config(config)) == arch
    assert config["note"] == 64
    assert config["vocab"] == config["width"]["vocab"] == 64, "said twice, changed twice"
    assert config["kinds"] == {"names": ["far", "near", "near", "far", "near"], "count": 5}


def test_a_value_that_no_member_states_is_named() -> None:
    contract = ManifestContract(
        family="toy", arch=type(toy_arch()), pinned=(), from_config=lambda config: {**config["toy"], "vocabSize": 96}
    )
    with pytest.raises(UsageError, match=r"^config value for arch.vocabSize is not found by trial; expected 100; give"):
        fit_config(toy_config(toy_arch(), quantised=False), contract, toy_arch(vocab_size=100))


def test_one_value_that_states_two_keys() -> None:
    """Changing it is right when both keys want the same."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        return {**config["toy"], "headDim": config["head"], "fullHeadDim": config["head"]}

    contract = ManifestContract(family="toy", arch=type(toy_arch()), pinned=(), from_config=read)
    template = {"head": 32, **toy_config(toy_arch(), quantised=False)}
    assert fit_config(template, contract, toy_arch(head_dim=16, full_head_dim=16))["head"] == 16
    with pytest.raises(UsageError, match=r"arch.fullHeadDim is not found"):
        fit_config(template, contract, toy_arch(head_dim=16, full_head_dim=64))


def test_a_key_that_follows_from_two_values() -> None:
    """It is wrong while only one of them has been changed, and right in the end."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        share = config["turning"] / config["head"]
        return {**config["toy"], "headDim": config["head"], "fullHeadDim": config["head"], "partialRotaryFactor": share}

    contract = ManifestContract(family="toy", arch=type(toy_arch()), pinned=(), from_config=read)
    template = {"turning": 8, "head": 32, **toy_config(toy_arch(), quantised=False)}
    wanted = toy_arch(head_dim=128, full_head_dim=128, partial_rotary_factor=0.5)
    with pytest.raises(UsageError, match=r"arch.partialRotaryFactor is not found"):
        fit_config(template, contract, wanted)

    def read_count(config: Mapping[str, Any]) -> dict[str, Any]:
        return {**read(config), "slidingWindow": config["turning"]}

    contract = ManifestContract(family="toy", arch=type(toy_arch()), pinned=(), from_config=read_count)
    config = fit_config(template, contract, attrs.evolve(wanted, sliding_window=64))
    assert (config["head"], config["turning"]) == (128, 64)
