"""The install of the published checkpoint, to the byte, from names and shapes alone; and a real install of the tiny one."""

from pathlib import Path

import mference_gemma4
from mference_core.gturbo.index import Resident, encode_index, plan_index
from mference_core.gturbo.layout import plan_layout, plan_parts
from mference_core.placement import Resident as ResidentPlace
from mference_core.tensors import Quant
from mference_gemma4.arch import PINNED
from mference_gemma4.install import install_plan

REFERENCE = Path(mference_gemma4.__file__).parent / "reference"
CONTRACT = mference_gemma4.mference_manifest_contract()


def quant_of(name: str, shape: tuple[int, ...]) -> Quant | None:
    """Return how the published checkpoint stores a resident: matrices in 4 bits, routers in 8, the rest plain."""
    if len(shape) == 1:
        return None
    return Quant(bits=8 if ".router.proj." in name else 4, group_size=64)


def test_resident_file_of_the_published_checkpoint() -> None:
    """Format section 4.2: 597 entries, an index of 81,920 bytes, a file of 1,353,771,068."""
    plan = install_plan(PINNED)
    places = {name: plan.place(name) for name in plan.residents}
    order = {name: place.order for name, place in places.items() if isinstance(place, ResidentPlace)}
    tensors = [
        Resident(
            name=name,
            dtype="U32" if len(plan.residents[name]) > 1 else "BF16",
            shape=plan.residents[name],
            quant=quant_of(name, plan.residents[name]),
        )
        for name in sorted(plan.residents, key=lambda name: (order[name], name))
    ]
    index = plan_index(tensors)
    assert (len(index.entries), index.index_size, index.resident_size) == (597, 81_920, 1_353_689_148)
    assert index.file_size == 1_353_771_068
    assert len(encode_index(index)) == 81_920


def test_residents_come_in_the_published_order() -> None:
    plan = install_plan(PINNED)
    layer = "language_model.model.layers.5."
    names = [name.removeprefix(layer) for name in plan.residents if name.startswith(layer)]
    assert names == [
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "router.proj.weight",
        "router.scale",
        "router.per_expert_scale",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "pre_feedforward_layernorm_2.weight",
        "post_feedforward_layernorm.weight",
        "post_feedforward_layernorm_1.weight",
        "post_feedforward_layernorm_2.weight",
        "layer_scalar",
    ]
    orders = [place.order for name in plan.residents if isinstance(place := plan.place(name), ResidentPlace)]
    assert orders == sorted(orders)
    assert next(iter(plan.residents)) == "language_model.model.embed_tokens.weight"
    assert list(plan.residents)[-1] == "language_model.model.norm.weight"


def test_layer_files_of_the_published_checkpoint() -> None:
    """Format section 5: a stride of 3,358,720, files of 429,916,160, 12,897,484,800 bytes of experts."""
    plan = install_plan(PINNED)
    quants = dict.fromkeys(("gate", "up", "down"), Quant(bits=4, group_size=64))
    parts = {layer: plan_parts(shapes, quants) for layer, shapes in plan.experts.items()}
    layout = plan_layout(parts, num_layers=PINNED.num_layers, count=PINNED.num_experts)
    assert layout.expert_stride == 3_358_720
    assert layout.expert_stride * layout.experts_per_layer == 429_916_160
    assert 30 * layout.expert_stride * layout.experts_per_layer == 12_897_484_800
    assert {layer.parts[0].shape for layer in layout.layers} == {(704, 2816)}
    assert sum(part.size for part in layout.layers[0].parts) == 3_345_408
