"""Resident weights: each tensor read once, straight into the memory of its own array."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mference_core.errors import ManifestError
from mference_core.tensors import Quant, Span, Weight
from mference_kernels.quant import Dense, Matrix, Quantized, keeps_companions

MX_DTYPES = {
    "U32": mx.uint32,
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
    "I64": mx.int64,
    "I32": mx.int32,
}
FLOATS = {"BF16", "F16", "F32"}


def packed_shape(shape: tuple[int, ...], quant: Quant) -> tuple[int, ...]:
    """Return the shape of the uint32 codes of a logical shape."""
    return (*shape[:-1], shape[-1] * quant.bits // 32)


def grouped_shape(shape: tuple[int, ...], quant: Quant) -> tuple[int, ...]:
    """Return the shape of scales and biases of a logical shape."""
    return (*shape[:-1], shape[-1] // quant.group_size)


def exact_product(companions: str, product: mx.Dtype) -> mx.Dtype:
    """Return the dtype products with such companions run in: `product` where it holds them exactly, else float32."""
    return product if MX_DTYPES[companions] in (product, mx.bfloat16) else mx.float32


def read_array(span: Span, dtype: str, shape: tuple[int, ...]) -> mx.array:
    """Read a span into a new evaluated array, without a second copy.

    Raises `ManifestError` naming the file when it is shorter than the span.
    """
    array = mx.zeros(shape, MX_DTYPES[dtype])
    mx.eval(array)
    view = memoryview(cast("Any", array)).cast("B")
    if len(view) != span.size:
        raise ManifestError(what=f"tensor of {span.path}", got=f"{span.size} bytes", expected=f"{len(view)} bytes")
    _fill(span.path, span.offset, view)
    return array


def _fill(path: Path, offset: int, view: memoryview) -> None:
    done = 0
    with path.open("rb", buffering=0) as handle:
        while done < len(view):
            count = os.preadv(handle.fileno(), [view[done:]], offset + done)
            if count == 0:
                raise ManifestError(
                    what=f"{path}",
                    got=f"{offset + done} bytes long",
                    expected=f"at least {offset + len(view)}",
                    remedy="verify or install the model again",
                )
            done += count


class Weights:
    """Resident weights by name.

    `dtype` is the dtype of hidden rows. `product_dtype` is what products run in: float32 on CPUs, where half-precision
    products are slow and coarse, and wherever hidden rows are float32; companions of codes are widened to it once,
    unless the kernels here read them as stored (`keeps_companions`). Companions it cannot hold exactly (`exact_product`) make their matrix's products run in float32.
    """

    def __init__(self, weights: Mapping[str, Weight], dtype: mx.Dtype, product_dtype: mx.Dtype) -> None:
        self.dtype, self.product_dtype = dtype, product_dtype
        self._weights = weights
        self._arrays: dict[str, mx.array] = {}
        self._matrices: dict[str, Matrix] = {}

    def _weight(self, name: str) -> Weight:
        if name not in self._weights:
            raise ManifestError(what=f"tensor {name}", got="missing", remedy="install the model again")
        return self._weights[name]

    def array(self, name: str) -> mx.array:
        """Return a plain tensor, in the dtype it is stored in unless something is added to it: then in float32.

        Raises `ManifestError` if it is missing or quantised.
        """
        if name not in self._arrays:
            weight = self._weight(name)
            if weight.quant is not None:
                raise ManifestError(what=f"tensor {name}", got="quantised", expected="plain values")
            self._arrays[name] = _plain(weight)
        return self._arrays[name]

    def matrix(self, name: str) -> Matrix:
        """Return a matrix [out, in] for products, dense or quantised as stored."""
        if name not in self._matrices:
            self._matrices[name] = self._matrix(self._weight(name))
        return self._matrices[name]

    def _matrix(self, weight: Weight) -> Matrix:
        if weight.quant is None:
            dense = _plain(weight).astype(self.product_dtype)
            mx.eval(dense)
            return Dense(weight=dense)
        assert weight.scales is not None
        assert weight.biases is not None
        groups = grouped_shape(weight.shape, weight.quant)
        held = _held_companions(weight, weight.quant, self.product_dtype)
        scales = read_array(weight.scales, weight.companions, groups).astype(held)
        biases = read_array(weight.biases, weight.companions, groups).astype(held)
        mx.eval(scales, biases)
        return Quantized(
            codes=read_array(weight.data, "U32", packed_shape(weight.shape, weight.quant)),
            scales=scales,
            biases=biases,
            bits=weight.quant.bits,
            group_size=weight.quant.group_size,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors made so far."""
        return sum(made.nbytes for held in (self._arrays, self._matrices) for made in held.values())


def _held_companions(weight: Weight, quant: Quant, product: mx.Dtype) -> mx.Dtype:
    """Return the dtype scales and biases are held in: as stored where products read that exactly, else widened."""
    if keeps_companions(quant.bits, quant.group_size):
        return MX_DTYPES[weight.companions]
    return exact_product(weight.companions, product)


def _plain(weight: Weight) -> mx.array:
    stored = read_array(weight.data, weight.dtype, weight.shape)
    if not weight.add:
        return stored
    added = stored.astype(mx.float32) + weight.add
    mx.eval(added)
    return added


def resident_bytes(weights: Mapping[str, Weight], product: mx.Dtype) -> int:
    """Return the bytes `weights` take in memory when products run in `product`."""
    total = 0
    for weight in weights.values():
        if weight.quant is None:
            size = product.size if weight.dtype in FLOATS and len(weight.shape) > 1 else 4 if weight.add else None
            total += weight.data.size if size is None else _count(weight.shape) * size
        else:
            held = _held_companions(weight, weight.quant, product)
            total += weight.data.size + 2 * _count(grouped_shape(weight.shape, weight.quant)) * held.size
    return total


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
