"""How much of a prompt a call takes beside decoding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mference_core.scheduler.pace import Pace


def learned(fixed: float, each: float, sizes: list[int], target: float = 0.1) -> Pace:
    pace = Pace(target)
    for size in sizes:
        pace.observe(size, fixed + each * size)
    return pace


def test_nothing_known_takes_all() -> None:
    assert Pace(0.1).tokens(512) == 512


def test_cost_by_token_fits_the_target() -> None:
    """1 ms a token: 100 tokens are what 0.1 s is enough for, from the first call on."""
    assert learned(0, 0.001, [512]).tokens(512) == 100
    assert learned(0, 0.001, [512, 100, 30, 100]).tokens(512) == pytest.approx(100, abs=1)


def test_where_reading_costs_most_calls_stay_large() -> None:
    """12 s whatever the size: small calls would only multiply it. Found out after one small call."""
    pace = learned(12, 0.0001, [512])
    assert pace.tokens(512) < 10
    pace.observe(64, 12.0064)
    assert pace.tokens(512) == 512


@given(st.floats(0, 5), st.floats(1e-5, 0.1), st.lists(st.integers(1, 600), min_size=2, unique=True))
def test_costs_are_found(fixed: float, each: float, sizes: list[int]) -> None:
    got = learned(fixed, each, sizes).costs()
    assert got[0] >= 0
    assert got[0] + got[1] * sizes[-1] == pytest.approx(fixed + each * sizes[-1], rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1e4)), max_size=20), st.integers(1, 5000))
def test_any_history_gives_a_size(calls: list[tuple[int, float]], most: int) -> None:
    pace = Pace(0.1)
    for tokens, seconds in calls:
        pace.observe(tokens, seconds)
    assert 1 <= pace.tokens(most) <= most
