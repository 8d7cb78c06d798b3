"""Going back after one call: exact for every kind of state, and sessions that survive what failed."""

from typing import Any

import mlx.core as mx
import pytest

from mference_core.errors import CannotRewind
from mference_core.kv import Composite, Compressed, Linear, Recurrent, Ring
from mference_core.state import RecurrentState, RowState
from mference_core.states import CompositeState, CompressedState, new_state

DIM = 2
RECURRENT = Recurrent(arrays={"s": (2, 3), "tail": (3,)}, dtypes={"tail": "bfloat16"})
COMPRESSED = Compressed(
    entries=Linear(rows={"e": (1, DIM)}, dtype="float32", block_rows=2), rate=4, open_rows={"a": 3}, carried={"a": 2}
)
COMPOSITE = Composite(
    parts={
        "window": Ring(rows={"k": (1, DIM)}, dtype="float32", window=4, slack_rows=5),
        "pool": COMPRESSED,
        "past": RECURRENT,
    }
)


def take(state: Any, tokens: int, value: float) -> None:
    """Take `tokens` in one call, all of one value."""
    if isinstance(state, RowState):
        state.append(k=mx.full((1, tokens, DIM), value))
    elif isinstance(state, CompositeState):
        for part in state.parts.values():
            take(part, tokens, value)
    elif isinstance(state, RecurrentState):
        state.advance(tokens, s=mx.full((2, 3), value), tail=mx.full((3,), value))
    else:
        assert isinstance(state, CompressedState)
        windows = state.take(a=mx.full((tokens, 3), value))
        if windows.count:
            state.entries.append(e=mx.full((1, windows.count, DIM), value))


def seen(state: Any) -> list[Any]:
    """Return everything a reader of the state can see."""
    if isinstance(state, RowState):
        return [a.tolist() for a in state.read(1)[1].values()]
    if isinstance(state, RecurrentState):
        return [state.values[name].tolist() for name in sorted(state.values)]
    if isinstance(state, CompositeState):
        return [value for part in state.parts.values() for value in seen(part)]
    held = state.open_rows["a"][: state.length % COMPRESSED.rate].tolist()
    return [held, state.carried["a"].tolist(), *seen(state.entries)]


LAYOUTS = [
    Linear(rows={"k": (1, DIM)}, dtype="float32", block_rows=4),
    Ring(rows={"k": (1, DIM)}, dtype="float32", window=4, slack_rows=5),
    RECURRENT,
    COMPRESSED,
    COMPOSITE,
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: type(layout).__name__)
def test_a_call_of_any_kind_can_be_undone_and_repeated(layout: Any) -> None:
    state = new_state(layout, 40)
    for call, tokens in enumerate((3, 5, 1, 5, 2)):
        before, length = seen(state), state.length
        mark = state.mark()
        take(state, tokens, 100.0 + call)
        state.undo(mark)
        assert (state.length, seen(state)) == (length, before)
        take(state, tokens, float(call))
        assert state.length == length + tokens
        assert state.nbytes == layout.bytes_at(state.length, 40)


def test_an_undone_call_may_have_failed_half_way() -> None:
    """A layer that was not reached goes back to where it is."""
    state = new_state(RECURRENT, 10)
    take(state, 1, 1.0)
    state.undo(state.mark())
    assert (state.length, seen(state)[0][0]) == (1, [1.0] * 3)


def test_a_refused_advance_changes_nothing() -> None:
    state = RecurrentState(layout=RECURRENT)
    take(state, 1, 1.0)
    with pytest.raises(ValueError, match=r"\[recurrent\] tail must be \(3,\)"):
        state.advance(1, s=mx.zeros((2, 3)), tail=mx.zeros((4,)))
    assert (state.length, seen(state)[0][0]) == (1, [1.0] * 3)


def test_arrays_of_a_layout_may_differ_in_dtype() -> None:
    state = RecurrentState(layout=RECURRENT)
    assert RECURRENT.bytes_at(5, 10) == state.nbytes == 4 * 6 + 2 * 3
    take(state, 1, 1.00001)
    assert [state.values[name].dtype for name in ("s", "tail")] == [mx.float32, mx.bfloat16]
    assert state.nbytes == RECURRENT.bytes_at(0, 0)


def test_marks_are_no_way_around_a_refusal() -> None:
    state = RecurrentState(layout=RECURRENT)
    take(state, 2, 1.0)
    state.mark()
    take(state, 1, 2.0)
    assert not state.can_truncate(2)
    with pytest.raises(CannotRewind):
        state.truncate(2)
