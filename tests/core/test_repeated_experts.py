"""A choice may name an expert twice, as a table by token id may: each place counts, wherever experts are held."""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions, can_map
from mference_core.graph import Routing
from mference_core.routed import routed_branch
from mference_core.steps import make_step

CHOICES = [[[2, 2, 5], [0, 0, 0], [7, 1, 7]], [[1, 3, 3], [4, 4, 6], [0, 0, 0]]]
LENGTHS = [3, 2]
"""The last row is padding."""


def branch(engine: Engine, rows: mx.array, ids: Any, weights: mx.array) -> mx.array:
    layer, held = engine.graph.layers[1], engine.experts[1]
    assert held is not None
    step = make_step([0, 0], mx.zeros(rows.shape[:2], dtype=mx.int32), LENGTHS)
    return routed_branch(layer, held, rows, Routing(ids=mx.array(ids, dtype=mx.int32), weights=weights), step)


@pytest.fixture(scope="module")
def path() -> Path:
    return cast("Path", plugins.load("deepseekv4").family.reference) / "mlx"


def test_each_place_counts(path: Path) -> None:
    family = plugins.load("deepseekv4")
    rows = mx.random.normal((2, 3, 64), key=mx.random.key(1))
    weights = mx.random.uniform(shape=(2, 3, 3), key=mx.random.key(2))
    with Engine.load(family, path, LoadOptions(dtype="float32", context=32, slots="resident")) as engine:
        ones = mx.ones((2, 3, 1))
        single = [branch(engine, rows, [[[row[rank]] for row in part] for part in CHOICES], ones) for rank in range(3)]
        want = single[0] * weights[..., :1] + single[1] * weights[..., 1:2] + single[2] * weights[..., 2:]
        got = branch(engine, rows, CHOICES, weights)
        assert mx.allclose(got[0], want[0], rtol=1e-6, atol=1e-6)
        assert mx.allclose(got[1, :2], want[1, :2], rtol=1e-6, atol=1e-6)
        kinds: list[Any] = [3, 4, 7, *(["mapped"] if can_map(engine.checkpoint) else [])]
    for slots in kinds:
        with Engine.load(family, path, LoadOptions(dtype="float32", context=32, slots=slots)) as engine:
            again = branch(engine, rows, CHOICES, weights)
            assert mx.array_equal(again[0], got[0]), slots
            assert mx.array_equal(again[1, :2], got[1, :2]), slots
