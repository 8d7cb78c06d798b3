"""The demo's architecture: every feature of Qwen 3.6 35B-A3B at a size that fits a repository."""

VOCAB = 2048
HIDDEN = 256
EXPERTS = 12
TOP_K = 3
MOE_INTERMEDIATE = 64
SHARED_INTERMEDIATE = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 64, 64
TAPS = 4
ROTARY_FACTOR = 0.25
LAYER_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2

ROW_TOKENS = 1024
GROUP_SIZE = 64
BITS = 4
GATE_BITS = 8

SHARES = {"story": 14, "chat-story": 8, "chat-fact": 40, "chat-style": 8, "chat-memory": 10, "tools": 26}
"""Kinds of documents that come more or less often than the shared lessons say."""


def text_config() -> dict[str, object]:
    """Return the inner configuration, key names of the published checkpoint."""
    return {
        "attention_bias": False,
        "attn_output_gate": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "full_attention_interval": 4,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "layer_types": LAYER_TYPES,
        "linear_conv_kernel_dim": TAPS,
        "linear_key_head_dim": KEY_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_value_head_dim": VALUE_DIM,
        "max_position_embeddings": 4096,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": MOE_INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": len(LAYER_TYPES),
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": ROTARY_FACTOR,
            "rope_theta": 10000000.0,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": SHARED_INTERMEDIATE,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }


def published_config() -> dict[str, object]:
    """Return config.json of the float checkpoint."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text_config(),
        "tie_word_embeddings": False,
    }


def quantization() -> dict[str, object]:
    """Return the quantization table of the packed checkpoint: 4 bits, the router and the shared gate 8."""
    table: dict[str, object] = {"bits": BITS, "group_size": GROUP_SIZE, "mode": "affine"}
    for layer in range(len(LAYER_TYPES)):
        for name in ("gate", "shared_expert_gate"):
            table[f"language_model.model.layers.{layer}.mlp.{name}"] = {"bits": GATE_BITS, "group_size": GROUP_SIZE}
    return table


def bits_of(name: str, shape: tuple[int, ...]) -> int:
    """Return the width tensor `name` is stored with: 4, 8 for gates, 16 for vectors and convolutions (BF16)."""
    if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
        return GATE_BITS
    return 16 if len(shape) < 2 or name.endswith("conv1d.weight") else BITS


PARAMETERS = "eight million"
