"""The synthetic checkpoint of real size: published sizes without writing it, and finite activations in any depth."""

from itertools import pairwise
from pathlib import Path

import attrs
import mlx.core as mx

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions
from mference_core.testing.config_fit import fit_config
from mference_core.testing.synthetic import plan_synthetic, write_synthetic
from mference_qwen36.arch import CHECKPOINT, PINNED

FAMILY = plugins.load("qwen36")


def test_sizes_are_the_published_ones() -> None:
    """Format sections 4.2 and 5; the rest of the published install is tokenizer files of less than 40 MB."""
    outputs = plan_synthetic(FAMILY).outputs
    assert outputs.index.file_size == 1_389_476_096
    assert len(outputs.index.entries) == 613
    assert outputs.layout.expert_stride * outputs.layout.experts_per_layer == 452_984_832
    assert outputs.total_bytes - len(outputs.layout_image) == 1_389_476_096 + 18_119_393_280
    assert 10_000_000 < CHECKPOINT.installed_bytes - outputs.total_bytes < 40_000_000
    assert {slot: row.weight_bits for slot, row in outputs.quant.items()} == {
        "embedding": 4,
        "attention": 4,
        "router": 8,
        "sharedExpert": 4,
        "routedExpert": 4,
    }


def test_a_config_of_the_published_checkpoint_is_found() -> None:
    forms = plan_synthetic(FAMILY).forms
    assert forms.config is not None
    config = fit_config(forms.config, FAMILY.contract, PINNED)
    assert FAMILY.contract.accept(FAMILY.contract.from_config(config)) == PINNED
    assert config["text_config"]["layer_types"][2:4] == ["linear_attention", "full_attention"]


def test_forty_layers_stay_finite_and_of_one_size(tmp_path: Path) -> None:
    """Every layer's output is finite and no layer more than doubles it, down to the logits."""
    small = attrs.evolve(
        PINNED,
        hidden_size=128,
        ffn_intermediate=64,
        moe_intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        num_full_kv_heads=2,
        head_dim=32,
        full_head_dim=32,
        attention_scale=32**-0.5,
        linear_num_k_heads=2,
        linear_num_v_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        vocab_size=512,
        num_experts=16,
        top_k_experts=4,
    )
    write_synthetic(FAMILY, tmp_path / "small.gturbo", arch=small)
    sizes = list[float]()
    with Engine.load(FAMILY, tmp_path / "small.gturbo", LoadOptions(context=32, slots=4)) as engine:
        session = engine.session()
        logits = session.prefill(
            [3, 1, 4, 1, 5, 9, 2, 6], observe=lambda _, x, __: sizes.append(float(mx.sqrt((x * x).mean())))
        )
        assert bool(mx.isfinite(logits).all())
        assert float(mx.diff(mx.sort(logits)).min()) > 0, "no two tokens tie"
    assert len(sizes) == 40
    assert 0.1 < sizes[0] < 10
    assert all(after < 2 * before for before, after in pairwise(sizes))
