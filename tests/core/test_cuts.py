"""Where prompts are cut: every way of cutting gives the same bits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mference_core.cuts import TAIL_TOKENS, UNIT_TOKENS, Cuts
from mference_core.kv import KVLayout, Layout, Linear, Recurrent, Ring

ROWS = Linear(rows={"k": (1, 2)}, dtype="float32")
RING = Ring(rows={"k": (1, 2)}, dtype="float32", window=4, slack_rows=4)
STATE = Recurrent(arrays={"s": (2,)})


def cuts_of(*layers: Layout, chunk: int) -> Cuts:
    return Cuts.of(KVLayout(layers=layers, context=4096), chunk)


def walk(cuts: Cuts, start: int, total: int, wanted: list[int]) -> list[int]:
    """Return every place a prompt is cut, its end included."""
    ends, at = [], start
    while at < total:
        at = cuts.end(at, total, wanted[len(ends) % len(wanted)] if wanted else None)
        ends.append(at)
        assert len(ends) <= total
    return ends


def test_rows_are_cut_anywhere() -> None:
    cuts = cuts_of(ROWS, RING, chunk=50)
    assert walk(cuts, 7, 120, []) == [57, 107, 120]
    assert walk(cuts, 7, 20, [5]) == [12, 17, 20]


def test_what_is_carried_is_cut_at_the_unit() -> None:
    cuts = cuts_of(ROWS, STATE, chunk=512)
    assert walk(cuts, 0, 500, []) == [500]
    assert walk(cuts, 0, 513, []) == [448, 513]
    assert walk(cuts, 0, 1100, []) == [512, 1024, 1100]
    assert walk(cuts, 0, 200, [1]) == [64, 128, 200]
    assert walk(cuts, 59, 700, []) == [512, 700]


def test_chunks_too_small_to_choose_from_are_the_unit() -> None:
    assert walk(cuts_of(STATE, chunk=7), 0, 20, [1, 100]) == [7, 14, 20]


@given(
    st.integers(1, 700), st.integers(0, 900), st.integers(1, 900), st.lists(st.integers(1, 700), max_size=4), st.data()
)
def test_calls_begin_at_units_and_are_never_too_short(
    chunk: int, start: int, more: int, wanted: list[int], data: st.DataObject
) -> None:
    cuts = cuts_of(*data.draw(st.sampled_from([(ROWS,), (STATE,), (ROWS, STATE)])), chunk=chunk)
    start, total = cuts.floor(start), cuts.floor(start) + more
    ends = walk(cuts, start, total, wanted)
    starts = [start, *ends[:-1]]
    assert ends[-1] == total
    assert all(begin % cuts.unit_tokens == 0 for begin in starts)
    assert all(0 < end - begin <= chunk for begin, end in zip(starts, ends, strict=True))
    assert len(ends) == 1 or total - starts[-1] >= cuts.tail_tokens


@pytest.mark.parametrize(("total", "last"), [(0, 0), (79, 0), (80, 64), (143, 64), (144, 128)])
def test_the_last_cut_leaves_a_tail(total: int, last: int) -> None:
    assert (UNIT_TOKENS, TAIL_TOKENS) == (64, 16)
    assert cuts_of(STATE, chunk=512).last(total) == last
