"""The routed block in one call: each pair on its own, same bits for any slot, tile, thread count and variant."""

import ctypes
from typing import Any

import mlx.core as mx
import pytest

from mference_kernels import cpu, native
from mference_kernels.activations import geglu_ops, swiglu_ops
from mference_kernels.experts import (
    ExpertWeights,
    gated_experts_ops,
    gated_linear,
    gated_linear_ops,
    placed_sum,
    placed_sum_ops,
    weighted_sum,
    weighted_sum_ops,
)
from mference_kernels.quant import Quantized

pytestmark = pytest.mark.usefixtures("restored")
SLOTS, HIDDEN, INNER = 7, 384, 192


def stack(out: int, width: int, bits: int, group: int, seed: int) -> Quantized:
    weight = mx.random.normal((SLOTS, out, width), key=mx.random.key(seed)) * width**-0.5
    codes, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
    return Quantized(
        codes=codes, scales=scales.astype(mx.bfloat16), biases=biases.astype(mx.bfloat16), bits=bits, group_size=group
    )


def experts(bits: tuple[int, int, int] = (4, 4, 4), group: int = 64) -> ExpertWeights:
    return ExpertWeights(
        gate=stack(INNER, HIDDEN, bits[0], group, 1),
        up=stack(INNER, HIDDEN, bits[1], group, 2),
        down=stack(HIDDEN, INNER, bits[2], group, 3),
        dtype=mx.float32,
    )


def inputs(rows: int, choices: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(seed), 2)
    return mx.random.normal((rows, HIDDEN), key=keys[0]), mx.random.randint(0, SLOTS, (rows, choices), key=keys[1])


@pytest.mark.parametrize("activation", [geglu_ops, swiglu_ops])
@pytest.mark.parametrize("bits", [(4, 4, 4), (8, 8, 8), (2, 2, 2), (4, 8, 2)])
def test_close_to_the_definition(activation: object, bits: tuple[int, int, int]) -> None:
    held, (x, slots) = experts(bits), inputs(5, 3)
    want = gated_experts_ops(x, slots, held, activation)  # type: ignore[arg-type]
    error = cpu.gated_experts_cpu(x, slots, held, activation) - want  # type: ignore[arg-type]
    assert float(mx.sqrt(mx.mean(error * error) / mx.mean(want * want))) < 1e-6


@pytest.mark.parametrize("group", [32, 64])
def test_variants_and_threads_agree(group: int) -> None:
    held, (x, slots) = experts(group=group), inputs(90, 4)
    native.choose("portable")
    native.set_threads(1)
    want = cpu.gated_experts_cpu(x, slots, held, geglu_ops)
    for variant in native.variants():
        for threads in (1, 2, 5):
            native.choose(variant)
            native.set_threads(threads)
            assert mx.array_equal(cpu.gated_experts_cpu(x, slots, held, geglu_ops), want), (variant, threads)


def test_a_pair_is_the_same_alone_in_any_slot() -> None:
    held, (x, slots) = experts(), inputs(40, 2)
    want = cpu.gated_experts_cpu(x, slots, held, swiglu_ops)
    order = mx.array([3, 0, 6, 1, 5, 2, 4])
    moved = ExpertWeights(
        **{
            role: Quantized(codes=w.codes[order], scales=w.scales[order], biases=w.biases[order], bits=4, group_size=64)
            for role, w in (("gate", held.gate), ("up", held.up), ("down", held.down))
            if isinstance(w, Quantized)
        },
        dtype=mx.float32,
    )
    place = mx.argsort(order)
    for row in (0, 17, 39):
        alone = cpu.gated_experts_cpu(x[row : row + 1], place[slots[row : row + 1, 1:]], moved, swiglu_ops)
        assert mx.array_equal(alone[0, 0], want[row, 1])


def test_the_weighted_sum_equals_its_definition_bit_for_bit() -> None:
    held, (x, slots) = experts(), inputs(6, 3)
    weights = mx.random.normal(slots.shape, key=mx.random.key(9))
    want = weighted_sum_ops(cpu.gated_experts_cpu(x, slots, held, geglu_ops), weights)
    assert mx.array_equal(cpu.gated_experts_cpu(x, slots, held, geglu_ops, weights), want)


