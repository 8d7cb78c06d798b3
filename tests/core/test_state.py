"""States against plain lists: what is held, in how many bytes, and what cannot be brought back."""

from collections.abc import Callable
from typing import Any, cast

import attrs
import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mference_core.errors import CannotRewind
from mference_core.kv import Composite, Compressed, KVLayout, Linear, Recurrent, Ring
from mference_core.state import RecurrentState, RowState, Snapshot
from mference_core.states import CompositeState, CompressedState, new_state, new_states

HEADS, DIM = 2, 3
ROWS = {"k": (HEADS, DIM), "v": (1, DIM)}


def rows(values: list[int]) -> dict[str, mx.array]:
    """Return rows whose every element tells the token; `v` holds the negative."""
    line = mx.array(values, dtype=mx.float32)[None, :, None]
    return {
        "k": mx.broadcast_to(line, (HEADS, len(values), DIM)),
        "v": mx.broadcast_to(-line, (1, len(values), DIM)),
    }


def tokens_of(array: mx.array) -> list[int]:
    """Return the token of each row, which all its elements must tell."""
    first = array[:1, :, :1]
    assert bool((array == first).all())
    return [int(value) for value in cast("list[float]", first.reshape(-1).tolist())]


def linear(block_rows: int = 4) -> Linear:
    return Linear(rows=ROWS, dtype="float32", block_rows=block_rows)


def ring(window: int, slack: int) -> Ring:
    return Ring(rows=ROWS, dtype="float32", window=window, slack_rows=slack)


class Timeline(RuleBasedStateMachine):
    """A row state beside the plain list of every token it was given."""

    CONTEXT = 40

    @initialize(
        layout=st.one_of(st.builds(linear, st.integers(1, 9)), st.builds(ring, st.integers(1, 9), st.integers(1, 5)))
    )
    def start(self, layout: Linear | Ring) -> None:
        self.layout = layout
        self.state = RowState(layout=layout, context=self.CONTEXT)
        self.held: list[int] = []
        self.highest = 0
        self.most = 0
        self.saved: list[tuple[Snapshot, list[int], int]] = []
        self.next = 1

    @property
    def capacity(self) -> int:
        return self.state.capacity_rows

    def room(self) -> int:
        """Return the tokens one append may hold."""
        left = self.CONTEXT - len(self.held)
        if isinstance(self.layout, Linear) or len(self.held) + left <= self.capacity:
            return left
        fits = max(self.capacity - len(self.held), self.capacity - self.layout.window + 1)
        return min(left, fits)

    @precondition(lambda self: self.room() > 0)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, min(self.room(), 8)), label="count")
        new = list(range(self.next, self.next + count))
        self.next += count
        self.state.append(**rows(new))
        self.held += new
        self.highest = max(self.highest, len(self.held))
        self.most = max(self.most, len(self.held))
        first, seen = self.state.read(count)
        begin = 0
        if isinstance(self.layout, Ring):
            begin = max(0, len(self.held) - count - self.layout.window + 1)
        assert first == begin
        assert tokens_of(seen["k"]) == self.held[begin:]
        assert tokens_of(seen["v"]) == [-token for token in self.held[begin:]]
        assert seen["k"].shape == (HEADS, len(self.held) - begin, DIM)
        first, whole, ring = self.state.visible(count)
        assert first == begin
        if ring:
            order = mx.arange(begin, len(self.held)) % self.state.capacity_rows
            whole = {name: array[:, order] for name, array in whole.items()}
        assert all(mx.array_equal(whole[name], seen[name]) for name in seen)

    def rewindable(self, length: int) -> bool:
        """Say whether the rows that a query at `length` sees can still be there."""
        if length in (0, len(self.held)) or isinstance(self.layout, Linear):
            return length <= len(self.held)
        oldest_row = max(0, self.highest - self.capacity)
        return length <= len(self.held) and max(0, length - self.layout.window + 1) >= oldest_row

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.held) + 2), label="length")
        assert self.state.can_truncate(length) == self.rewindable(length)
        if not self.rewindable(length):
            with pytest.raises(CannotRewind, match="row state of"):
                self.state.truncate(length)
            return
        self.state.truncate(length)
        del self.held[length:]
        if length == 0:
            self.highest = 0

    @rule()
    def snapshot(self) -> None:
        self.saved.append((self.state.snapshot(), list(self.held), self.highest))

    @precondition(lambda self: bool(self.saved))
    @rule(data=st.data(), fresh=st.booleans())
    def restore(self, data: st.DataObject, *, fresh: bool) -> None:
        snapshot, held, highest = data.draw(st.sampled_from(self.saved), label="snapshot")
        if fresh:
            self.state = RowState(layout=self.layout, context=self.CONTEXT)
        self.state.restore(snapshot)
        self.held, self.highest, self.most = list(held), highest, len(held)

    @invariant()
    def bytes_are_those_declared(self) -> None:
        assert self.state.length == len(self.held)
        assert self.state.nbytes == sum(array.nbytes for array in self.state.arrays)
        assert self.state.nbytes == self.layout.bytes_at(self.most, self.CONTEXT)

    @invariant()
    def it_goes_back_exactly_as_far_as_rows_are_left(self) -> None:
        lengths = range(len(self.held) + 3)
        assert [self.state.can_truncate(n) for n in lengths] == [self.rewindable(n) for n in lengths]

    @invariant()
    def what_is_held_is_seen(self) -> None:
        """One more query always sees its whole window."""
        first, seen = self.state.read(0)
        begin = max(0, len(self.held) - self.layout.window + 1) if isinstance(self.layout, Ring) else 0
        assert first == begin
        assert tokens_of(seen["k"]) == self.held[begin:]


