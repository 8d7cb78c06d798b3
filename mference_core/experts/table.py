"""Which expert each slot of one layer holds, and which slot to give up next: least frequently used, with ageing."""

from collections.abc import Collection, Sequence
from threading import Lock

from attrs import define, field, frozen

EMPTY = -1
# Use counts are halved once per this many plans, so an old topic fades within about a thousand tokens.
# One plan is one token of decode; below some hundreds the counts of a token's own experts would be noise.
AGEING_PLANS = 1024


@frozen(kw_only=True)
class SlotPlan:
    """Slots given to a request; `slots` is aligned with it, `hits` and `misses` are (expert, slot) in its order."""

    slots: tuple[int, ...]
    hits: tuple[tuple[int, int], ...] = ()
    misses: tuple[tuple[int, int], ...] = ()


def _distinct(experts: Sequence[int], count: int) -> None:
    """Raise `ValueError` unless `experts` are different ids below `count`."""
    if len(set(experts)) != len(experts):
        raise ValueError(f"[slots] experts must be distinct but got {list(experts)}")
    if experts and not (min(experts) >= 0 and max(experts) < count):
        raise ValueError(f"[slots] experts must be from 0 to {count - 1} but got {list(experts)}")


@define(kw_only=True)
class SlotTable:
    """Slot ownership of one layer; every method is atomic, and a refused one changes nothing.

    `slots` and `experts` are counts. A slot is empty, filling (planned, not yet published) or publishes one expert;
    an expert is published by at most one slot. Raises: ValueError for requests that cannot be meant.
    """

    slots: int
    experts: int
    clock: int = field(default=0, init=False)
    slot_expert: list[int] = field(init=False)
    slot_of: list[int] = field(init=False)
    use_count: list[int] = field(init=False)
    _last_use: list[int] = field(init=False)
    _filling: list[int] = field(init=False)
    _lock: Lock = field(factory=Lock, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.slots < 1 or self.experts < 1:
            raise ValueError(f"[slots] need at least 1 slot and expert but got {self.slots} and {self.experts}")
        self.slot_expert = [EMPTY] * self.slots
        self.slot_of = [EMPTY] * self.experts
        self.use_count = [0] * self.experts
        self._last_use = [0] * self.slots
        self._filling = [EMPTY] * self.slots

    def plan(self, experts: Sequence[int], avoiding: Collection[int] = frozenset()) -> SlotPlan | None:
        """Give each of `experts` a slot, or return None and change nothing when too few can be evicted.

        Slots in `avoiding` may be hits but are not refilled. The slots of misses are unpublished and filling until
        `publish` or `abandon`. An expert that another plan is filling counts as a miss.
        """
        _distinct(experts, self.experts)
        if len(experts) > self.slots:
            raise ValueError(f"[slots] {len(experts)} experts do not fit {self.slots} slots")
        with self._lock:
            found = [self.slot_of[expert] for expert in experts]
            wanted = found.count(EMPTY)
            victims = self._victims({*found, *avoiding}) if wanted else []
            if wanted > len(victims):
                return None
            free = iter(victims)
            slots = tuple(next(free) if slot == EMPTY else slot for slot in found)
            pairs = tuple(zip(experts, slots, strict=True))
            misses = tuple(pair for pair, slot in zip(pairs, found, strict=True) if slot == EMPTY)
            hits = tuple(pair for pair, slot in zip(pairs, found, strict=True) if slot != EMPTY)
            self._use(experts, slots)
            self._reserve(misses)
        return SlotPlan(slots=slots, hits=hits, misses=misses)

    def publish(self, plan: SlotPlan) -> None:
        """Let the misses of `plan`, whose bytes are now complete, be found.

        Where another slot published the same expert meanwhile, that one stays and this slot becomes empty.
        """
        with self._lock:
            self._finish(plan)
            for expert, slot in plan.misses:
                if self.slot_of[expert] == EMPTY:
                    self._own(slot, expert)

    def abandon(self, plan: SlotPlan) -> None:
        """Give up the misses of `plan` after a failed read: their slots are empty, nothing is published."""
        with self._lock:
            self._finish(plan)

    def note_all_hit_use(self, experts: Sequence[int]) -> None:
        """Count a use of published `experts`, leaving exactly the state that planning them would leave."""
        _distinct(experts, self.experts)
        with self._lock:
            slots = [self.slot_of[expert] for expert in experts]
            if EMPTY in slots:
                raise ValueError(f"[slots] experts must all be published but got {list(experts)}")
            self._use(experts, slots)

    def non_resident(self, experts: Sequence[int]) -> tuple[int, ...]:
        """Return those of `experts` that no slot publishes, once each, in order; nothing is counted."""
        with self._lock:
            return tuple(expert for expert in dict.fromkeys(experts) if self.slot_of[expert] == EMPTY)

    def reserve_speculative(self, experts: Sequence[int], keep_evictable: int) -> SlotPlan:
        """Reserve slots for the first of `experts` that are neither published nor filling; nothing is counted.

        At least `keep_evictable` slots stay free for a plan. `slots` of the result is aligned with its misses.
        """
        _distinct(experts, self.experts)
        with self._lock:
            found = [self.slot_of[expert] for expert in experts]
            hits = tuple(pair for pair in zip(experts, found, strict=True) if pair[1] != EMPTY)
            missing = [expert for expert in experts if self.slot_of[expert] == EMPTY and expert not in self._filling]
            victims = self._victims(set(found))
            victims = victims[: max(0, len(victims) - keep_evictable)]
            misses = tuple(zip(missing, victims, strict=False))
            self._reserve(misses)
        return SlotPlan(slots=tuple(slot for _, slot in misses), hits=hits, misses=misses)

    @property
    def filling(self) -> frozenset[int]:
        """Slots planned but neither published nor abandoned."""
        return frozenset(slot for slot, expert in enumerate(self._filling) if expert != EMPTY)

    @property
    def full(self) -> bool:
        """Whether every expert is published, so that none can be evicted any more."""
        return self.slots >= self.experts and EMPTY not in self.slot_of

    def _victims(self, kept: set[int]) -> list[int]:
        """Return the slots that may be refilled, first the one to give up first."""
        free = [s for s in range(self.slots) if self._filling[s] == EMPTY and s not in kept]
        return sorted(free, key=self._worth)

    def _worth(self, slot: int) -> tuple[int, int, int]:
        """Order slots for eviction: empty ones, then lower use count, then older last use, then lower index."""
        expert = self.slot_expert[slot]
        if expert == EMPTY:
            return (EMPTY, 0, slot)
        return (self.use_count[expert], self._last_use[slot], slot)

    def _use(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Advance the clock by one plan that used `experts` in `slots`."""
        self.clock += 1
        for expert, slot in zip(experts, slots, strict=True):
            self.use_count[expert] += 1
            self._last_use[slot] = self.clock
        if self.clock % AGEING_PLANS == 0:
            self.use_count = [uses >> 1 for uses in self.use_count]

    def _reserve(self, misses: Sequence[tuple[int, int]]) -> None:
        """Mark the slots of `misses` as unpublished and filling."""
        for expert, slot in misses:
            self._own(slot, EMPTY)
            self._filling[slot] = expert

    def _finish(self, plan: SlotPlan) -> None:
        """Clear the filling marks of `plan`, all or none."""
        if any(self._filling[slot] != expert for expert, slot in plan.misses):
            raise ValueError("[slots] a plan can be published or abandoned once")
        for _, slot in plan.misses:
            self._filling[slot] = EMPTY

    def _own(self, slot: int, expert: int) -> None:
        """Change what `slot` publishes: the one place where table and array are written, so they agree."""
        if self.slot_expert[slot] != EMPTY:
            self.slot_of[self.slot_expert[slot]] = EMPTY
        self.slot_expert[slot] = expert
        if expert != EMPTY:
            self.slot_of[expert] = slot
