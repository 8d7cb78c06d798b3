"""Tensors of a plain directory: the quantisation table, and one refusal per tensor that does not fit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from mference_core.arch import Arch
from mference_core.checkpoint import Checkpoint, open_checkpoint, peek
from mference_core.errors import ManifestError
from mference_core.placement import InstallPlan, Place, Resident, Routed
from mference_core.safetensors_index import read_source
from mference_core.tensors import Quant
from mference_core.testing.toys import (
    Spec,
    float_tensors,
    mlx_tensors,
    toy_arch,
    toy_config,
    toy_contract,
    toy_plan,
    write_safetensors,
    write_toy,
)

Specs = dict[str, Spec]
ARCH = toy_arch()
Q4 = Quant(bits=4, group_size=64)
GATE = "trunk.layers.1.experts.gate"


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(peek(path), toy_contract(), toy_plan)


# --- the quantisation table


def with_table(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = toy_config(ARCH, quantised=True)
    change(config["quantization"])
    (path / "config.json").write_text(json.dumps(config))
    return path


TABLES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "mode": (lambda t: t.update(mode="mxfp4"), "config.json quantization mode is 'mxfp4'; expected 'affine'"),
    "bits missing": (lambda t: t.pop("bits"), "config.json quantization bits is missing"),
    "bits of 6": (lambda t: t.update(bits=6), "config.json quantization bits is 6; expected 2, 4 or 8"),
    "bits a string": (lambda t: t.update(bits="4"), "config.json quantization bits is '4'; expected an integer"),
    "group of 16": (lambda t: t.update(group_size=16), "quantization group_size is 16; expected 32, 64 or 128"),
    "group missing": (lambda t: t.pop("group_size"), "config.json quantization group_size is missing"),
    "override with another group": (
        lambda t: t.update({"trunk.embed": {"bits": 4, "group_size": 32}}),
        "quantization trunk.embed group_size is 32; expected 64, or 32 or 64 at 2 bits",
    ),
    "override without a group": (lambda t: t.update({"trunk.embed": {"bits": 8}}), "trunk.embed group_size is missing"),
    "override of another mode": (
        lambda t: t.update({"trunk.embed": {"mode": "nvfp4", "bits": 4, "group_size": 64}}),
        "trunk.embed mode is 'nvfp4'",
    ),
    "override says float": (lambda t: t.update({"trunk.embed": False}), "tensor trunk.embed.weight is U32"),
    "override of a false width": (
        lambda t: t.update({"trunk.embed": {"bits": 8, "group_size": 64}}),
        "tensor trunk.embed.scales is of shape [96, 1]; expected [96, 0] for [96, 32] at 8 bits",
    ),
}


@pytest.mark.parametrize(("change", "text"), TABLES.values(), ids=TABLES)
def test_table_that_cannot_be_meant_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    path = with_table(write_toy(tmp_path / "a", ARCH), change)
    with pytest.raises(ManifestError) as caught:
        opened(path)
    assert text in str(caught.value)


def test_override_to_two_bits_may_narrow_the_group(tmp_path: Path) -> None:
    path = with_table(
        write_toy(tmp_path / "a", ARCH), lambda t: t.update({GATE: {"bits": 2, "group_size": 32}, "trunk.embed": True})
    )
    specs = mlx_tensors(ARCH)
    specs[GATE + ".weight"] = ("U32", (4, 64, 4))
    specs[GATE + ".scales"] = specs[GATE + ".biases"] = ("BF16", (4, 64, 2))
    write_safetensors(path / "model.safetensors", specs)
    parts = {part.name: part for part in opened(path).experts[1].parts}
    assert (parts["gate"].quant, parts["gate"].shape) == (Quant(bits=2, group_size=32), (64, 4))
    assert parts["up"].quant == Q4


@pytest.mark.parametrize("method", ["gptq", "fp8", "compressed-tensors"])
def test_foreign_quantisation_is_refused(tmp_path: Path, method: str) -> None:
    path = write_toy(tmp_path / "a", ARCH, quantised=False)
    config = {**toy_config(ARCH, quantised=False), "quantization_config": {"quant_method": method}}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ManifestError, match=f"quant_method is '{method}'.*use an MLX checkpoint"):
        peek(path)


# --- tensors that do not fit


def spec(name: str, dtype: str, *shape: int) -> Callable[[Specs], Any]:
    return lambda specs: specs.update({name: (dtype, shape)})


def drop(*names: str) -> Callable[[Specs], Any]:
    return lambda specs: [specs.pop(name) for name in names]


EMBED = "trunk.embed"
UNFIT_MLX: dict[str, tuple[Callable[[Specs], Any], str]] = {
    "resident missing": (drop("trunk.norm.weight"), "tensor trunk.norm.weight is missing; expected shape [64]"),
    "resident of another shape": (spec("trunk.norm.weight", "BF16", 32), "trunk.norm.weight is of shape [32]"),
    "resident of integers": (spec("trunk.norm.weight", "I64", 64), "norm.weight is I64; expected BF16 or F16 or F32"),
    "resident not of this shape": (
        spec("trunk.layers.0.router.weight", "BF16", 4, 64),
        "layers.0.router.weight is there",
    ),
    "unknown name": (spec("head.weight", "BF16", 4), "tensor head.weight is unknown to the family"),
    "layer too many": (spec("trunk.layers.3.norm.weight", "BF16", 64), "layers.3.norm.weight is unknown to the family"),
    "scales missing": (drop(EMBED + ".scales"), "tensor trunk.embed.weight is without .scales"),
    "biases missing": (drop(EMBED + ".biases"), "tensor trunk.embed.weight is without .biases"),
    "scales without a weight": (drop(EMBED + ".weight"), "tensor trunk.embed.scales is unknown to the family"),
    "scales unlike biases": (spec(EMBED + ".scales", "F16", 96, 1), "trunk.embed.biases is BF16; expected F16, as"),
    "scales of integers": (spec(EMBED + ".scales", "I32", 96, 1), "tensor trunk.embed.scales is I32; expected BF16"),
    "scales of another shape": (spec(EMBED + ".scales", "BF16", 96, 2), "trunk.embed.scales is of shape [96, 2]"),
    "scales beside a float": (spec(EMBED + ".weight", "BF16", 96, 64), "trunk.embed.scales is beside a BF16 weight"),
    "codes of one axis": (spec("trunk.norm.weight", "U32", 8), "tensor trunk.norm.weight is without .scales"),
    "codes without .weight": (spec("trunk.layers.0.scalar", "U32", 1), "layers.0.scalar is U32 without the suffix"),
    "role missing": (
        drop(*(GATE + kind for kind in (".weight", ".scales", ".biases"))),
        "layer 1 experts gate is missing; expected gate, up and down",
    ),
    "layer without experts": (
        lambda specs: [specs.pop(name) for name in list(specs) if "layers.2.experts" in name],
        "layer 2 experts is missing; expected those of a routed layer",
    ),
    "experts in a dense layer": (
        lambda specs: specs.update({"trunk.layers.0.experts.gate.weight": ("BF16", (4, 64, 64))}),
        "layer 0 experts is there; expected none in this layer",
    ),
    "role twice": (
        spec("trunk.layers.1.experts.gate_up", "BF16", 4, 128, 64),
        "is a second tensor for layer 1 gate; expected one tensor per place",
    ),
    "experts of another shape": (
        lambda specs: specs.update(
            {GATE + ".weight": ("U32", (4, 32, 8)), **{GATE + k: ("BF16", (4, 32, 1)) for k in (".scales", ".biases")}}
        ),
        "gate.weight is of shape [4, 32, 64]; expected [experts, 64, 64]",
    ),
    "experts in other numbers": (
        lambda specs: specs.update(
            {GATE + ".weight": ("U32", (3, 64, 8)), **{GATE + k: ("BF16", (3, 64, 1)) for k in (".scales", ".biases")}}
        ),
        "layer 1 experts is [3, 4] in number; expected one count",
    ),
}


@pytest.mark.parametrize(("change", "text"), UNFIT_MLX.values(), ids=UNFIT_MLX)
def test_mlx_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Callable[[Specs], Any], text: str) -> None:
    path = write_toy(tmp_path / "a", ARCH)
    specs = mlx_tensors(ARCH)
    change(specs)
    write_safetensors(path / "model.safetensors", specs)
    with pytest.raises(ManifestError) as caught:
        opened(path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


UNFIT_FLOAT: dict[str, tuple[Callable[[Specs], Any], str]] = {
    "fused rows": (spec("trunk.layers.1.experts.gate_up", "F32", 4, 64, 64), "expected [experts, 128, 64]"),
    "not stacked": (spec("trunk.layers.1.experts.down", "F32", 64, 64), "expected [experts, 64, 64]"),
    "integers": (spec("trunk.layers.1.experts.down", "I32", 4, 64, 64), "is I32; expected BF16 or F16 or F32"),
    "codes": (spec("trunk.embed.weight", "U32", 96, 8), "trunk.embed.weight is U32; expected a float tensor"),
    "other count": (
        lambda specs: specs.update(
            {
                "trunk.layers.1.experts.gate_up": ("F32", (5, 128, 64)),
                "trunk.layers.1.experts.down": ("F32", (5, 64, 64)),
            }
        ),
        "layer 1 experts is 5 in number; expected 4",
    ),
    "no experts at all": (
        lambda specs: specs.update(
            {
                "trunk.layers.1.experts.gate_up": ("F32", (0, 128, 64)),
                "trunk.layers.1.experts.down": ("F32", (0, 64, 64)),
            }
        ),
        "layer 1 experts is [0] in number",
    ),
}


@pytest.mark.parametrize(("change", "text"), UNFIT_FLOAT.values(), ids=UNFIT_FLOAT)
def test_float_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Callable[[Specs], Any], text: str) -> None:
    path = write_toy(tmp_path / "a", ARCH, quantised=False)
    specs = float_tensors(ARCH)
    change(specs)
    write_safetensors(path / "model.safetensors", specs)
    with pytest.raises(ManifestError) as caught:
        opened(path)
    assert text in str(caught.value)


def test_dropped_tensors_are_named_with_their_reason(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "a", ARCH)
    specs = mlx_tensors(ARCH) | {
        "tower.x.weight": ("U32", (4, 8)),
        "tower.x.scales": ("BF16", (4, 1)),
        "tower.x.biases": ("BF16", (4, 1)),
        "tower.lone.scales": ("F32", (3,)),
    }
    write_safetensors(path / "model.safetensors", specs)
    reason = "the toy has no tower"
    assert opened(path).dropped == {"tower.x.weight": reason, "tower.lone.scales": reason}


def test_two_tensors_for_one_resident_are_refused(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "a", ARCH)
    write_safetensors(path / "model.safetensors", mlx_tensors(ARCH) | {"old.norm.weight": ("BF16", (64,))})

    def plan_for(arch: Arch) -> InstallPlan:
        plan = toy_plan(arch)
        alias = Resident(name="trunk.norm.weight", order=(3, 0, 0))
        return evolve(plan, place=lambda name: alias if name == "old.norm.weight" else plan.place(name))

    with pytest.raises(ManifestError, match=r"is a second tensor for trunk\.norm\.weight; expected one tensor"):
        open_checkpoint(peek(path), toy_contract(), plan_for)


@pytest.mark.parametrize(("dtype", "good"), [("I64", True), ("I32", True), ("F32", False), ("BF16", False)])
def test_a_resident_of_integers_holds_nothing_else(tmp_path: Path, dtype: str, *, good: bool) -> None:
    path, name = write_toy(tmp_path / "a", ARCH), "trunk.norm.weight"
    write_safetensors(path / "model.safetensors", mlx_tensors(ARCH) | {name: (dtype, (64,))})

    def plan_for(arch: Arch) -> InstallPlan:
        return evolve(toy_plan(arch), integers=frozenset([name]))

    if good:
        assert open_checkpoint(peek(path), toy_contract(), plan_for).weights[name].dtype == dtype
        return
    with pytest.raises(ManifestError, match=rf"trunk\.norm\.weight is {dtype}; expected I64 or I32"):
        open_checkpoint(peek(path), toy_contract(), plan_for)


def test_quantised_integers_are_refused(tmp_path: Path) -> None:
    def plan_for(arch: Arch) -> InstallPlan:
        return evolve(toy_plan(arch), integers=frozenset(["trunk.embed.weight"]))

    with pytest.raises(ManifestError, match=r"trunk\.embed\.weight is U32; expected I64 or I32"):
        open_checkpoint(peek(write_toy(tmp_path / "a", ARCH)), toy_contract(), plan_for)


# --- experts stored one by one


def one_by_one(arch: Arch) -> InstallPlan:
    """Return the toy's plan, also placing `experts.E.ROLE` of a layer."""
    plan = toy_plan(arch)

    def place(name: str) -> Place | None:
        found = re.fullmatch(r"trunk\.layers\.(\d)\.experts\.(\d+)\.(gate|up|down)\.weight", name)
        return Routed(layer=int(found[1]), roles=(found[3],), expert=int(found[2])) if found else plan.place(name)

    return evolve(plan, place=place)


