"""What one call advances: positions per row, and rows that are padding."""

from typing import Any

import attrs
import mlx.core as mx
import pytest

from mference_core.graph import Attended, Layer, LayerGraph, Routing
from mference_core.steps import advance, make_step


def test_positions_go_on_from_each_timelines_own_offset() -> None:
    step = make_step([0, 7, 100], mx.zeros((3, 4), dtype=mx.int32), [4, 1, 2])
    assert step.positions.tolist() == [[0, 1, 2, 3], [7, 8, 9, 10], [100, 101, 102, 103]]
    assert step.positions.dtype == mx.int32
    assert (step.offsets, step.lengths) == ((0, 7, 100), (4, 1, 2))


def test_without_lengths_every_column_is_real() -> None:
    assert make_step([3, 4], mx.zeros((2, 5), dtype=mx.int32)).lengths == (5, 5)


def test_a_step_equals_another_of_the_same_values() -> None:
    ids = mx.array([[1, 2]])
    assert make_step([0], ids) == make_step([0], mx.array([[1, 2]]))
    assert make_step([0], ids) != make_step([0], mx.array([[1, 3]]))


def dense(index: int, log: list[str]) -> Layer:
    """Return a layer that writes down the order it is called in and adds its index."""

    def attend(x: mx.array, states: Any, step: Any) -> Attended:
        assert states == [f"state {index} of {b}" for b in range(len(step.lengths))]
        log.append(f"attend {index}")
        return Attended(h=x)

    def shared(h: mx.array) -> mx.array:
        log.append(f"shared {index}")
        return h + index

    def combine(h: mx.array, shared: mx.array, routed: mx.array | None) -> mx.array:
        assert routed is None
        log.append(f"combine {index}")
        return 2 * h + shared

    return Layer(attend=attend, shared=shared, combine=combine)


@pytest.mark.parametrize("batch", [1, 2])
def test_layers_run_in_order_and_are_observed(batch: int) -> None:
    log: list[str] = []
    graph = LayerGraph(
        embed=lambda ids: ids.astype(mx.float32)[..., None],
        layers=tuple(dense(i, log) for i in range(3)),
        final_norm=lambda x: x + 0.5,
        project=lambda x: 10 * x,
        dtype=mx.float32,
        vocab_size=1,
    )
    seen: list[tuple[int, Any, Routing | None]] = []
    states: list[list[Any]] = [[f"state {i} of {b}" for b in range(batch)] for i in range(3)]
    step = make_step([0] * batch, mx.array([[1, 2]] * batch))
    x = advance(graph, [None] * 3, states, step, lambda i, x, r: seen.append((i, x, r)))
    assert x.tolist() == [[[32.0], [59.0]]] * batch
    assert graph.head(x).tolist() == [[[325.0], [595.0]]] * batch
    assert log == [f"{what} {i}" for i in range(3) for what in ("attend", "shared", "combine")]
    assert [(i, r) for i, _, r in seen] == [(0, None), (1, None), (2, None)]
    assert seen[-1][1] is x
    assert attrs.fields_dict(type(step)).keys() == {"offsets", "lengths", "positions", "ids"}
