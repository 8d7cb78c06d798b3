"""One view over three kinds of directory: the same tensors from each, and one refusal per way to be incomplete."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from mference_core.arch import Arch, ManifestContract
from mference_core.checkpoint import Checkpoint, open_checkpoint, peek
from mference_core.errors import ArchMismatch, ManifestError, MferenceError, PartialInstall
from mference_core.install import install_local
from mference_core.placement import Dropped, InstallPlan
from mference_core.tensors import ExpertLayer, Quant, Span
from mference_core.testing.toys import (
    float_tensors,
    mlx_tensors,
    toy_arch,
    toy_config,
    toy_contract,
    toy_plan,
    write_safetensors,
    write_toy,
)

ARCH = toy_arch()
Q4, Q8 = Quant(bits=4, group_size=64), Quant(bits=8, group_size=64)
GATE = "trunk.layers.1.experts.gate"


def opened(path: Path, contract: ManifestContract | None = None, verify: str = "full-sha256") -> Checkpoint:
    return open_checkpoint(peek(path), contract or toy_contract(), toy_plan, verify=verify)


def read(span: Span) -> bytes:
    with span.path.open("rb") as file:
        file.seek(span.offset)
        return file.read(span.size)


def parts_of(layer: ExpertLayer, expert: int) -> dict[str, bytes]:
    """Return the bytes of each part of one expert, taken from its extents."""
    sizes, found = {part.name: part.size for part in layer.parts}, dict[str, bytes]()
    for extent in layer.extents(expert):
        data = read(extent.span)
        for name in extent.parts:
            found[name], data = data[: sizes[name]], data[sizes[name] :]
        assert not data
    return found


def raw(path: Path, name: str) -> bytes:
    """Return a tensor's bytes, found through the JSON header alone."""
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    begin, end = json.loads(blob[8 : 8 + length])[name]["data_offsets"]
    return blob[8 + length + begin : 8 + length + end]


# --- what each kind gives


def test_mlx_directory(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "mlx", ARCH)
    checkpoint = opened(path)
    assert (checkpoint.kind, checkpoint.arch, checkpoint.pinned, checkpoint.tokenizer_dir) == ("mlx", ARCH, False, path)
    embed = checkpoint.weights["trunk.embed.weight"]
    assert (embed.dtype, embed.shape, embed.quant) == ("U32", (96, 64), Q4)
    assert embed.scales is not None
    assert embed.biases is not None
    file = path / "model.safetensors"
    assert read(embed.data) == raw(file, "trunk.embed.weight")
    assert read(embed.scales) == raw(file, "trunk.embed.scales")
    assert read(embed.biases) == raw(file, "trunk.embed.biases")
    assert checkpoint.weights["trunk.layers.2.router.weight"].quant == Q8
    assert checkpoint.weights["trunk.layers.0.scalar"].quant is None
    assert not any(name.endswith((".scales", ".biases")) for name in checkpoint.weights)
    layer = checkpoint.experts[1]
    assert [(part.name, part.dtype, part.shape) for part in layer.parts[:3]] == [
        ("gate", "U32", (64, 8)),
        ("gate_scales", "BF16", (64, 1)),
        ("gate_biases", "BF16", (64, 1)),
    ]
    codes = raw(file, GATE + ".weight")
    for expert in range(4):
        size = len(codes) // 4
        assert parts_of(layer, expert)["gate"] == codes[expert * size : (expert + 1) * size]
        assert parts_of(layer, expert).keys() == {part.name for part in layer.parts}


def test_float_directory_stacks_gate_and_up_in_one_extent(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "hf", ARCH, quantised=False)
    checkpoint = opened(path)
    layer = checkpoint.experts[2]
    assert checkpoint.kind == "hf"
    assert [extent.parts for extent in layer.extents(0)] == [("gate", "up"), ("down",)]
    fused = raw(path / "model.safetensors", "trunk.layers.2.experts.gate_up")
    size = len(fused) // 4
    for expert in range(4):
        parts = parts_of(layer, expert)
        assert parts["gate"] + parts["up"] == fused[expert * size : (expert + 1) * size]
        assert len(parts["gate"]) == 64 * 64 * 4
    assert {weight.dtype for weight in checkpoint.weights.values()} == {"F32"}


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_float_directory_of_half_precision(tmp_path: Path, dtype: str) -> None:
    path = write_toy(tmp_path / "hf", ARCH, quantised=False)
    write_safetensors(path / "model.safetensors", float_tensors(ARCH, dtype))
    assert {part.dtype for part in opened(path).experts[1].parts} == {dtype}