def single_tensors(*, quantised: bool) -> Specs:
    """Return the toy's tensors with every stack taken apart, experts in falling order."""
    specs = Specs()
    for name, (dtype, shape) in (mlx_tensors(ARCH) if quantised else float_tensors(ARCH)).items():
        stem, dot, role = name.partition(".experts.")
        if not dot:
            specs[name] = (dtype, shape)
            continue
        for expert in reversed(range(ARCH.num_experts)):
            for single in ("gate", "up") if role == "gate_up" else (role,):
                rows = shape[1] // 2 if role == "gate_up" else shape[1]
                kind = single if "." in single else f"{single}.weight"
                specs[f"{stem}.experts.{expert}.{kind}"] = (dtype, (rows, *shape[2:]))
    return specs


def opened_singles(path: Path, specs: Specs, *, quantised: bool) -> Checkpoint:
    write_safetensors(write_toy(path, ARCH, quantised=quantised) / "model.safetensors", specs)
    return open_checkpoint(peek(path), toy_contract(), one_by_one)


@pytest.mark.parametrize("quantised", [True, False])
def test_experts_stored_one_by_one_are_those_of_a_stack(tmp_path: Path, *, quantised: bool) -> None:
    """Parts are the stack's, and each expert's extents are its own tensors."""
    specs = single_tensors(quantised=quantised)
    single = opened_singles(tmp_path / "single", specs, quantised=quantised)
    stacked = opened(write_toy(tmp_path / "stacked", ARCH, quantised=quantised))
    source = read_source(tmp_path / "single").tensors
    for number, layer in single.experts.items():
        assert (layer.count, layer.parts) == (ARCH.num_experts, stacked.experts[number].parts)
        for expert in range(layer.count):
            spans = {name: extent.span for extent in layer.extents(expert) for name in extent.parts}
            assert len(spans) == len(layer.parts)
            for part in layer.parts:
                role, _, companion = part.name.partition("_")
                kind = companion or "weight"
                assert spans[part.name] == source[f"trunk.layers.{number}.experts.{expert}.{role}.{kind}"].span


