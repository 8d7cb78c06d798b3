"""Numbers on the pages are those of the code: whoever changes one is told where it is written."""

from pathlib import Path

import attrs
import pytest

import mference_gemma4
from mference_acceptance.case import HALF_BAR, HALF_PRODUCT_BAR, LAYER_BAR, PRODUCT_BAR, ROUTER_WEIGHT_BAR, WIDEST_BAR
from mference_core import engine, gturbo
from mference_core.arch import MASK_KINDS, Arch, key_of
from mference_core.experts import plan, reader, table
from mference_core.gturbo import index, layout
from mference_core.install import transaction
from mference_core.kv import Linear
from mference_core.manifest import FLAGS, MANIFEST_CAP_BYTES, SLOT_ROWS
from mference_gemma4.arch import CHECKPOINT, PINNED
from mference_gemma4.chat import MAX_CALL_BYTES

DOCS = Path(__file__).parents[2] / "docs"
MIB = 1 << 20
EXPERT_BYTES = 3 * PINNED.hidden_size * PINNED.moe_intermediate_size * 36 // 64
STRIDE_BYTES = gturbo.page_up(EXPERT_BYTES)
LINEAR = Linear(rows={"k": (1, 1)}, dtype="float32")


def token_bytes(dtype: str) -> int:
    return mference_gemma4.mference_kv_layout(PINNED, 4096, engine.DEFAULT_CHUNK, dtype).bytes_per_token


NAMES = {"unquantized": "unquantised", "none": "absent"}
WRITTEN = {
    "memory.md": (
        f"blocks of {LINEAR.block_rows} tokens",
        f"{plan.AUTO_SHARE * 100} % of the memory available",
        f"`--prefill-chunk auto` is {engine.DEFAULT_CHUNK} tokens",
        f"halved every {table.AGEING_PLANS} plans",
        f"on {reader.WORKERS} threads",
        f"{engine.SCRATCH_FLOOR_BYTES // MIB} MiB + 4",
        f"{LAYER_BAR:.0e}".replace("e-0", "e-"),
    ),
    "acceptance.md": (
        f"at most {LAYER_BAR:.0e} for rows and logits".replace("e-0", "e-"),
        f"its own disagreement counts, at most {WIDEST_BAR:.0e}.".replace("e-0", "e-"),
        f"Router weights may differ by {ROUTER_WEIGHT_BAR:.0e},".replace("e-0", "e-"),
        f"a root mean square of {PRODUCT_BAR:.0e} of their size".replace("e-0", "e-"),
        f"at most {HALF_BAR} of that of the golden where products run in float32, {HALF_PRODUCT_BAR} where",
    ),
    "gturbo-format.md": (
        f'"Page" is {gturbo.PAGE_BYTES:,} bytes',
        f"a multiple of {gturbo.MIN_PAGE_BYTES:,}",
        f"Entries of {index.ENTRY_BYTES} bytes follow at {index.HEADER_BYTES}",
        "dtype: " + ", ".join(f"{code} {dtype}" for code, dtype in enumerate(index.DTYPE_CODES)),
        f"At most {layout.LAYOUT_CAP_BYTES // MIB} MiB.",
        f"At most {MANIFEST_CAP_BYTES // MIB} MiB;",
        ", ".join(f"`{flag}` {str(value).lower()}" for flag, value in FLAGS.items()),
        f"these {len(attrs.fields(Arch))} keys",
        *(f"{number} {kind}" for number, kind in list(MASK_KINDS.items())[1:]),
        f"{transaction.CHUNK_BYTES // MIB} MiB, and 1 GiB more for outputs above 1 GiB",
    ),
    "families/gemma4.md": (
        f"`{CHECKPOINT.repo}` at `{CHECKPOINT.revision}`",
        f"{CHECKPOINT.download_bytes:,} and {CHECKPOINT.installed_bytes:,} bytes",
        f"| Layers | {PINNED.num_layers}: five with a sliding window of {PINNED.sliding_window} tokens, one full",
        f"{PINNED.hidden_size}; {PINNED.vocab_size:,}, embedding",
        f"{PINNED.num_heads} heads; sliding layers {PINNED.num_kv_heads} key heads of {PINNED.head_dim},",
        f"full layers {PINNED.num_full_kv_heads} of {PINNED.full_head_dim}",
        f"{PINNED.num_experts} per layer of width {PINNED.moe_intermediate_size}, {PINNED.top_k_experts} per token",
        f"a shared branch of width {PINNED.ffn_intermediate}",
        f"{EXPERT_BYTES:,} bytes in 4 bits, {STRIDE_BYTES:,} with padding",
        f"{STRIDE_BYTES * PINNED.num_experts * PINNED.num_layers:,} bytes on disk",
        f"window plus chunk, {PINNED.sliding_window + engine.DEFAULT_CHUNK} rows",
        f"{token_bytes('bfloat16'):,} bytes each in bfloat16 and {token_bytes('float32'):,} in float32",
        f"capped at ±{PINNED.final_logit_softcap:.0f}",
        f"at most {MAX_CALL_BYTES >> 10} KiB",
    ),
}


@pytest.mark.parametrize("page", WRITTEN)
def test_the_page_says_what_the_code_does(page: str) -> None:
    text = " ".join((DOCS / page).read_text("utf-8").split())
    missing = [phrase for phrase in WRITTEN[page] if phrase not in text]
    assert missing == []


def test_the_pages_list_the_keys_and_rows_of_a_manifest() -> None:
    text = (DOCS / "gturbo-format.md").read_text("utf-8")
    keys = " ".join(key_of(field) for field in attrs.fields(Arch))
    assert keys in " ".join(text.split())
    for slot, rows in SLOT_ROWS.items():
        said = ", ".join(NAMES.get(row.scheme, f"affine {row.weight_bits}") for row in rows)
        (line,) = [line for line in text.splitlines() if line.startswith("| `") and f"`{slot}`" in line.split("|")[1]]
        assert line.split("|")[2].strip() == said, slot


def test_the_scratch_formula() -> None:
    """memory.md states what `scratch_bytes` computes, and a chunk of nothing costs the floor and the logits."""
    text = (DOCS / "memory.md").read_text("utf-8")
    formula = "96 MiB + 4 · (c · k · (3 H + 3 M) + c · (8 H + 4 F) + 4 V)"
    assert formula in text
    k, H, M = PINNED.top_k_experts, PINNED.hidden_size, PINNED.moe_intermediate_size
    F, V = PINNED.ffn_intermediate, PINNED.vocab_size
    for c in (0, 1, 512):
        want = 96 * MIB + 4 * (c * k * (3 * H + 3 * M) + c * (8 * H + 4 * F) + 4 * V)
        assert engine.scratch_bytes(PINNED, c) == want