def test_sums_of_scattered_pairs_equal_their_definition_bit_for_bit() -> None:
    rows, choices, width = 7, 3, 45
    keys = mx.random.split(mx.random.key(4), 3)
    y = mx.random.normal((rows, choices, width), key=keys[0])
    weights = mx.random.normal((rows, choices), key=keys[1])
    want = weighted_sum_ops(y, weights)
    assert mx.array_equal(weighted_sum(y, weights), want)
    order = mx.random.permutation(rows * choices, key=keys[2])
    place: Any = mx.argsort(order).tolist()
    scattered = y.reshape(-1, width)[order]
    for cuts in ([], [4], [1, 2, 19]):
        parts = [part for part in mx.split(scattered, cuts) if part.size] if cuts else [scattered]
        assert mx.array_equal(placed_sum(parts, place, weights), want)
        assert mx.array_equal(placed_sum_ops(parts, place, weights), want)
    with pytest.raises(ValueError, match="out of range"):
        placed_sum([scattered], [*place[:-1], rows * choices], weights)
    with pytest.raises(ValueError, match="must have 21 rows"):
        weighted_sum(y[1:], weights)


def test_a_block_for_every_row_equals_its_steps_bit_for_bit() -> None:
    held, x = experts((4, 8, 4)), inputs(6, 1)[0].reshape(2, 3, HIDDEN)
    gate, up, down = (
        Quantized(
            codes=w.codes[2],
            scales=w.scales[2].astype(mx.float32),
            biases=w.biases[2].astype(mx.float32),
            bits=w.bits,
            group_size=64,
        )
        for w in (held.gate, held.up, held.down)
        if isinstance(w, Quantized)
    )
    got = cpu.gated_linear_cpu(x, gate, up, down, geglu_ops)
    alone = cpu.gated_experts_cpu(x.reshape(6, HIDDEN), mx.full((6, 1), 2, mx.int32), held, geglu_ops)
    assert mx.array_equal(got.reshape(6, 1, HIDDEN), alone)
    want = gated_linear_ops(x, gate, up, down, geglu_ops)
    assert mx.allclose(got, want, rtol=1e-4, atol=1e-5)
    assert mx.array_equal(gated_linear(x, gate, up, down, geglu_ops), got)


def test_experts_anywhere_in_memory_give_the_same_bits() -> None:
    """A table of addresses, most of them odd, as parts of a mapped file have."""
    held, (x, slots) = experts(), inputs(9, 2)
    want = cpu.gated_experts_cpu(x, slots, held, geglu_ops)
    kept, table = [], (ctypes.c_void_p * (9 * SLOTS))()
    for slot in range(SLOTS):
        for role, w in enumerate((held.gate, held.up, held.down)):
            assert isinstance(w, Quantized)
            for part, array in enumerate((w.codes, w.scales, w.biases)):
                data = native.contents(array[slot])
                copy = (ctypes.c_char * (len(data) + 1)).from_buffer(bytearray(b"\0" + data))
                kept.append(copy)
                table[9 * slot + 3 * role + part] = ctypes.addressof(copy) + 1
    shapes = [cpu.matrix_args(w, "test") for w in (held.gate, held.up, held.down) if isinstance(w, Quantized)]
    assert mx.array_equal(cpu.mapped_experts_cpu(x, slots, shapes, table, geglu_ops), want)
    assert len(kept) == 9 * SLOTS


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_outside_the_slabs_is_refused(slot: int) -> None:
    x, slots = inputs(1, 2)
    slots[0, 1] = slot
    with pytest.raises(ValueError, match="out of range"):
        cpu.gated_experts_cpu(x, slots, experts(), geglu_ops)


def test_unknown_activations_are_refused() -> None:
    x, slots = inputs(1, 2)
    with pytest.raises(ValueError, match="activation"):
        cpu.gated_experts_cpu(x, slots, experts(), lambda gate, up: gate + up)
