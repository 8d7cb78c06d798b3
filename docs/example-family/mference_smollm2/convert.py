"""Turn a SmolLM2 GGUF file into a model directory, without rounding anything: `python -m mference_smollm2.convert`.

Q4_1 tensors become 4-bit affine codes in groups of 32 with half-precision scales and biases, all others floats. Memory
stays bounded by one tile whatever the size; the directory appears complete or not at all.
"""

import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from attrs import frozen

from mference_core import MferenceError
from mference_smollm2.arch import RMS_EPS
from mference_smollm2.blocks import GROUP, VALUES, affine_codes, unrotated
from mference_smollm2.gguf import Gguf, GgufError, GgufTensor, read_gguf
from mference_smollm2.vocabulary import tokenizer_files

TILE_BYTES = 8 << 20
DTYPE_BYTES = {"U32": 4, "F32": 4, "F16": 2, "BF16": 2}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
ROTATED = ("attn_q", "attn_k")


@frozen(kw_only=True)
class Output:
    """A tensor of the directory: dtype, stored shape, and where it starts in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


def published_name(gguf: Gguf, name: str) -> str:
    """Return the published name of a tensor; raises `GgufError` for one this family does not have."""
    layer, dot, rest = name.removeprefix("blk.").partition(".")
    part = rest.removesuffix(".weight")
    if name in TOP:
        return TOP[name]
    if name.startswith("blk.") and dot and layer.isdigit() and rest != part and part in IN_LAYER:
        return f"model.layers.{int(layer)}.{IN_LAYER[part]}.weight"
    raise GgufError(what=f"{gguf.path} tensor {name}", got="unknown to the family", expected="a tensor of a tied llama")


def config_of(gguf: Gguf) -> dict[str, Any]:
    """Return config.json; raises `GgufError` for another architecture or a feature this family does not compute."""
    if gguf.get("general.architecture", str) != "llama":
        got = repr(gguf.metadata["general.architecture"])
        raise GgufError(what=f"{gguf.path} architecture", got=got, expected="'llama'")
    scaling = [key for key in gguf.metadata if key.startswith("llama.rope.scaling") or "expert" in key]
    if scaling:
        raise GgufError(what=f"{gguf.path} metadata {scaling[0]}", got="there", expected="plain rotary dense layers")
    hidden, heads = gguf.get("llama.embedding_length", int), gguf.get("llama.attention.head_count", int)
    if not heads or hidden % heads:
        raise GgufError(what=f"{gguf.path} heads", got=str(heads), expected=f"a divisor of {hidden}")
    head_dim = gguf.get("llama.rope.dimension_count", int, hidden // heads)
    eps = gguf.get("llama.attention.layer_norm_rms_epsilon", float)
    if eps != struct.unpack("<f", struct.pack("<f", RMS_EPS))[0]:
        raise GgufError(what=f"{gguf.path} norm epsilon", got=str(eps), expected=str(RMS_EPS))
    kinds = {tensor.kind.name for tensor in gguf.tensors.values()}
    quantised = {"quantization": {"group_size": GROUP, "bits": 4, "mode": "affine"}} if "Q4_1" in kinds else {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": gguf.get("llama.feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.get("llama.attention.head_count_kv", int, heads),
        "num_hidden_layers": gguf.get("llama.block_count", int),
        "head_dim": head_dim,
        "vocab_size": gguf.get("llama.vocab_size", int, len(gguf.get("tokenizer.ggml.tokens", list))),
        "max_position_embeddings": gguf.get("llama.context_length", int),
        "rope_theta": gguf.get("llama.rope.freq_base", float, 1e4),
        "rms_norm_eps": RMS_EPS,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        **quantised,
    }


def plan_outputs(gguf: Gguf) -> dict[str, tuple[Output, ...]]:
    """Return what each source tensor becomes, laid out in order without gaps; offsets start at 0."""
    plan, at = dict[str, tuple[Output, ...]](), 0
    for tensor in gguf.tensors.values():
        name = published_name(gguf, tensor.name)
        specs = [(name, VALUES[tensor.kind.name][0] if tensor.kind.name in VALUES else "U32", tensor.shape)]
        if tensor.kind.name == "Q4_1":
            *lead, columns = tensor.shape
            groups, stem = (*lead, columns // GROUP), name.removesuffix(".weight")
            specs = [(name, "U32", (*lead, columns // 8))]
            specs += [(stem + end, "F16", groups) for end in (".scales", ".biases")]
        outputs = []
        for spelled, dtype, shape in specs:
            outputs.append(Output(name=spelled, dtype=dtype, shape=shape, offset=at))
            at += outputs[-1].size
        plan[tensor.name] = tuple(outputs)
    return plan


def header_of(plan: dict[str, tuple[Output, ...]]) -> bytes:
    """Return the head of the safetensors file, length prefix included, padded to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    for output in (output for outputs in plan.values() for output in outputs):
        span = [output.offset, output.offset + output.size]
        entries[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_tile(handle: int, tensor: GgufTensor, row: int, count: int, path: Path) -> mx.array:
    """Return `count` rows as (blocks, bytes of a block) uint8."""
    blocks = mx.zeros((count * tensor.row_bytes // tensor.kind.size, tensor.kind.size), mx.uint8)
    mx.eval(blocks)
    view, done = memoryview(cast("Any", blocks)).cast("B"), 0
    while done < len(view):
        got = os.preadv(handle, [view[done:]], tensor.offset + row * tensor.row_bytes + done)
        if not got:
            raise GgufError(what=str(path), got=f"cut short in {tensor.name}", expected="an unchanged file")
        done += got
    return blocks


def tiles(gguf: Gguf, tensor: GgufTensor, handle: int, head_dim: int) -> Iterator[tuple[int, Sequence[mx.array]]]:
    """Yield (first row, the outputs' rows) of a tensor; a rotated one comes in whole heads, in half-split order."""
    rows = prod(tensor.shape[:-1])
    rotated = any(f".{part}." in tensor.name for part in ROTATED)
    step = head_dim if rotated else 1
    if rows % step:
        raise GgufError(what=f"{gguf.path} tensor {tensor.name}", got=f"{rows} rows", expected=f"heads of {head_dim}")
    size = max(1, TILE_BYTES // (4 * tensor.shape[-1]) // step) * step
    for row in range(0, rows, size):
        count = min(size, rows - row)
        blocks = _read_tile(handle, tensor, row, count, gguf.path)
        if tensor.kind.name == "Q4_1":
            parts: Sequence[mx.array] = affine_codes(blocks)
        else:
            parts = (VALUES[tensor.kind.name][1](blocks),)
        parts = [part.reshape(count, -1) for part in parts]
        if rotated:
            parts = [unrotated(part, head_dim) for part in parts]
        mx.eval(parts)
        yield row, parts


def write_weights(gguf: Gguf, path: Path, head_dim: int) -> None:
    """Write model.safetensors, tile by tile."""
    plan = plan_outputs(gguf)
    head = header_of(plan)
    source = os.open(gguf.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with path.open("xb") as file:
            file.write(head)
            for name, outputs in plan.items():
                for row, parts in tiles(gguf, gguf.tensors[name], source, head_dim):
                    for output, part in zip(outputs, parts, strict=True):
                        row_bytes = output.size // max(1, prod(output.shape[:-1]))
                        file.seek(len(head) + output.offset + row * row_bytes)
                        file.write(memoryview(cast("Any", mx.contiguous(part))).cast("B"))
            file.flush()
            os.fsync(file.fileno())
    finally:
        os.close(source)


def convert(source: Path, output: Path) -> None:
    """Write the model directory `output` from the GGUF file `source`.

    Raises `GgufError`; after any failure nothing is left at `output`.
    """
    if output.exists():
        raise GgufError(what=f"output {output}", got="there already", expected="a new path")
    gguf = read_gguf(source)
    config = config_of(gguf)
    files = {"config.json": json.dumps(config, indent=1) + "\n", **tokenizer_files(gguf)}
    partial = output.with_name(output.name + ".partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise GgufError(what=str(partial), got=f"not to be made ({error.strerror})", expected="a new path") from error
    try:
        for name, text in files.items():
            (partial / name).write_text(text, "utf-8")
        write_weights(gguf, partial / "model.safetensors", config["head_dim"])
        partial.rename(output)
    except OSError as error:
        raise GgufError(what=str(output), got=f"not written ({error.strerror})", expected="room on the disk") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Convert the file of two arguments GGUF and OUT_DIR; return the exit code."""
    if len(arguments) != 2:
        print("usage: python -m mference_smollm2.convert GGUF OUT_DIR", file=sys.stderr)  # noqa: T201
        return 2
    try:
        convert(Path(arguments[0]), Path(arguments[1]))
    except MferenceError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
