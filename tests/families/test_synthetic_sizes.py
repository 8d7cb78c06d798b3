"""Synthetic checkpoints of real size: published sizes without writing them, and finite activations in any depth."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions
from mference_core.testing.config_fit import fit_config
from mference_core.testing.synthetic import plan_synthetic, write_synthetic

SMALL = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_full_kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "num_experts": 16,
    "top_k_experts": 4,
}
DELTA = {f"linear_{name}": size for name, size in (("num_k_heads", 2), ("num_v_heads", 4))}
DELTA |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}


@attrs.frozen(kw_only=True)
class Published:
    """Sizes in bytes of sections 4.2 and 5 of the format page, kinds of some layers, and a small arch of full depth."""

    resident: int
    entries: int
    layer_file: int
    pool: int
    side_files: tuple[int, int]
    kinds: dict[int, str | int]
    kinds_in: str = "layer_types"
    routed_bits: int = 4
    small: dict[str, Any]


PUBLISHED = {
    "deepseekv4": Published(
        resident=4_312_867_932,
        entries=1_199,
        layer_file=2_147_483_648,
        pool=92_341_796_864,
        side_files=(10_000_000, 40_000_000),
        kinds={1: 0, 2: 4, 41: 128, 42: 4},
        kinds_in="compress_ratios",
        routed_bits=2,
        small={
            **SMALL,
            **dict.fromkeys(("num_kv_heads", "num_full_kv_heads"), 1),
            "ffn_intermediate": 64,
            "full_head_dim": 32,
            "attention_scale": 32**-0.5,
            "partial_rotary_factor": 0.25,
            "sliding_window": 8,
            "ca_rope_head_dim": 8,
            "ca_q_lora_rank": 64,
            "ca_o_lora_rank": 64,
            "ca_o_groups": 2,
            "ca_index_n_heads": 4,
            "ca_index_head_dim": 32,
        },
    ),
    "gemma4": Published(
        resident=1_353_771_068,
        entries=597,
        layer_file=429_916_160,
        pool=12_897_484_800,
        side_files=(30_000_000, 40_000_000),
        kinds={4: "sliding_attention", 5: "full_attention"},
        small={**SMALL, "ffn_intermediate": 192, "full_head_dim": 64, "sliding_window": 8},
    ),
    "qwen36": Published(
        resident=1_389_476_096,
        entries=613,
        layer_file=452_984_832,
        pool=18_119_393_280,
        side_files=(10_000_000, 40_000_000),
        kinds={2: "linear_attention", 3: "full_attention"},
        small={**SMALL, **DELTA, "ffn_intermediate": 64, "full_head_dim": 32, "attention_scale": 32**-0.5},
    ),
}

each_family = pytest.mark.parametrize("name", sorted(PUBLISHED))


@each_family
def test_sizes_are_the_published_ones(name: str) -> None:
    """The rest of a published install is tokenizer files."""
    family, want = plugins.load(name), PUBLISHED[name]
    outputs = plan_synthetic(family).outputs
    assert outputs.index.file_size == want.resident
    assert len(outputs.index.entries) == want.entries
    assert outputs.layout.expert_stride * outputs.layout.experts_per_layer == want.layer_file
    assert outputs.total_bytes - len(outputs.layout_image) == want.resident + want.pool
    least, most = want.side_files
    assert least < family.family.pinned[0].installed_bytes - outputs.total_bytes < most
    assert {slot: row.weight_bits for slot, row in outputs.quant.items()} == {
        "embedding": 4,
        "attention": 4,
        "router": 8,
        "sharedExpert": 4,
        "routedExpert": want.routed_bits,
    }


@each_family
def test_a_config_of_the_published_checkpoint_is_found(name: str) -> None:
    family = plugins.load(name)
    (pinned,) = family.contract.pinned
    forms = plan_synthetic(family).forms
    assert forms.config is not None
    config = fit_config(forms.config, family.contract, pinned)
    assert family.contract.accept(family.contract.from_config(config)) == pinned
    for layer, kind in PUBLISHED[name].kinds.items():
        assert config.get("text_config", config)[PUBLISHED[name].kinds_in][layer] == kind


@each_family
def test_all_layers_stay_finite_and_of_one_size(name: str, tmp_path: Path) -> None:
    """Every layer's output is finite and no layer more than doubles it, down to the logits."""
    family = plugins.load(name)
    small = attrs.evolve(family.contract.pinned[0], **PUBLISHED[name].small)
    write_synthetic(family, tmp_path / "small.gturbo", arch=small)
    sizes = list[float]()
    with Engine.load(family, tmp_path / "small.gturbo", LoadOptions(context=32, slots=4)) as engine:
        session = engine.session()
        logits = session.prefill(
            [3, 1, 4, 1, 5, 9, 2, 6], observe=lambda _, x, __: sizes.append(float(mx.sqrt((x * x).mean())))
        )
        assert bool(mx.isfinite(logits).all())
        assert float(mx.diff(mx.sort(logits)).min()) > 0, "no two tokens tie"
    assert len(sizes) == small.num_layers
    assert 0.1 < sizes[0] < 10
    assert all(after < 2 * before for before, after in pairwise(sizes))
