"""Gates in programs: of one value a row, or of one per feature."""

import mlx.core as mx
import pytest

from mference_kernels import native
from mference_kernels.program import Builder, Register, compiled

pytestmark = pytest.mark.usefixtures("restored")


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_gate_of_one_value_opens_the_row_as_one_per_feature_does(rows: int) -> None:
    x, gate = mx.random.normal((rows, 37)), mx.random.normal((rows, 1)) * 3

    def write(width: int) -> list[mx.array]:
        def gated(p: Builder) -> tuple[Register]:
            opened, values = p.input(width), p.input(37)
            return (p.sigmoid_gate(opened, values),)

        program = compiled(gated)
        wide = gate if width == 1 else mx.contiguous(mx.broadcast_to(gate, (rows, 37)))
        assert program.runs(wide, x)
        return program(wide, x)

    for variant in native.variants():
        native.choose(variant)
        (one,), (each,) = write(1), write(37)
        assert mx.array_equal(one, each), variant
        assert mx.allclose(one, mx.sigmoid(gate) * x, rtol=1e-6, atol=1e-7), variant


def test_gates_of_another_width_are_refused() -> None:
    builder = Builder()
    with pytest.raises(ValueError, match="widths must be equal but got 2 and 4"):
        builder.sigmoid_gate(builder.input(2), builder.input(4))
