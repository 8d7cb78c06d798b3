"""Pooled states against plain lists: what is open, carried and pooled, and how far they can go back."""

from typing import cast

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mference_core.errors import CannotRewind
from mference_core.kv import Composite, Compressed, Linear, Ring
from mference_core.state import RowState, Snapshot
from mference_core.states import CompositeState, CompressedState, new_state

CONTEXT, WIDTH, CARRIED = 60, 3, 2


def pooled(rate: int, block_rows: int = 3) -> Compressed:
    entries = Linear(rows={"e": (1, 1)}, dtype="float32", block_rows=block_rows)
    return Compressed(entries=entries, rate=rate, open_rows={"a": WIDTH, "b": 1}, carried={"a": CARRIED})


def layout(rate: int, window: int, slack: int) -> Composite:
    ring = Ring(rows={"k": (1, 1)}, dtype="float32", window=window, slack_rows=slack)
    return Composite(parts={"window": ring, "pool": pooled(rate), "other": pooled(rate + 1)})


def numbers(array: mx.array) -> list[int]:
    """Return what each row's elements all tell."""
    flat = cast("list[list[float]]", array.reshape(-1, array.shape[-1]).tolist())
    assert all(len(set(row)) == 1 for row in flat)
    return [int(row[0]) for row in flat]


def pool(state: CompressedState, tokens: list[int], told: list[int]) -> None:
    """Take tokens; an entry is the sum of its window and of the one before, which the state must have kept."""
    column = mx.array(tokens, dtype=mx.float32)[:, None]
    windows = state.take(a=mx.broadcast_to(column, (len(tokens), WIDTH)), b=-column)
    held = told + tokens
    rate = state.layout.rate
    assert windows.first == len(told) // rate
    assert windows.count == len(held) // rate - len(told) // rate
    if not windows.count:
        return
    before = numbers(windows.before["a"])
    start = windows.first * rate
    assert before == (held[start - rate : start] if start else [0] * rate)
    assert windows.before["a"].shape == (rate, CARRIED)
    assert numbers(windows.rows["a"]) == held[start : start + windows.count * rate]
    assert numbers(windows.rows["b"]) == [-token for token in held[start : start + windows.count * rate]]
    sums = windows.rows["a"][:, :, 0].sum(axis=1)
    shifted = mx.concatenate([windows.before["a"][:, 0].sum()[None], sums[:-1]])
    state.entries.append(e=(sums + shifted)[None, :, None])


def expected_entries(told: list[int], rate: int) -> list[int]:
    sums = [sum(told[at : at + rate]) for at in range(0, len(told) // rate * rate, rate)]
    return [a + b for a, b in zip(sums, [0, *sums], strict=False)]


class Timeline(RuleBasedStateMachine):
    """A composite state beside the list of every token it was given."""

    @initialize(rate=st.integers(2, 6), window=st.integers(1, 9), slack=st.integers(1, 12))
    def start(self, rate: int, window: int, slack: int) -> None:
        self.layout = layout(rate, window, slack)
        self.state = cast("CompositeState", new_state(self.layout, CONTEXT))
        self.told: list[int] = []
        self.saved: list[tuple[Snapshot, list[int], int]] = []
        self.next, self.most, self.highest, self.chunk = 1, 0, 0, slack

    def new_tokens(self, count: int) -> list[int]:
        made = list(range(self.next, self.next + count))
        self.next += count
        return made

    def take(self, tokens: list[int]) -> None:
        row = mx.array(tokens, dtype=mx.float32)[None, :, None]
        cast("RowState", self.state.parts["window"]).append(k=row)
        for name in ("pool", "other"):
            pool(cast("CompressedState", self.state.parts[name]), tokens, self.told)

    @precondition(lambda self: len(self.told) < CONTEXT)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, min(self.chunk, CONTEXT - len(self.told))), label="count")
        tokens = self.new_tokens(count)
        self.take(tokens)
        self.told += tokens
        self.most, self.highest = max(self.most, len(self.told)), max(self.highest, len(self.told))

    @precondition(lambda self: len(self.told) < CONTEXT)
    @rule(data=st.data(), reached=st.integers(0, 3))
    def fail_half_way(self, data: st.DataObject, reached: int) -> None:
        """A call that came to some parts only, or left windows without entries, is undone."""
        count = data.draw(st.integers(1, min(self.chunk, CONTEXT - len(self.told))), label="count")
        ring = self.layout.parts["window"]
        assert isinstance(ring, Ring)
        mark = self.state.mark()
        column = mx.array(self.new_tokens(count), dtype=mx.float32)[:, None]
        if reached > 0:
            cast("RowState", self.state.parts["window"]).append(k=column[None])
            self.highest = max(self.highest, len(self.told) + count)
        for name in ("pool", "other")[: max(0, reached - 1)]:
            part = cast("CompressedState", self.state.parts[name])
            part.take(a=mx.broadcast_to(column, (count, WIDTH)), b=column)
        self.state.undo(mark)

    def rewindable(self, length: int) -> bool:
        if length in (0, len(self.told)):
            return True
        if not 0 < length < len(self.told):
            return False
        rates = [part.rate for part in self.layout.parts.values() if isinstance(part, Compressed)]
        ring = self.layout.parts["window"]
        assert isinstance(ring, Ring)
        capacity = min(CONTEXT, ring.window + ring.slack_rows)
        seen = max(0, length - ring.window + 1) >= max(0, self.highest - capacity)
        return seen and all(length // rate == len(self.told) // rate for rate in rates)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.told) + 1), label="length")
        assert self.state.can_truncate(length) == self.rewindable(length)
        if not self.rewindable(length):
            with pytest.raises(CannotRewind):
                self.state.truncate(length)
            return
        self.state.truncate(length)
        del self.told[length:]
        if length == 0:
            self.highest = 0

    @rule()
    def snapshot(self) -> None:
        self.saved.append((self.state.snapshot(), list(self.told), self.highest))

    @precondition(lambda self: bool(self.saved))
    @rule(data=st.data(), fresh=st.booleans())
    def restore(self, data: st.DataObject, *, fresh: bool) -> None:
        snapshot, told, highest = data.draw(st.sampled_from(self.saved), label="snapshot")
        if fresh:
            self.state = cast("CompositeState", new_state(self.layout, CONTEXT))
        self.state.restore(snapshot)
        self.told, self.highest, self.most = list(told), highest, len(told)

    @invariant()
    def everything_is_as_told(self) -> None:
        assert self.state.length == len(self.told)
        for name in ("pool", "other"):
            part = cast("CompressedState", self.state.parts[name])
            rate = part.layout.rate
            assert numbers(part.entries.read(1)[1]["e"]) == expected_entries(self.told, rate)
            start = len(self.told) // rate * rate
            assert numbers(part.open_rows["a"][: len(self.told) - start]) == self.told[start:]

    @invariant()
    def bytes_are_those_declared(self) -> None:
        """Rows that were allocated for tokens since forgotten stay."""
        assert self.state.nbytes == sum(array.nbytes for array in self.state.arrays)
        assert self.state.nbytes == self.layout.bytes_at(self.most, CONTEXT)


TestTimeline = Timeline.TestCase
TestTimeline.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=9), rate=st.integers(2, 5))
@settings(max_examples=30, deadline=None)
def test_where_calls_end_does_not_matter(cuts: list[int], rate: int) -> None:
    """The previous window's carried rows reach the next one across any cut, between calls and inside one."""
    state = cast("CompressedState", new_state(pooled(rate), sum(cuts)))
    told: list[int] = []
    for count in cuts:
        tokens = list(range(len(told) + 1, len(told) + 1 + count))
        pool(state, tokens, told)
        told += tokens
    assert numbers(state.entries.read(1)[1]["e"]) == expected_entries(told, rate)


