"""Synthetic checkpoints: complete, seeded, distinct, the same from both doors, and written in bounded memory."""

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve

from mference_core.arch import Arch
from mference_core.checkpoint import Checkpoint, open_checkpoint, peek
from mference_core.errors import InstallError, UsageError
from mference_core.family import Family
from mference_core.install import install_local
from mference_core.manifest import LAYOUT_NAME, WEIGHTS_NAME
from mference_core.plugins import Entry, LoadedFamily
from mference_core.safetensors_index import INDEX_NAME, read_source
from mference_core.tensors import Quant
from mference_core.testing import synthetic
from mference_core.testing.synthetic import plan_synthetic, write_synthetic, write_synthetic_mlx
from mference_core.testing.toys import toy_arch, toy_contract, toy_plan, write_toy

BIG = toy_arch(num_layers=4, full_attention_layer_mask=(0, 1, 0, 1), hidden_size=128, vocab_size=160)


def toy_family(*pinned: Arch, reference: Path | None = None) -> LoadedFamily:
    """Return the toy as a loaded family: contract, plan and reference are all that writing asks for."""
    point = EntryPoint(name="toy", value="toy", group="mference.families")
    return LoadedFamily(
        entry=Entry(name="toy", distribution="toy", version="1", point=point),
        family=Family(name="toy", title="Toy", spellings=(None,), model_types=("toy",), reference=reference),
        contract=toy_contract(*pinned),
        hooks=SimpleNamespace(mference_install_plan=toy_plan),
    )


@pytest.fixture
def family(tmp_path: Path) -> LoadedFamily:
    """The toy with a pinned arch and a smaller reference checkpoint."""
    write_toy(tmp_path / "reference" / "mlx", toy_arch())
    return toy_family(BIG, reference=tmp_path / "reference")


def opened(path: Path, verify: str = "full-sha256") -> Checkpoint:
    return open_checkpoint(peek(path), toy_contract(BIG), toy_plan, verify=verify)


def model_files(path: Path) -> dict[str, bytes]:
    """Return what model files of an install hold, by name."""
    names = [WEIGHTS_NAME, LAYOUT_NAME, *(f"packed_experts/{p.name}" for p in path.glob("packed_experts/*.bin"))]
    return {name: (path / name).read_bytes() for name in names}


def test_the_install_opens_under_both_policies_with_every_digest_right(family: LoadedFamily, tmp_path: Path) -> None:
    report = write_synthetic(family, tmp_path / "out.gturbo")
    for policy in ("full-sha256", "trusted-receipt"):
        checkpoint = opened(tmp_path / "out.gturbo", policy)
        for layer in checkpoint.experts:
            checkpoint.touch(layer)
        assert checkpoint.pinned
        assert checkpoint.arch == BIG
        assert set(checkpoint.weights) == set(toy_plan(BIG).residents)
    on_disk = [path for path in (tmp_path / "out.gturbo").rglob("*") if path.is_file()]
    assert report.files == len(on_disk)
    assert report.size_bytes == sum(path.stat().st_size for path in on_disk)


def test_installing_the_mlx_directory_gives_the_same_bytes(family: LoadedFamily, tmp_path: Path) -> None:
    write_synthetic(family, tmp_path / "direct.gturbo", seed=3)
    write_synthetic_mlx(family, tmp_path / "mlx", seed=3, shard_bytes=40_000)
    assert len(list((tmp_path / "mlx").glob("model-*-of-*.safetensors"))) > 3
    install_local(tmp_path / "mlx", tmp_path / "installed.gturbo", family.contract, toy_plan)
    assert model_files(tmp_path / "direct.gturbo") == model_files(tmp_path / "installed.gturbo")
    assert opened(tmp_path / "installed.gturbo").arch == BIG


def test_the_plan_alone_says_every_size(family: LoadedFamily, tmp_path: Path) -> None:
    outputs = plan_synthetic(family).outputs
    write_synthetic(family, tmp_path / "out.gturbo")
    assert outputs.total_bytes == sum(len(data) for data in model_files(tmp_path / "out.gturbo").values())


def test_experts_differ_from_each_other_in_every_sub_tensor(family: LoadedFamily, tmp_path: Path) -> None:
    write_synthetic(family, tmp_path / "out.gturbo")
    checkpoint = opened(tmp_path / "out.gturbo")
    seen = list[dict[str, bytes]]()
    for layer in checkpoint.experts.values():
        for expert in range(layer.count):
            (extent,) = layer.extents(expert)
            with extent.span.path.open("rb") as file:
                file.seek(extent.span.offset)
                sizes = {part.name: part.size for part in layer.parts}
                seen.append({name: file.read(sizes[name]) for name in extent.parts})
    assert len(seen) == 3 * BIG.num_experts
    for one, other in combinations(seen, 2):
        assert not [name for name in one if one[name] == other[name]]


