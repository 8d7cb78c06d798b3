"""The layer graph: a layer as five callables, so that streaming, batching and overlap are written once, here in the core.

Arrays of hidden rows have axes (B, L, ...): B token timelines, L tokens of each. A family may carry several arrays
(residual streams, convolution inputs): `x` and `h` are opaque trees whose leaves all start with (B, L).
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from attrs import frozen

from mference_core.state import LayerState
from mference_kernels.experts import ExpertWeights
from mference_kernels.fields import array_field
from mference_kernels.program import Program


@frozen(kw_only=True)
class Step:
    """Which tokens one call advances.

    `offsets[b]` tokens of timeline b are already in its states, and `lengths[b]` of the L columns are real; the
    rest is padding, whose rows no state may keep. `positions` is (B, L) int32, `ids` the token ids (B, L) int32.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    positions: mx.array = array_field()
    ids: mx.array = array_field()


@frozen(kw_only=True)
class Routing:
    """What a router chose: `ids` (..., k) int32 best expert first, `weights` (..., k) float32."""

    ids: mx.array = array_field()
    weights: mx.array = array_field()


@frozen(kw_only=True)
class Attended:
    """What `attend` leaves behind: `h`, read by the other four, and `rows` (B, L, H), the routed experts' input."""

    h: Any
    rows: mx.array | None = array_field(default=None)


@frozen(kw_only=True)
class NativeLayer:
    """A layer as one native program, for float32 rows on the CPU; its bits are those of the layer's parts.

    The program takes rows x and returns the next ones; with experts also what `attended` makes an `Attended` of, then
    the routed experts' rows, ids and weights: where an expert must be read, the other parts take over there.
    """

    program: Program
    attended: Callable[[Sequence[mx.array], mx.array], Attended] | None = None


@frozen(kw_only=True)
class Layer:
    """One layer.

    attend(x, states, step) -> Attended: everything up to and including the router's input; `states` holds this
        layer's state of each timeline. Touches resident weights and states.
    route(h, step) -> Routing; None for a dense layer.
    shared(h) -> opaque: the branch that needs no streamed weight; runs while experts are read.
    experts(rows (R, H), slots (R, K) int32, weights) -> (R, K, H) float32, each pair on its own and unweighted: the
        core sums the ranks in router order. Touches the slots only. None for a dense layer.
    combine(h, shared, routed (B, L, H) float32 or None) -> next x: norms, residuals, scalars.
    native: the same as a whole, or None; it makes decoding on the CPU faster and changes nothing else.
    """

    attend: Callable[[Any, Sequence[LayerState], Step], Attended]
    shared: Callable[[Any], Any]
    combine: Callable[[Any, Any, mx.array | None], Any]
    route: Callable[[Any, Step], Routing] | None = None
    experts: Callable[[mx.array, mx.array, ExpertWeights], mx.array] | None = None
    native: NativeLayer | None = None


@frozen(kw_only=True)
class LayerGraph:
    """A whole model.

    embed(ids (B, L) int32) -> x; layers in order; head(x) -> logits (B, L, V) float32, final norm included;
    `final_norm(x)` (B, L, H) is what the head projects. `dtype` is the dtype of hidden rows.
    """

    embed: Callable[[mx.array], Any]
    layers: tuple[Layer, ...]
    final_norm: Callable[[Any], mx.array]
    project: Callable[[mx.array], mx.array]
    dtype: mx.Dtype
    vocab_size: int

    def head(self, x: Any) -> mx.array:
        """Return logits (B, L, V) float32 of hidden rows."""
        return self.project(self.final_norm(x))
