"""Affine quantisation in torch: one scale and one bias, both BF16, per group of inputs of a row."""

import config
from torch import Tensor

Piece = tuple[Tensor, int, int]
"""A parameter or a part of one, its bits and its group size."""


def affine(weight: Tensor, bits: int, group: int = config.GROUP_SIZE) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise along the last axis; returns codes (int32, shape of `weight`), scales and biases (float32 values of BF16).

    The values span a group, but for 2 bits, whose four values lie half and one and a half deviations from its mean: that
    loses least of a bell curve. Codes are fitted to the rounded scale and bias, so that `scale * code + bias` is the
    nearest stored value.
    """
    groups = weight.float().unflatten(-1, (-1, group))
    top = 2**bits - 1
    if bits == 2:
        mean = groups.mean(-1)
        scales = groups.std(-1, correction=0).clamp_min(1e-6).bfloat16().float()
        biases = (mean - 1.5 * scales).bfloat16().float()
    else:
        biases = groups.amin(-1).bfloat16().float()
        scales = ((groups.amax(-1) - biases) / top).clamp_min(1e-6).bfloat16().float()
    codes = ((groups - biases[..., None]) / scales[..., None]).round().clamp(0, top)
    return codes.flatten(-2).int(), scales, biases


def rounded(weight: Tensor, bits: int, group: int = config.GROUP_SIZE) -> Tensor:
    """Return `weight` as the stored checkpoint will give it back: quantised, or BF16 (16 bits), or as it is (more)."""
    if bits > 16:
        return weight
    if bits == 16:
        return weight.bfloat16().to(weight.dtype)
    codes, scales, biases = affine(weight, bits, group)
    values = codes.unflatten(-1, (-1, group)) * scales[..., None] + biases[..., None]
    return values.flatten(-2).to(weight.dtype)


def whole(name: str, weight: Tensor) -> list[Piece]:
    """Return a parameter that is stored in one way."""
    return [(weight, config.bits_of(name, weight.shape), config.GROUP_SIZE)]
