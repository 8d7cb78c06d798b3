"""The range plan: the format's golden digests, and the bytes a plan moves."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from mference_core.errors import InstallError
from mference_core.install.ranges import (
    Copy,
    RangePlan,
    RangeRequest,
    plan_fingerprint,
    plan_ranges,
    range_digest,
)


def copy(shard: str, offset: int, size: int, dest_offset: int, dest_path: str = "weights.bin") -> Copy:
    return Copy(shard=shard, offset=offset, size=size, dest_path=dest_path, dest_offset=dest_offset)


def test_range_digest_golden() -> None:
    """Format vector 21.1, whatever the pieces the bytes come in."""
    request = RangeRequest(ident="range-00000000", shard="s", offset=7, size=4, copies=(copy("s", 7, 4, 0),))
    golden = "b9ae1be999b259f6de9cc3024bee4d145692881e19d17722351cccbf994a1b52"
    assert range_digest(request, [[b"\x01\x02\x03\x04"]]) == golden
    assert range_digest(request, [[b"\x01", memoryview(b"\x02\x03"), b"\x04"]]) == golden
    assert range_digest(request, [[b"\x01\x02\x03\x05"]]) != golden


def golden_plan() -> RangePlan:
    request = RangeRequest(
        ident="range-00000000", shard="source.bin", offset=4, size=8, copies=(copy("source.bin", 4, 8, 12),)
    )
    return RangePlan(ranges=(request,), outputs={"weights.bin": 32}, index_sha256="a" * 64, chunk_bytes=4096)


def test_plan_fingerprint_golden() -> None:
    """Format vector 21.2."""
    golden = "fa14918215869b02f0fae5b0de6b05112c505b2c3f2734f8924a8a7adb926581"
    assert plan_fingerprint(golden_plan()) == golden
    assert plan_fingerprint(evolve(golden_plan(), chunk_bytes=8192)) != golden


def test_a_transform_changes_both_digests_and_their_domain() -> None:
    """Version 2 states written bytes and the transform's name, so two transforms never share a digest."""
    plan = golden_plan()
    names = ("unpack-int2-to-int4", "repeat-bf16:2:0", "repeat-bf16:2:1")
    requests = [
        evolve(plan.ranges[0], copies=(evolve(plan.ranges[0].copies[0], transform=name, unit_bytes=4, growth=2),))
        for name in names
    ]
    digests = {range_digest(request, [[b"x" * 16]]) for request in (plan.ranges[0], *requests)}
    prints = {plan_fingerprint(evolve(plan, ranges=(request,))) for request in (plan.ranges[0], *requests)}
    assert len(digests) == len(prints) == 4


def test_digest_needs_the_bytes_of_every_copy() -> None:
    with pytest.raises(ValueError, match="zip"):
        range_digest(golden_plan().ranges[0], [])


def test_neighbours_join_until_the_chunk_is_full() -> None:
    copies = [copy("b", 0, 10, 90), copy("a", 40, 20, 0), copy("a", 0, 30, 20), copy("a", 61, 4, 60)]
    plan = plan_ranges(copies, {"weights.bin": 100}, "", chunk_bytes=64)
    shown = [(r.ident, r.shard, r.offset, r.size, [c.dest_offset for c in r.copies]) for r in plan.ranges]
    assert shown == [
        ("range-00000000", "a", 0, 60, [0, 20]),
        ("range-00000001", "a", 61, 4, [60]),
        ("range-00000002", "b", 0, 10, [90]),
    ]
    assert plan.source_bytes == 74


def test_long_copies_are_split_at_units() -> None:
    long = evolve(copy("a", 8, 30, 4), transform="t", unit_bytes=4, growth=2)
    plan = plan_ranges([long], {"weights.bin": 64}, "", chunk_bytes=14)
    assert [(r.offset, r.size, r.copies[0].dest_offset) for r in plan.ranges] == [(8, 12, 4), (20, 12, 28), (32, 6, 52)]


@pytest.mark.parametrize(
    ("copies", "text"),
    [
        ([copy("a", 0, 8, 0), copy("a", 8, 8, 7)], "weights.bin at 7 is written twice"),
        ([copy("a", 0, 8, 25)], "weights.bin at 25 is 8 bytes; expected a span inside the file"),
        ([copy("a", 0, 8, 0, "other.bin")], "other.bin at 0 is not a planned output"),
    ],
)
def test_destinations_that_cannot_be_are_refused(copies: list[Copy], text: str) -> None:
    with pytest.raises(InstallError, match=text):
        plan_ranges(copies, {"weights.bin": 32}, "")


def test_destination_outside_the_install_is_refused() -> None:
    with pytest.raises(InstallError, match="not a planned output"):
        plan_ranges([copy("a", 0, 8, 0, "../x")], {"../x": 32}, "")


@given(
    pieces=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 150), st.integers(1, 50)), max_size=12),
    chunk=st.integers(8, 80),
)
def test_a_plan_moves_every_byte_to_its_place(pieces: list[tuple[str, int, int]], chunk: int) -> None:
    """Fetching each request once and serving its copies gives the same file as copying directly."""
    shards = {"a": bytes(range(200)), "b": bytes(reversed(range(200)))}
    copies, expected = [], b""
    for shard, offset, size in pieces:
        copies.append(copy(shard, offset, size, len(expected)))
        expected += shards[shard][offset : offset + size]
    plan = plan_ranges(copies, {"weights.bin": len(expected)}, "", chunk_bytes=chunk)
    written = bytearray(len(expected))
    for request in plan.ranges:
        assert request.size <= chunk
        data = shards[request.shard][request.offset : request.offset + request.size]
        for part in request.copies:
            start = part.offset - request.offset
            written[part.dest_offset : part.dest_offset + part.size] = data[start : start + part.size]
    assert bytes(written) == expected
    assert [r.ident for r in plan.ranges] == [f"range-{i:08d}" for i in range(len(plan.ranges))]
