"""The routed branch, written once for all families: slots, tiles, reads beside work, and the sum in router order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import mlx.core as mx
from attrs import field, frozen

from mference_core.errors import NumericError
from mference_core.experts.mapping import MappedExperts
from mference_core.experts.pool import ExpertSource, Lease, SlotSource
from mference_core.experts.slab import DTYPES
from mference_core.graph import Layer, Routing, Step
from mference_core.placement import ROLES
from mference_core.tensors import ExpertPart
from mference_kernels import levels
from mference_kernels.chain import Held
from mference_kernels.experts import ExpertWeights, placed_sum, weighted_sum
from mference_kernels.mapped import MappedWeights, Shape
from mference_kernels.native import reshaped
from mference_kernels.quant import Dense, Matrix, Quantized


@frozen(kw_only=True)
class LayerExperts:
    """One layer's source of experts, and the dtype its products run in.

    `ahead` is how many of them may be read for a guess (0: none is made), `certain` whether guesses are always right.
    """

    source: SlotSource | MappedExperts
    product_dtype: mx.Dtype
    ahead: int = 0
    certain: bool = False
    _mapped: MappedWeights | None = field(init=False, eq=False, repr=False)

    @_mapped.default
    def _in_place(self) -> MappedWeights | None:
        if not isinstance(self.source, MappedExperts):
            return None
        parts = {part.name: part for part in self.source.layer.parts}
        gate, up, down = (_shape(parts[role], parts[f"{role}_scales"]) for role in ROLES)
        return MappedWeights(shapes=(gate, up, down), table=self.source.table, copy=self._copied)

    def weights(self) -> ExpertWeights:
        """Return the slots as matrices, to be asked for anew for each use; a mapping as what stands for them."""
        if isinstance(self.source, MappedExperts):
            return cast("ExpertWeights", self._mapped)  # families pass it on unopened
        return self._stacked(self.source.slab)

    def native(self) -> Held | None:
        """Return the experts as native chains take them, or None where no native kernel does."""
        fast, weights = levels.cpu(), self.weights()
        slot_of = self.source.slots_in_memory
        if fast is None or slot_of is None:
            return None
        if isinstance(weights, MappedWeights):
            return Held(weights.matrices(), slot_of, weights.table)
        stacks = [
            w for w in (weights.gate, weights.up, weights.down) if isinstance(w, Quantized) and fast.can_multiply(w)
        ]
        if len(stacks) < len(ROLES):
            return None
        return Held([fast.matrix_args(w, "experts") for w in stacks], slot_of, kept=stacks)

    def _copied(self, experts: Sequence[int]) -> ExpertWeights:
        assert isinstance(self.source, MappedExperts)
        return self._stacked(self.source.copied(experts))

    def _stacked(self, arrays: Mapping[str, mx.array]) -> ExpertWeights:
        gate, up, down = (self._matrix(arrays, role) for role in ROLES)
        return ExpertWeights(gate=gate, up=up, down=down, dtype=self.product_dtype)

    def _matrix(self, arrays: Mapping[str, mx.array], role: str) -> Matrix:
        quant = next(part.quant for part in self.source.layer.parts if part.name == role)
        if quant is None:
            return Dense(weight=arrays[role])
        return Quantized(
            codes=arrays[role],
            scales=arrays[f"{role}_scales"],
            biases=arrays[f"{role}_biases"],
            bits=quant.bits,
            group_size=quant.group_size,
        )


def _shape(codes: ExpertPart, scales: ExpertPart) -> Shape:
    assert codes.quant is not None, "only quantised experts are mapped"
    (rows, words), quant = codes.shape, codes.quant
    return Shape(
        out=rows,
        width=words * 32 // quant.bits,
        bits=quant.bits,
        group_size=quant.group_size,
        companions=DTYPES[scales.dtype],
    )


def routed_branch(
    layer: Layer,
    experts: LayerExperts,
    rows: mx.array,
    routing: Routing,
    step: Step,
    meanwhile: Callable[[], object] = lambda: None,
    afterwards: Callable[[], object] = lambda: None,
) -> mx.array:
    """Return the weighted sum of each row's experts.

    Shapes: rows (B, L, H), routing (B, L, k) -> (B, L, H) float32. Padding rows come out undefined but finite.
    Each (row, expert) pair is computed alone and ranks are summed in order, so neither slots nor tiles change a bit.
    `meanwhile` is called once if something must be read, as soon as reading has begun, and `afterwards` once, when
    nothing is left to be read and the last experts have yet to compute. Raises: `StreamError` if reading fails;
    `NumericError` if the router chose no valid expert.
    """
    assert layer.experts is not None
    B, L, H = rows.shape
    if experts.source.full:
        afterwards()
        ids = routing.ids.reshape(B * L, -1)
        y = layer.experts(rows.reshape(B * L, H), experts.source.slot_map[ids], experts.weights())
        return weighted_sum(y, routing.weights)
    outputs, place = _streamed(layer, experts, reshaped(rows, (B * L, H)), routing.ids, step, meanwhile, afterwards)
    return weighted_sum(outputs[0], routing.weights) if place is None else placed_sum(outputs, place, routing.weights)


def _streamed(
    layer: Layer,
    experts: LayerExperts,
    rows: mx.array,
    ids: mx.array,
    step: Step,
    meanwhile: Callable[[], object],
    afterwards: Callable[[], object],
) -> tuple[list[mx.array], list[int] | None]:
    """Return pairs' unweighted outputs, experts read as needed, and where among them each (row, rank) pair lies.

    The place is None if they are one array in order: then all experts were at hand.
    """
    assert layer.experts is not None
    chosen_by_row = [row for timeline in cast("list[list[list[int]]]", ids.tolist()) for row in timeline]
    k, source = ids.shape[-1], experts.source
    pairs = _pairs_by_expert(chosen_by_row, step, source.experts)
    wanted = sorted(pairs)
    if sum(step.lengths) == len(chosen_by_row) and (lease := source.at_hand(wanted)) is not None:
        afterwards()
        slot_of = dict(zip(wanted, lease.slots, strict=True))
        where = mx.array([[slot_of[expert] for expert in row] for row in chosen_by_row], dtype=mx.int32)
        y = layer.experts(rows, where, experts.weights())
        _queue(source, y, lease.slots)
        return [y], None
    outputs: list[mx.array] = []
    order: list[int] = []
    for chosen, slot_of in _tiles(source, wanted, meanwhile, afterwards):
        mine = [pair for expert in chosen for pair in pairs[expert]]
        slots = [slot_of[expert] for expert in chosen for _ in pairs[expert]]
        if len(chosen_by_row) == 1:  # one row meets all of them
            y = layer.experts(rows, mx.array([slots], dtype=mx.int32), experts.weights())
        else:
            tile_rows = rows[mx.array([pair // k for pair in mine], dtype=mx.int32)]
            y = layer.experts(tile_rows, mx.array(slots, dtype=mx.int32)[:, None], experts.weights())
        _queue(source, y, slots)
        outputs.append(y)
        order += mine
    place = [0] * (len(chosen_by_row) * k)
    for at, pair in enumerate(order):
        place[pair] = at
    return outputs, place


def _queue(source: ExpertSource, y: mx.array, slots: Sequence[int]) -> None:
    """Have `y` computed; what native kernels returned is there already, and need not be kept for the slots' sake."""
    if levels.cpu() is not None:
        mx.eval(y)
    else:
        mx.async_eval(y)
        source.reads_pending(y, set(slots))


