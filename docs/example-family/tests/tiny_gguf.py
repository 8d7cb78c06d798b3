"""Writes the tiny reference checkpoint as a GGUF file, the way llama.cpp's own converter lays one out."""

import struct
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mference_smollm2.convert import IN_LAYER, ROTATED, TOP

Tensor = tuple[int, tuple[int, ...], bytes]
"""Type number, shape slowest axis first, bytes."""

TYPES: dict[type, tuple[int, str]] = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Return a metadata value with its type number."""
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if isinstance(item, list):
        inner = [value(part) for part in item]
        return struct.pack("<I", 9) + inner[0][:4] + struct.pack("<Q", len(item)) + b"".join(p[4:] for p in inner)
    number, form = TYPES[type(item)]
    return struct.pack("<I", number) + struct.pack(form, item)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a file of version 3 with 32-byte alignment."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, (kind, shape, payload) in tensors.items():
        data += bytes(-len(data) % 32)
        axes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += text(name) + struct.pack("<I", len(shape)) + axes + struct.pack("<IQ", kind, len(data))
        data += payload
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def byte_letters() -> list[str]:
    """Return the letter each byte has in a byte-level vocabulary."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in own else chr(next(spare)) for byte in range(256)]


def metadata() -> dict[str, Any]:
    """Return the tiny checkpoint's metadata: 256 tokens, of which three are control tokens."""
    letters = byte_letters()
    pairs = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    tokens = [*WORDS, *letters[:250], *("".join(pair) for pair in pairs)]
    return {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "llama.context_length": 1024,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e5,
        "llama.vocab_size": 256,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 253,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def paired(rows: mx.array, head_dim: int) -> mx.array:
    """Put the two rows of each rotated pair side by side."""
    return rows.reshape(-1, 2, head_dim // 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def q4_1(codes: mx.array, scales: mx.array, biases: mx.array) -> bytes:
    """Return blocks of 32: a scale, a minimum, and value j beside value j + 16 in one byte."""
    blocks: Any = codes.reshape(-1, 2, 16).tolist()
    parts: Any = [mx.repeat(part.astype(mx.float32), 2, axis=1).flatten().tolist() for part in (scales, biases)]
    out = b""
    for (low, high), scale, bias in zip(blocks, *parts, strict=True):
        out += struct.pack("<ee", scale, bias) + bytes(a | b << 4 for a, b in zip(low, high, strict=True))
    return out


def float_bytes(values: mx.array) -> bytes:
    """Return values as float32 bytes."""
    return bytes(memoryview(cast("Any", values.astype(mx.float32))))


def tensors_of(reference: Path) -> dict[str, Tensor]:
    """Return the tensors of the quantised reference: matrices in Q4_1, the embedding and norms in F32."""
    stored = mx.load(str(reference / "mlx" / "model.safetensors"))
    assert isinstance(stored, dict)
    back = {new: old for old, new in TOP.items()}
    for layer in range(3):
        back |= {f"model.layers.{layer}.{new}.weight": f"blk.{layer}.{old}.weight" for old, new in IN_LAYER.items()}
    made: dict[str, Tensor] = {}
    for name, old in back.items():
        weight, stem = stored[name], name.removesuffix(".weight")
        if weight.ndim == 1:
            made[old] = (0, weight.shape, float_bytes(weight))
            continue
        codes = (weight[..., None] >> (4 * mx.arange(8, dtype=mx.uint32))) & 15
        parts = [codes.reshape(weight.shape[0], -1), stored[f"{stem}.scales"], stored[f"{stem}.biases"]]
        if any(f".{part}." in old for part in ROTATED):
            parts = [paired(part, 16) for part in parts]
        if old in TOP:
            groups = [mx.repeat(part.astype(mx.float32), 64, axis=1) for part in parts[1:]]
            made[old] = (0, parts[0].shape, float_bytes(parts[0].astype(mx.float32) * groups[0] + groups[1]))
        else:
            made[old] = (3, parts[0].shape, q4_1(*parts))
    return made
