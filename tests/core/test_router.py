"""What a router ranks by."""

import attrs
import mlx.core as mx
import pytest

from mference_core.router import Router, no_router


def test_a_bias_is_added_where_a_layer_has_one() -> None:
    scores = mx.array([[[0.5, -1.0]]])
    plain = no_router()
    assert plain.bias is None
    assert plain.ranked_by(0, scores) is scores
    bias = mx.array([-0.25, 1.5])
    router: Router = attrs.evolve(plain, bias=lambda layer: bias if layer else None)
    assert router.ranked_by(0, scores) is scores
    assert router.ranked_by(1, scores).tolist() == [[[0.25, 0.5]]]


def test_a_dense_layer_has_no_scores() -> None:
    with pytest.raises(ValueError, match="layer 3 is dense"):
        no_router().scores(3, mx.zeros((1, 1)))


def test_a_table_is_stated_by_layer() -> None:
    table = mx.array([[1, 0], [0, 0]])
    router: Router = attrs.evolve(no_router(), table=lambda layer: None if layer else table)
    assert no_router().looked_up(0) is None
    assert router.looked_up(0) is table
    assert router.looked_up(1) is None
