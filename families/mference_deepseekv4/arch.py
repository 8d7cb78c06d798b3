"""Pinned facts of DeepSeek-V4-Flash: dimensions and constraints of its `arch`.

Unusual: the residual is several streams that are mixed at every layer; a layer attends to a window, and to compressed
entries of the past beyond it, all of them (rate 128) or those an indexer picks (rate 4); one row per token is both key
and value; the first layers choose their experts by token id. `config` says how a config.json states all this.

Sources: transformers 5.24.0 `deepseek_v4`, the release's own inference code, and the checkpoint pinned below.
"""

import math
from typing import Any

from attrs import field, frozen

from mference_core import Arch, Pinned, must

SLIDING, CSA, HCA = 0, 3, 4
"""Kinds of layers, as the manifest counts them: window only, compressed sparse, heavily compressed."""
CSA_RATE, HCA_RATE = 4, 128
MAX_ROUNDS = 1000
RMS_EPS = 1e-6
ROUTING_EPS = 1e-20
ACTIVATION, SCORING = "silu", "sqrtsoftplus"

CHECKPOINT = Pinned(
    repo="mlx-community/DeepSeek-V4-Flash-2bit-DQ",
    revision="722bf559b7de93575b2320973cf2002e05bfe6c9",
    index_sha256="d1c2d929ab0a35be32cf18026bb31d6f99dad58d6c93a5a2abbe43791f9d6c30",
    model_id="deepseek-v4-flash-2bit-dq",
    download_bytes=97_000_000_000,
    installed_bytes=96_689_373_952,
    licence="MIT",
)


def _fixed(value: Any, key: str | None = None) -> Any:
    """Declare a field with the one value this family computes."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return field(validator=must(shown, lambda _, v: v == value), metadata={"key": key} if key else {})


def _above_zero(key: str | None = None) -> Any:
    return field(validator=must("above 0", lambda _, v: v > 0), metadata={"key": key} if key else {})


def _equals(other: str, shown: str, key: str | None = None) -> Any:
    holds = must(f"equal to {shown}", lambda arch, v: v == getattr(arch, other))
    return field(validator=holds, metadata={"key": key} if key else {})


def _turns(arch: "DeepseekV4Arch", dims: int) -> bool:
    return dims >= 2 and dims % 2 == 0 and dims <= min(arch.head_dim, arch.ca_index_head_dim)


@frozen(kw_only=True)
class DeepseekV4Arch(Arch):
    """The base keys, narrowed to what this family computes, and the keys it writes besides.

    `ca_` stands for compressed attention, `hc_` for the connections between the residual's streams.
    """

    ffn_intermediate: int = _equals("moe_intermediate_size", "moeIntermediateSize")
    moe_intermediate_size: int = _above_zero()
    num_experts: int = _above_zero()
    top_k_experts: int = field(validator=must("from 1 to numExperts", lambda a, v: 1 <= v <= a.num_experts))
    num_kv_heads: int = _fixed(1, "numKVHeads")
    num_full_kv_heads: int = _fixed(1, "numFullKVHeads")
    full_head_dim: int = _equals("head_dim", "headDim")
    sliding_window: int = _above_zero()
    final_logit_softcap: float = _fixed(0)
    rope_theta: float = field(validator=must("above 1", lambda _, v: v > 1))
    full_rope_theta: float = _equals("rope_theta", "ropeTheta")
    partial_rotary_factor: float = field(
        validator=must(
            "caRopeHeadDim / headDim", lambda a, v: math.isclose(v * a.head_dim, a.ca_rope_head_dim, rel_tol=1e-9)
        ),
    )
    tie_word_embeddings: bool = _fixed(value=False)
    attention_k_eq_v: bool = _fixed(value=True, key="attentionKEqV")
    hidden_activation: str = _fixed(ACTIVATION)
    full_attention_layer_mask: tuple[int, ...] = field(
        validator=[
            must("one entry per layer", lambda a, v: len(v) == a.num_layers),
            must("entries 0 (sliding), 3 (CSA) or 4 (HCA)", lambda _, v: set(v) <= {SLIDING, CSA, HCA}),
        ],
    )
    family: str = _fixed("deepseekV4Flash")
    attn_output_gate: bool = _fixed(value=False)
    attention_scale: float = field(
        validator=must("1 / sqrt(headDim)", lambda a, v: math.isclose(v, a.head_dim**-0.5, rel_tol=1e-12)),
    )
    embedding_scaled_by_sqrt_hidden: bool = _fixed(value=False)
    router_scaled: bool = _fixed(value=False)
    ffn_sandwich_norms: bool = _fixed(value=False)
    shared_expert_gated: bool = _fixed(value=False)
    rope_neox_subdim: bool = _fixed(value=False)
    linear_num_k_heads: int = _fixed(0)
    linear_num_v_heads: int = _fixed(0)
    linear_key_head_dim: int = _fixed(0)
    linear_value_head_dim: int = _fixed(0)
    linear_conv_kernel_size: int = _fixed(0)
    ca_q_lora_rank: int = _above_zero()
    ca_o_lora_rank: int = _above_zero()
    ca_o_groups: int = field(validator=must("a divisor of numHeads", lambda a, v: v > 0 and a.num_heads % v == 0))
    ca_rope_head_dim: int = field(validator=must("even, from 2 to headDim and to caIndexHeadDim", _turns))
    ca_index_n_heads: int = _above_zero()
    ca_index_head_dim: int = _above_zero()
    ca_index_top_k: int = _above_zero()
    ca_csa_compress_rate: int = _fixed(CSA_RATE, "caCSACompressRate")
    ca_hca_compress_rate: int = _fixed(HCA_RATE, "caHCACompressRate")
    ca_compress_rope_theta: float = field(validator=must("above 1", lambda _, v: v > 1))
    ca_rope_scaling_factor: float = field(validator=must("at least 1", lambda _, v: v >= 1))
    ca_rope_scaling_original_max: int = _above_zero()
    ca_rope_scaling_beta_fast: float = field(
        validator=must("above caRopeScalingBetaSlow", lambda a, v: v > a.ca_rope_scaling_beta_slow),
    )
    ca_rope_scaling_beta_slow: float = _above_zero()
    hc_mult: int = _above_zero()
    hc_sinkhorn_iters: int = field(validator=must("from 1 to 1000", lambda _, v: 1 <= v <= MAX_ROUNDS))
    hc_eps: float = _above_zero()
    num_hash_routed_layers: int = field(validator=must("at least 0", lambda _, v: v >= 0))
    router_scoring_func: str = _fixed(SCORING)
    routed_scaling_factor: float = _above_zero()
    swiglu_limit: float = _above_zero()

    def kind(self, layer: int) -> int:
        """Return SLIDING, CSA or HCA."""
        return self.full_attention_layer_mask[layer]

    def rate(self, layer: int) -> int:
        """Return how many tokens of a layer make one entry, 0 for a layer with none."""
        return {SLIDING: 0, CSA: self.ca_csa_compress_rate, HCA: self.ca_hca_compress_rate}[self.kind(layer)]

    def is_hashed(self, layer: int) -> bool:
        """Say whether a layer's experts are chosen by token id."""
        return layer < self.num_hash_routed_layers

    @property
    def hc_rows(self) -> int:
        """Rows of a layer's stream mixing: one in and one out per stream, and one per pair of streams."""
        return (2 + self.hc_mult) * self.hc_mult


