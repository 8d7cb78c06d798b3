"""A synthetic GGUF file in Q4_0 for llama.cpp, of the same shapes as a Gemma 4 architecture; standard library only.

Facts of the format: gguf version 3; key names and tensor names are those llama.cpp 0.5 reads for `gemma4`.
"""

import struct
from collections.abc import Iterator
from math import prod, sqrt
from pathlib import Path
from random import Random
from typing import Any

ALIGNMENT = 32
F32, Q4_0 = 0, 2
BLOCK_VALUES, BLOCK_BYTES = 32, 18
U32, I32, F32_KEY, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
Q4_0_DEVIATION = sqrt((16**2 - 1) / 12)

Tensor = tuple[str, tuple[int, ...], int]
"""Name, dimensions as the format writes them (inputs first), type."""


def write_gguf(path: Path, arch: Any, *, context: int, seed: int = 0) -> None:
    """Write a model of `arch`, a Gemma 4 architecture; all matrices Q4_0 but the routers, values of a sane size."""
    tensors = list(_tensors(arch))
    keys = list(_keys(arch, context))
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys)) + b"".join(keys)
    offset = 0
    for name, shape, kind in tensors:
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        offset += -(-_size(shape, kind) // ALIGNMENT) * ALIGNMENT
    draw = Random(seed)  # noqa: S311 (test data)
    blocks: dict[int, bytes] = {}
    with path.open("wb") as file:
        file.write(head.ljust(-(-len(head) // ALIGNMENT) * ALIGNMENT, b"\0"))
        for name, shape, kind in tensors:
            for piece in _values(name, shape, kind, draw, blocks):
                file.write(piece)
            file.write(bytes(-_size(shape, kind) % ALIGNMENT))


def _size(shape: tuple[int, ...], kind: int) -> int:
    return prod(shape) // BLOCK_VALUES * BLOCK_BYTES if kind == Q4_0 else 4 * prod(shape)


def _values(
    name: str, shape: tuple[int, ...], kind: int, draw: Random, blocks: dict[int, bytes]
) -> Iterator[bytes | memoryview]:
    """Yield a tensor's bytes; blocks of one width are made once and used from another place each time."""
    if name == "rope_freqs.weight":
        turning = shape[0] // 4
        yield struct.pack(f"<{shape[0]}f", *([1.0] * turning + [1e30] * (shape[0] - turning)))
        return
    if kind == F32:
        edge = sqrt(3 / shape[0])
        values = [draw.uniform(-edge, edge) for _ in range(prod(shape))] if len(shape) > 1 else [1.0] * shape[0]
        yield struct.pack(f"<{len(values)}f", *values)
        return
    if shape[0] not in blocks:
        scale = struct.pack("<e", 1 / sqrt(shape[0]) / Q4_0_DEVIATION)
        blocks[shape[0]] = b"".join(scale + draw.randbytes(16) for _ in range(200_003))
    data, left = memoryview(blocks[shape[0]]), _size(shape, kind)
    at = draw.randrange(len(data) // BLOCK_BYTES) * BLOCK_BYTES
    while left:
        piece = data[at : at + left]
        yield piece
        left, at = left - len(piece), 0


def _tensors(arch: Any) -> Iterator[Tensor]:
    hidden, experts, width = arch.hidden_size, arch.num_experts, arch.moe_intermediate_size
    yield "token_embd.weight", (hidden, arch.vocab_size), Q4_0
    yield "output_norm.weight", (hidden,), F32
    full = [layer for layer in range(arch.num_layers) if arch.full_attention_layer_mask[layer]]
    if full:
        yield "rope_freqs.weight", (arch.full_head_dim // 2,), F32
    for layer in range(arch.num_layers):
        head = arch.full_head_dim if layer in full else arch.head_dim
        keys = head * (arch.num_full_kv_heads if layer in full else arch.num_kv_heads)
        queries, shared = head * arch.num_heads, arch.ffn_intermediate
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        more = ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
        plain: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in (*norms, *more)}
        plain |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,), "layer_output_scale.weight": (1,)}
        plain |= {"ffn_gate_inp.weight": (hidden, experts), "ffn_gate_inp.scale": (hidden,)}
        plain |= {"ffn_down_exps.scale": (experts,)}
        packed: dict[str, tuple[int, ...]] = {"attn_q": (hidden, queries), "attn_k": (hidden, keys)}
        packed |= {} if layer in full else {"attn_v": (hidden, keys)}
        packed |= {"attn_output": (queries, hidden), "ffn_gate": (hidden, shared), "ffn_up": (hidden, shared)}
        packed |= {"ffn_down": (shared, hidden), "ffn_gate_up_exps": (hidden, 2 * width, experts)}
        packed |= {"ffn_down_exps": (width, hidden, experts)}
        yield from ((f"blk.{layer}.{name}", shape, F32) for name, shape in plain.items())
        yield from ((f"blk.{layer}.{name}.weight", shape, Q4_0) for name, shape in packed.items())


def _keys(arch: Any, context: int) -> Iterator[bytes]:
    sliding = [kind == 0 for kind in arch.full_attention_layer_mask]
    yield _key("general.architecture", STRING, "gemma4")
    yield _key("tokenizer.ggml.model", STRING, "none")
    numbers = {
        "vocab_size": arch.vocab_size,
        "context_length": context,
        "embedding_length": arch.hidden_size,
        "block_count": arch.num_layers,
        "feed_forward_length": arch.ffn_intermediate,
        "expert_feed_forward_length": arch.moe_intermediate_size,
        "expert_count": arch.num_experts,
        "expert_used_count": arch.top_k_experts,
        "attention.head_count": arch.num_heads,
        "attention.key_length": arch.full_head_dim,
        "attention.value_length": arch.full_head_dim,
        "attention.key_length_swa": arch.head_dim,
        "attention.value_length_swa": arch.head_dim,
        "attention.sliding_window": arch.sliding_window,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": arch.full_head_dim,
        "rope.dimension_count_swa": arch.head_dim,
    }
    floats = {
        "attention.layer_norm_rms_epsilon": 1e-6,
        "final_logit_softcapping": arch.final_logit_softcap,
        "rope.freq_base": arch.full_rope_theta,
        "rope.freq_base_swa": arch.rope_theta,
    }
    yield from (_key(f"gemma4.{name}", U32, value) for name, value in numbers.items())
    yield from (_key(f"gemma4.{name}", F32_KEY, value) for name, value in floats.items())
    heads = [arch.num_kv_heads if near else arch.num_full_kv_heads for near in sliding]
    yield _array("gemma4.attention.head_count_kv", I32, struct.pack(f"<{len(heads)}i", *heads), len(heads))
    yield _array("gemma4.attention.sliding_window_pattern", BOOL, bytes(sliding), len(sliding))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _key(name: str, kind: int, value: Any) -> bytes:
    packed = _text(value) if kind == STRING else struct.pack("<f" if kind == F32_KEY else "<I", value)
    return _text(name) + struct.pack("<I", kind) + packed


def _array(name: str, kind: int, data: bytes, count: int) -> bytes:
    return _text(name) + struct.pack("<IIQ", ARRAY, kind, count) + data
