"""The demo's architecture: every feature of Gemma 4 26B-A4B at a size that fits a repository."""

VOCAB = 4096
HIDDEN = 256
INTERMEDIATE = 256
MOE_INTERMEDIATE = 64
EXPERTS = 16
TOP_K = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
GLOBAL_KV_HEADS = 1
GLOBAL_HEAD_DIM = 128
WINDOW_TOKENS = 128
SOFTCAP = 30.0
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2

ROW_TOKENS = 1024
GROUP_SIZE = 64
BITS = 4
ROUTER_BITS = 8


def text_config() -> dict[str, object]:
    """Return the inner configuration, key names of the published checkpoint."""
    return {
        "attention_bias": False,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "enable_moe_block": True,
        "eos_token_id": 1,
        "final_logit_softcapping": SOFTCAP,
        "global_head_dim": GLOBAL_HEAD_DIM,
        "head_dim": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": HIDDEN,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": INTERMEDIATE,
        "layer_types": LAYER_TYPES,
        "max_position_embeddings": 4096,
        "model_type": "gemma4_text",
        "moe_intermediate_size": MOE_INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_global_key_value_heads": GLOBAL_KV_HEADS,
        "num_hidden_layers": len(LAYER_TYPES),
        "num_key_value_heads": KV_HEADS,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": WINDOW_TOKENS,
        "tie_word_embeddings": True,
        "top_k_experts": TOP_K,
        "use_double_wide_mlp": False,
        "vocab_size": VOCAB,
    }


def published_config() -> dict[str, object]:
    """Return config.json of the float checkpoint."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text_config(),
        "tie_word_embeddings": True,
        "vocab_size": VOCAB,
    }


def quantization() -> dict[str, object]:
    """Return the quantization table of the packed checkpoint: 4 bits, the router's projection 8."""
    table: dict[str, object] = {"bits": BITS, "group_size": GROUP_SIZE, "mode": "affine"}
    for layer in range(len(LAYER_TYPES)):
        name = f"language_model.model.layers.{layer}.router.proj"
        table[name] = {"bits": ROUTER_BITS, "group_size": GROUP_SIZE}
    return table


def bits_of(name: str, shape: tuple[int, ...]) -> int:
    """Return the width tensor `name` is stored with: 4, 8 for the router's projection, 16 for vectors (BF16)."""
    if name.endswith("router.proj.weight"):
        return ROUTER_BITS
    return BITS if len(shape) >= 2 else 16


PARAMETERS = "eight million"
