"""Layouts as numbers: rows and bytes, by hand."""

from typing import Any

import pytest

from mference_core.kv import DTYPE_BYTES, Composite, Compressed, KVLayout, Linear, Recurrent, Ring, stored_as

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
        rate=4,
        open_rows={"a": 16, "g": 8},
        carried={"a": 4},
        dtype="bfloat16",
    )
    assert layout.bytes_at(tokens, 30) == entries * 64 + 2 * (3 * 24 + 4 * 4)


def test_a_timeline_is_the_sum_of_its_layers() -> None:
    ring = Ring(rows=ROWS, dtype="bfloat16", window=32, slack_rows=8)
    pooled = Compressed(entries=Linear(rows={"e": (1, 16)}, dtype="float32"), rate=4, open_rows={"a": 2})
    both = Composite(parts={"window": ring, "pool": pooled, "past": Recurrent(arrays={"t": (4, 16)})})
    layout = KVLayout(layers=(full(), ring, full(), both), context=600)
    assert layout.fixed_bytes == 80 * ROW_BYTES + 24 + 256
    assert layout.bytes_at(300) == 2 * 512 * ROW_BYTES + 80 * ROW_BYTES + 150 * 64 + 24 + 256
    assert layout.bytes_per_token == 2 * ROW_BYTES + 16
    assert [layout.bytes_at(n) for n in range(601)] == sorted(layout.bytes_at(n) for n in range(601))


def test_growth_is_added_up_before_it_is_rounded() -> None:
    """Two layers that each cost half a byte per token cost one together."""
    pooled = Compressed(entries=Linear(rows={"e": (1, 1)}, dtype="bfloat16"), rate=4, open_rows={"a": 1})
    assert KVLayout(layers=(pooled,), context=8).bytes_per_token == 0
    assert KVLayout(layers=(pooled, pooled), context=8).bytes_per_token == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 1}, "rate must be at least 2"),
        ({"carried": {"a": 3}}, "carried must be a part"),
        ({"carried": {"b": 1}}, "part"),
    ],
)
def test_windows_that_cannot_be_pooled_are_refused(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"entries": full(), "rate": 2, "open_rows": {"a": 2}} | changes
    with pytest.raises(ValueError, match=message):
        Compressed(**values)


def test_entries_are_stored_as_rows_are() -> None:
    """Open windows and recurrent arrays stay as they are, however deep they lie."""
    pooled = Compressed(entries=Linear(rows={"e": (1, 16)}, dtype="float32"), rate=4, open_rows={"a": 2})
    ring = Ring(rows=ROWS, dtype="float32", window=4, slack_rows=2)
    past = Recurrent(arrays={"t": (4,)})
    layout = KVLayout(layers=(Composite(parts={"w": ring, "p": pooled, "r": past}), pooled, past), context=64)
    made = stored_as(layout, "bfloat16")
    assert made.bytes_per_token == layout.bytes_per_token // 2 == 16
    both, alone, same = made.layers
    assert isinstance(both, Composite)
    assert isinstance(alone, Compressed)
    assert [part.dtype for part in both.parts.values()] == ["bfloat16", "float32", "float32"]
    assert (alone.entries.dtype, alone.dtype, both.parts["p"], same) == ("bfloat16", "float32", alone, past)
