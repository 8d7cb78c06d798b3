"""layout.json: the format's golden figures, round trips, and one refusal per lie."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mference_core.errors import ManifestError
from mference_core.gturbo.layout import Layout, decode_layout, encode_layout, plan_layout, plan_parts
from mference_core.tensors import Quant

Json = dict[str, Any]
Q4 = Quant(bits=4, group_size=64)


def toy_layout() -> Layout:
    """Return two layers, the second routed with three experts of 4-bit codes."""
    shapes = {"gate": (32, 64), "up": (32, 64), "down": (64, 64)}
    return plan_layout({1: plan_parts(shapes, dict.fromkeys(shapes, Q4))}, num_layers=2, count=3)


def test_layout_golden() -> None:
    """The offsets, sizes, shapes and stride the format gives for 128 experts of [704, 2816]."""
    shapes = {"gate": (704, 2816), "up": (704, 2816), "down": (2816, 704)}
    parts = plan_parts(shapes, dict.fromkeys(shapes, Q4))
    layout = plan_layout(dict.fromkeys(range(30), parts), num_layers=30, count=128)
    assert (layout.expert_stride, layout.experts_per_layer, layout.layers[29].file) == (3358720, 128, "layer_29.bin")
    assert 128 * layout.expert_stride == 429_916_160
    top = json.loads(encode_layout(layout))
    assert {key: top[key] for key in ("expertStride", "numLayers", "expertsPerLayer")} == {
        "expertStride": 3358720,
        "numLayers": 30,
        "expertsPerLayer": 128,
    }
    expert = top["layers"][3]["experts"][127]
    assert (expert["expert"], expert["offset"], expert["size"]) == (127, 127 * 3358720, 3358720)
    small = {"size": 61952, "dtype": "BF16"}
    assert expert["tensors"] == {
        "gate": {"offset": 0, "size": 991232, "dtype": "U32", "shape": [704, 2816], "bits": 4},
        "gate_scales": {"offset": 991232, **small, "shape": [704, 44]},
        "gate_biases": {"offset": 1053184, **small, "shape": [704, 44]},
        "up": {"offset": 1115136, "size": 991232, "dtype": "U32", "shape": [704, 2816], "bits": 4},
        "up_scales": {"offset": 2106368, **small, "shape": [704, 44]},
        "up_biases": {"offset": 2168320, **small, "shape": [704, 44]},
        "down": {"offset": 2230272, "size": 991232, "dtype": "U32", "shape": [2816, 704], "bits": 4},
        "down_scales": {"offset": 3221504, **small, "shape": [2816, 11]},
        "down_biases": {"offset": 3283456, **small, "shape": [2816, 11]},
    }


def quants(bits: int, gate: int = 64, others: int = 64) -> dict[str, Quant]:
    groups = {"gate": gate, "up": others, "down": others}
    return {role: Quant(bits=bits, group_size=group) for role, group in groups.items()}


@pytest.mark.parametrize(
    ("width", "hidden", "quant", "raw", "stride"),
    [
        (512, 2048, quants(4), 1769472, 1769472),
        (2048, 4096, quants(2, gate=32), 8388608, 8388608),
        (2048, 4096, quants(2), 7864320, 7864320),
        (2048, 4096, quants(4), 14155776, 14155776),
        (512, 2048, quants(2), 983040, 983040),
    ],
)
def test_published_strides(width: int, hidden: int, quant: dict[str, Quant], raw: int, stride: int) -> None:
    parts = plan_parts({"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}, quant)
    assert sum(part.size for part in parts) == raw
    assert plan_layout({0: parts}, num_layers=1, count=2).expert_stride == stride


def test_the_widest_layer_sets_the_stride_of_all() -> None:
    shapes = {"gate": (2048, 4096), "up": (2048, 4096), "down": (4096, 2048)}
    layers = {0: plan_parts(shapes, quants(2, gate=32)), 1: plan_parts(shapes, quants(2))}
    layout = plan_layout(layers, num_layers=2, count=4)
    assert [layer.offsets[1] for layer in layout.layers] == [8388608, 8388608]
    read = decode_layout(encode_layout(layout))
    assert [layer.expert_parts[0].quant for layer in read.layers] == [
        Quant(bits=2, group_size=32),
        Quant(bits=2, group_size=64),
    ]


def test_layout_without_experts() -> None:
    layout = plan_layout({}, num_layers=2, count=0)
    assert (layout.expert_stride, layout.experts_per_layer) == (0, 0)
    assert decode_layout(encode_layout(layout)) == layout


@given(
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    bits=st.sampled_from([2, 4, 8]),
    gate_group=st.sampled_from([32, 64, 128]),
    routed=st.sets(st.integers(0, 4), max_size=5),
    count=st.integers(1, 5),
)
def test_any_layout_round_trips(
    size: tuple[int, int], bits: int, gate_group: int, routed: set[int], count: int
) -> None:
    width, hidden = 128 * size[0], 128 * size[1]
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    parts = plan_parts(shapes, quants(bits, gate=gate_group))
    layout = plan_layout(dict.fromkeys(routed, parts), num_layers=5, count=count)
    assert decode_layout(encode_layout(layout)) == layout


def at(*keys: Any, value: Any) -> Callable[[Json], Any]:
    """Set the member of layout.json under `keys`."""

    def change(top: Json) -> None:
        here: Any = top
        for key in keys[:-1]:
            here = here[key]
        here[keys[-1]] = value

    return change


def without(*keys: Any) -> Callable[[Json], Any]:
    def change(top: Json) -> None:
        here: Any = top
        for key in keys[:-1]:
            here = here[key]
        del here[keys[-1]]

    return change


def part(name: str, **members: Any) -> Callable[[Json], Any]:
    """Change members of one sub-tensor, alike in every expert."""

    def change(top: Json) -> None:
        for expert in top["layers"][1]["experts"]:
            expert["tensors"][name].update(members)

    return change


L1 = ("layers", 1)
E2 = (*L1, "experts", 2)
LAYOUT_LIES: dict[str, tuple[Callable[[Json], Any], str]] = {
    "stride missing": (without("expertStride"), "layout.json expertStride is missing"),
    "stride unaligned": (
        lambda top: [e.update(size=16385) for e in top["layers"][1]["experts"]] and top.update(expertStride=16385),
        "layout.json expertStride is 16385; expected a multiple of 4096",
    ),
    "count missing": (without("expertsPerLayer"), "layout.json expertsPerLayer is missing"),
    "layers missing": (without("layers"), "layout.json layers is missing"),
    "numLayers": (at("numLayers", value=3), "layout.json numLayers is 3; expected its 2 layers"),
    "layer not an object": (at("layers", 0, value=3), "layout.json layer 0 is 3; expected an object"),
    "layers out of order": (at(*L1, "layer", value=0), "layer at position 1 is layer 0; expected layers in order"),
    "file of another layer": (at(*L1, "file", value="layer_00.bin"), "layer 1 file is 'layer_00.bin'"),
    "file outside": (at(*L1, "file", value="../layer_01.bin"), "layer 1 file is '../layer_01.bin'"),
    "an expert short": (without(*E2), "layer 1 experts is 2; expected expertsPerLayer 3"),
    "expert id out of range": (at(*E2, "expert", value=3), "expert 2 expert is 3; expected an integer under 3"),
    "expert id twice": (at(*E2, "expert", value=1), "layer 1 expert id 1 is there twice"),
    "physical rank": (at(*E2, "physicalRank", value=3), "expert 2 physicalRank is 3; expected an integer under 3"),
    "expert size": (at(*E2, "size", value=8192), "expert 2 size is 8192; expected expertStride 16384"),
    "expert offset missing": (without(*E2, "offset"), "layer 1 expert 2 offset is missing"),
    "expert offset unaligned": (at(*E2, "offset", value=100), "layer 1 expert offset is 100"),
    "expert offset past the end": (at(*E2, "offset", value=3 * 16384), "layer 1 expert offset is 49152"),
    "expert offset twice": (at(*E2, "offset", value=16384), "layer 1 expert offset is shared by two"),
    "tensors missing": (without(*E2, "tensors"), "layer 1 expert 2 tensors is missing"),
    "tensors unlike the first's": (
        at(*E2, "tensors", "up", "offset", value=8192),
        "layer 1 expert 2 tensors is unlike the first's",
    ),
    "a sub-tensor short": (
        lambda top: [e["tensors"].pop("up_biases") for e in top["layers"][1]["experts"]],
        "layer 1 tensors is wrong in up_biases",
    ),
    "an unknown sub-tensor": (
        lambda top: [e["tensors"].update(x={}) for e in top["layers"][1]["experts"]],
        "layer 1 tensors is wrong in x",
    ),
    "codes not U32": (part("gate", dtype="F32"), "layer 1 gate dtype is F32; expected U32"),
    "scales not BF16": (part("up_scales", dtype="F16"), "layer 1 up_scales dtype is F16; expected BF16"),
    "codes of rank 1": (part("gate", shape=[64]), "layer 1 gate shape is [64]; expected two axes above 0"),
    "codes of an odd size": (part("gate", size=1000), "layer 1 gate size is 1000 bytes at 4 bits; expected [32, 64]"),
    "bits that are not true": (part("gate", bits=8), "layer 1 gate size is 1024 bytes at 8 bits"),
    "scales of other rows": (part("up_scales", shape=[16, 1]), "layer 1 up_scales shape is [16, 1]"),
    "scales of no group": (part("up_scales", shape=[32, 3]), "layer 1 up_scales shape is [32, 3]"),
    "biases unlike scales": (part("up_biases", shape=[32, 2]), "layer 1 up_biases shape is [32, 2]"),
    "scales of another size": (part("up_scales", size=32), "layer 1 up_scales size is 32; expected 64 bytes"),
    "sub-tensors overlap": (part("up", offset=0), "layer 1 up bytes is 0 to 1024; expected an own span"),
    "sub-tensor outside the blob": (part("up", offset=16000), "layer 1 up bytes is 16000 to 17024"),
}


@pytest.mark.parametrize(("change", "text"), LAYOUT_LIES.values(), ids=LAYOUT_LIES)
def test_lying_layout_is_refused(change: Callable[[Json], Any], text: str) -> None:
    top = json.loads(encode_layout(toy_layout()))
    change(top)
    with pytest.raises(ManifestError) as caught:
        decode_layout(json.dumps(top).encode())
    assert text in str(caught.value)


def test_layout_members_the_format_leaves_open() -> None:
    """Ids may be missing, bits too, experts may lie in any order, and the stride may suit 4 KiB pages."""
    top = json.loads(encode_layout(toy_layout()))
    top["expertStride"] = 8192
    for ordinal, expert in enumerate(top["layers"][1]["experts"]):
        del expert["expert"]
        del expert["tensors"]["gate"]["bits"]
        expert.update(offset=8192 * (2 - ordinal), size=8192, physicalRank=2 - ordinal)
    layer = decode_layout(json.dumps(top).encode()).layers[1]
    assert layer.offsets == (16384, 8192, 0)
    assert layer.expert_parts[0].quant == Q4