def test_a_seed_decides_every_code(family: LoadedFamily, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_synthetic(family, tmp_path / f"{name}.gturbo", seed=seed)
    a, b, c = (model_files(tmp_path / f"{name}.gturbo") for name in "abc")
    assert a == b
    assert [name for name in a if a[name] == c[name]] == [LAYOUT_NAME]


@pytest.mark.parametrize("bits", [2, 4])
def test_experts_have_the_width_asked_for(family: LoadedFamily, tmp_path: Path, bits: int) -> None:
    write_synthetic(family, tmp_path / "out.gturbo", routed_bits=bits)
    layer = opened(tmp_path / "out.gturbo").experts[1]
    assert {part.quant for part in layer.parts if part.quant} == {Quant(bits=bits, group_size=64)}


def test_the_first_layers_alone_make_a_model(family: LoadedFamily, tmp_path: Path) -> None:
    write_synthetic(family, tmp_path / "out.gturbo", layers=2)
    checkpoint = opened(tmp_path / "out.gturbo")
    assert checkpoint.arch == evolve(BIG, num_layers=2, full_attention_layer_mask=(0, 1))
    assert not checkpoint.pinned


@pytest.mark.parametrize("layers", [0, -1, 5])
def test_a_number_of_layers_that_there_are_not_is_refused(family: LoadedFamily, tmp_path: Path, layers: int) -> None:
    with pytest.raises(UsageError, match=rf"^layers is {layers}; expected 1 to 4$"):
        write_synthetic(family, tmp_path / "out.gturbo", layers=layers)


def test_tokenizer_files_are_copied_and_listed(family: LoadedFamily, tmp_path: Path) -> None:
    write_synthetic(family, tmp_path / "out.gturbo", tokenizer=tmp_path / "reference" / "mlx")
    checkpoint = opened(tmp_path / "out.gturbo", "trusted-receipt")
    assert checkpoint.tokenizer_dir == tmp_path / "out.gturbo" / "tokenizer"


@pytest.mark.parametrize("mlx", [False, True])
def test_what_is_there_is_never_replaced(family: LoadedFamily, tmp_path: Path, *, mlx: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(InstallError, match="already there"):
        (write_synthetic_mlx if mlx else write_synthetic)(family, tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "kept"


@pytest.mark.parametrize("mlx", [False, True])
def test_a_stopped_run_leaves_nothing(family: LoadedFamily, tmp_path: Path, *, mlx: bool) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        (write_synthetic_mlx if mlx else write_synthetic)(family, tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_progress_ends_at_the_total(family: LoadedFamily, tmp_path: Path) -> None:
    seen = list[tuple[int, int]]()
    write_synthetic(family, tmp_path / "out.gturbo", progress=lambda p: seen.append((p.done_bytes, p.total_bytes)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == plan_synthetic(family).outputs.total_bytes


def test_a_family_without_a_reference_writes_installs_only(tmp_path: Path) -> None:
    """Matrices are then quantised as the manifest's slots say, and stacks of experts have no known name."""
    family = toy_family(BIG)
    write_synthetic(family, tmp_path / "out.gturbo")
    weights = opened(tmp_path / "out.gturbo").weights
    assert weights["trunk.layers.2.router.weight"].quant == Quant(bits=8, group_size=64)
    assert weights["trunk.layers.2.attn.weight"].quant == Quant(bits=4, group_size=64)
    with pytest.raises(UsageError, match="reference checkpoint"):
        write_synthetic_mlx(family, tmp_path / "mlx")


def test_a_family_without_a_pinned_arch_needs_one_given(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without a pinned arch"):
        plan_synthetic(toy_family())
    assert write_synthetic(toy_family(), tmp_path / "out.gturbo", arch=BIG).routed_layers == 3


def test_the_index_of_the_mlx_directory_lists_every_tensor(family: LoadedFamily, tmp_path: Path) -> None:
    write_synthetic_mlx(family, tmp_path / "mlx", shard_bytes=100_000)
    index = json.loads((tmp_path / "mlx" / INDEX_NAME).read_text())
    tensors = read_source(tmp_path / "mlx").tensors
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.span.size for tensor in tensors.values())


PEAK = """
import resource, sys
from pathlib import Path
from attrs import evolve
from mference_core import plugins
from mference_core.testing.synthetic import write_synthetic, write_synthetic_mlx
family = plugins.load(sys.argv[1])
arch = family.contract.pinned[0]
arch = evolve(arch, num_layers=2, full_attention_layer_mask=arch.full_attention_layer_mask[:2], vocab_size=65536,
              num_experts=32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write = write_synthetic_mlx if sys.argv[3] == "mlx" else write_synthetic
report = write(family, Path(sys.argv[2]), arch=arch)
print(report.size_bytes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is in kilobytes on Linux only")
@pytest.mark.parametrize("kind", ["mlx", "gturbo"])
def test_memory_does_not_grow_with_the_size(tmp_path: Path, kind: str) -> None:
    """A checkpoint of several hundred megabytes is written with less than 64 MiB more than before."""
    command = [sys.executable, "-c", PEAK, "gemma4", str(tmp_path / "out"), kind]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    size, growth = map(int, run.stdout.split())
    assert size > 300 << 20
    assert growth < 64 << 20


def test_the_command_writes_and_refuses_in_one_line(
    family: LoadedFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mference_core.plugins.load", lambda _: family)
    arguments = ["toy", str(tmp_path / "out"), "--layers", "2", "--mlx", "--seed", "7"]
    assert synthetic.main(arguments) == 0
    assert "GB/s" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["toy"]["numLayers"] == 2
    assert synthetic.main(arguments) == InstallError(what="").exit_code
    assert capsys.readouterr().err.splitlines() == [f"error: {tmp_path / 'out'} is already there; expected a new path"]


def test_an_unknown_family_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert synthetic.main(["nosuch", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: no family 'nosuch'")
