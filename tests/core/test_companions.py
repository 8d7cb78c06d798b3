"""Scales and biases in BF16, F16 or F32, in groups of 32, 64 or 128: read as they are stored, never narrowed."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mference_core.checkpoint import open_checkpoint, peek
from mference_core.errors import InstallError, ManifestError
from mference_core.install import install_local
from mference_core.placement import InstallPlan, Resident
from mference_core.router import no_router
from mference_core.safetensors_index import read_source
from mference_core.source_weights import QuantTable, place_tensors
from mference_core.tensors import Quant
from mference_core.testing.toys import mlx_tensors, toy_arch, toy_config, toy_contract, toy_plan, write_safetensors
from mference_core.weights import Weights, exact_product, resident_bytes
from mference_kernels.quant import Quantized

KINDS = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
ROWS, COLUMNS = 6, 128


def write_matrix(folder: Path, kind: str, group: int) -> mx.array:
    """Write one 4-bit matrix whose companions use all digits of their dtype; return its values."""
    mx.random.seed(7)
    codes = mx.random.randint(0, 2**31 - 1, (ROWS, COLUMNS // 8)).astype(mx.uint32)
    scales, biases = (mx.random.normal((ROWS, COLUMNS // group)).astype(KINDS[kind]) for _ in range(2))
    tensors = {"a.weight": codes, "a.scales": scales, "a.biases": biases}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    places = mx.arange(8, dtype=mx.uint32) * 4
    unpacked = ((codes[:, :, None] >> places) & 15).reshape(ROWS, COLUMNS).astype(mx.float32)
    wide = [mx.repeat(part.astype(mx.float32), group, axis=1) for part in (scales, biases)]
    return unpacked * wide[0] + wide[1]


def place_matrix(folder: Path, group: int) -> Weights:
    plan = InstallPlan(
        place=lambda name: Resident(name=name, order=(0, 0, 0)), residents={}, experts={}, quant_slots={}
    )
    placed = place_tensors(read_source(folder), QuantTable(base=Quant(bits=4, group_size=group)), plan)
    return Weights(placed.residents, mx.float32, mx.float32)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_values_come_out_as_they_were_written(tmp_path: Path, kind: str, group: int) -> None:
    want = write_matrix(tmp_path, kind, group)
    matrix = place_matrix(tmp_path, group).matrix("a.weight")
    assert isinstance(matrix, Quantized)
    scales, biases = matrix.scales.astype(mx.float32), matrix.biases.astype(mx.float32)
    got = mx.dequantize(matrix.codes, scales, biases, group_size=matrix.group_size, bits=matrix.bits)
    assert mx.array_equal(got, want)


def test_products_run_in_a_dtype_that_holds_the_companions() -> None:
    assert exact_product("BF16", mx.bfloat16) == mx.bfloat16
    assert exact_product("F16", mx.bfloat16) == mx.float32
    assert exact_product("F32", mx.bfloat16) == mx.float32
    assert all(exact_product(kind, mx.float32) == mx.float32 for kind in KINDS)


def test_bytes_are_those_that_are_held(tmp_path: Path) -> None:
    write_matrix(tmp_path, "F16", 32)
    weights = place_matrix(tmp_path, 32)
    weights.product_dtype = mx.bfloat16
    weights.matrix("a.weight")
    assert weights.nbytes == resident_bytes(weights._weights, mx.bfloat16)


def test_companions_of_two_kinds_are_refused(tmp_path: Path) -> None:
    write_matrix(tmp_path, "F16", 32)
    tensors = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(tensors, dict)
    tensors["a.biases"] = tensors["a.biases"].astype(mx.float32)
    mx.eval(tensors)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    with pytest.raises(ManifestError, match=r"tensor a.biases is F32; expected F16, as a.scales"):
        place_matrix(tmp_path, 32)


def test_experts_keep_the_dtype_and_an_install_refuses_it(tmp_path: Path) -> None:
    arch = toy_arch()
    specs = {
        name: ("F16" if name.endswith((".scales", ".biases")) else dtype, shape)
        for name, (dtype, shape) in mlx_tensors(arch).items()
    }
    source = tmp_path / "source"
    source.mkdir()
    write_safetensors(source / "model.safetensors", specs)
    (source / "config.json").write_text(json.dumps(toy_config(arch, quantised=True)))
    checkpoint = open_checkpoint(peek(source), toy_contract(), toy_plan)
    kinds = {part.dtype for part in checkpoint.experts[1].parts if part.name.endswith(("_scales", "_biases"))}
    assert kinds == {"F16"}
    with pytest.raises(InstallError, match="expected BF16, the only kind an install holds; run the directory"):
        install_local(source, tmp_path / "out.gturbo", toy_contract(), toy_plan)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_family_without_experts_has_no_routing_rule() -> None:
    rule = no_router()
    assert (rule.experts, rule.top_k) == (0, 0)
    with pytest.raises(ValueError, match="layer 3 is dense"):
        rule.scores(3, None)
    with pytest.raises(ValueError, match="layer 3 is dense"):
        rule.choose(3, mx.zeros((1, 1, 1)), None)
