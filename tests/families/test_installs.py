"""Installs of every family's tiny reference hold what their sources hold, as another reader reads them."""

from pathlib import Path

import mlx.core as mx
import pytest

from mference_core import plugins
from mference_core.checkpoint import Checkpoint, open_checkpoint, peek
from mference_core.errors import InstallError
from mference_core.install import install_local
from mference_core.tensors import Span

EXPERTS = {
    "deepseekv4": "model.layers.{}.ffn.switch_mlp.",
    "gemma4": "language_model.model.layers.{}.experts.switch_glu.",
    "qwen36": "language_model.model.layers.{}.mlp.switch_mlp.",
}
"""Where each family's quantised repository keeps a layer's experts."""


class Tiny:
    """A family's reference checkpoint, and the install made from it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.family = name, plugins.load(name)
        assert self.family.family.reference is not None
        self.reference, self.installed = self.family.family.reference, folder / f"{name}.gturbo"

    def install(self, source: Path, output: Path) -> None:
        hooks = self.family.hooks
        install_local(source, output, self.family.contract, lambda arch: hooks.mference_install_plan(arch=arch))

    def opened(self, path: Path) -> Checkpoint:
        hooks = self.family.hooks
        checkpoint = open_checkpoint(
            peek(path), self.family.contract, lambda arch: hooks.mference_install_plan(arch=arch)
        )
        for layer in checkpoint.experts:
            checkpoint.touch(layer)
        return checkpoint

    def source(self) -> dict[str, mx.array]:
        arrays = mx.load(str(self.reference / "mlx" / "model.safetensors"))
        assert isinstance(arrays, dict)
        return arrays


@pytest.fixture(scope="module", params=sorted(EXPERTS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = Tiny(request.param, tmp_path_factory.mktemp("install"))
    made.install(made.reference / "mlx", made.installed)
    return made


def read(span: Span) -> bytes:
    with span.path.open("rb") as file:
        file.seek(span.offset)
        return file.read(span.size)


def stored(array: mx.array) -> bytes:
    return bytes(memoryview(array.view(mx.uint8)))  # type: ignore[arg-type]


def test_every_installed_family_is_here() -> None:
    assert sorted(EXPERTS) == [name for name, entry in plugins.installed().items() if entry.distribution == "mference"]


def test_three_directories_hold_one_model(tiny: Tiny) -> None:
    """Float, quantised and installed checkpoints agree in architecture, names and logical shapes."""
    three = [tiny.opened(path) for path in (tiny.reference, tiny.reference / "mlx", tiny.installed)]
    assert [checkpoint.kind for checkpoint in three] == ["hf", "mlx", "gturbo"]
    assert three[0].arch == three[1].arch == three[2].arch
    shapes = [{name: weight.shape for name, weight in checkpoint.weights.items()} for checkpoint in three]
    assert shapes[0] == shapes[1] == shapes[2]
    assert [sorted(checkpoint.experts) for checkpoint in three] == [list(range(three[0].arch.num_layers))] * 3


def test_installed_values_are_the_source_files(tiny: Tiny) -> None:
    """Mlx reads the source by name; the install's spans hold the very same bytes."""
    source, compared = tiny.source(), 0
    for name, weight in tiny.opened(tiny.installed).weights.items():
        stem = name.removesuffix(".weight")
        for span, key in ((weight.data, name), (weight.scales, stem + ".scales"), (weight.biases, stem + ".biases")):
            if span is not None:
                assert read(span) == stored(source[key])
                compared += 1
    assert compared > 100


def test_installed_experts_are_the_source_files(tiny: Tiny) -> None:
    source = tiny.source()
    for number, layer in tiny.opened(tiny.installed).experts.items():
        stem = EXPERTS[tiny.name].format(number)
        for expert in range(layer.count):
            expected = b"".join(
                stored(source[f"{stem}{role}_proj.{kind}"][expert])
                for role in ("gate", "up", "down")
                for kind in ("weight", "scales", "biases")
            )
            assert b"".join(read(extent.span) for extent in layer.extents(expert)) == expected


def test_float_reference_is_refused_as_a_source(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="is in float; expected quantised weights"):
        tiny.install(tiny.reference, tmp_path / "x.gturbo")
    assert not list(tmp_path.iterdir())
