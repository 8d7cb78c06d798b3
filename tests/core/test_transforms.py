"""Residents that a source states otherwise: other axes, or less a constant; never a silent change of an install."""

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import pytest
from attrs import evolve

from mference_core.arch import Arch
from mference_core.checkpoint import Checkpoint, open_checkpoint, peek
from mference_core.errors import InstallError, ManifestError
from mference_core.install import install_local
from mference_core.placement import InstallPlan, Place, Resident, Transform
from mference_core.testing.toys import Spec, float_tensors, mlx_tensors, toy_arch, toy_contract, toy_plan, write_toy
from mference_core.testing.toys import write_safetensors as write
from mference_core.weights import Weights, resident_bytes

ARCH = toy_arch()
NORM, FINAL = "trunk.layers.1.norm.weight", "trunk.norm.weight"
SCALAR = "trunk.layers.1.scalar"


def plan_with(transforms: Mapping[str, Transform], shapes: Mapping[str, tuple[int, ...]] | None = None) -> InstallPlan:
    """Return the toy plan with transforms for some residents, and other install shapes."""
    plan = toy_plan(ARCH)

    def place(name: str) -> Place | None:
        found = plan.place(name)
        if isinstance(found, Resident) and name in transforms:
            return evolve(found, transform=transforms[name])
        return found

    return evolve(plan, place=place, residents={**plan.residents, **(shapes or {})})


def opened(path: Path, plan: InstallPlan) -> Checkpoint:
    return open_checkpoint(peek(path), toy_contract(), lambda _: plan)


def float_toy(path: Path, change: Mapping[str, Spec] | None = None, dtype: str = "BF16") -> Path:
    write_toy(path, ARCH, quantised=False)
    write(path / "model.safetensors", {**float_tensors(ARCH, dtype), **(change or {})}, seed=3)
    return path


def values(checkpoint: Checkpoint) -> Weights:
    return Weights(checkpoint.weights, mx.float32, mx.float32)


def finite(a: mx.array, b: mx.array) -> bool:
    """Compare random bytes read as floats: equal wherever they are numbers."""
    return bool(mx.array_equal(a, b, equal_nan=True))


def test_a_constant_is_added_in_float32(tmp_path: Path) -> None:
    """BF16 cannot hold 1 + w for a small w; the sum must not go through it."""
    path = float_toy(tmp_path)
    checkpoint = opened(path, plan_with({NORM: Transform(add=1.0)}))
    plain, added = values(opened(path, toy_plan(ARCH))).array(NORM), values(checkpoint).array(NORM)
    assert plain.dtype == mx.bfloat16
    assert added.dtype == mx.float32
    assert finite(added, plain.astype(mx.float32) + 1.0)
    assert not finite(added, (plain + 1.0).astype(mx.float32))
    assert finite(values(checkpoint).array(FINAL), values(opened(path, toy_plan(ARCH))).array(FINAL))


def test_the_plan_counts_what_is_added_to_as_float32(tmp_path: Path) -> None:
    path = float_toy(tmp_path)
    before = resident_bytes(opened(path, toy_plan(ARCH)).weights, mx.float32)
    checkpoint = opened(path, plan_with({NORM: Transform(add=1.0)}))
    assert resident_bytes(checkpoint.weights, mx.float32) == before + 2 * ARCH.hidden_size
    assert values(checkpoint).array(NORM).nbytes == 4 * ARCH.hidden_size


def test_other_axes_keep_values_and_order(tmp_path: Path) -> None:
    path = float_toy(tmp_path, {NORM: ("F32", (16, 1, 4))}, dtype="F32")
    plan = plan_with({NORM: Transform(stored=(16, 1, 4))}, {NORM: (16, 4, 1)})
    array = values(opened(path, plan)).array(NORM)
    assert array.shape == (16, 4, 1)
    stored = mx.load(str(path / "model.safetensors"))
    assert isinstance(stored, dict)
    assert finite(array.reshape(-1), stored[NORM].reshape(-1))


@pytest.mark.parametrize("shape", [(4, 1, 16), (64,), (16, 4, 1)])
def test_a_source_with_other_axes_than_the_stated_ones_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = float_toy(tmp_path, {NORM: ("F32", shape)})
    with pytest.raises(ManifestError, match=rf"norm\.weight is of shape \[{shape[0]}.*; expected \[16, 1, 4\]"):
        opened(path, plan_with({NORM: Transform(stored=(16, 1, 4))}, {NORM: (16, 4, 1)}))


@pytest.mark.parametrize("transform", [Transform(add=1.0), Transform(stored=(96, 64))])
def test_quantised_tensors_are_never_changed(tmp_path: Path, transform: Transform) -> None:
    path = write_toy(tmp_path / "mlx", ARCH)
    with pytest.raises(ManifestError, match=r"trunk\.embed\.weight is U32; expected BF16 or F16 or F32"):
        opened(path, plan_with({"trunk.embed.weight": transform}))


def test_integers_are_never_added_to(tmp_path: Path) -> None:
    path = float_toy(tmp_path, {SCALAR: ("I32", (1,))})
    with pytest.raises(ManifestError, match="scalar is I32; expected BF16 or F16 or F32"):
        opened(path, plan_with({SCALAR: Transform(add=1.0)}))


def test_an_install_never_changes_values(tmp_path: Path) -> None:
    path, plan = write_toy(tmp_path / "mlx", ARCH), plan_with({NORM: Transform(add=1.0)})

    def plan_for(_: Arch) -> InstallPlan:
        return plan

    with pytest.raises(InstallError, match=r"layers\.1\.norm\.weight is stored less 1; expected whole"):
        install_local(path, tmp_path / "out.gturbo", toy_contract(), plan_for)
    assert sorted(item.name for item in tmp_path.iterdir()) in (["mlx"], ["mlx", "out.gturbo.install.lock"])


def test_an_install_of_other_axes_moves_the_same_bytes(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "mlx", ARCH)
    write(path / "model.safetensors", {**mlx_tensors(ARCH), NORM: ("BF16", (16, 1, 4))}, seed=5)
    installed, output = plan_with({}, {NORM: (16, 4, 1)}), tmp_path / "out.gturbo"
    source = plan_with({NORM: Transform(stored=(16, 1, 4))}, {NORM: (16, 4, 1)})
    install_local(path, output, toy_contract(), lambda _: source)
    got = values(opened(output, installed)).array(NORM)
    assert got.shape == (16, 4, 1)
    assert finite(got, values(opened(path, source)).array(NORM))