def test_a_closed_window_cannot_be_opened_again() -> None:
    state = cast("CompressedState", new_state(pooled(4), 30))
    pool(state, list(range(1, 11)), [])
    assert [n for n in range(12) if state.can_truncate(n)] == [0, 8, 9, 10]
    with pytest.raises(CannotRewind, match="compressed state of 10 tokens cut to 7; expected 0, or 8 to 10"):
        state.truncate(7)
    state.truncate(9)
    pool(state, [90, 91, 92], list(range(1, 10)))
    assert numbers(state.entries.read(1)[1]["e"]) == expected_entries([*range(1, 10), 90, 91, 92], 4)


def test_rows_of_other_shapes_are_refused_and_change_nothing() -> None:
    state = cast("CompressedState", new_state(pooled(4), 30))
    with pytest.raises(ValueError, match=r"\[compressed\] rows must be"):
        state.take(a=mx.zeros((2, WIDTH)), b=mx.zeros((3, 1)))
    assert state.length == 0


def test_rows_of_a_batch_are_taken_from_where_they_begin() -> None:
    """Arrays hold several timelines' rows; what is before `first` and after `count` is someone else's."""
    state = cast("CompressedState", new_state(pooled(4), 30))
    column = mx.arange(12, dtype=mx.float32).reshape(2, 6, 1)
    rows = {"a": mx.broadcast_to(column, (2, 6, WIDTH)), "b": -column}
    assert state.take(first=6, count=3, **rows).count == 0
    assert numbers(state.open_rows["a"]) == [6, 7, 8]
    windows = state.take(first=1, count=2, **rows)
    assert numbers(windows.rows["a"]) == [6, 7, 8, 1]
    state.entries.append(e=mx.zeros((1, 1, 1)))
    assert numbers(state.open_rows["b"][:1]) == [-2]
    with pytest.raises(ValueError, match=r"\[compressed\] rows must be"):
        state.take(first=10, count=3, **rows)


def test_states_hold_on_to_no_more_than_they_declare() -> None:
    """Open and carried rows are copies: not views that keep a whole chunk alive, nor shared with a snapshot."""
    state = cast("CompressedState", new_state(pooled(4), 40))
    pool(state, list(range(1, 12)), [])
    saved = state.snapshot()
    before = {name: array.tolist() for name, array in saved.arrays.items()}
    pool(state, [50, 51], list(range(1, 12)))
    pool(state, [60], [*range(1, 12), 50, 51])
    state.restore(saved)
    pool(state, [70], list(range(1, 12)))
    pool(state, [80], [*range(1, 12), 70])
    assert {name: array.tolist() for name, array in saved.arrays.items()} == before
