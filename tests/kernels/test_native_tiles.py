"""The tile variant on tiles emulated in C: the same bits as the contract and as every other variant."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mference_kernels import compile as build
from mference_kernels import cpu, native
from mference_kernels.activations import swiglu_ops
from mference_kernels.experts import ExpertWeights
from mference_kernels.quant import Quantized

LAYOUTS = [(bits, group) for bits in (2, 4, 8) for group in (32, 64, 128)]


@pytest.fixture(scope="module")
def emulated(native_library: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The library with emulated tiles in place of the real one."""
    del native_library
    if "avx512" not in native.variants():
        pytest.skip("the tile variant needs AVX-512 around its tiles")
    output = tmp_path_factory.mktemp("tiles") / "lib.so"
    flags = ["-O1", "-include", str(Path(__file__).with_name("emulated_tiles.h"))]
    assert build.compile_all(output, *flags) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "LIBRARY", output)
        native.library.cache_clear()
        yield
    native.library.cache_clear()
    native.choose(native.variants()[0])


def matrix(out: int, width: int, bits: int, group: int, stack: tuple[int, ...] = ()) -> Quantized:
    keys = mx.random.split(mx.random.key(out + width), 3)
    words = mx.random.randint(-(2**31), 2**31 - 1, (*stack, out, width * bits // 32), key=keys[0]).view(mx.uint32)
    scales, biases = (mx.random.normal((*stack, out, width // group), key=key) * 0.01 for key in keys[1:])
    return Quantized(codes=words, scales=scales, biases=biases, bits=bits, group_size=group)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("bits", "group"), LAYOUTS)
@pytest.mark.parametrize("rows", [4, 16, 17, 75])
def test_tiles_give_the_bits_of_the_portable_variant(bits: int, group: int, rows: int) -> None:
    for groups in (1, 16, 21):
        w, x = (
            matrix(53, groups * group, bits, group),
            mx.random.normal((rows, groups * group), key=mx.random.key(rows)),
        )
        native.choose("portable")
        want = cpu.linear_cpu(x, w)
        native.choose("amx")
        assert mx.array_equal(cpu.linear_cpu(x, w), want)


@pytest.mark.usefixtures("emulated")
def test_tiles_give_the_same_routed_block() -> None:
    keys = mx.random.split(mx.random.key(3), 2)
    x, slots = mx.random.normal((60, 256), key=keys[0]), mx.random.randint(0, 5, (60, 3), key=keys[1])
    held = ExpertWeights(
        gate=matrix(96, 256, 4, 64, (5,)),
        up=matrix(96, 256, 4, 64, (5,)),
        down=matrix(256, 96, 4, 32, (5,)),
        dtype=mx.float32,
    )
    native.choose("portable")
    want = cpu.gated_experts_cpu(x, slots, held, swiglu_ops)
    native.choose("amx")
    assert mx.array_equal(cpu.gated_experts_cpu(x, slots, held, swiglu_ops), want)
