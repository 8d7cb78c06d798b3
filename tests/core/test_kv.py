"""Layouts as numbers: rows and bytes, by hand."""

import pytest

from mference_core.kv import DTYPE_BYTES, Compressed, KVLayout, Linear, Recurrent, Ring

ROWS = {"k": (2, 8), "v": (2, 8)}
ROW_BYTES = 2 * 2 * 8 * 2


def full(block_rows: int = 256) -> Linear:
    return Linear(rows=ROWS, dtype="bfloat16", block_rows=block_rows)


@pytest.mark.parametrize(
    ("tokens", "context", "expected"),
    [(0, 1000, 0), (1, 1000, 256), (256, 1000, 256), (257, 1000, 512), (1000, 1000, 1000), (5, 100, 100)],
)
def test_append_only_rows_grow_in_blocks_up_to_the_context(tokens: int, context: int, expected: int) -> None:
    assert full().capacity_rows(tokens, context) == expected
    assert full().bytes_at(tokens, context) == expected * ROW_BYTES


@pytest.mark.parametrize(("context", "expected"), [(1000, 40), (40, 40), (39, 39), (1, 1)])
def test_a_ring_is_whole_from_the_start_and_never_longer_than_the_context(context: int, expected: int) -> None:
    ring = Ring(rows=ROWS, dtype="bfloat16", window=32, slack_rows=8)
    for tokens in (0, 1, 33, 1000):
        assert ring.capacity_rows(tokens, context) == expected
        assert ring.bytes_at(tokens, context) == expected * ROW_BYTES


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_fixed_arrays_are_counted_in_their_dtype(dtype: str, size: int) -> None:
    layout = Recurrent(arrays={"s": (4, 8, 8), "c": (3,)}, dtype=dtype)
    assert layout.bytes_at(0, 10) == layout.bytes_at(10, 10) == (4 * 64 + 3) * size
    assert DTYPE_BYTES[dtype] == size


@pytest.mark.parametrize(("tokens", "entries"), [(0, 0), (3, 0), (4, 2), (8, 2), (11, 2), (12, 4), (30, 8)])
def test_pooled_entries_count_whole_groups(tokens: int, entries: int) -> None:
    """Blocks of two entries; a context of 30 tokens has room for eight."""
    layout = Compressed(
        entries=Linear(rows={"e": (1, 16)}, dtype="float32", block_rows=2),
        tail=Recurrent(arrays={"t": (4, 16)}),
        rate=4,
    )
    assert layout.bytes_at(tokens, 30) == entries * 64 + 256


def test_a_timeline_is_the_sum_of_its_layers() -> None:
    ring = Ring(rows=ROWS, dtype="bfloat16", window=32, slack_rows=8)
    pooled = Compressed(
        entries=Linear(rows={"e": (1, 16)}, dtype="float32"), tail=Recurrent(arrays={"t": (4, 16)}), rate=4
    )
    layout = KVLayout(layers=(full(), ring, full(), pooled), context=600)
    assert layout.fixed_bytes == 40 * ROW_BYTES + 256
    assert layout.bytes_at(300) == 2 * 512 * ROW_BYTES + 40 * ROW_BYTES + 150 * 64 + 256
    assert layout.bytes_per_token == 2 * ROW_BYTES + 16
    assert [layout.bytes_at(n) for n in range(601)] == sorted(layout.bytes_at(n) for n in range(601))
