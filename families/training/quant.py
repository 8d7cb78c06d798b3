"""Affine quantisation in torch: one scale and one bias, both BF16, per group of 64 inputs of a row."""

import config
from torch import Tensor


def affine(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise along the last axis; returns codes (int32, shape of `weight`), scales and biases (float32 values of BF16).

    The codes are fitted to the rounded scale and bias, so that `scale * code + bias` is the nearest stored value.
    """
    groups = weight.float().unflatten(-1, (-1, config.GROUP_SIZE))
    biases = groups.amin(-1).bfloat16().float()
    top = 2**bits - 1
    scales = ((groups.amax(-1) - biases) / top).clamp_min(1e-6).bfloat16().float()
    codes = ((groups - biases[..., None]) / scales[..., None]).round().clamp(0, top)
    return codes.flatten(-2).int(), scales, biases


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Return `weight` as the stored checkpoint will give it back."""
    if bits == 16:
        return weight.bfloat16().to(weight.dtype)
    codes, scales, biases = affine(weight, bits)
    values = codes.unflatten(-1, (-1, config.GROUP_SIZE)) * scales[..., None] + biases[..., None]
    return values.flatten(-2).to(weight.dtype)
