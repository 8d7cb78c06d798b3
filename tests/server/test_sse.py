"""Events survive any text and any cut of the bytes."""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mference_core.server import sse
from mference_core.server.sse import Reader, ServerEvent

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
names = st.none() | st.sampled_from(["ping", "response.created"])


def read_at(data: bytes, cuts: list[int]) -> list[ServerEvent]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    reader = Reader()
    return [e for a, b in pairwise(edges) for e in reader.push(data[a:b])]


@given(st.lists(st.tuples(values, names), max_size=5), st.lists(st.integers(0, 4096)))
def test_what_is_written_is_read(written: list[tuple[Any, str | None]], cuts: list[int]) -> None:
    data = b"".join(sse.encode(value, name) + sse.PING for value, name in written)
    found = read_at(data, cuts)
    assert [(json.loads(event.data), event.event) for event in found] == [
        (value, name or "message") for value, name in written
    ]


@given(st.text(alphabet="ab:\r\n de\ufeff", max_size=40), st.lists(st.integers(0, 64)))
def test_the_cut_makes_no_difference(text: str, cuts: list[int]) -> None:
    """Line ends of all three kinds, comments, empty fields and a byte order mark included."""
    data = text.encode()
    assert read_at(data, cuts) == read_at(data, [])
    assert read_at(data, list(range(len(data)))) == read_at(data, [])


def test_the_standards_own_examples() -> None:
    assert read_at(b"data: YHOO\ndata: +2\ndata: 10\n\n", []) == [ServerEvent("message", "YHOO\n+2\n10")]
    assert read_at(b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event", []) == [
        ServerEvent("message", "first event"),
        ServerEvent("message", "second event"),
    ]
    assert read_at(b"data\n\ndata\ndata\n\ndata:", []) == [ServerEvent("message", ""), ServerEvent("message", "\n")]
    assert read_at(b"event: x\r\ndata: a\r\n\r\n", [3, 9, 10]) == [ServerEvent("x", "a")]
