"""Where a layer's experts are served from: slots filled on demand."""

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from threading import RLock
from types import MappingProxyType
from typing import Any, Protocol

import mlx.core as mx

from mference_core.experts.reader import ExpertRead, ExpertReader
from mference_core.experts.slab import Landing, Slab, Staging, host_memory
from mference_core.experts.stats import ExpertStats, Guesses
from mference_core.experts.table import SlotPlan, SlotTable
from mference_core.tensors import ExpertLayer

# Outputs registered but not yet known to be finished; the older half of a full list is long done when it is waited for.
PENDING_LIMIT = 16


class Lease:
    """Slots for one request: `slots` is aligned with it; `hits` and `misses` are its experts, in order.

    Hits can be used at once, misses after `wait`. A slot stays valid until a later `acquire` that does not avoid it.
    """

    def __init__(self, plan: SlotPlan, finish: Callable[[], None] | None = None) -> None:
        self.slots = plan.slots
        self.hits = tuple(expert for expert, _ in plan.hits)
        self.misses = tuple(expert for expert, _ in plan.misses)
        self._finish = finish

    def wait(self) -> None:
        """Block until the misses are read and published; StreamError, each time, when they could not be."""
        if self._finish is not None:
            self._finish()


class ExpertSource(Protocol):
    """Serves the experts of one layer; what the engine needs to know of pools, residents and mappings.

    At most `slots` experts are asked for at a time.
    """

    layer: ExpertLayer
    slots: int
    experts: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory of its own."""

    @property
    def full(self) -> bool:
        """Whether every expert is published and none can ever be evicted: `slot_map` then never changes."""

    @property
    def slot_map(self) -> mx.array:
        """Slot of each expert, int32 (experts,); -1 where it has none."""

    @property
    def stats(self) -> ExpertStats:
        """Figures since the load."""

    @property
    def slots_in_memory(self) -> "ctypes.Array[ctypes.c_int32] | None":
        """Slot of each expert that can be used at once, -1 for others; always the same memory, which is kept up to date.

        None where slots have no fixed place in memory.
        """

    def acquire(self, experts: Sequence[int], avoiding: Collection[int] = frozenset()) -> Lease | None:
        """Give distinct `experts` slots and begin reading the misses; None when too few slots may be refilled."""

    def at_hand(self, experts: Sequence[int]) -> Lease | None:
        """Use distinct `experts`, any number of them, if all are in memory; else change nothing and return None."""

    def prefetch(self, experts: Sequence[int], keep_evictable: int) -> int:
        """Begin reading some of `experts` into slots nobody needs; return how many. Never changes results."""

    def look_ahead(self, experts: Sequence[int], most: int, *, certain: bool) -> None:
        """Expect a request for distinct `experts`, best guess first, and begin reading the first `most` that are missing.

        A `certain` guess may take every slot; another leaves as many free as there are experts.
        """

    def non_resident(self, experts: Sequence[int]) -> Sequence[int]:
        """Return those of `experts` that are in no slot, in order; changes nothing."""

    def note_all_hit_use(self, experts: Sequence[int]) -> None:
        """Count a use of experts that are all published, as `acquire` would."""

    def reads_pending(self, array: mx.array, slots: Collection[int] | None = None) -> None:
        """Say that `array`, perhaps not evaluated yet, is computed from `slots` (None: any): no refill before it."""

    def reads_done(self) -> None:
        """Say that everything queued so far is computed, so that nothing need be kept to wait for."""


class SlotSource(ExpertSource, Protocol):
    """A source that holds experts as rows of arrays."""

    @property
    def slab(self) -> Mapping[str, mx.array]:
        """Part name to array (slots, *part.shape); look arrays up anew for each use."""


class _Fill:
    """Reads under way into the slots of a plan, until they are published or given up."""

    def __init__(self, plan: SlotPlan, read: ExpertRead, landing: Landing) -> None:
        self.plan = plan
        self.read = read
        self.landing = landing
        self.experts = frozenset(expert for expert, _ in plan.misses)
        self.ended = False
        self.error: Exception | None = None


class ExpertPool:
    """Least-frequently-used slots of one layer, filled by `reader`; to be used from one thread at a time.

    `slots` is capped at the layer's experts. `in_place` and `staging` are those of `Slab`; `before_first_read(layer)`
    is called once, before the layer's files are first read. Raises: StreamError, ValueError as `SlotTable`.
    """

    def __init__(
        self,
        layer: ExpertLayer,
        reader: ExpertReader,
        *,
        slots: int,
        in_place: bool | None = None,
        staging: Staging | None = None,
        before_first_read: Callable[[int], None] | None = None,
    ) -> None:
        self.layer = layer
        self.experts = layer.count
        self.slots = min(slots, layer.count)
        self.table = SlotTable(slots=self.slots, experts=layer.count)
        self._slab = Slab(
            layer.parts, self.slots, in_place=host_memory() if in_place is None else in_place, staging=staging
        )
        self._reader = reader
        self._before_first_read = before_first_read
        self._fills: list[_Fill] = []
        self._pending: list[tuple[mx.array, frozenset[int] | None]] = []
        self._hits = self._misses = self._bytes_read = 0
        self._stall_seconds = 0.0
        self._guesses = Guesses(expert_bytes=layer.expert_bytes)
        self._map: mx.array | None = None
        self._slots_in_memory = (ctypes.c_int32 * layer.count)(*self.table.slot_of)
        self._lock = RLock()

    @property
    def slab(self) -> Mapping[str, mx.array]:
        """Part name to array (slots, *part.shape); look arrays up anew for each use."""
        return MappingProxyType(self._slab.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the slab."""
        return self._slab.nbytes

    @property
    def full(self) -> bool:
        """Whether every expert is published and none can ever be evicted."""
        return self.table.full

    @property
    def slot_map(self) -> mx.array:
        """Slot of each expert, int32 (experts,); -1 where it has none."""
        if self._map is None:
            self._map = mx.array(self.table.slot_of, dtype=mx.int32)
        return self._map

    @property
    def slots_in_memory(self) -> "ctypes.Array[ctypes.c_int32] | None":
        """Slot of each published expert, -1 for others; None where slots are filled by copies into new arrays."""
        return self._slots_in_memory if self._slab.in_place else None

    def _changed(self) -> None:
        """Take note that slots have changed hands."""
        self._map = None
        held: Any = self._slots_in_memory
        held[:] = self.table.slot_of

    @property
    def stats(self) -> ExpertStats:
        """Figures since the load; speculative reads count as bytes, not as misses."""
        served = ExpertStats(
            hits=self._hits,
            misses=self._misses,
            bytes_read=self._bytes_read,
            stall_seconds=self._stall_seconds,
        )
        return served + self._guesses.stats

    def acquire(self, experts: Sequence[int], avoiding: Collection[int] = frozenset()) -> Lease | None:
        """Give distinct `experts` slots and begin reading the misses; None when too few slots may be refilled.

        None changes nothing. An expert already being read, by a prefetch or an earlier lease, is waited for.
        """
        with self._lock:
            self._guesses.settle(experts)
            if self._fills:
                self._reap(frozenset(experts))
            if self._before_first_read is not None and self.table.non_resident(experts):
                self._touch()
            plan = self.table.plan(experts, avoiding)
            if plan is None and self._fills:
                self._reap(frozenset(range(self.experts)))
                plan = self.table.plan(experts, avoiding)
            if plan is None:
                return None
            fill = self._start(plan) if plan.misses else None
            self._hits += len(plan.hits)
            self._misses += len(plan.misses)
        return Lease(plan, partial(self._wait, fill) if fill else None)

    def at_hand(self, experts: Sequence[int]) -> Lease | None:
        """Use distinct `experts` if all are published; else change nothing and return None."""
        with self._lock:
            if self._fills:
                self._reap(frozenset())
            missing = len(experts) > self.slots or self.table.non_resident(experts)
            return None if missing else self.acquire(experts)

    def prefetch(self, experts: Sequence[int], keep_evictable: int) -> int:
        """Begin reading some of `experts` into slots nobody needs; return how many. Never changes results.

        `keep_evictable` slots stay free for the next `acquire`. A failed read is forgotten: whoever needs the expert
        reads it again and gets the error.
        """
        with self._lock:
            return len(self._speculate(experts, keep_evictable))

    def _speculate(self, experts: Sequence[int], keep_evictable: int) -> tuple[int, ...]:
        self._reap(frozenset())
        if not self.table.non_resident(experts):
            return ()
        self._touch()
        plan = self.table.reserve_speculative(experts, keep_evictable)
        if plan.misses:
            self._start(plan)
        return tuple(expert for expert, _ in plan.misses)

    def look_ahead(self, experts: Sequence[int], most: int, *, certain: bool) -> None:
        """Expect a request for distinct `experts`, best guess first, and begin reading the first `most` that are missing.

        A `certain` guess may take every slot; another leaves as many free as there are experts. Errors as `prefetch`.
        """
        with self._lock:
            missing = self.table.non_resident(experts)[:most]
            begun = self._speculate(missing, 0 if certain else len(experts)) if missing else ()
            self._guesses.note(experts, begun)

    def non_resident(self, experts: Sequence[int]) -> Sequence[int]:
        """Return those of `experts` that are in no slot, in order; changes nothing."""
        with self._lock:
            return self.table.non_resident(experts)

    def note_all_hit_use(self, experts: Sequence[int]) -> None:
        """Count a use of experts that are all published, as `acquire` would."""
        with self._lock:
            self.table.note_all_hit_use(experts)
            self._hits += len(experts)

    def reads_pending(self, array: mx.array, slots: Collection[int] | None = None) -> None:
        """Say that `array`, perhaps not evaluated yet, is computed from `slots` of `slab` (None: from any).

        They are not refilled before it is evaluated; this call itself evaluates nothing, except older arrays when many
        are outstanding. Naming the slots lets other ones be refilled while the work runs.
        """
        with self._lock:
            if self.full:
                self._pending.clear()
                return
            self._pending.append((array, None if slots is None else frozenset(slots)))
            if len(self._pending) > PENDING_LIMIT:
                older, self._pending = self._pending[: PENDING_LIMIT // 2], self._pending[PENDING_LIMIT // 2 :]
                mx.eval([array for array, _ in older])

    def reads_done(self) -> None:
        """Say that everything queued so far is computed: the arrays told of are let go."""
        with self._lock:
            self._pending.clear()

    def _touch(self) -> None:
        """Run the hook before the first read; one that raises runs again next time."""
        if self._before_first_read is not None:
            self._before_first_read(self.layer.layer)
            self._before_first_read = None

    def _start(self, plan: SlotPlan) -> _Fill:
        """Begin reading the misses of `plan`, once nothing queued reads the slab any more."""
        self._changed()
        try:
            slots = [slot for _, slot in plan.misses]
            self._settle(slots)
            landing = self._slab.landing(slots)
            requests = [(expert, views) for (expert, _), views in zip(plan.misses, landing.views, strict=True)]
            fill = _Fill(plan, self._reader.start(self.layer, requests), landing)
        except BaseException:
            self.table.abandon(plan)
            raise
        self._fills.append(fill)
        return fill

    def _settle(self, slots: Sequence[int]) -> None:
        """Wait for the queued work that reads one of `slots`."""
        kept: list[tuple[mx.array, frozenset[int] | None]] = []
        due: list[mx.array] = []
        for array, used in self._pending:
            if used is not None and used.isdisjoint(slots):
                kept.append((array, used))
            else:
                due.append(array)
        if due:
            mx.eval(due)
            self._pending = kept

    def _reap(self, experts: frozenset[int]) -> None:
        """End every fill that is done, and wait for those that read one of `experts`."""
        for fill in list(self._fills):
            if fill.read.done or fill.experts & experts:
                self._end(fill)

    def _wait(self, fill: _Fill) -> None:
        with self._lock:
            self._end(fill)
        if fill.error is not None:
            raise fill.error

    def _end(self, fill: _Fill) -> None:
        """Wait for the reads of `fill`; publish all of its slots, or none and keep the error."""
        if fill.ended:
            return
        try:
            fill.read.wait()
            fill.landing.land()
        except Exception as error:  # noqa: BLE001  whatever failed, the slots are given back; raised by `_wait`
            fill.error = error
            fill.landing.drop()
            self.table.abandon(fill.plan)
        else:
            self.table.publish(fill.plan)
            self._changed()
        fill.ended = True
        self._fills.remove(fill)
        self._bytes_read += 0 if fill.error else fill.read.size
        self._stall_seconds += fill.read.stall_seconds