def _pairs_by_expert(ids: list[list[int]], step: Step, count: int) -> dict[int, list[int]]:
    """Return flat (row, rank) indices by expert; padding rows ask for nothing."""
    columns = len(ids) // len(step.lengths)
    pairs: dict[int, list[int]] = {}
    for row, chosen in enumerate(ids):
        if row % columns >= step.lengths[row // columns]:
            continue
        for rank, expert in enumerate(chosen):
            if not 0 <= expert < count:
                raise NumericError(what="router choice", got=f"expert {expert}", expected=f"0 to {count - 1}")
            pairs.setdefault(expert, []).append(row * len(chosen) + rank)
    return pairs


def _tiles(
    source: ExpertSource,
    wanted: Sequence[int],
    meanwhile: Callable[[], object] = lambda: None,
    afterwards: Callable[[], object] = lambda: None,
) -> Iterator[tuple[Sequence[int], dict[int, int]]]:
    """Yield groups of experts with their slots, ready for use; later groups are being read meanwhile.

    Experts already in memory come first: they need no wait, and using them first keeps them from being evicted.
    Each expert is in one group, so a chunk reads it at most once.
    """
    if len(wanted) <= source.slots:
        lease = _acquire(source, wanted)
        if lease.misses:
            meanwhile()
        slot_of = dict(zip(wanted, lease.slots, strict=True))
        if lease.hits and lease.misses:
            yield lease.hits, slot_of
        lease.wait()
        afterwards()
        yield lease.misses or lease.hits, slot_of
        return
    missing = set(source.non_resident(wanted))
    ordered = [e for e in wanted if e not in missing] + [e for e in wanted if e in missing]
    size = max(1, source.slots // 2)
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    lease = _acquire(source, groups[0])
    if missing:
        meanwhile()
    for index, group in enumerate(groups):
        ahead = groups[index + 1] if index + 1 < len(groups) else None
        coming = source.acquire(ahead, frozenset(lease.slots)) if ahead else None
        lease.wait()
        if ahead is None:
            afterwards()
        yield group, dict(zip(group, lease.slots, strict=True))
        if ahead is not None:
            lease = coming or _acquire(source, ahead)


def _acquire(source: ExpertSource, wanted: Sequence[int]) -> Lease:
    lease = source.acquire(wanted)
    assert lease is not None, "slots hold at least one tile and nothing else is in use"
    return lease