TestTimeline = Timeline.TestCase
TestTimeline.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(
    layout=st.one_of(st.builds(linear, st.integers(1, 300)), st.builds(ring, st.integers(1, 64), st.integers(1, 64))),
    context=st.integers(1, 400),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    share=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_bytes_allocated_equal_bytes_declared(layout: Any, context: int, dtype: str, share: float) -> None:
    layout = attrs.evolve(layout, dtype=dtype)
    state = RowState(layout=layout, context=context)
    assert state.nbytes == layout.bytes_at(0, context)
    length = int(share * context)
    while state.length < length:
        count = min(length - state.length, getattr(layout, "slack_rows", 1000))
        state.append(**rows([1] * count))
        assert state.nbytes == layout.bytes_at(state.length, context)


def test_a_ring_refuses_a_chunk_that_would_overwrite_visible_keys() -> None:
    """Of 12 rows with a window of 8, five tokens may be written at once when the ring is full, not six."""
    state = RowState(layout=ring(8, 4), context=100)
    state.append(**rows(list(range(12))))
    before = tokens_of(state.read(1)[1]["k"])
    with pytest.raises(ValueError, match=r"\[ring\] a chunk must have at most 5 tokens but got 6"):
        state.append(**rows(list(range(6))))
    assert state.length == 12
    assert tokens_of(state.read(1)[1]["k"]) == before
    state.append(**rows(list(range(12, 17))))
    first, seen = state.read(5)
    assert (first, tokens_of(seen["k"])) == (5, list(range(5, 17)))


def test_rows_are_stored_in_the_declared_dtype() -> None:
    state = RowState(layout=Linear(rows=ROWS, dtype="bfloat16"), context=10)
    state.append(**rows([1, 2]))
    assert all(array.dtype == mx.bfloat16 for array in state.read(2)[1].values())


def test_a_read_is_not_changed_by_later_writes() -> None:
    """A graph that is not evaluated yet keeps what it read, though the ring is written in place."""
    state = RowState(layout=ring(4, 4), context=100)
    state.append(**rows([1, 2, 3, 4]))
    _, seen = state.read(1)
    lazy = seen["k"] * 1
    state.append(**rows([5, 6, 7, 8]))
    state.append(**rows([9]))
    assert tokens_of(lazy) == [1, 2, 3, 4]


RECURRENT = Recurrent(arrays={"s": (2, 3), "c": (4,)})


def advance(state: RecurrentState, token: int, tokens: int = 1) -> None:
    state.advance(tokens, s=mx.full((2, 3), float(token)), c=mx.full((4,), -float(token)))


def test_a_recurrent_state_keeps_all_or_nothing() -> None:
    state = RecurrentState(layout=RECURRENT)
    assert state.nbytes == RECURRENT.bytes_at(0, 1) == 40
    advance(state, 7, tokens=3)
    assert [state.can_truncate(n) for n in range(5)] == [True, False, False, True, False]
    with pytest.raises(CannotRewind, match="recurrent state of 3 tokens cut to 2; expected 0 or 3"):
        state.truncate(2)
    assert float(cast("float", state.values["s"][0, 0].item())) == 7
    state.truncate(3)
    state.truncate(0)
    assert state.length == 0
    assert not any(bool(array.any()) for array in state.arrays)


def test_a_recurrent_state_refuses_other_shapes() -> None:
    state = RecurrentState(layout=RECURRENT)
    with pytest.raises(ValueError, match=r"\[recurrent\] s must be \(2, 3\) but got \(3, 2\)"):
        state.advance(1, s=mx.zeros((3, 2)))


def test_a_recurrent_snapshot_outlives_what_follows() -> None:
    state = RecurrentState(layout=RECURRENT)
    advance(state, 1)
    saved = state.snapshot()
    advance(state, 2)
    for _ in range(2):
        state.restore(saved)
        assert (state.length, state.values["s"].tolist()) == (1, [[1.0] * 3] * 2)
        advance(state, 3)
    assert saved.nbytes == 40


COMPRESSED = Compressed(
    entries=Linear(rows={"e": (1, DIM)}, dtype="float32", block_rows=2), rate=4, open_rows={"a": 2, "g": 3}
)
COMPOSITE = Composite(parts={"window": ring(2, 2), "pool": COMPRESSED, "past": RECURRENT})


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (linear(), RowState),
        (ring(2, 2), RowState),
        (RECURRENT, RecurrentState),
        (COMPRESSED, CompressedState),
        (COMPOSITE, CompositeState),
    ],
)
def test_each_layout_has_its_state(layout: Any, kind: Callable[..., Any]) -> None:
    state = new_state(layout, 20)
    assert isinstance(state, kind)  # type: ignore[arg-type]
    assert state.nbytes == layout.bytes_at(0, 20)
    assert state.length == 0


