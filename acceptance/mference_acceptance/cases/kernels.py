"""The kernels that this machine chooses compute what their definitions compute."""

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
from attrs import evolve

from mference_acceptance.arrays import number
from mference_acceptance.case import PRODUCT_BAR, CaseFailed, Figures, require
from mference_acceptance.context import Context
from mference_core.engine import Engine
from mference_core.weights import FLOATS
from mference_kernels import levels, native, quant
from mference_kernels.quant import Matrix, Quantized

ROWS = (1, 2, 17)
"""Rows of a product: decode, a small batch, and more than any register holds."""


def kernel_bars(context: Context) -> Figures:
    """Native kernels equal the contract bit for bit, and the family's own products are within rounding of mlx's."""
    chosen = levels.level()
    checked = [_checked(variant) for variant in native.variants() if variant not in levels.UNPROVEN]
    if chosen.variant is not None:
        native.choose(chosen.variant)  # a check leaves its own variant chosen
    worst, products = 0.0, 0
    with context.engine("mlx") as engine:
        for name, matrix, multiply in _matrices(engine):
            worst, products = max(worst, _product(name, matrix, multiply)), products + 1
    ran = levels.cpu() is not None
    return {
        "level": f"native {chosen.variant}" if ran else "mlx operations",
        "checked": ", ".join(checked) or "no native variant",
        "matrices": products,
        "bar": PRODUCT_BAR,
        "worst": worst,
    }


def _checked(variant: str) -> str:
    problem = levels.self_check(variant)
    if problem is not None:
        raise CaseFailed(problem)
    return variant


Multiply = Callable[[mx.array], mx.array]


def _matrices(engine: Engine) -> Iterator[tuple[str, Matrix, Multiply]]:
    """Yield every resident matrix, and those of each routed layer's first and last expert, with the product chosen."""
    for name, weight in engine.checkpoint.weights.items():
        if len(weight.shape) == 2 and (weight.quant is not None or weight.dtype in FLOATS):
            matrix = engine.weights.matrix(name)
            yield name, matrix, partial(quant.linear, w=matrix)
    for index, held in enumerate(engine.experts):
        if held is None:
            continue
        experts = held.weights()
        for role, stack in (("gate", experts.gate), ("up", experts.up), ("down", experts.down)):
            for expert in (0, held.source.experts - 1):
                name, matrix = f"layer {index} expert {expert} {role}", _one(stack, expert)
                yield name, matrix, partial(_expert_product, stack=stack, expert=expert, dtype=experts.dtype)


def _one(stack: Matrix, expert: int) -> Matrix:
    if isinstance(stack, Quantized):
        parts = {part: getattr(stack, part)[expert] for part in ("codes", "scales", "biases")}
        return evolve(stack, **parts)
    return evolve(stack, weight=stack.weight[expert])


def _expert_product(x: mx.array, *, stack: Matrix, expert: int, dtype: mx.Dtype) -> mx.array:
    """Multiply by one expert's matrix, as the routed block does."""
    fast, matrix = levels.cpu(), _one(stack, expert)
    if fast and fast.can_multiply(matrix):
        return quant.linear(x, matrix)
    return quant.gathered_linear(x, mx.full((x.shape[0],), expert, dtype=mx.int32), stack, dtype)


def _product(name: str, matrix: Matrix, multiply: Multiply) -> float:
    """Return the largest error of products with a matrix, and of its rows, as `PRODUCT_BAR` counts it."""
    wide, worst = _widened(matrix), 0.0
    out, width = _shape(matrix)
    squares = mx.square(quant.rows_ops(mx.arange(out), wide))
    for rows in ROWS:
        x = mx.random.normal((rows, width), key=mx.random.key(rows))
        size = number(mx.sqrt(mx.mean(mx.square(x) @ squares.T)))
        what = f"product of {rows} rows with {name}"
        worst = max(worst, _error(multiply(x), quant.linear_ops(x, wide), size, what))
    ids = mx.array([0, out // 2, out - 1], dtype=mx.int32)
    size = number(mx.sqrt(mx.mean(squares[ids])))
    return max(worst, _error(quant.rows(ids, wide), quant.rows_ops(ids, wide), size, f"rows of {name}"))


def _shape(matrix: Matrix) -> tuple[int, int]:
    """Return outputs and inputs."""
    if isinstance(matrix, Quantized):
        out, words = matrix.codes.shape
        return out, words * 32 // matrix.bits
    out, width = matrix.weight.shape
    return out, width


def _widened(matrix: Matrix) -> Matrix:
    """Return a matrix whose products the definitions compute in float32."""
    if isinstance(matrix, Quantized):
        return evolve(matrix, scales=matrix.scales.astype(mx.float32), biases=matrix.biases.astype(mx.float32))
    return evolve(matrix, weight=matrix.weight.astype(mx.float32))


def _error(got: mx.array, want: mx.array, size: float, what: str) -> float:
    """Return the root mean square of the difference over `size`, what such values come to without cancelling out."""
    require(got.shape == want.shape, f"{what} has shape {list(got.shape)}, expected {list(want.shape)}")
    difference = number(mx.sqrt(mx.mean(mx.square(got.astype(mx.float32) - want))))
    error = difference / size if size else difference
    require(error <= PRODUCT_BAR, f"{what} is off by {error:.2g} of its size, at most {PRODUCT_BAR} is allowed")
    return error
