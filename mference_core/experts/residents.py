"""A layer's experts all in memory from the start."""

from collections.abc import Callable, Collection, Sequence

import mlx.core as mx

from mference_core.errors import MferenceError
from mference_core.experts.pool import ExpertPool, Lease
from mference_core.experts.reader import ExpertReader
from mference_core.experts.slab import Staging
from mference_core.experts.stats import ExpertStats
from mference_core.experts.table import SlotPlan
from mference_core.tensors import ExpertLayer

# A resident load goes through so much host memory at a time when it cannot read in place.
LOAD_BYTES = 64 * 1024 * 1024


class ResidentExperts:
    """All experts of one layer in memory from the start; slot index is expert id.

    Arguments and errors as `ExpertPool`; reads everything before it returns.
    """

    def __init__(
        self,
        layer: ExpertLayer,
        reader: ExpertReader,
        *,
        in_place: bool | None = None,
        staging: Staging | None = None,
        before_first_read: Callable[[int], None] | None = None,
    ) -> None:
        self.layer = layer
        self.slots = self.experts = layer.count
        pool = ExpertPool(
            layer, reader, slots=layer.count, in_place=in_place, staging=staging, before_first_read=before_first_read
        )
        step = max(1, LOAD_BYTES // max(1, layer.expert_bytes))
        for first in range(0, layer.count, step):
            lease = pool.acquire(range(first, min(first + step, layer.count)))
            if lease is None:  # an empty slot is left for every expert
                raise MferenceError(what=f"layer {layer.layer} could not be made resident")
            lease.wait()
        self.slab = pool.slab
        self.nbytes = pool.nbytes
        self.full = True
        self.slot_map = pool.slot_map
        mx.eval(self.slot_map)
        self.slots_in_memory = pool.slots_in_memory
        self._stats = ExpertStats(bytes_read=pool.stats.bytes_read, stall_seconds=pool.stats.stall_seconds)

    @property
    def stats(self) -> ExpertStats:
        """Figures since the load: the bytes are those of the load, every use is a hit."""
        return self._stats

    def acquire(self, experts: Sequence[int], avoiding: Collection[int] = frozenset()) -> Lease:
        """Return the slots of distinct `experts`: their own numbers."""
        del avoiding  # nothing is ever refilled
        self.note_all_hit_use(experts)
        return Lease(SlotPlan(slots=tuple(experts), hits=tuple((expert, expert) for expert in experts)))

    def at_hand(self, experts: Sequence[int]) -> Lease:
        """Return the slots of distinct `experts`: their own numbers."""
        return self.acquire(experts)

    def prefetch(self, experts: Sequence[int], keep_evictable: int) -> int:
        """Do nothing: there is nothing to read."""
        del experts, keep_evictable
        return 0

    def look_ahead(self, experts: Sequence[int], most: int, *, certain: bool) -> None:
        """Do nothing: there is nothing to read."""
        del experts, most, certain

    def non_resident(self, experts: Sequence[int]) -> Sequence[int]:
        """Return nothing: every expert is in its slot."""
        del experts
        return ()

    def note_all_hit_use(self, experts: Sequence[int]) -> None:
        """Count a use."""
        self._stats += ExpertStats(hits=len(experts))

    def reads_pending(self, array: mx.array, slots: Collection[int] | None = None) -> None:
        """Do nothing: slots are never refilled."""
        del array, slots

    def reads_done(self) -> None:
        """Do nothing."""