def test_install_holds_what_its_source_held(tmp_path: Path) -> None:
    source = opened(write_toy(tmp_path / "mlx", ARCH))
    install_local(source.path, tmp_path / "toy.gturbo", toy_contract(), toy_plan)
    installed = opened(tmp_path / "toy.gturbo")
    assert (installed.kind, installed.arch) == ("gturbo", ARCH)
    assert installed.tokenizer_dir == tmp_path / "toy.gturbo/tokenizer"
    assert installed.config == source.config
    assert installed.weights.keys() == source.weights.keys()
    for name, weight in source.weights.items():
        other = installed.weights[name]
        assert (other.dtype, other.shape, other.quant) == (weight.dtype, weight.shape, weight.quant)
        pairs = ((weight.data, other.data), (weight.scales, other.scales), (weight.biases, other.biases))
        assert all(read(a) == read(b) for a, b in pairs if a is not None and b is not None)
    for number, layer in source.experts.items():
        installed.touch(number)
        other_layer = installed.experts[number]
        assert (other_layer.count, other_layer.parts) == (layer.count, layer.parts)
        assert all(parts_of(layer, e) == parts_of(other_layer, e) for e in range(4))


def test_digest_follows_the_content(tmp_path: Path) -> None:
    first, same = opened(write_toy(tmp_path / "a", ARCH)), opened(write_toy(tmp_path / "b", ARCH))
    assert first.digest == same.digest
    other = write_toy(tmp_path / "c", toy_arch(vocab_size=128))
    assert opened(other).digest != first.digest
    write_safetensors(tmp_path / "b/model.safetensors", dict(reversed(mlx_tensors(ARCH).items())))
    assert opened(tmp_path / "b").digest != first.digest
    install_local(first.path, tmp_path / "toy.gturbo", toy_contract(), toy_plan)
    manifest = peek(tmp_path / "toy.gturbo").manifest
    assert manifest is not None
    assert opened(tmp_path / "toy.gturbo").digest == manifest.digest


def test_pinned_arch_is_recognised(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "a", ARCH)
    assert opened(path, toy_contract(ARCH)).pinned
    assert not opened(path, toy_contract(toy_arch(vocab_size=97))).pinned


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "a", ARCH)
    (path / "tokenizer.json").unlink()
    assert opened(path).tokenizer_dir is None


# --- peek


def test_peek_says_what_it_found(tmp_path: Path) -> None:
    write_toy(tmp_path / "mlx", ARCH)
    write_toy(tmp_path / "hf", ARCH, quantised=False)
    install_local(tmp_path / "mlx", tmp_path / "toy.gturbo", toy_contract(), toy_plan)
    found = {kind: peek(tmp_path / kind) for kind in ("mlx", "hf", "toy.gturbo")}
    assert [(p.kind, p.model_type, p.spelling) for p in found.values()] == [
        ("mlx", "toy", None),
        ("hf", "toy", None),
        ("gturbo", None, None),
    ]
    assert found["mlx"].path == tmp_path / "mlx"


def test_peek_follows_a_link_to_the_directory(tmp_path: Path) -> None:
    write_toy(tmp_path / "mlx", ARCH)
    (tmp_path / "link").symlink_to(tmp_path / "mlx")
    assert opened(tmp_path / "link").kind == "mlx"


def files(*names: str) -> Callable[[Path], Path]:
    """Make a directory of files of a few bytes."""

    def make(root: Path) -> Path:
        for name in ("", *names):
            path = root / "model" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name:
                path.write_bytes(b"{}")
            else:
                path.mkdir()
        return root / "model"

    return make


def one_file(name: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        (root / name).write_bytes(b"GGUF")
        return root / name

    return make


def half(root: Path) -> Path:
    return partial(root).with_suffix("")


def partial(root: Path) -> Path:
    (root / "toy.gturbo.partial").mkdir()
    return root / "toy.gturbo.partial"


NO_MODEL: dict[str, tuple[Callable[[Path], Path], type[MferenceError], str]] = {
    "missing": (lambda root: root / "none", ManifestError, "none is missing; expected a model directory"),
    "empty": (files(), ManifestError, "model is empty; expected a model directory"),
    "a file": (one_file("notes.txt"), ManifestError, "notes.txt is a file; expected a model directory"),
    "a GGUF file": (one_file("m.gguf"), ManifestError, "m.gguf is in GGUF; expected safetensors or an install"),
    "a shard": (one_file("m.safetensors"), ManifestError, "give the directory that holds it"),
    "GGUF inside": (files("m.gguf"), ManifestError, "model is in GGUF"),
    "GGUF beside a config": (files("m.gguf", "config.json"), ManifestError, "model is in GGUF"),
    "half": (half, PartialInstall, "is half installed; expected a finished install; run the install again"),
    "partial": (partial, PartialInstall, "is a partial install; expected a finished one; resume the install"),
    "install without manifest": (files("model_weights.bin"), PartialInstall, "model is without manifest.json"),
    "experts without manifest": (files("packed_experts/x"), PartialInstall, "model is without manifest.json"),
    "cache entry": (files("snapshots/abc/config.json"), ManifestError, "is a cache entry; expected one of its"),
    "no config": (files("model.safetensors"), ManifestError, "model is without config.json"),
    "nothing known": (files("readme"), ManifestError, "model is without manifest.json or config.json"),
    "no weights": (files("config.json"), ManifestError, "model is without .safetensors files"),
    "pickles": (files("config.json", "pytorch_model.bin"), ManifestError, "is a checkpoint of pickled .bin files"),
}


@pytest.mark.parametrize(("make", "kind", "text"), NO_MODEL.values(), ids=NO_MODEL)
def test_what_is_no_model_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], kind: type[MferenceError], text: str
) -> None:
    with pytest.raises(kind) as caught:
        peek(make(tmp_path))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[]", "expected a JSON object"), ("{", "malformed"), ('{"model_type": 3}', "model_type is 3; expected a string")],
)
def test_config_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write_toy(tmp_path / "a", ARCH)
    (path / "config.json").write_text(text)
    with pytest.raises(ManifestError, match=message):
        peek(path)


