"""The routed branch: what is read, in what groups, and the order of the sum."""

from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions
from mference_core.errors import NumericError
from mference_core.experts.table import SlotTable
from mference_core.routed import _pairs_by_expert, _tiles
from mference_core.steps import make_step
from mference_kernels.experts import weighted_sum


class Counting:
    """A source that reads at once and remembers what it read; the real table decides about slots."""

    def __init__(self, slots: int, experts: int) -> None:
        self.table, self.slots, self.experts = SlotTable(slots=slots, experts=experts), slots, experts
        self.read: list[int] = []

    def non_resident(self, experts: Sequence[int]) -> Sequence[int]:
        return self.table.non_resident(experts)

    def acquire(self, experts: Sequence[int], avoiding: Collection[int] = frozenset()) -> Any:
        plan = self.table.plan(experts, frozenset(avoiding))
        if plan is None:
            return None
        self.read += [expert for expert, _ in plan.misses]
        self.table.publish(plan)
        hits, misses = ([expert for expert, _ in pairs] for pairs in (plan.hits, plan.misses))
        return SimpleNamespace(slots=plan.slots, hits=hits, misses=misses, wait=lambda: None)


@given(
    slots=st.integers(1, 12),
    chunks=st.lists(st.sets(st.integers(0, 23), min_size=1), min_size=1, max_size=6),
)
def test_each_expert_is_served_once_and_read_at_most_once(slots: int, chunks: list[set[int]]) -> None:
    """Whatever the slots, a chunk's groups cover its experts exactly, hold them while in use, and read none twice."""
    source = Counting(slots, 24)
    for wanted in chunks:
        before = len(source.read)
        served: list[int] = []
        for group, slot_of in _tiles(cast("Any", source), sorted(wanted)):
            served += group
            assert all(source.table.slot_of[expert] == slot_of[expert] for expert in group)
        assert sorted(served) == sorted(wanted)
        read = source.read[before:]
        assert len(read) == len(set(read))


def test_experts_in_memory_are_used_before_any_wait() -> None:
    source = Counting(4, 8)
    list(_tiles(cast("Any", source), [1, 2]))
    groups = [list(group) for group, _ in _tiles(cast("Any", source), [0, 1, 2, 3])]
    assert groups == [[1, 2], [0, 3]]


def test_padding_asks_for_nothing_and_bad_choices_are_refused() -> None:
    step = make_step([0, 0], mx.zeros((2, 2), mx.int32), [2, 1])
    assert _pairs_by_expert([[0], [1], [1], [9]], step, 4) == {0: [0], 1: [1, 2]}
    with pytest.raises(NumericError, match="router choice is expert 9; expected 0 to 3"):
        _pairs_by_expert([[0], [9], [1], [1]], step, 4)


def test_the_sum_goes_best_expert_first() -> None:
    """Float32 addition is not associative: the order of ranks must be the written one."""
    y = mx.array([[[1e8], [1.0], [-1e8]]])
    ones = mx.ones((1, 3))
    assert weighted_sum(y, ones).tolist() == [[0.0]]
    assert weighted_sum(y[:, mx.array([0, 2, 1])], ones).tolist() == [[1.0]]


@pytest.mark.parametrize("slots", [3, 4, 7])
def test_a_chunk_reads_an_expert_at_most_once(gemma4_reference: Path, slots: int) -> None:
    """A chunk of 64 tokens reads at most every expert of every layer once, even with slots for one token only."""
    family = plugins.load("gemma4")
    options = LoadOptions(dtype="float32", chunk=64, slots=slots, context=128)
    with Engine.load(family, gemma4_reference / "mlx", options) as engine:
        engine.session().prefill(list(range(64)))
        layers = [held for held in engine.experts if held is not None]
        whole = sum(held.source.layer.expert_bytes * held.source.experts for held in layers)
        assert 0 < engine.stats.bytes_read <= whole
