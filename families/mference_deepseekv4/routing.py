"""The routing rule: the square root of a softplus scores every expert; token ids or the scores choose.

The first layers take a token's experts from a table. The others take the largest scores, a bias added that is no part
of the weights; the lower id wins a tie. Either way the weights are the chosen scores, renormalised and scaled.
"""

from typing import cast

import mlx.core as mx

from mference_core import MferenceError, Router, Routing, Step, Weights
from mference_deepseekv4.arch import ROUTING_EPS, DeepseekV4Arch
from mference_deepseekv4.install import TRUNK
from mference_deepseekv4.streams import LayerRows
from mference_kernels.dense import row_products
from mference_kernels.routing import top_k


def _table(weights: Weights, name: str, experts: int) -> mx.array:
    """Return the experts of each token id. Raises `MferenceError` if one of them does not exist."""
    table = weights.array(name)
    ends = cast("list[int]", [table.min().item(), table.max().item()])
    odd = [n for n in ends if not 0 <= n < experts]
    if odd:
        raise MferenceError(what=f"tensor {name}", got=f"a table with expert {odd[0]}", expected=f"0 to {experts - 1}")
    return table.astype(mx.int32)


def router(arch: DeepseekV4Arch, weights: Weights) -> Router:
    """Return the rule of every layer."""
    layers = range(arch.num_layers)
    gates = [f"{TRUNK}layers.{layer}.ffn.gate." for layer in layers]
    projection = [weights.matrix(f"{gate}weight") for gate in gates]
    tables = {n: _table(weights, f"{gates[n]}tid2eid", arch.num_experts) for n in layers if arch.is_hashed(n)}
    biases = {
        n: weights.array(f"{gates[n]}e_score_correction_bias").astype(mx.float32)
        for n in layers
        if not arch.is_hashed(n)
    }

    def scores(layer: int, h: LayerRows) -> mx.array:
        return mx.sqrt(mx.logaddexp(row_products(h.rows, projection[layer]), 0.0))

    def choose(layer: int, s: mx.array, step: Step | None) -> Routing:
        if layer in tables:
            assert step is not None, "a layer that chooses by token id needs the ids"
            ids = tables[layer][step.ids]
        else:
            ids = top_k(s + biases[layer], arch.top_k_experts)
        chosen = mx.take_along_axis(s, ids, axis=-1)
        share = chosen / (chosen.sum(axis=-1, keepdims=True) + ROUTING_EPS)
        shares = share * arch.routed_scaling_factor
        mx.async_eval(ids, shares)  # both are asked for at once, one after the other
        return Routing(ids=ids, weights=shares)

    return Router(
        experts=arch.num_experts,
        top_k=arch.top_k_experts,
        scores=scores,
        choose=choose,
        bias=biases.get,
        table=tables.get,
    )
