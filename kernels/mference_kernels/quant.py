"""Linear maps over dense or affine-quantised matrices."""

from collections.abc import Sequence
from functools import cache
from typing import cast

import mlx.core as mx
from attrs import evolve, frozen

from mference_kernels import levels
from mference_kernels.fields import array_field


@frozen(kw_only=True)
class Dense:
    """A matrix [out, in] of floats, or a stack of them with leading axes."""

    weight: mx.array = array_field()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.weight.nbytes)


@frozen(kw_only=True)
class Quantized:
    """A matrix [out, in] as packed codes; w = code * scale + bias per `group_size` inputs.

    Shapes: codes (out, in * bits / 32) uint32; scales, biases (out, in / group_size); leading axes stack matrices.
    Products run in the dtype of `scales`: widen them to float32 for float32 results.
    """

    codes: mx.array = array_field()
    scales: mx.array = array_field()
    biases: mx.array = array_field()
    bits: int
    group_size: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.codes.nbytes + self.scales.nbytes + self.biases.nbytes)


Matrix = Dense | Quantized


def linear_ops(x: mx.array, w: Matrix) -> mx.array:
    """Return x wT.

    Shapes: x (..., in), w [out, in] -> (..., out).   Dtypes: any float in, same out; computed in w's float dtype.
    """
    if isinstance(w, Dense):
        return (x.astype(w.weight.dtype) @ w.weight.T).astype(x.dtype)
    if _wrong_for_rows() and x.size > x.shape[-1]:
        weight = mx.dequantize(w.codes, w.scales, w.biases, group_size=w.group_size, bits=w.bits)
        return (x.astype(weight.dtype) @ weight.T).astype(x.dtype)
    y = mx.quantized_matmul(
        x.astype(w.scales.dtype),
        w.codes,
        w.scales,
        w.biases,
        transpose=True,
        group_size=w.group_size,
        bits=w.bits,
    )
    return y.astype(x.dtype)


@cache
def _wrong_for_rows() -> bool:
    """Say whether the library's product of several rows cannot be used: mlx 0.32.4 on CUDA.

    Measured there in float32: off by 20 to 40 at 64 inputs and by 0.03 at 512, and up to 50 s to compile; one row is right.
    """
    return mx.default_device() != mx.Device(mx.cpu) and not mx.metal.is_available()


def rows_ops(ids: mx.array, w: Matrix) -> mx.array:
    """Return rows of `w`, as an embedding table does.

    Shapes: ids (...) integer -> (..., in), in w's float dtype.
    """
    if isinstance(w, Dense):
        return w.weight[ids]
    return mx.dequantize(w.codes[ids], w.scales[ids], w.biases[ids], group_size=w.group_size, bits=w.bits)


def gathered_linear_ops(x: mx.array, slots: mx.array, w: Matrix, dtype: mx.Dtype) -> mx.array:
    """Multiply each row by the matrix of its own slot; a row's result does not depend on the other rows.

    Shapes: x (P, in), slots (P,) int32, w [slots, out, in] -> (P, out).   Dtypes: `dtype` inside and out.
    """
    lhs = x.astype(dtype)[:, None, :]
    if isinstance(w, Dense):
        weight = w.weight
        if weight.dtype != dtype and slots.size < weight.shape[0]:
            weight, slots = weight[slots], mx.arange(slots.size, dtype=mx.int32)
        weight = weight.astype(dtype).swapaxes(-1, -2)
        return mx.gather_mm(lhs, weight, rhs_indices=slots.astype(mx.uint32))[:, 0]
    codes, scales, biases = w.codes, w.scales, w.biases
    if scales.dtype != dtype and slots.size < codes.shape[0]:  # widen only what is used
        codes, scales, biases = codes[slots], scales[slots], biases[slots]
        slots = mx.arange(slots.size, dtype=mx.int32)
    return mx.gather_qmm(
        lhs,
        codes,
        scales.astype(dtype),
        biases.astype(dtype),
        rhs_indices=slots.astype(mx.uint32),
        transpose=True,
        group_size=w.group_size,
        bits=w.bits,
    )[:, 0]


def keeps_companions(bits: int, group_size: int) -> bool:
    """Say whether products here read half-precision scales and biases exactly: the native kernels widen them as they go.

    Elsewhere products run in the companions' dtype, so float32 products need them widened in memory.
    """
    fast = levels.cpu()
    return fast is not None and bits in fast.BITS and group_size in fast.GROUPS


def linear(x: mx.array, w: Matrix) -> mx.array:
    """Choose: native kernels where `levels` allows them and they know the codes, else `linear_ops`."""
    fast = levels.cpu()
    return fast.linear_cpu(x, w) if fast and fast.can_multiply(w) else linear_ops(x, w)


def linears(x: mx.array, ws: Sequence[Matrix]) -> list[mx.array]:
    """Return `linear(x, w)` of each w: one call where native kernels know all of them."""
    fast = levels.cpu()
    if fast and all(fast.can_multiply(w) for w in ws):
        return cast("list[mx.array]", fast.linears_cpu(x, ws))
    return [linear(x, w) for w in ws]


def rows(ids: mx.array, w: Matrix) -> mx.array:
    """Choose as `linear` does; native kernels return float32."""
    fast = levels.cpu()
    return fast.rows_cpu(ids, w) if fast and fast.can_multiply(w) else rows_ops(ids, w)


def split_rows(w: Matrix, parts: int) -> tuple[Matrix, ...]:
    """Return a matrix [out, in] cut into `parts` along its outputs, in place: block-diagonal products use one each.

    Raises: ValueError if `parts` does not divide the outputs.
    """
    out = (w.weight if isinstance(w, Dense) else w.codes).shape[0]
    if out % parts:
        raise ValueError(f"[split_rows] parts must divide {out} outputs but got {parts}")
    made: list[Matrix] = []
    for first in range(0, out, out // parts):
        rows = slice(first, first + out // parts)
        if isinstance(w, Dense):
            made.append(Dense(weight=w.weight[rows]))
        else:
            made.append(evolve(w, codes=w.codes[rows], scales=w.scales[rows], biases=w.biases[rows]))
    return tuple(made)


def block_linear(x: mx.array, parts: Sequence[Matrix]) -> mx.array:
    """Multiply by a block-diagonal matrix: equal parts of each row by `parts` in turn.

    Shapes: x (..., G * in), G parts [out, in] -> (..., G * out).   Dtypes: as `linear`.
    """
    fast = levels.cpu()
    if fast and x.size == x.shape[-1] and all(fast.can_multiply(w) for w in parts):
        return cast("mx.array", fast.block_row_cpu(x, parts))
    cut = mx.split(x, len(parts), axis=-1)
    return mx.concatenate([linear(part, w) for part, w in zip(cut, parts, strict=True)], axis=-1)


gathered_linear = gathered_linear_ops
