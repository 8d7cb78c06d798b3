"""The model computes what an independent float32 implementation computes."""

import json

import mlx.core as mx

from mference_acceptance.arrays import best_token, listed, number
from mference_acceptance.case import LAYER_BAR, ROUTER_WEIGHT_BAR, WIDEST_BAR, CaseFailed, Figures, require, within
from mference_acceptance.context import Context, Golden
from mference_acceptance.runs import Trace, first_leaf
from mference_core.engine import Engine
from mference_core.session import Session


def parity_float(context: Context) -> Figures:
    """Layers, routing, states, logits and greedy tokens of the float checkpoint agree with the goldens."""
    return against_goldens(context, "float")


def parity_quantised(context: Context) -> Figures:
    """Layers, routing, states, logits and greedy tokens of the quantised checkpoint agree with the goldens."""
    return against_goldens(context, "mlx")


def parity_install(context: Context) -> Figures:
    """Layers, routing, states, logits and greedy tokens of an install agree with the goldens."""
    return against_goldens(context, "gturbo")


def golden_bar(context: Context) -> float:
    """Return what goldens may be missed by, as `LAYER_BAR` counts it.

    No program can agree with the reference more closely than the reference, taken whole and in pieces, with itself;
    meta.json of the goldens says how closely that is.
    """
    path = context.reference / "goldens" / "meta.json"
    prompts = json.loads(path.read_text("utf-8")).get("prompts", {}) if path.is_file() else {}
    checks = [prompt.get("reference_self_check_max_abs", {}) for prompt in prompts.values()]
    own = [float(value) for check in checks for name, value in check.items() if not name.startswith("min_")]
    return min(WIDEST_BAR, max([LAYER_BAR, *own]))


def against_goldens(context: Context, kind: str) -> Figures:
    """Compare every golden with one engine; returns the bar and the largest errors, relative as it is."""
    worst: dict[str, float] = {"bar": golden_bar(context)}
    with context.engine(kind) as engine:
        for golden in context.goldens:
            for name, error in compare(engine, golden, worst["bar"]).items():
                worst[name] = max(worst.get(name, 0.0), error)
    return {"prompts": len(context.goldens), **worst}


def compare(engine: Engine, golden: Golden, bar: float = LAYER_BAR) -> dict[str, float]:
    """Take one golden prompt and its greedy continuation; raise `CaseFailed` at the first difference."""
    want, trace, session = golden.arrays, Trace(), engine.session()
    logits = session.prefill(golden.ids, observe=trace)
    where = f"prompt {golden.name}"
    worst = {"embeddings": _embeddings(engine, golden, bar), "layers": 0.0, "router_weights": 0.0}
    for index in range(len(engine.graph.layers)):
        worst["router_weights"] = max(worst["router_weights"], _routing(trace, golden, index, bar))
        error = within(trace.rows(index), want[f"layer.{index}"], bar, f"{where} layer {index}")
        worst["layers"] = max(worst["layers"], error)
    last = trace.outputs[len(engine.graph.layers) - 1]
    every = mx.concatenate([engine.graph.head(x)[0] for x in last])
    normed = mx.concatenate([engine.graph.final_norm(x)[0] for x in last])
    worst["final_norm"] = within(normed, want["final_norm"], bar, f"{where} final norm")
    worst["logits"] = within(every, want["logits"], bar, f"{where} logits")
    within(logits, every[-1], bar, f"{where} last logits of the session")
    worst |= _states(session, golden, bar)
    worst["decode"] = 0.0
    for step, token in enumerate(golden.decoded):
        error = within(logits, want["decode.logits"][step], bar, f"{where} decode step {step}")
        worst["decode"] = max(worst["decode"], error)
        best = best_token(logits)
        require(best == token, f"{where} decode step {step} chooses token {best}, the golden {token}")
        logits = session.decode(token)
    return worst


def _embeddings(engine: Engine, golden: Golden, bar: float) -> float:
    got, want = first_leaf(engine.graph.embed(mx.array([golden.ids])))[0], golden.arrays["embeddings"]
    if got.ndim != want.ndim:  # several streams: what the golden has is compared in layer 0
        return 0.0
    return within(got, want, bar, f"prompt {golden.name} embeddings")


def _states(session: Session, golden: Golden, bar: float) -> dict[str, float]:
    """Compare the states after the prompt that the golden has: `state.I.NAME`, the array NAME of layer I's state.

    A name that the state does not know means its only array of that shape.
    """
    wanted = [key for key in golden.arrays if key.startswith("state.")]
    worst = 0.0
    for key in wanted:
        _, index, name = key.split(".", 2)
        where, want = f"prompt {golden.name} {key}", golden.arrays[key]
        require(index.isdigit() and int(index) < len(session.states), f"{where} is of a layer the model does not have")
        held = session.states[int(index)].snapshot().arrays
        alike = [array for array in held.values() if array.shape == want.shape]
        got = held.get(name, alike[0] if len(alike) == 1 else None)
        if got is None:
            shapes = ", ".join(f"{known} {list(array.shape)}" for known, array in held.items())
            raise CaseFailed(f"{where} of shape {list(want.shape)} is none of the layer's arrays: {shapes}")
        worst = max(worst, within(got, want, bar, where))
    return {"states": worst} if wanted else {}


def _routing(trace: Trace, golden: Golden, index: int, bar: float) -> float:
    where, key = f"prompt {golden.name} layer {index}", f"router.{index}"
    if f"{key}.experts" not in golden.arrays:
        require(index not in trace.routings, f"{where} is routed, in the golden it is dense")
        return 0.0
    require(index in trace.routings, f"{where} is dense, in the golden it is routed")
    ids, weights = trace.ids(index), trace.weights(index)
    order = mx.argsort(ids, axis=-1)
    ids, weights = (mx.take_along_axis(a, order, axis=-1) for a in (ids, weights))
    want = golden.arrays[f"{key}.experts"]
    wrong = [row for row, (a, b) in enumerate(zip(listed(ids), listed(want), strict=True)) if a != b]
    if wrong:
        row = wrong[0]
        got, expected = listed(ids[row]), listed(want[row])
        raise CaseFailed(f"{where} token {row} is sent to experts {got}, in the golden to {expected}")
    error = number(mx.abs(weights - golden.arrays[f"{key}.weights"]).max())
    require(error <= ROUTER_WEIGHT_BAR * bar / LAYER_BAR, f"{where} router weights are off by {error:.2g}")
    return error
