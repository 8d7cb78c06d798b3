"""The demo's architecture: every feature of DeepSeek-V4-Flash at a size that fits a repository."""

VOCAB = 2048
HIDDEN = 256
RATIOS = [0, 0, 4, 128, 4, 4]
"""Tokens in an entry, layer by layer: 0 has a window only, 4 an indexer that picks entries, 128 neither."""
HASH_LAYERS = 2
EXPERTS = 12
TOP_K = 4
MOE_INTERMEDIATE = 128
LIMIT = 10.0
HEADS, HEAD_DIM, ROPE_DIM = 8, 64, 32
Q_LORA, O_LORA, O_GROUPS = 128, 128, 2
WINDOW_TOKENS = 128
INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 16, 32, 64
STREAMS, SINKHORN_STEPS = 4, 20
EPS, HC_EPS = 1e-6, 1e-6
SCALING = 1.5

ROW_TOKENS = 1024
GROUP_SIZE = 64
BITS = 4
EXPERT_BITS = 2
GATE_GROUP = 32

SHARES = {"story": 22, "chat-memory": 10, "chat-copy": 4, "tools": 30}
"""Kinds of documents that come more or less often than the shared lessons say."""


def published_config() -> dict[str, object]:
    """Return config.json of the float checkpoint."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "compress_ratios": RATIOS,
        "compress_rope_theta": 160000.0,
        "eos_token_id": 1,
        "hc_eps": HC_EPS,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": SINKHORN_STEPS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "index_head_dim": INDEX_DIM,
        "index_n_heads": INDEX_HEADS,
        "index_topk": INDEX_TOPK,
        "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": MOE_INTERMEDIATE,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts_per_tok": TOP_K,
        "num_hash_layers": HASH_LAYERS,
        "num_hidden_layers": len(RATIOS),
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "o_groups": O_GROUPS,
        "o_lora_rank": O_LORA,
        "q_lora_rank": Q_LORA,
        "qk_rope_head_dim": ROPE_DIM,
        "rms_norm_eps": EPS,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000.0,
        "routed_scaling_factor": SCALING,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": WINDOW_TOKENS,
        "swiglu_limit": LIMIT,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "vocab_size": VOCAB,
    }


def gate_group(layer: int) -> int:
    """Return the group size of an expert's gate matrix: smaller than the others', but in the last layer."""
    return GROUP_SIZE if layer == len(RATIOS) - 1 else GATE_GROUP


def quantization() -> dict[str, object]:
    """Return the quantization table of the packed checkpoint: 4 bits, experts 2."""
    table: dict[str, object] = {"bits": BITS, "group_size": GROUP_SIZE, "mode": "affine"}
    for layer in range(len(RATIOS)):
        stem = f"model.layers.{layer}.ffn.switch_mlp."
        for part, group in (("gate", gate_group(layer)), ("up", GROUP_SIZE), ("down", GROUP_SIZE)):
            table[f"{stem}{part}_proj"] = {"bits": EXPERT_BITS, "group_size": group}
    return table


PARAMETERS = "eleven million"

FLOAT32 = ("attn_hc.", "ffn_hc.", "hc_head.", "sinks", "attn_sink", "e_score_correction_bias")
BFLOAT16 = ("position_bias", ".ape", "mlp.gate.weight", "ffn.gate.weight", "norm.weight")
EXPERTS_OF = ("mlp.experts.", "ffn.switch_mlp.")


def bits_of(name: str, shape: tuple[int, ...]) -> int:
    """Return the width tensor `name` (of the class or packed) is stored with: 2, 4, 16 (BF16), 32, or 64 (integers)."""
    if name.endswith("tid2eid"):
        return 64
    if any(part in name for part in FLOAT32):
        return 32
    if name.endswith(BFLOAT16) or len(shape) < 2:
        return 16
    return EXPERT_BITS if any(part in name for part in EXPERTS_OF) else BITS
