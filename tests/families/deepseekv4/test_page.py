"""The family's page says what the code does."""

from pathlib import Path

from mference_core import plugins
from mference_core.testing.synthetic import plan_synthetic
from mference_deepseekv4.arch import CHECKPOINT, PINNED, ROUTING_EPS
from mference_deepseekv4.calls import DSML, MAX_DEPTH
from mference_deepseekv4.chat import EFFORTS, MAX_BLOCK_BYTES

PAGE = Path(__file__).parents[3] / "docs" / "families" / "deepseekv4.md"
FAMILY = plugins.load("deepseekv4")


def token_bytes(dtype: str) -> int:
    layout = FAMILY.ask("mference_kv_layout", arch=PINNED, context=1, chunk=1, dtype=dtype)
    return int(layout.bytes_per_token)


def test_state_of_the_published_checkpoint() -> None:
    """Family page, section 5: 21 layers of 640 features per 4 tokens, 20 of 512 per 128, in halves."""
    assert token_bytes("float16") == 21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128 == 6880
    layout = FAMILY.ask("mference_kv_layout", arch=PINNED, context=4096, chunk=1, dtype="float16")
    rings = 43 * (128 + 1) * 512 * 2  # the window and a chunk
    entries = 21 * (4096 // 4) * (512 + 128) * 2 + 20 * (4096 // 128) * 512 * 2
    open_rows = 4 * (21 * 3 * 2 * (1024 + 256) + 20 * 127 * 2 * 512)
    carried = 4 * 21 * 4 * 2 * (512 + 128)
    assert layout.bytes_at(4096) == rings + entries + open_rows + carried


def test_the_page_says_what_the_code_does() -> None:
    text = " ".join(PAGE.read_text("utf-8").split())
    layers = plan_synthetic(FAMILY).checkpoint.experts
    outputs = plan_synthetic(FAMILY).outputs
    arch = PINNED
    phrases = (
        f"`{CHECKPOINT.repo}` at `{CHECKPOINT.revision}`",
        f"about {CHECKPOINT.download_bytes:,} and {CHECKPOINT.installed_bytes:,} bytes",
        f"| Licence of the weights | {CHECKPOINT.licence} |",
        f"| Layers | {arch.num_layers}: two with a window of {arch.sliding_window} tokens alone",
        f"{arch.hidden_size} in {arch.hc_mult} streams; {arch.vocab_size:,}, embedding and head are two tables",
        f"{arch.num_heads} heads of {arch.head_dim}, one row of {arch.head_dim} per token",
        f"the last {arch.ca_rope_head_dim} features turn",
        f"an entry per {arch.ca_csa_compress_rate} tokens; an indexer of {arch.ca_index_n_heads} heads",
        f"heads of {arch.ca_index_head_dim} picks {arch.ca_index_top_k} of them",
        f"an entry per {arch.ca_hca_compress_rate} tokens; every query sees all",
        f"{arch.num_experts} per layer of width {arch.moe_intermediate_size}, {arch.top_k_experts} per token",
        f"a shared expert of width {arch.ffn_intermediate}",
        f"{layers[0].expert_bytes:,} bytes in 2 bits, {layers[42].expert_bytes:,} in the last layer",
        f"{outputs.layout.expert_stride * arch.num_experts * arch.num_layers:,} bytes on disk",
        f"{len(outputs.index.entries):,} in a file of {outputs.index.file_size:,} bytes",
        f"{arch.hc_sinkhorn_iters} rounds",
        f"times {arch.routed_scaling_factor}.",
        f"Gates are at most {arch.swiglu_limit:.0f}, the other half of each expert lies within ±{arch.swiglu_limit:.0f}",
        f"{token_bytes('bfloat16'):,} bytes each in bfloat16 and {token_bytes('float32'):,} in float32",
        ", ".join(f"`{effort}`" for effort in list(EFFORTS)[:-1]) + f" and `{list(EFFORTS)[-1]}`",
        f"at most {MAX_BLOCK_BYTES >> 10} KiB and values at most {MAX_DEPTH} levels",
        f"Arguments that hold `{DSML}`",
    )
    assert [phrase for phrase in phrases if phrase not in text] == []
    assert ROUTING_EPS == 1e-20