PINNED = DeepseekV4Arch(
    hidden_size=4096,
    ffn_intermediate=2048,
    moe_intermediate_size=2048,
    num_heads=64,
    num_kv_heads=1,
    num_full_kv_heads=1,
    head_dim=512,
    full_head_dim=512,
    vocab_size=129_280,
    sliding_window=128,
    final_logit_softcap=0.0,
    rope_theta=1e4,
    full_rope_theta=1e4,
    partial_rotary_factor=0.125,
    num_layers=43,
    num_experts=256,
    top_k_experts=6,
    tie_word_embeddings=False,
    attention_k_eq_v=True,
    hidden_activation=ACTIVATION,
    full_attention_layer_mask=(SLIDING, SLIDING) + (CSA, HCA) * 20 + (CSA,),
    family="deepseekV4Flash",
    attn_output_gate=False,
    attention_scale=1 / math.sqrt(512),
    embedding_scaled_by_sqrt_hidden=False,
    router_scaled=False,
    ffn_sandwich_norms=False,
    shared_expert_gated=False,
    rope_neox_subdim=False,
    linear_num_k_heads=0,
    linear_num_v_heads=0,
    linear_key_head_dim=0,
    linear_value_head_dim=0,
    linear_conv_kernel_size=0,
    ca_q_lora_rank=1024,
    ca_o_lora_rank=1024,
    ca_o_groups=8,
    ca_rope_head_dim=64,
    ca_index_n_heads=64,
    ca_index_head_dim=128,
    ca_index_top_k=512,
    ca_csa_compress_rate=CSA_RATE,
    ca_hca_compress_rate=HCA_RATE,
    ca_compress_rope_theta=1.6e5,
    ca_rope_scaling_factor=16.0,
    ca_rope_scaling_original_max=65_536,
    ca_rope_scaling_beta_fast=32.0,
    ca_rope_scaling_beta_slow=1.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    num_hash_routed_layers=3,
    router_scoring_func=SCORING,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
)

__all__ = ["CHECKPOINT", "CSA", "HCA", "PINNED", "RMS_EPS", "ROUTING_EPS", "SLIDING", "DeepseekV4Arch"]
