"""Which slot holds which expert: the written rule, and a simple model that must agree after any history."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from attrs import define
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mference_core.experts.table import AGEING_PLANS, EMPTY, SlotPlan, SlotTable

SLOTS, EXPERTS = 4, 10


def snapshot(table: SlotTable) -> object:
    """Return everything a later decision can depend on."""
    return (
        table.clock,
        list(table.slot_expert),
        list(table.slot_of),
        list(table.use_count),
        list(table._last_use),
        table.filling,
    )


def used(table: SlotTable, *experts: int) -> SlotPlan:
    """Plan and publish."""
    plan = table.plan(experts)
    assert plan is not None
    table.publish(plan)
    return plan


def test_the_worked_example() -> None:
    """Every step of the example of the written behaviour, slots, misses, counts and clock."""
    table = SlotTable(slots=4, experts=12)
    steps = [
        ([5, 9], (0, 1), [5, 9], [5, 9, -1, -1]),
        ([5, 2], (0, 2), [2], [5, 9, 2, -1]),
        ([7, 9], (3, 1), [7], [5, 9, 2, 7]),
        ([1, 3], (2, 3), [1, 3], [5, 9, 1, 3]),
        ([5, 1], (0, 2), [], [5, 9, 1, 3]),
        ([2, 9], (3, 1), [2], [5, 9, 1, 2]),
    ]
    for number, (experts, slots, misses, after) in enumerate(steps, start=1):
        plan = used(table, *experts)
        assert plan.slots == slots
        assert [expert for expert, _ in plan.misses] == misses
        assert table.slot_expert == after
        assert table.clock == number
    assert {e: n for e, n in enumerate(table.use_count) if n} == {5: 3, 1: 2, 2: 2, 9: 3, 7: 1, 3: 1}
    before = snapshot(table)
    assert table.plan([10, 11], avoiding={0, 1, 2}) is None
    assert snapshot(table) == before
    assert table.clock == 6


def test_equal_counts_and_ages_give_up_the_lower_slot() -> None:
    table = SlotTable(slots=3, experts=6)
    used(table, 4, 1, 2)
    plan = table.plan([0, 5])
    assert plan is not None
    assert plan.misses == ((0, 0), (5, 1))


def test_an_avoided_slot_may_be_hit_but_not_refilled() -> None:
    table = SlotTable(slots=2, experts=4)
    used(table, 0, 1)
    plan = table.plan([0, 2], avoiding={0})
    assert plan is not None
    assert plan.slots == (0, 1)
    assert plan.hits == ((0, 0),)


@pytest.mark.parametrize("experts", [[1, 1], [0, 1, 2, 3, 4], [-1], [EXPERTS]])
def test_requests_that_cannot_be_meant_change_nothing(experts: list[int]) -> None:
    table = SlotTable(slots=SLOTS, experts=EXPERTS)
    used(table, 3, 4)
    before = snapshot(table)
    with pytest.raises(ValueError, match=r"^\[slots\]"):
        table.plan(experts)
    with pytest.raises(ValueError, match=r"^\[slots\]"):
        table.note_all_hit_use(experts)
    assert snapshot(table) == before


@pytest.mark.parametrize(("slots", "experts"), [(0, 1), (1, 0)])
def test_a_table_needs_slots_and_experts(slots: int, experts: int) -> None:
    with pytest.raises(ValueError, match=r"^\[slots\]"):
        SlotTable(slots=slots, experts=experts)


def test_a_plan_is_published_or_abandoned_once() -> None:
    table = SlotTable(slots=SLOTS, experts=EXPERTS)
    plan = used(table, 3, 4)
    before = snapshot(table)
    for again in (table.publish, table.abandon):
        with pytest.raises(ValueError, match="once"):
            again(plan)
    assert snapshot(table) == before


def test_abandoned_slots_are_empty_and_first_in_line() -> None:
    table = SlotTable(slots=2, experts=4)
    used(table, 0, 1)
    used(table, 0)
    failed = table.plan([2])
    assert failed is not None
    assert failed.misses == ((2, 1),)
    table.abandon(failed)
    assert table.slot_expert == [0, EMPTY]
    assert table.non_resident([2, 1, 2, 0]) == (2, 1)
    retry = table.plan([2])
    assert retry is not None
    assert retry.misses == ((2, 1),)


def test_one_expert_read_twice_is_published_once() -> None:
    """Two plans may both read an expert; the first published stays and the other slot is free again."""
    table = SlotTable(slots=3, experts=4)
    first, second = table.plan([0]), table.plan([0])
    assert first is not None
    assert second is not None
    assert second.misses == ((0, 1),)
    table.publish(second)
    table.publish(first)
    assert table.slot_expert == [EMPTY, 0, EMPTY]
    assert table.slot_of[0] == 1


def test_counts_fade() -> None:
    """An expert used long ago must lose against one used a little, lately."""
    table = SlotTable(slots=2, experts=3)
    for _ in range(40):
        used(table, 0)
    for _ in range(8 * AGEING_PLANS):
        table.note_all_hit_use([])
    for _ in range(2):
        used(table, 1)
    plan = table.plan([2])
    assert plan is not None
    assert plan.misses == ((2, 0),)


def test_counts_are_halved_exactly_every_so_many_plans() -> None:
    table = SlotTable(slots=2, experts=3)
    for _ in range(AGEING_PLANS - 1):
        used(table, 0)
    assert table.use_count[0] == AGEING_PLANS - 1
    used(table, 0)
    assert table.use_count[0] == AGEING_PLANS // 2


def test_speculation_leaves_room_and_counts_nothing() -> None:
    table = SlotTable(slots=4, experts=10)
    used(table, 0, 1, 2)
    counts, clock = list(table.use_count), table.clock
    plan = table.reserve_speculative([2, 7, 8, 9], keep_evictable=1)
    assert plan.hits == ((2, 2),)
    assert plan.misses == ((7, 3), (8, 0))
    assert plan.slots == (3, 0)
    assert (table.use_count, table.clock) == (counts, clock)
    assert table.reserve_speculative([7, 9], keep_evictable=2).misses == ()
    assert table.reserve_speculative([7], keep_evictable=0).misses == ()
    table.publish(plan)
    assert table.slot_expert == [8, 1, 2, 7]


def test_full_means_that_nothing_can_be_evicted() -> None:
    table = SlotTable(slots=3, experts=3)
    used(table, 0, 1)
    last = table.plan([2])
    assert last is not None
    assert not table.full
    table.publish(last)
    assert table.full
    small = SlotTable(slots=2, experts=3)
    used(small, 0, 1)
    assert not small.full


def test_threads_cannot_break_it() -> None:
    """Whatever the interleaving: no slot is filled by two plans, and table and array agree."""
    table = SlotTable(slots=8, experts=32)

    def work(seed: int) -> None:
        rng = random.Random(seed)  # noqa: S311  a reproducible order, no secret
        for _ in range(300):
            plan = table.plan(rng.sample(range(32), 2))
            if plan is not None:
                rng.choice([table.publish, table.abandon])(plan)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not table.filling
    assert all(table.slot_expert[s] == e for e, s in enumerate(table.slot_of) if s != EMPTY)
    assert sum(e != EMPTY for e in table.slot_expert) == sum(s != EMPTY for s in table.slot_of)


@define
class Held:
    """What the model remembers of a slot."""

    expert: int | None = None
    last_use: int = 0
    filling: int | None = None


class Model(RuleBasedStateMachine):
    """Drive a table and a naive model of the written rule with the same requests."""

    distinct = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=SLOTS, unique=True)
    avoided = st.frozensets(st.integers(0, SLOTS - 1))

    @initialize(clock=st.sampled_from([0, AGEING_PLANS - 3]))
    def start(self, clock: int) -> None:
        self.table = SlotTable(slots=SLOTS, experts=EXPERTS)
        self.table.clock = self.clock = clock
        self.held = [Held() for _ in range(SLOTS)]
        self.count = dict.fromkeys(range(EXPERTS), 0)
        self.open: list[SlotPlan] = []

    def where(self, expert: int) -> int | None:
        return next((n for n, held in enumerate(self.held) if held.expert == expert), None)

    def evictable(self, kept: set[int]) -> list[int]:
        def order(slot: int) -> tuple[object, ...]:
            held = self.held[slot]
            return (0,) if held.expert is None else (1, self.count[held.expert], held.last_use)

        return sorted((n for n in range(SLOTS) if self.held[n].filling is None and n not in kept), key=order)

    def note(self, pairs: list[tuple[int, int]]) -> None:
        self.clock += 1
        for expert, slot in pairs:
            self.count[expert] += 1
            self.held[slot].last_use = self.clock
        if self.clock % AGEING_PLANS == 0:
            self.count = {expert: uses // 2 for expert, uses in self.count.items()}

    @rule(experts=distinct, avoiding=avoided)
    def plan(self, experts: list[int], avoiding: frozenset[int]) -> None:
        """Follow the rule; a plan that does not fit changes nothing."""
        before = snapshot(self.table)
        hits = {expert: slot for expert in experts if (slot := self.where(expert)) is not None}
        victims = self.evictable({*hits.values(), *avoiding})
        plan = self.table.plan(experts, avoiding)
        if len(experts) - len(hits) > len(victims):
            assert plan is None
            assert snapshot(self.table) == before
            return
        assert plan is not None
        expected = [(e, hits[e]) if e in hits else (e, victims.pop(0)) for e in experts]
        assert plan.slots == tuple(slot for _, slot in expected)
        assert plan.hits == tuple(pair for pair in expected if pair[0] in hits)
        assert plan.misses == tuple(pair for pair in expected if pair[0] not in hits)
        assert not {slot for _, slot in plan.misses} & avoiding
        self.note(expected)
        self.fill(plan)

    @rule(experts=distinct, keep=st.integers(0, SLOTS))
    def speculate(self, experts: list[int], keep: int) -> None:
        wanted = {slot for expert in experts if (slot := self.where(expert)) is not None}
        victims = self.evictable(wanted)
        room = max(0, len(victims) - keep)
        filling = {held.filling for held in self.held}
        missing = [expert for expert in experts if self.where(expert) is None and expert not in filling]
        plan = self.table.reserve_speculative(experts, keep)
        assert plan.misses == tuple(zip(missing, victims[:room], strict=False))
        self.fill(plan)

    def fill(self, plan: SlotPlan) -> None:
        for expert, slot in plan.misses:
            assert self.held[slot].filling is None, "a slot being filled was given away"
            self.held[slot].expert, self.held[slot].filling = None, expert
        if plan.misses:
            self.open.append(plan)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data: st.DataObject, *, good: bool) -> None:
        plan = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        finish: Callable[[SlotPlan], None] = self.table.publish if good else self.table.abandon
        finish(plan)
        for expert, slot in plan.misses:
            self.held[slot].filling = None
            if good and self.where(expert) is None:
                self.held[slot].expert = expert

    @rule(experts=distinct)
    def note_all_hit_use(self, experts: list[int]) -> None:
        """Leave exactly what planning the same hits leaves; be refused when one is a miss."""
        slots = [self.where(expert) for expert in experts]
        before = snapshot(self.table)
        if None in slots:
            with pytest.raises(ValueError, match="published"):
                self.table.note_all_hit_use(experts)
            assert snapshot(self.table) == before
        else:
            self.table.note_all_hit_use(experts)
            self.note([(e, s) for e, s in zip(experts, slots, strict=True) if s is not None])

    @rule(experts=st.lists(st.integers(0, EXPERTS - 1)))
    def non_resident(self, experts: list[int]) -> None:
        before = snapshot(self.table)
        expected = [expert for expert in dict.fromkeys(experts) if self.where(expert) is None]
        assert self.table.non_resident(experts) == tuple(expected)
        assert snapshot(self.table) == before

    @invariant()
    def agrees(self) -> None:
        """Table, array and model say the same after every step."""
        assert self.table.slot_expert == [EMPTY if h.expert is None else h.expert for h in self.held]
        assert self.table.slot_of == [EMPTY if (s := self.where(e)) is None else s for e in range(EXPERTS)]
        assert self.table.filling == {n for n, held in enumerate(self.held) if held.filling is not None}
        assert self.table.use_count == list(self.count.values())
        assert self.table.clock == self.clock


Model.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase
