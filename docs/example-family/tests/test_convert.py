"""The converter loses nothing: the tiny file has the goldens' logits, blocks are what their formulas say."""

import contextlib
import json
import random
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny_gguf import TEMPLATE, metadata, tensors_of, write_gguf

from mference_acceptance.cases.parity import against_goldens
from mference_acceptance.context import Context
from mference_core.checkpoint import peek
from mference_core.engine import open_model
from mference_core.plugins import load
from mference_core.tokens import Tokenizer
from mference_smollm2.blocks import affine_codes, q6_k_values, q8_0_values
from mference_smollm2.convert import convert, main
from mference_smollm2.gguf import GgufError, read_gguf


def bytes_of(data: bytes, block: int) -> mx.array:
    return mx.array(list(data), mx.uint8).reshape(-1, block)


def test_the_converted_file_has_the_logits_of_the_goldens(tiny: Path, tmp_path: Path, reference: Path) -> None:
    """Codes in groups of 32 with half-precision companions, rotated rows put back: the same numbers in the end."""
    (tmp_path / "goldens").symlink_to(reference / "goldens")
    convert(tiny, tmp_path / "mlx")
    family = load("smollm2")

    class Converted(Context):
        @property
        def reference(self) -> Path:
            return tmp_path

    figures = against_goldens(Converted(family=family, folder=tmp_path), "mlx")
    assert figures["prompts"] == 3
    checkpoint = open_model(family, tmp_path / "mlx", "full-sha256")
    weight = checkpoint.weights["model.layers.0.self_attn.q_proj.weight"]
    assert weight.quant is not None
    assert (weight.quant.bits, weight.quant.group_size, weight.companions) == (4, 32, "F16")
    assert peek(tmp_path / "mlx").kind == "mlx"


def test_the_tokenizer_and_template_come_along(tiny: Path, tmp_path: Path) -> None:
    convert(tiny, tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert tokenizer.control == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.template == TEMPLATE
    ids = tokenizer.encode("the the 12")
    assert tokenizer.decode(ids) == "the the 12"
    assert 255 in ids  # " the", by its merges
    assert tokenizer.variables["eos_token"] == "<|im_end|>"  # noqa: S105  a token, no secret


def test_codes_keep_their_scale_and_minimum() -> None:
    rng = random.Random(4)  # noqa: S311
    data = b"".join(struct.pack("<ee", rng.uniform(-3, 3), rng.uniform(-9, 9)) + rng.randbytes(16) for _ in range(50))
    codes, scales, biases = affine_codes(bytes_of(data, 20))
    got = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=4)
    for n in range(50):
        scale, minimum = struct.unpack_from("<ee", data, 20 * n)
        packed = data[20 * n + 4 : 20 * n + 20]
        want = [scale * code + minimum for code in [b & 15 for b in packed] + [b >> 4 for b in packed]]
        assert mx.array_equal(got[n], mx.array(want))


def test_eight_bit_blocks_are_exact() -> None:
    rng = random.Random(5)  # noqa: S311
    data = b"".join(struct.pack("<e", rng.uniform(-3, 3)) + rng.randbytes(32) for _ in range(50))
    want = [
        [struct.unpack_from("<e", data, 34 * n)[0] * b for b in struct.unpack_from("32b", data, 34 * n + 2)]
        for n in range(50)
    ]
    assert mx.array_equal(q8_0_values(bytes_of(data, 34)), mx.array(want))


def six_bit_value(block: bytes, index: int) -> float:
    """Return one value of a Q6_K block by the format's addressing, a number at a time."""
    half, within = divmod(index, 128)
    run, lane = divmod(within, 32)
    low = block[64 * half + 32 * (run % 2) + lane]
    code = (low >> 4 if run > 1 else low & 15) | ((block[128 + 32 * half + lane] >> (2 * run)) & 3) << 4
    scale = struct.unpack_from("b", block, 192 + index // 16)[0]
    return float(struct.unpack_from("<e", block, 208)[0] * scale * (code - 32))


def test_six_bit_blocks_are_exact() -> None:
    rng = random.Random(6)  # noqa: S311
    blocks = [rng.randbytes(208) + struct.pack("<e", rng.uniform(-3, 3)) for _ in range(5)]
    want = [[six_bit_value(block, index) for index in range(256)] for block in blocks]
    assert mx.array_equal(q6_k_values(bytes_of(b"".join(blocks), 210)), mx.array(want))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"general.architecture": "mamba"}, "expected 'llama'"),
        ({"llama.attention.layer_norm_rms_epsilon": 1e-6}, "norm epsilon is .* expected 1e-05"),
        ({"llama.rope.scaling.type": "yarn"}, "expected plain rotary dense layers"),
        ({"llama.attention.head_count": 0}, "heads is 0"),
        ({"llama.block_count": "three"}, "metadata llama.block_count is str"),
        ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer is gpt2 with qwen2"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges is not pairs"),
        ({"tokenizer.ggml.tokens": ["a"] * 256}, "tokens is repeated"),
    ],
)
def test_what_the_family_does_not_compute_is_refused(
    tmp_path: Path, reference: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "odd.gguf"
    write_gguf(path, metadata() | change, tensors_of(reference))
    with pytest.raises(GgufError, match=said) as caught:
        convert(path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["odd.gguf"]


def test_an_unknown_tensor_leaves_nothing_behind(tmp_path: Path, reference: Path) -> None:
    tensors = tensors_of(reference) | {"output.weight": (0, (1,), bytes(4))}
    write_gguf(tmp_path / "odd.gguf", metadata(), tensors)
    with pytest.raises(GgufError, match=r"tensor output.weight is unknown to the family"):
        convert(tmp_path / "odd.gguf", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["odd.gguf"]


def test_a_file_cut_anywhere_is_refused_in_one_line(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 64, 3), *range(100, 6000, 371), len(data) - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(GgufError) as caught:
            read_gguf(cut)
        assert "\n" not in str(caught.value)


def test_counts_that_cannot_be_meant_are_refused(tiny: Path, tmp_path: Path) -> None:
    """No length of the file is believed before memory is taken for it."""
    rng, data = random.Random(9), tiny.read_bytes()  # noqa: S311
    spoilt = tmp_path / "spoilt.gguf"
    errors = []
    for _ in range(300):
        changed = bytearray(data)
        at = rng.randrange(4, 6000)
        changed[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", rng.randbytes(4)])
        spoilt.write_bytes(changed)
        with contextlib.suppress(GgufError):
            read_gguf(spoilt)
            continue
        errors.append(at)
    assert len(errors) > 30


def test_the_command_says_one_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny), str(tmp_path / "out")]) == 0
    assert main([str(tiny), str(tmp_path / "out")]) == 1
    assert main([]) == 2
    assert main([str(tmp_path / "none.gguf"), str(tmp_path / "other")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "usage", "error"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
