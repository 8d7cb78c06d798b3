"""Half precision, layer by layer: errors do not add up, and a flipped choice of experts does not count."""

from typing import Any

import mlx.core as mx

from mference_acceptance.arrays import number
from mference_acceptance.case import HALF_BAR, HALF_PRODUCT_BAR, Figures, require
from mference_acceptance.context import Context, Golden
from mference_acceptance.runs import first_leaf
from mference_core.engine import Engine
from mference_core.graph import Routing
from mference_core.routed import routed_branch
from mference_core.steps import make_step


def half_precision_layers(context: Context) -> Figures:
    """In bfloat16 each layer, given the golden input and the golden experts, comes close to the golden output."""
    worst, flipped, rows = 0.0, 0, 0
    with context.engine("mlx", dtype="bfloat16") as engine:
        bar = HALF_BAR if engine.weights.product_dtype == mx.float32 else HALF_PRODUCT_BAR
        for golden in context.goldens:
            require(engine.graph.dtype == mx.bfloat16, f"hidden rows are {engine.graph.dtype}, not bfloat16")
            if not isinstance(_input(engine, golden, 0), mx.array):
                return {"skipped": "hidden rows are several arrays, of which goldens hold one"}
            for index in range(len(engine.graph.layers)):
                error, flips = _layer(engine, golden, index)
                where = f"prompt {golden.name} layer {index}"
                require(error <= bar, f"{where} is off by {error:.2g} of its size, at most {bar} is allowed")
                worst, flipped, rows = max(worst, error), flipped + flips, rows + len(golden.ids)
    return {"worst": worst, "bar": bar, "share_of_rows_with_other_experts": flipped / max(1, rows)}


def _layer(engine: Engine, golden: Golden, index: int) -> tuple[float, int]:
    """Return one layer's error as `HALF_BAR` counts it, and the number of rows that chose other experts."""
    layer, held = engine.graph.layers[index], engine.experts[index]
    ids = mx.array([golden.ids], dtype=mx.int32)
    step = make_step([0], ids)
    attended = layer.attend(_input(engine, golden, index), [engine.session().states[index]], step)
    routed, flips = None, 0
    if layer.route is not None and held is not None and attended.rows is not None:
        routing, flips = _hold_routing(layer.route(attended.h, step), golden, index)
        routed = routed_branch(layer, held, attended.rows, routing, step)
    out: Any = layer.combine(attended.h, layer.shared(attended.h), routed)
    got, want = first_leaf(out), golden.arrays[f"layer.{index}"]
    require(got.dtype == engine.graph.dtype, f"layer {index} returns {got.dtype}, not {engine.graph.dtype}")
    require(bool(mx.isfinite(got).all()), f"layer {index} is not finite")
    difference = got[0].astype(mx.float32) - want
    return number(mx.sqrt(mx.mean(difference * difference) / mx.mean(want * want))), flips


def _input(engine: Engine, golden: Golden, index: int) -> Any:
    """Return the golden input of a layer; what enters layer 0 is the model's own where it has axes of streams besides."""
    x = engine.graph.embed(mx.array([golden.ids], dtype=mx.int32))
    if index:
        return golden.arrays[f"layer.{index - 1}"].astype(engine.graph.dtype)[None]
    golden_x = golden.arrays["embeddings"].astype(engine.graph.dtype)[None]
    return golden_x if isinstance(x, mx.array) and x.shape == golden_x.shape else x


def _hold_routing(routing: Routing, golden: Golden, index: int) -> tuple[Routing, int]:
    """Give rows that chose other experts than the golden the golden's experts and weights; count them."""
    want = golden.arrays[f"router.{index}.experts"][None]
    other = ~(mx.sort(routing.ids, axis=-1) == want).all(axis=-1, keepdims=True)
    weights = golden.arrays[f"router.{index}.weights"][None]
    held = Routing(
        ids=mx.where(other, want, routing.ids).astype(mx.int32), weights=mx.where(other, weights, routing.weights)
    )
    return held, int(number(other.sum()))
