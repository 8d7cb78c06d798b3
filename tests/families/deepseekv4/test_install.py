"""The install of the published checkpoint, to the byte, from names and shapes alone; what is refused of sources."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mference_deepseekv4
from mference_core import plugins
from mference_core.checkpoint import Checkpoint, open_checkpoint, peek
from mference_core.engine import Engine, LoadOptions
from mference_core.errors import ManifestError, MferenceError
from mference_core.gturbo.index import Resident, encode_index, plan_index
from mference_core.gturbo.layout import plan_layout, plan_parts
from mference_core.install import install_local
from mference_core.manifest import read_manifest
from mference_core.placement import Dropped, Routed
from mference_core.placement import Resident as ResidentPlace
from mference_core.tensors import Quant
from mference_core.testing.synthetic import plan_synthetic
from mference_deepseekv4.arch import PINNED
from mference_deepseekv4.install import install_plan

REFERENCE = Path(mference_deepseekv4.__file__).parent / "reference"
CONTRACT = mference_deepseekv4.mference_manifest_contract()
PLAIN = {
    "BF16": ("norm.weight", "ape", "ffn.gate.weight"),
    "F32": ("attn_sink", "_bias", ".fn", ".base", ".scale"),
    "I64": ("tid2eid",),
}


def dtype_of(name: str) -> str:
    """Return how the published checkpoint stores a resident: matrices in 4 bits, the rest plain."""
    return next((dtype for dtype, ends in PLAIN.items() if name.endswith(ends)), "U32")


def resident(name: str, shape: tuple[int, ...]) -> Resident:
    dtype = dtype_of(name)
    quant = Quant(bits=4, group_size=64) if dtype == "U32" else None
    return Resident(name=name, dtype=dtype, shape=shape, quant=quant)


def test_resident_file_of_the_published_checkpoint() -> None:
    """Format section 4.2: 1,199 entries, an index of 131,072 bytes, a file of 4,312,867,932."""
    plan = install_plan(PINNED)
    places = {name: plan.place(name) for name in plan.residents}
    order = {name: place.order for name, place in places.items() if isinstance(place, ResidentPlace)}
    names = sorted(plan.residents, key=lambda name: (order[name], name))
    index = plan_index([resident(name, plan.residents[name]) for name in names])
    assert (len(index.entries), index.index_size, index.resident_size) == (1_199, 131_072, 4_312_736_860)
    assert index.file_size == 4_312_867_932
    assert len(encode_index(index)) == 131_072
    assert names == list(plan.residents)


def test_synthetic_forms_are_those_of_the_published_checkpoint() -> None:
    made = plan_synthetic(plugins.load("deepseekv4"))
    for name, weight in made.checkpoint.weights.items():
        expected = resident(name, weight.shape)
        assert (weight.dtype, weight.quant) == (expected.dtype, expected.quant), name
    strides = {sum(part.size for part in layer.parts) for layer in made.outputs.layout.layers[:42]}
    assert strides == {8_388_608} == {made.outputs.layout.expert_stride}
    assert sum(part.size for part in made.outputs.layout.layers[42].parts) == 7_864_320


def test_layer_files_of_the_published_checkpoint() -> None:
    """Format section 5: gates in groups of 32, of 64 in the last layer, which is padded to the same 8 MiB."""
    plan = install_plan(PINNED)
    wide = {role: Quant(bits=2, group_size=64) for role in ("gate", "up", "down")}
    parts = {
        layer: plan_parts(shapes, wide if layer == 42 else {**wide, "gate": Quant(bits=2, group_size=32)})
        for layer, shapes in plan.experts.items()
    }
    layout = plan_layout(parts, num_layers=PINNED.num_layers, count=PINNED.num_experts)
    assert layout.expert_stride == 8 << 20
    assert layout.expert_stride * layout.experts_per_layer == 2_147_483_648
    assert 43 * layout.expert_stride * layout.experts_per_layer == 92_341_796_864
    sizes = {part.name: part.size for part in layout.layers[0].parts}
    assert (sizes["gate"], sizes["gate_scales"], sizes["up_scales"]) == (2_097_152, 524_288, 262_144)


ATTENTION = [
    "attn.wq_a.weight",
    "attn.q_norm.weight",
    "attn.wq_b.weight",
    "attn.wkv.weight",
    "attn.kv_norm.weight",
    "attn.attn_sink",
    "attn.wo_a.weight",
    "attn.wo_b.weight",
]
COMPRESSOR = [f"attn.compressor.{name}" for name in ("wkv.weight", "wgate.weight", "norm.weight", "ape")]
INDEXER = [
    *(name.replace("attn.", "attn.indexer.") for name in COMPRESSOR),
    "attn.indexer.wq_b.weight",
    "attn.indexer.weights_proj.weight",
]
BLOCK = [
    *(f"ffn.shared_experts.{role}_proj.weight" for role in ("gate", "up", "down")),
    "attn_norm.weight",
    "ffn_norm.weight",
    *(f"{site}_hc.{name}" for site in ("attn", "ffn") for name in ("fn", "base", "scale")),
]
TABLE, BIAS = ["ffn.gate.weight", "ffn.gate.tid2eid"], ["ffn.gate.weight", "ffn.gate.e_score_correction_bias"]


def test_residents_come_in_the_published_order() -> None:
    plan = install_plan(PINNED)
    rows = {
        0: ATTENTION + TABLE,
        2: ATTENTION + COMPRESSOR + INDEXER + TABLE,
        3: ATTENTION + COMPRESSOR + BIAS,
        42: ATTENTION + COMPRESSOR + INDEXER + BIAS,
    }
    for layer, names in rows.items():
        prefix = f"model.layers.{layer}."
        assert [n.removeprefix(prefix) for n in plan.residents if n.startswith(prefix)] == names + BLOCK
    heads = [f"model.hc_head.{name}" for name in ("base", "fn", "scale")]
    assert list(plan.residents)[-5:] == [*heads, "model.norm.weight", "lm_head.weight"]
    assert next(iter(plan.residents)) == "model.embed_tokens.weight"


def test_shapes_of_the_published_checkpoint() -> None:
    """Family page, section 6."""
    shapes = install_plan(PINNED).residents
    expected: dict[str, tuple[int, ...]] = {
        "0.attn.wq_b.weight": (32_768, 1024),
        "0.attn.wkv.weight": (512, 4096),
        "0.attn.wo_a.weight": (8192, 4096),
        "0.attn.wo_b.weight": (4096, 8192),
        "0.attn.attn_sink": (64,),
        "0.ffn.gate.tid2eid": (129_280, 6),
        "0.attn_hc.fn": (24, 16_384),
        "0.ffn_hc.scale": (3,),
        "2.attn.compressor.wkv.weight": (1024, 4096),
        "2.attn.compressor.ape": (4, 1024),
        "2.attn.compressor.norm.weight": (512,),
        "2.attn.indexer.compressor.wgate.weight": (256, 4096),
        "2.attn.indexer.compressor.ape": (4, 256),
        "2.attn.indexer.wq_b.weight": (8192, 1024),
        "2.attn.indexer.weights_proj.weight": (64, 4096),
        "3.attn.compressor.wgate.weight": (512, 4096),
        "3.attn.compressor.ape": (128, 512),
        "3.ffn.gate.e_score_correction_bias": (256,),
    }
    assert {name: shapes[f"model.layers.{name}"] for name in expected} == expected
    assert shapes["model.hc_head.fn"] == (4, 16_384)
    assert shapes["lm_head.weight"] == (129_280, 4096)


def test_both_spellings_have_the_same_places() -> None:
    """Every published name of the tiny checkpoint is placed where its converted one is, experts role by role."""
    plan = mference_deepseekv4.mference_install_plan(arch=opened(REFERENCE).arch)
    published = [name for name in read_names(REFERENCE) if ".ffn.experts." not in name]
    places = [plan.place(name) for name in published]
    assert all(isinstance(place, ResidentPlace) for place in places)
    assert sorted(place.name for place in places if isinstance(place, ResidentPlace)) == sorted(plan.residents)
    for name in plan.residents:
        place = plan.place(name)
        assert isinstance(place, ResidentPlace)
        assert place.name == name
    for w, role in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        assert plan.place(f"layers.3.ffn.experts.7.{w}.weight") == Routed(layer=3, roles=(role,), expert=7)
        assert plan.place(f"model.layers.3.ffn.switch_mlp.{role}_proj.weight") == Routed(layer=3, roles=(role,))


def read_names(path: Path) -> list[str]:
    arrays = mx.load(str(path / "model.safetensors"))
    assert isinstance(arrays, dict)
    return sorted(arrays)


def test_what_is_dropped_and_what_is_not_known() -> None:
    plan = install_plan(PINNED)
    for name in ("mtp.0.attn.wq_a.weight", "model.mtp.0.e_proj.weight"):
        assert isinstance(plan.place(name), Dropped)
    for name in (
        "layers.43.attn.wq_a.weight",
        "model.layers.0.ffn.experts.0.w1.weight",
        "layers.0.ffn.switch_mlp.gate_proj.weight",
        "layers.0.attn.wq_a.scale",
        "layers.0.attn.compressor.wkv.weight",
        "model.layers.3.attn.indexer.wq_b.weight",
        "model.layers.3.ffn.gate.tid2eid",
        "model.layers.0.ffn.gate.e_score_correction_bias",
        "model.layers.00.attn.wq_a.weight",
        "layers.0.attn_hc.other",
        "embed_tokens.weight",
        "model.embed.weight",
        "hc_head_other",
    ):
        assert plan.place(name) is None, name


def copied(tmp_path: Path, source: Path, **config: Any) -> Path:
    """Return a copy of a checkpoint whose config.json has further entries."""
    path = tmp_path / "copy"
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("mlx", "goldens"))
    whole = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(whole))
    return path


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(peek(path), CONTRACT, lambda arch: mference_deepseekv4.mference_install_plan(arch=arch))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quant_method is 'fp8'; expected none; use an MLX checkpoint",
        ),
        (
            {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
            "quantization mode is 'mxfp4'; expected 'aff",
        ),
        (
            {
                "quantization": {
                    "group_size": 64,
                    "bits": 4,
                    "model.layers.0.ffn.switch_mlp.up_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
                }
            },
            "layers.0.ffn.switch_mlp.up_proj mode is 'mxfp4'; expected 'affine'",
        ),
    ],
)
def test_other_quantisations_are_refused(tmp_path: Path, config: dict[str, Any], text: str) -> None:
    with pytest.raises(ManifestError) as caught:
        opened(copied(tmp_path, REFERENCE, **config))
    assert text in str(caught.value)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E8M0", "I8"])
def test_release_files_are_refused_in_one_line(tmp_path: Path, dtype: str) -> None:
    """FP8 matrices, their scales, and FP4 pairs in bytes, whatever the config says."""
    path = copied(tmp_path, REFERENCE)
    header = {"layers.0.attn.wkv.weight": {"dtype": dtype, "shape": [4, 4], "data_offsets": [0, 16]}}
    head = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(16))
    with pytest.raises(ManifestError) as caught:
        opened(path)
    assert f"tensor layers.0.attn.wkv.weight dtype is {dtype}; expected U32 or BF16" in str(caught.value)
    assert str(caught.value).endswith("or the float checkpoint")


def test_a_router_is_installed_unquantised(tmp_path: Path) -> None:
    """The manifest's row says 8 bits all the same, as the format's own writer does."""
    output = tmp_path / "x.gturbo"
    install_local(REFERENCE / "mlx", output, CONTRACT, lambda a: mference_deepseekv4.mference_install_plan(arch=a))
    manifest, weights = read_manifest(output / "manifest.json"), opened(output).weights
    assert manifest.quant is not None
    assert {slot: row.weight_bits for slot, row in manifest.quant.items()} == {
        "embedding": 4,
        "attention": 4,
        "router": 8,
        "sharedExpert": 4,
        "routedExpert": 2,
    }
    assert manifest.bit_width_overrides_honored == 15
    forms = {name: (weight.dtype, weight.quant) for name, weight in weights.items()}
    assert forms["model.layers.3.ffn.gate.weight"] == ("BF16", None)
    assert forms["model.layers.0.ffn.gate.tid2eid"] == ("I64", None)
    assert forms["model.layers.0.attn_hc.fn"] == ("F32", None)


def test_a_draft_layer_is_left_out_by_name(tmp_path: Path) -> None:
    path = copied(tmp_path, REFERENCE / "mlx")
    arrays = mx.load(str(path / "model.safetensors"))
    assert isinstance(arrays, dict)
    mx.save_safetensors(str(path / "model.safetensors"), {**arrays, "mtp.0.attn.wq_a.weight": mx.zeros((4, 4))})
    assert opened(path).dropped == {"mtp.0.attn.wq_a.weight": "layers that draft further tokens are not run"}


def test_experts_of_a_layer_too_many_are_refused(tmp_path: Path) -> None:
    path = copied(tmp_path, REFERENCE, num_hidden_layers=4)
    with pytest.raises(ManifestError, match=r"tensor layers\.4\..* is unknown to the family"):
        opened(path)


TABLE_NAME = "model.layers.0.ffn.gate.tid2eid"
TABLES: dict[str, tuple[Callable[[mx.array], mx.array], str]] = {
    "of floats": (lambda t: t.astype(mx.float32), "tid2eid is F32; expected I64 or I32"),
    "too narrow": (lambda t: t[:, :2], "tid2eid is of shape [256, 2]; expected [256, 3]"),
    "of experts that are not there": (lambda t: t + 1, "tid2eid is a table with expert 8; expected 0 to 7"),
    "of negative experts": (lambda t: t - 1, "tid2eid is a table with expert -1; expected 0 to 7"),
}


@pytest.mark.parametrize(("change", "text"), TABLES.values(), ids=TABLES)
def test_a_table_that_cannot_be_meant_is_refused(
    tmp_path: Path, change: Callable[[mx.array], mx.array], text: str
) -> None:
    """When the model is loaded, not when a token comes along that it names."""
    with pytest.raises(MferenceError) as caught:
        Engine.load(plugins.load("deepseekv4"), with_table(tmp_path, change), LoadOptions(context=8))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def with_table(tmp_path: Path, change: Callable[[mx.array], mx.array]) -> Path:
    path = copied(tmp_path, REFERENCE / "mlx")
    arrays = mx.load(str(path / "model.safetensors"))
    assert isinstance(arrays, dict)
    changed = {**arrays, TABLE_NAME: change(arrays[TABLE_NAME])}
    mx.eval(changed)
    mx.save_safetensors(str(path / "model.safetensors"), changed)
    return path


def test_a_table_may_name_an_expert_twice_and_be_narrower(tmp_path: Path) -> None:
    """Both slots of the expert count: the layer gives what it gives with every weight on that expert."""
    plugin = plugins.load("deepseekv4")
    logits = []
    for number, dtype in enumerate((mx.int64, mx.int32)):
        path = with_table(tmp_path / str(number), lambda t, dtype=dtype: mx.zeros_like(t).astype(dtype))  # type: ignore[misc]
        for slots in (3, "resident"):
            with Engine.load(plugin, path, LoadOptions(context=32, slots=slots, dtype="float32")) as engine:
                logits.append(engine.session().prefill([1, 2, 3]))
    assert bool(mx.isfinite(logits[0]).all())
    assert all(bool(mx.array_equal(logits[0], other)) for other in logits[1:])
