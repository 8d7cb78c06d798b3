"""Linear maps over dense or affine-quantised matrices."""

import mlx.core as mx
from attrs import frozen

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


linear, rows, gathered_linear = linear_ops, rows_ops, gathered_linear_ops
