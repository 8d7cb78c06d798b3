"""The install of the published checkpoint, to the byte, from names and shapes alone; and a real install of the tiny one."""

from pathlib import Path

import pytest

import mference_qwen36
from mference_core.gturbo.index import Resident, encode_index, plan_index
from mference_core.gturbo.layout import plan_layout, plan_parts
from mference_core.placement import Dropped, Transform
from mference_core.placement import Resident as ResidentPlace
from mference_core.tensors import Quant
from mference_qwen36.arch import PINNED
from mference_qwen36.install import install_plan

REFERENCE = Path(mference_qwen36.__file__).parent / "reference"
CONTRACT = mference_qwen36.mference_manifest_contract()


EIGHT_BITS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
PLAIN = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")


def quant_of(name: str) -> Quant | None:
    """Return how the published checkpoint stores a resident: matrices in 4 bits, both gates in 8, the rest plain."""
    if name.endswith(PLAIN):
        return None
    return Quant(bits=8 if name.endswith(EIGHT_BITS) else 4, group_size=64)


def test_resident_file_of_the_published_checkpoint() -> None:
    """Format section 4.2: 613 entries, an index of 81,920 bytes, a file of 1,389,476,096."""
    plan = install_plan(PINNED)
    places = {name: plan.place(name) for name in plan.residents}
    order = {name: place.order for name, place in places.items() if isinstance(place, ResidentPlace)}
    tensors = [
        Resident(
            name=name,
            dtype="U32" if quant_of(name) else "BF16",
            shape=plan.residents[name],
            quant=quant_of(name),
        )
        for name in sorted(plan.residents, key=lambda name: (order[name], name))
    ]
    index = plan_index(tensors)
    assert (len(index.entries), index.index_size, index.resident_size) == (613, 81_920, 1_389_394_176)
    assert index.file_size == 1_389_476_096
    assert len(encode_index(index)) == 81_920


DELTA_NAMES = [
    "linear_attn.in_proj_qkv.weight",
    "linear_attn.in_proj_z.weight",
    "linear_attn.in_proj_a.weight",
    "linear_attn.in_proj_b.weight",
    "linear_attn.conv1d.weight",
    "linear_attn.A_log",
    "linear_attn.dt_bias",
    "linear_attn.norm.weight",
    "linear_attn.out_proj.weight",
]
FULL_NAMES = [f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
BLOCK_NAMES = [
    "mlp.gate.weight",
    "mlp.shared_expert_gate.weight",
    "mlp.shared_expert.gate_proj.weight",
    "mlp.shared_expert.up_proj.weight",
    "mlp.shared_expert.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
]


def test_residents_come_in_the_published_order() -> None:
    plan = install_plan(PINNED)
    for layer, mixer in ((0, DELTA_NAMES), (2, DELTA_NAMES), (3, FULL_NAMES), (39, FULL_NAMES)):
        prefix = f"language_model.model.layers.{layer}."
        names = [name.removeprefix(prefix) for name in plan.residents if name.startswith(prefix)]
        assert names == mixer + BLOCK_NAMES
    orders = [place.order for name in plan.residents if isinstance(place := plan.place(name), ResidentPlace)]
    assert orders == sorted(orders)
    assert next(iter(plan.residents)) == "language_model.model.embed_tokens.weight"
    assert list(plan.residents)[-2:] == ["language_model.model.norm.weight", "language_model.lm_head.weight"]


def test_shapes_of_the_published_checkpoint() -> None:
    """Family page, section 4."""
    shapes, prefix = install_plan(PINNED).residents, "language_model.model.layers."
    expected = {
        "3.self_attn.q_proj.weight": (8192, 2048),
        "3.self_attn.k_proj.weight": (512, 2048),
        "3.self_attn.o_proj.weight": (2048, 4096),
        "0.linear_attn.in_proj_qkv.weight": (8192, 2048),
        "0.linear_attn.in_proj_z.weight": (4096, 2048),
        "0.linear_attn.in_proj_a.weight": (32, 2048),
        "0.linear_attn.conv1d.weight": (8192, 4, 1),
        "0.linear_attn.A_log": (32,),
        "0.linear_attn.norm.weight": (128,),
        "0.linear_attn.out_proj.weight": (2048, 4096),
        "0.mlp.gate.weight": (256, 2048),
        "0.mlp.shared_expert_gate.weight": (1, 2048),
        "0.mlp.shared_expert.down_proj.weight": (2048, 512),
    }
    assert {name: shapes[prefix + name] for name in expected} == expected
    assert shapes["language_model.lm_head.weight"] == (248_320, 2048)


def test_layer_files_of_the_published_checkpoint() -> None:
    """Format section 5: a stride of 1,769,472, files of 452,984,832, 18,119,393,280 bytes of experts."""
    plan = install_plan(PINNED)
    quants = dict.fromkeys(("gate", "up", "down"), Quant(bits=4, group_size=64))
    parts = {layer: plan_parts(shapes, quants) for layer, shapes in plan.experts.items()}
    layout = plan_layout(parts, num_layers=PINNED.num_layers, count=PINNED.num_experts)
    assert layout.expert_stride == 1_769_472 == sum(part.size for part in layout.layers[0].parts)
    assert layout.expert_stride * layout.experts_per_layer == 452_984_832
    assert 40 * layout.expert_stride * layout.experts_per_layer == 18_119_393_280


@pytest.mark.parametrize("published", [True, False])
def test_names_say_how_a_tensor_is_stated(published: bool) -> None:  # noqa: FBT001
    """Published norms but the delta network's own are stored less one, published taps lie on the last axis."""
    trunk = "model.language_model." if published else "language_model.model."
    plan = install_plan(PINNED)

    def transform(name: str) -> Transform:
        place = plan.place(trunk + name)
        assert isinstance(place, ResidentPlace)
        return place.transform

    for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm", "layers.3.self_attn.q_norm"):
        assert transform(f"{name}.weight") == Transform(add=1.0 if published else 0.0)
    assert transform("layers.3.self_attn.k_norm.weight").add == (1.0 if published else 0.0)
    for name in ("layers.0.linear_attn.norm.weight", "layers.0.linear_attn.A_log", "layers.0.mlp.gate.weight"):
        assert transform(name) == Transform()
    stored = (8192, 1, 4) if published else None
    assert transform("layers.0.linear_attn.conv1d.weight") == Transform(stored=stored)


def test_what_is_dropped_and_what_is_not_known() -> None:
    plan = install_plan(PINNED)
    for name in (
        "model.visual.blocks.0.attn.qkv.weight",
        "vision_tower.x",
        "mtp.layers.0.mlp.gate.weight",
        "mtp.fc.weight",
    ):
        assert isinstance(plan.place(name), Dropped)
    for name in (
        "model.language_model.layers.40.mlp.gate.weight",
        "model.language_model.layers.0.self_attn.q_proj.weight",
    ):
        assert plan.place(name) is None
    for name in ("language_model.model.layers.3.linear_attn.A_log", "model.layers.0.mlp.gate.weight", "norm.weight"):
        assert plan.place(name) is None