# --- arch


def test_arch_outside_the_contract_is_refused(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "a", ARCH)
    config = toy_config(ARCH, quantised=True)
    config["toy"]["topKExperts"] = 5
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArchMismatch, match=r"arch\.topKExperts is 5"):
        opened(path)


def test_config_the_family_cannot_read_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "a", ARCH)
    config = toy_config(ARCH, quantised=True)
    del config["toy"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ManifestError, match=r"config\.json is not of toy \(KeyError: 'toy'\)"):
        opened(path)


# --- installs against the plan


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("installed")
    install_local(write_toy(root / "mlx", ARCH), root / "toy.gturbo", toy_contract(), toy_plan)
    return root / "toy.gturbo"


def replanned(**changes: Callable[[InstallPlan], Any]) -> Callable[[Arch], InstallPlan]:
    def plan_for(arch: Arch) -> InstallPlan:
        plan = toy_plan(arch)
        return evolve(plan, **{name: change(plan) for name, change in changes.items()})

    return plan_for


def wider(experts: Mapping[int, Mapping[str, tuple[int, int]]]) -> dict[int, dict[str, tuple[int, int]]]:
    return {layer: {**shapes, "up": (128, 64)} for layer, shapes in experts.items()}


UNFIT_INSTALL: dict[str, tuple[Callable[[Arch], InstallPlan], str]] = {
    "resident missing": (
        replanned(residents=lambda plan: {**plan.residents, "trunk.layers.0.router.weight": (4, 64)}),
        "tensor trunk.layers.0.router.weight is missing; expected shape [4, 64]",
    ),
    "resident of another shape": (
        replanned(residents=lambda plan: {**plan.residents, "trunk.norm.weight": (65,)}),
        "tensor trunk.norm.weight is of shape [64]; expected [65]",
    ),
    "resident unknown": (
        replanned(place=lambda plan: lambda name: None if name == "trunk.norm.weight" else plan.place(name)),
        "model_weights.bin trunk.norm.weight is unknown to the family",
    ),
    "experts of another shape": (
        replanned(experts=lambda plan: wider(plan.experts)),
        "layer 1 experts up is of shape [64, 64]; expected [128, 64]",
    ),
    "routed layer missing": (
        replanned(experts=lambda plan: {0: plan.experts[1], **plan.experts}),
        "layer 0 experts is missing; expected those of a routed layer",
    ),
    "routed layer too many": (
        replanned(experts=lambda plan: {1: plan.experts[1]}),
        "layer 2 experts is there; expected none in this layer",
    ),
}


@pytest.mark.parametrize(("plan_for", "text"), UNFIT_INSTALL.values(), ids=UNFIT_INSTALL)
def test_install_that_does_not_fit_the_plan_is_refused(
    installed: Path, plan_for: Callable[[Arch], InstallPlan], text: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        open_checkpoint(peek(installed), toy_contract(), plan_for)
    assert text in str(caught.value)


def test_install_may_carry_tensors_the_family_drops(installed: Path) -> None:
    drop_norm = Dropped(reason="not used")
    plan_for = replanned(
        place=lambda plan: lambda name: drop_norm if name == "trunk.norm.weight" else plan.place(name),
        residents=lambda plan: {name: s for name, s in plan.residents.items() if name != "trunk.norm.weight"},
    )
    checkpoint = open_checkpoint(peek(installed), toy_contract(), plan_for)
    assert checkpoint.dropped == {"trunk.norm.weight": "not used"}
    assert "trunk.norm.weight" not in checkpoint.weights


def test_published_shape_needs_its_quant_rows(installed: Path) -> None:
    found = peek(installed)
    assert found.manifest is not None
    bare = evolve(found, manifest=evolve(found.manifest, quant=None))
    assert open_checkpoint(bare, toy_contract(), toy_plan).weights
    with pytest.raises(ManifestError, match="manifest quant is missing; expected its five slots"):
        open_checkpoint(bare, toy_contract(ARCH), toy_plan)


def test_manifest_layers_unlike_its_arch_are_refused(installed: Path) -> None:
    found = peek(installed)
    assert found.manifest is not None
    lying = evolve(found, manifest=evolve(found.manifest, num_layers=4))
    with pytest.raises(ManifestError, match=r"manifest numLayers is 4; expected arch\.numLayers 3"):
        open_checkpoint(lying, toy_contract(), toy_plan)
