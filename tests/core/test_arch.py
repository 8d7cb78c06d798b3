"""Typed architectures: every key checked, by name, and nothing changed on the way in."""

import json
from typing import Any

import attrs
import pytest
from attrs import frozen

from mference_core.arch import Arch, ManifestContract, count, decode_arch, encode_arch, key_of, must
from mference_core.errors import ArchMismatch
from mference_core.testing.toys import toy_arch

KEYS = {
    "hiddenSize",
    "ffnIntermediate",
    "moeIntermediateSize",
    "numHeads",
    "numKVHeads",
    "numFullKVHeads",
    "headDim",
    "fullHeadDim",
    "vocabSize",
    "slidingWindow",
    "finalLogitSoftcap",
    "ropeTheta",
    "fullRopeTheta",
    "partialRotaryFactor",
    "numLayers",
    "numExperts",
    "topKExperts",
    "tieWordEmbeddings",
    "attentionKEqV",
    "hiddenActivation",
    "fullAttentionLayerMask",
}


@frozen(kw_only=True)
class Extended(Arch):
    """An arch with keys of its own."""

    conv_taps: int = count(default=4)
    derived: int = attrs.field(default=0, metadata={"on_disk": False})


def values(**changes: Any) -> dict[str, Any]:
    return {**encode_arch(toy_arch()), **changes}


def test_the_keys_are_those_of_the_format() -> None:
    assert {key_of(attribute) for attribute in attrs.fields(Arch)} == KEYS
    assert set(encode_arch(toy_arch())) == KEYS


def test_an_arch_survives_json() -> None:
    arch = toy_arch()
    assert decode_arch(Arch, "toy", json.loads(json.dumps(encode_arch(arch)))) == arch


def test_json_may_write_a_whole_number_for_a_float() -> None:
    arch = decode_arch(Arch, "toy", values(ropeTheta=10000))
    assert isinstance(arch.rope_theta, float)


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_missing_key_is_named(key: str) -> None:
    some = values()
    del some[key]
    with pytest.raises(ArchMismatch, match=rf"^manifest arch\.{key} is missing; expected a value for toy$"):
        decode_arch(Arch, "toy", some)


@pytest.mark.parametrize("key", sorted(KEYS))
@pytest.mark.parametrize("wrong", [None, "x", True, 1.5, [], {}, float("inf"), [True], -1])
def test_a_wrong_type_is_named_or_a_value_kept(key: str, wrong: Any) -> None:
    """Whatever stands for a key, it is refused under the key's own name or becomes exactly that value."""
    try:
        arch = decode_arch(Arch, "toy", values(**{key: wrong}))
    except ArchMismatch as error:
        text = str(error)
    else:
        assert encode_arch(arch)[key] == wrong
        assert isinstance(wrong, (bool, str, float))
        return
    assert text.startswith(f"manifest arch.{key} is ")
    assert "expected" in text


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"hiddenSize": 0}, "hiddenSize", "a positive integer"),
        ({"numKVHeads": 3}, "numKVHeads", "a positive divisor of numHeads"),
        ({"numFullKVHeads": 0}, "numFullKVHeads", "a positive divisor of numHeads"),
        ({"topKExperts": 5}, "topKExperts", "an integer from 0 to numExperts"),
        ({"partialRotaryFactor": 1.01}, "partialRotaryFactor", "a number from 0 to 1"),
        ({"fullAttentionLayerMask": [0, 1]}, "fullAttentionLayerMask", "one entry per layer"),
        ({"fullAttentionLayerMask": [0, 1, 5]}, "fullAttentionLayerMask", "entries from 0 to 4"),
        ({"slidingWindow": -1}, "slidingWindow", "an integer of at least 0"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(changes: dict[str, Any], key: str, expected: str) -> None:
    with pytest.raises(ArchMismatch) as caught:
        decode_arch(Arch, "toy", values(**changes))
    assert str(caught.value) == f"manifest arch.{key} is {_shown(changes[key])}; expected {expected}"


def _shown(value: Any) -> str:
    return repr(tuple(value) if isinstance(value, list) else value)


def test_unknown_keys_are_ignored() -> None:
    assert decode_arch(Arch, "toy", values(family="toy", later=1)) == toy_arch()


def test_a_family_adds_keys_with_and_without_a_place_on_disk() -> None:
    arch = decode_arch(Extended, "toy", values(convTaps=3, derived=9))
    assert (arch.conv_taps, arch.derived) == (3, 9)
    assert encode_arch(arch)["convTaps"] == 3
    assert "derived" not in encode_arch(arch)
    assert decode_arch(Extended, "toy", values()).conv_taps == 4
    with pytest.raises(ArchMismatch, match=r"arch\.convTaps is 0"):
        decode_arch(Extended, "toy", values(convTaps=0))


def test_a_rule_sees_the_fields_before_it() -> None:
    @frozen(kw_only=True)
    class Even(Arch):
        head_dim: int = attrs.field(validator=must("twice numHeads", lambda a, v: v == 2 * a.num_heads))

    assert decode_arch(Even, "toy", values(headDim=4)).head_dim == 4
    with pytest.raises(ArchMismatch, match=r"manifest arch\.headDim is 5; expected twice numHeads"):
        decode_arch(Even, "toy", values(headDim=5))


def test_a_contract_recognises_exactly_its_pinned_values() -> None:
    pinned = toy_arch()
    contract = ManifestContract(family="toy", arch=Arch, pinned=(pinned,), from_config=lambda config: config)
    assert contract.is_pinned(contract.accept(values()))
    assert not contract.is_pinned(contract.accept(values(ropeTheta=1e5)))