def test_a_timeline_has_a_state_per_layer() -> None:
    layouts = (linear(), ring(4, 2), RECURRENT, COMPRESSED, COMPOSITE)
    layout = KVLayout(layers=layouts, context=20)
    states = new_states(layout)
    assert [type(state) for state in states] == [
        RowState,
        RowState,
        RecurrentState,
        CompressedState,
        CompositeState,
    ]
    assert sum(state.nbytes for state in states) == layout.fixed_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("held", [5, 12])
def test_rows_written_in_place_reach_no_snapshot(dtype: str, held: int) -> None:
    """Neither the one a state was restored from, though it covers every row, nor one taken of it."""
    ring = Ring(rows={"k": (1, 2), "v": (1, 2)}, dtype=dtype, window=4, slack_rows=4)
    state = RowState(layout=ring, context=64)
    for first in range(0, held, 2):
        rows = mx.full((1, min(2, held - first), 2), float(first))
        state.append(k=rows, v=rows)
    first_taken = state.snapshot()
    other = RowState(layout=ring, context=64)
    other.restore(first_taken)
    taken = other.snapshot()
    before = [mx.array(array).tolist() for snapshot in (first_taken, taken) for array in snapshot.arrays.values()]
    place = other.extend(3)
    assert (place.args.start, place.args.real, place.args.capacity) == (held, 3, 8)
    for array in place.kept:
        contents = memoryview(cast("Any", array)).cast("B")
        contents[:] = b"\x7f" * len(contents)
    assert other.length == held + 3
    after = [array.tolist() for snapshot in (first_taken, taken) for array in snapshot.arrays.values()]
    assert after == before
    assert state.read(1)[1]["k"].max().item() < 100


def test_room_for_rows_written_in_place_is_that_of_appended_ones() -> None:
    ring = RowState(layout=Ring(rows={"k": (1, 2), "v": (1, 2)}, dtype="float32", window=4, slack_rows=2), context=64)
    ring.extend(3)
    with pytest.raises(ValueError, match="at most 3 tokens but got 4"):
        ring.extend(4)
    assert ring.length == 3
    rows = RowState(layout=Linear(rows={"k": (1, 2), "v": (1, 2)}, dtype="float32", block_rows=4), context=10)
    assert [rows.extend(3).args.capacity, rows.extend(3).args.capacity] == [4, 8]
