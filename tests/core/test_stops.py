"""Stop strings: the published vector, matches across deltas, and independence of the split."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mference_core.errors import RequestError
from mference_core.stops import StopMatcher, check_stops


def run(stops: list[str], deltas: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops=stops)
    text = "".join([matcher.push(delta) for delta in deltas])
    return text + matcher.finish(), matcher.matched


def test_the_published_vector() -> None:
    matcher = StopMatcher(stops=["END"])
    assert [matcher.push(t) for t in ("abE", "N", "x", "END tail")] == ["ab", "", "ENx", ""]
    assert matcher.stopped
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


TOKENS = ["alpha", " be", "ta gam", "ma"]


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [
        (["beta gamma"], "alpha ", "beta gamma"),
        (["ta"], "alpha be", "ta"),
        (["gamma", "a g"], "alpha bet", "a g"),
        (["gammas"], "alpha beta gamma", None),
        (["pha be", "a beta"], "al", "pha be"),
        (["x"], "alpha beta gamma", None),
        ([], "alpha beta gamma", None),
    ],
)
def test_stops_across_tokens(stops: list[str], text: str, matched: str | None) -> None:
    assert run(stops, TOKENS) == (text, matched)
    assert run(stops, list("".join(TOKENS))) == (text, matched)
    assert run(stops, ["".join(TOKENS)]) == (text, matched)


def test_held_text_is_released_when_the_match_fails() -> None:
    matcher = StopMatcher(stops=["aab"])
    assert matcher.push("aa") == ""
    assert matcher.push("a") == "a"
    assert matcher.finish() == "aa"
    assert matcher.matched is None


def test_a_match_completed_first_wins_even_if_another_began_earlier() -> None:
    for deltas in (["abcd"], ["ab", "cd"], list("abcd")):
        assert run(["abcd", "c"], deltas) == ("ab", "c")


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    text=st.text("ab", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_the_split_never_matters_and_nothing_shown_holds_a_match(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    deltas = [text[a:b] for a, b in pairwise(edges)]
    shown, matched = run(stops, deltas)
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if ends:
        _, start, stop = min(ends)
        assert (shown, matched) == (text[:start], stop)
    else:
        assert (shown, matched) == (text, None)


def test_stop_options() -> None:
    assert check_stops(None) == ()
    assert check_stops("a") == ("a",)
    assert check_stops(["a", "b", "a"]) == ("a", "b")
    for empty in ("", ["a", ""]):
        with pytest.raises(RequestError, match="a stop string is empty; expected at least one character"):
            check_stops(empty)
    for wrong in (3, [3], {"a": 1}, b"x"):
        with pytest.raises(RequestError, match=r"stop is .*; expected a string or a list of strings"):
            check_stops(wrong)
    with pytest.raises(RequestError):
        StopMatcher(stops=[""])
