"""The family's page says what the code does."""

from pathlib import Path

from mference_core import plugins
from mference_core.experts.plan import plan_memory
from mference_kernels.gated_delta import CHUNK_BAR, CHUNK_TOKENS, CPU_CHUNK_TOKENS
from mference_qwen36.arch import CHECKPOINT, FULL, PINNED, RECURRENT
from mference_qwen36.calls import MAX_DEPTH
from mference_qwen36.chat import MAX_CALL_BYTES
from mference_qwen36.install import install_plan

PAGE = Path(__file__).parents[3] / "docs" / "families" / "qwen36.md"
ONE_EXPERT = sum(rows * columns * 36 // 64 for rows, columns in install_plan(PINNED).experts[0].values())
FAMILY = plugins.load("qwen36")


def token_bytes(dtype: str) -> int:
    layout = FAMILY.ask("mference_kv_layout", arch=PINNED, context=1, chunk=1, dtype=dtype)
    return int(layout.bytes_per_token)


def test_the_page_says_what_the_code_does() -> None:
    text = " ".join(PAGE.read_text("utf-8").split())
    kinds = PINNED.full_attention_layer_mask
    state_bytes = 4 * PINNED.linear_num_v_heads * PINNED.linear_key_head_dim * PINNED.linear_value_head_dim
    assert kinds == (RECURRENT, RECURRENT, RECURRENT, FULL) * 10
    phrases = (
        f"`{CHECKPOINT.repo}` at `{CHECKPOINT.revision}`",
        f"{CHECKPOINT.download_bytes:,} and {CHECKPOINT.installed_bytes:,} bytes",
        f"| Licence of the weights | {CHECKPOINT.licence} |",
        f"| Layers | {PINNED.num_layers}: three gated delta networks, one full attention, ten times over |",
        f"{PINNED.hidden_size}; {PINNED.vocab_size:,}, embedding and head are two tables",
        f"{PINNED.num_heads} heads, {PINNED.num_kv_heads} key heads of {PINNED.head_dim}; a quarter of each head turns",
        f"θ is {PINNED.rope_theta:,.0f}",
        f"{PINNED.linear_num_k_heads} key heads and {PINNED.linear_num_v_heads} value heads of {PINNED.linear_key_head_dim}",
        f"a convolution of {PINNED.linear_conv_kernel_size} taps",
        f"{PINNED.num_experts} per layer of width {PINNED.moe_intermediate_size}, {PINNED.top_k_experts} per token",
        f"a shared expert of width {PINNED.ffn_intermediate}",
        f"{ONE_EXPERT:,} bytes in 4 bits, {ONE_EXPERT // 16_384} pages without padding",
        f"{ONE_EXPERT * PINNED.num_experts * PINNED.num_layers:,} bytes on disk",
        f"{len(install_plan(PINNED).residents)} in a file",
        f"({CPU_CHUNK_TOKENS} tokens on CPUs, {CHUNK_TOKENS} on GPUs)",
        f"at most {CHUNK_BAR:.0e}".replace("e-0", "e-"),
        f"{kinds.count(RECURRENT)} delta networks take {state_bytes:,} bytes each",
        f"{token_bytes('bfloat16'):,} bytes each in bfloat16 and {token_bytes('float32'):,} in float32",
        f"at most {MAX_CALL_BYTES >> 10} KiB and values at most {MAX_DEPTH} levels",
    )
    assert [phrase for phrase in phrases if phrase not in text] == []
    assert ONE_EXPERT % 16_384 == 0


def test_a_fixed_rule_for_slots_is_a_budget() -> None:
    """96, 32 and 16 slots by memory: what they take, given as `--memory`, is what they are."""
    layout = FAMILY.ask("mference_kv_layout", arch=PINNED, context=4096, chunk=512, dtype="float32")
    for slots in (96, 32, 16):
        budget, found = None, None
        for requested in (slots, "auto"):
            found = plan_memory(
                budget_bytes=budget,
                resident_bytes=1_389_394_176,
                state_bytes=layout.bytes_at(4096),
                scratch_bytes=0,
                expert_bytes_per_layer=dict.fromkeys(range(PINNED.num_layers), ONE_EXPERT),
                experts=PINNED.num_experts,
                requested=requested,
            )
            budget = found.total_bytes
        assert found is not None
        assert (found.slots_per_layer, found.total_bytes) == (slots, budget)