SINGLE = "trunk.layers.1.experts."
UNFIT_SINGLES: dict[str, tuple[Callable[[Specs], Any], str]] = {
    "one missing": (drop(f"{SINGLE}2.up.weight"), "layer 1 experts up 2 is missing; expected experts 0 to 3"),
    "the last missing": (drop(f"{SINGLE}3.up.weight"), "layer 1 experts is [3, 4] in number; expected one count"),
    "one too many": (spec(f"{SINGLE}4.up.weight", "F32", 64, 64), "layer 1 experts is [4, 5] in number"),
    "one of each too many": (
        lambda specs: specs.update({f"{SINGLE}4.{role}.weight": ("F32", (64, 64)) for role in ("gate", "up", "down")}),
        "layer 1 experts is 5 in number; expected 4",
    ),
    "a role missing": (
        drop(*(f"{SINGLE}{expert}.down.weight" for expert in range(4))),
        "layer 1 experts down is missing; expected gate, up and down",
    ),
    "one of another dtype": (spec(f"{SINGLE}0.up.weight", "BF16", 64, 64), "is unlike trunk.layers.1.experts.0.up"),
    "one of another shape": (spec(f"{SINGLE}2.up.weight", "F32", 32, 64), "2.up.weight is unlike"),
    "all of another shape": (
        lambda specs: specs.update({f"{SINGLE}{expert}.up.weight": ("F32", (32, 64)) for expert in range(4)}),
        "0.up.weight is of shape [32, 64]; expected [64, 64]",
    ),
    "a stack too": (spec(f"{SINGLE}down", "F32", 4, 64, 64), "layer 1 experts down is stacked and stored one by one"),
    "in two ways": (
        lambda specs: specs.update({f"{SINGLE}gate_up": ("F32", (4, 128, 64))}),
        "layer 1 experts is stored in two ways",
    ),
    "in a dense layer": (
        spec("trunk.layers.0.experts.0.up.weight", "F32", 64, 64),
        "layer 0 experts is there; expected none in this layer",
    ),
}


@pytest.mark.parametrize(("change", "text"), UNFIT_SINGLES.values(), ids=UNFIT_SINGLES)
def test_single_experts_that_do_not_fit_are_refused(tmp_path: Path, change: Callable[[Specs], Any], text: str) -> None:
    specs = single_tensors(quantised=False)
    change(specs)
    with pytest.raises(ManifestError) as caught:
        opened_singles(tmp_path / "a", specs, quantised=False)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
