"""Windows with entries and an indexer: the definitions in plain numbers, and native paths that agree bit for bit."""

import math
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mference_kernels import cpu_sparse, native, sparse
from mference_kernels.native_program import Timeline
from mference_kernels.sparse import (
    Seen,
    pick_entries,
    pick_entries_ops,
    sparse_attention,
    sparse_attention_ops,
    sparse_attentions,
    sparse_attentions_ops,
)

NATIVE = pytest.mark.usefixtures("restored")
ANY = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def normal(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def numbers(array: mx.array) -> Any:
    return cast("Any", array.tolist())


def plain(made: Sequence[mx.array], chosen: list[list[int]], **where: Any) -> list[list[list[float]]]:
    """Return attention in double precision, one query and head at a time; `chosen` are each query's entries."""
    q, rows, entries, sinks = made
    out = []
    for at, query in enumerate(numbers(q)):
        position = where["query_start"] + at
        near = range(max(0, position - where["window"] + 1) - where["key_start"], position + 1 - where["key_start"])
        keys = [numbers(rows)[row] for row in near] + [numbers(entries)[entry] for entry in chosen[at]]
        heads = []
        for head, sink in zip(query, numbers(sinks), strict=True):
            scores = [where["scale"] * sum(a * b for a, b in zip(head, key, strict=True)) for key in keys]
            top = max([*scores, sink])
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights) + math.exp(sink - top)
            heads.append(
                [sum(w * key[d] for w, key in zip(weights, keys, strict=True)) / total for d in range(len(head))]
            )
        out.append(heads)
    return out


def visible(start: int, length: int, rate: int) -> list[list[int]]:
    return [list(range((start + at + 1) // rate)) if rate else [] for at in range(length)]


def test_calls_of_more_queries_give_products_no_other_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and entries that only a call's last queries see must not change which kernel takes the first ones."""
    widths, softmax = [], mx.softmax

    def spied(scores: mx.array, axis: int) -> mx.array:
        widths.append(scores.shape[-1])
        return softmax(scores, axis=axis)

    monkeypatch.setattr(mx, "softmax", spied)
    q, rows, entries, sinks = normal(4, 2, 8, seed=1), normal(19, 8, seed=2), normal(68, 8, seed=3), normal(2, seed=4)
    where = {"scale": 0.3, "query_start": 268, "key_start": 253, "window": 16, "rate": 4}
    many = sparse_attention_ops(q, rows, entries, sinks, **where)
    few = sparse_attention_ops(q[:2], rows[:17], entries[:67], sinks, **where)
    assert widths == [32 + 96 + 1] * 2
    assert mx.array_equal(many[:2], few)


CASES = st.fixed_dictionaries(
    {
        "start": st.integers(0, 30),
        "length": st.integers(1, 6),
        "window": st.integers(1, 12),
        "rate": st.sampled_from([0, 2, 4, 7]),
        "heads": st.integers(1, 5),
        "dim": st.sampled_from([3, 16, 40, 64]),
        "seed": st.integers(0, 2**16),
    }
)


def arrays(
    start: int, length: int, window: int, rate: int, heads: int, dim: int, seed: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    first = max(0, start - window + 1)
    count = (start + length) // rate if rate else 0
    made = (
        normal(length, heads, dim, seed=seed),
        normal(start + length - first, dim, seed=seed + 1),
        normal(count + 1, dim, seed=seed + 2),
        normal(heads, seed=seed + 3),
    )
    where: dict[str, Any] = {
        "scale": dim**-0.5,
        "query_start": start,
        "key_start": first,
        "window": window,
        "rate": rate,
    }
    return made, where


@given(case=CASES)
@ANY
def test_windows_entries_and_sinks_share_one_softmax(case: dict[str, Any]) -> None:
    made, where = arrays(**case)
    want = plain(made, visible(case["start"], case["length"], case["rate"]), **where)
    assert mx.allclose(sparse_attention_ops(*made, **where), mx.array(want), rtol=1e-5, atol=1e-5)
    assert mx.allclose(sparse_attention(*made, **where), mx.array(want), rtol=1e-5, atol=1e-5)


@given(case=CASES, data=st.data())
@ANY
def test_picked_entries_take_the_place_of_all(case: dict[str, Any], data: st.DataObject) -> None:
    case["rate"] = case["rate"] or 4
    made, where = arrays(**case)
    chosen = [
        sorted(data.draw(st.sets(st.sampled_from(all_of), max_size=3))) if all_of else []
        for all_of in visible(case["start"], case["length"], case["rate"])
    ]
    picks = mx.array([[*row, *[-1] * (4 - len(row))] for row in chosen], dtype=mx.int32)
    want = mx.array(plain(made, chosen, **where))
    assert mx.allclose(
        sparse_attention_ops(made[0], made[1], made[2], made[3], picks, **where), want, rtol=1e-5, atol=1e-5
    )
    assert mx.allclose(sparse_attention(made[0], made[1], made[2], made[3], picks, **where), want, rtol=1e-5, atol=1e-5)


@NATIVE
@given(case=CASES, wide=st.sampled_from([1, 17, 33]))
@ANY
def test_every_variant_gives_the_same_bits(case: dict[str, Any], wide: int) -> None:
    made, where = arrays(**case | {"heads": wide})
    first = None
    for variant in native.variants():
        native.choose(variant)
        got = cpu_sparse.sparse_attention_cpu(*made, **where)
        first = got if first is None else first
        assert mx.array_equal(got, first), variant


@NATIVE
@pytest.mark.parametrize(("heads", "dim", "rate"), [(64, 512, 4), (64, 512, 128), (5, 64, 4)])
def test_chunks_rings_threads_and_picking_everything_change_no_bit(heads: int, dim: int, rate: int) -> None:
    """At the published shape too: a query alone, where its window lies, and all entries named instead of implied."""
    start, length, window = 500, 9, 128
    q, sinks = normal(length, heads, dim, seed=1), normal(heads, seed=2)
    every = normal(start + length, dim, seed=3)
    entries = normal((start + length) // rate, dim, seed=4)
    where: dict[str, Any] = {"scale": dim**-0.5, "window": window, "rate": rate}
    want = cpu_sparse.sparse_attention_cpu(q, every, entries, sinks, query_start=start, key_start=0, **where)
    slots = window + length + 3
    order = list(range(start + length - slots, start + length))
    ring = every[mx.array(sorted(order, key=lambda p: p % slots))]
    for threads in (1, 3):
        native.set_threads(threads)
        for first, last in ((0, length), (0, 1), (3, 5), (8, 9)):
            query, key = start + first, start + first - window + 1
            named = [[*row, -1] for row in visible(query, last - first, rate)]
            most = max(map(len, named))
            picks = mx.array([row + [-1] * (most - len(row)) for row in named], dtype=mx.int32)
            part, at = q[first:last], {"query_start": query, "key_start": key}
            for rows, ringed, chosen in (
                (every[key : start + last], False, None),
                (ring, True, None),
                (ring, True, picks),
            ):
                got = cpu_sparse.sparse_attention_cpu(part, rows, entries, sinks, chosen, ring=ringed, **at, **where)
                assert mx.array_equal(got, want[first:last]), (threads, first, ringed, chosen is None)


def test_a_sink_takes_its_share_and_no_value() -> None:
    """A head whose sink is far above every score comes to nothing; one far below, to a plain softmax."""
    q, rows = normal(1, 2, 8, seed=5), mx.ones((1, 8))
    got = sparse_attention(
        q, rows, rows[:0], mx.array([50.0, -50.0]), scale=1.0, query_start=0, key_start=0, window=4, rate=0
    )
    assert float(mx.abs(got[0, 0]).max()) < 1e-9
    assert mx.allclose(got[0, 1], mx.ones(8), atol=1e-6)


def test_an_entry_is_seen_from_its_windows_last_token_on() -> None:
    rows = mx.zeros((8, 4))
    entries = mx.array([[1.0] * 4, [2.0] * 4])
    where: dict[str, Any] = {"scale": 1.0, "key_start": 0, "window": 2, "rate": 4}
    q = mx.zeros((8, 1, 4))
    got = sparse_attention(q, rows, entries, mx.array([-1e9]), query_start=0, **where)
    mean = [0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 1 / 3, 3 / 4]
    assert numbers(got[:, 0, 0]) == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("path", [sparse_attention_ops, sparse_attention])
def test_rows_and_entries_that_are_missing_are_refused(path: Any) -> None:
    (q, rows, entries, sinks), where = arrays(20, 4, 6, 4, 2, 16, 0)
    with pytest.raises(ValueError, match=r"\[sparse\] rows must cover positions to 23"):
        path(q, rows[:-1], entries, sinks, **where)
    with pytest.raises(ValueError, match=r"\[sparse\] rows must cover"):
        path(q, rows, entries, sinks, **where | {"key_start": 16})
    with pytest.raises(ValueError, match=r"\[sparse\] entries must be 6 but got 5"):
        path(q, rows, entries[:5], sinks, **where)


def best(made: Sequence[Any], start: int, rate: int, top_k: int, scale: float) -> list[list[int]]:
    """Return picks by the rule itself, in double precision."""
    q, weights, keys = map(numbers, made)
    picks = []
    for at, (heads, shares) in enumerate(zip(q, weights, strict=True)):
        seen = (start + at + 1) // rate
        scores = [
            sum(
                share * max(0.0, scale * sum(a * b for a, b in zip(head, key, strict=True)))
                for head, share in zip(heads, shares, strict=True)
            )
            for key in keys[:seen]
        ]
        order = sorted(range(seen), key=lambda entry: (-scores[entry], entry))[:top_k]
        picks.append(sorted(order) + [-1] * (min(top_k, len(keys)) - len(order)))
    return picks


@given(
    start=st.integers(0, 60),
    length=st.integers(1, 5),
    heads=st.sampled_from([1, 4, 16, 20, 48]),
    dim=st.sampled_from([3, 16, 32]),
    top_k=st.integers(1, 9),
    rate=st.sampled_from([2, 4]),
    seed=st.integers(0, 2**16),
)
@ANY
def test_the_best_visible_entries_are_picked(
    start: int, length: int, heads: int, dim: int, top_k: int, rate: int, seed: int
) -> None:
    count = (start + length) // rate + 1
    q, keys = normal(length, heads, dim, seed=seed), normal(count, dim, seed=seed + 1)
    weights = normal(length, heads, seed=seed + 2)
    where: dict[str, Any] = {"scale": dim**-0.5, "query_start": start, "rate": rate, "top_k": top_k}
    want = best((q, weights, keys), start=start, rate=rate, top_k=top_k, scale=dim**-0.5)
    if heads > 1:  # with one head many scores are exactly 0, or as close to each other as rounding
        assert numbers(pick_entries_ops(q, weights, keys, **where)) == want
        assert numbers(pick_entries(q, weights, keys, **where)) == want


@NATIVE
@pytest.mark.parametrize("path", [pick_entries_ops, cpu_sparse.pick_entries_cpu])
def test_the_lower_entry_wins_a_tie(path: Any) -> None:
    """Equal scores, zeros of both signs among them, and scores below zero: a weight may be negative."""
    keys = mx.array([[1.0], [2.0], [1.0], [-1.0], [2.0], [-5.0], [2.0], [0.0]])
    where: dict[str, Any] = {"scale": 1.0, "query_start": 7, "rate": 1}
    one = mx.ones((1, 1, 1))
    assert numbers(path(one, mx.ones((1, 1)), keys, top_k=2, **where)) == [[1, 4]]
    assert numbers(path(one, mx.ones((1, 1)), keys, top_k=4, **where)) == [[0, 1, 4, 6]]
    assert numbers(path(one, mx.ones((1, 1)), keys, top_k=6, **where)) == [[0, 1, 2, 3, 4, 6]]
    assert numbers(path(one, -mx.ones((1, 1)), keys, top_k=3, **where)) == [[3, 5, 7]]
    assert numbers(path(one, -mx.ones((1, 1)), keys, top_k=4, **where)) == [[0, 3, 5, 7]]


@NATIVE
@pytest.mark.parametrize("heads", [64, 3])
def test_queries_alone_and_variants_pick_the_same(heads: int) -> None:
    start, length, dim, top_k = 2000, 7, 128, 300
    q, weights = normal(length, heads, dim, seed=1), normal(length, heads, seed=2)
    keys = normal((start + length) // 4, dim, seed=3)
    where: dict[str, Any] = {"scale": 0.1, "rate": 4, "top_k": top_k}
    want = None
    for variant in native.variants():
        native.choose(variant)
        got = cpu_sparse.pick_entries_cpu(q, weights, keys, query_start=start, **where)
        want = got if want is None else want
        assert mx.array_equal(got, want), variant
        for at in (0, 3, 6):
            part = slice(at, at + 1)
            alone = cpu_sparse.pick_entries_cpu(q[part], weights[part], keys, query_start=start + at, **where)
            assert mx.array_equal(alone, got[part])
    assert want is not None
    ops = pick_entries_ops(q, weights, keys, query_start=start, **where)
    same = mx.array([len(set(a) & set(b)) for a, b in zip(numbers(want), numbers(ops), strict=True)])
    assert int(same.min()) >= top_k - 2, "equal but for scores as close as rounding"


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are taken in blocks whose scores fit a bound: the definitions too."""
    made, where = arrays(40, 6, 8, 4, 3, 16, 7)
    q, keys, weights = normal(6, 4, 8, seed=1), normal(12, 8, seed=2), normal(6, 4, seed=3)
    picking: dict[str, Any] = {"scale": 1.0, "query_start": 40, "rate": 4, "top_k": 3}
    picks = pick_entries_ops(q, weights, keys, **picking)
    whole = [
        sparse_attention_ops(*made, **where),
        sparse_attention_ops(made[0], made[1], made[2], made[3], picks, **where),
    ]
    monkeypatch.setattr(sparse, "SCORE_BYTES", 1)
    blocks = [
        sparse_attention_ops(*made, **where),
        sparse_attention_ops(made[0], made[1], made[2], made[3], picks, **where),
    ]
    assert mx.array_equal(pick_entries_ops(q, weights, keys, **picking), picks)
    assert all(mx.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(whole, blocks, strict=True))


def test_timelines_of_a_batch_are_each_their_own() -> None:
    """With and without picks, as rings, of different lengths: what is past a timeline's length is zero."""
    (q, rows, entries, sinks), where = arrays(20, 4, 6, 4, 3, 16, 0)
    batch = mx.stack([q, -q, 2 * q])
    picks = mx.array([[0, 3, -1]] * 2, dtype=mx.int32)
    place = {"query_start": 20, "key_start": where["key_start"]}
    order = mx.arange(where["key_start"], 24)
    ring = mx.zeros_like(rows)
    ring[order % rows.shape[0]] = rows
    seen = [
        Seen(rows=rows, entries=entries, length=4, **place),
        Seen(rows=ring, entries=entries, picks=picks, length=2, ring=True, **place),
        Seen(rows=rows, entries=entries, length=1, **place),
    ]
    shared: dict[str, Any] = {"scale": where["scale"], "window": where["window"], "rate": 4}
    for path in (sparse_attentions_ops, sparse_attentions):
        got = path(batch, seen, sinks, **shared)
        assert got.shape == batch.shape
        for b, (part, chosen) in enumerate(zip(seen, (None, picks, None), strict=True)):
            want = sparse_attention_ops(batch[b, : part.length], rows, entries, sinks, chosen, **where)
            assert mx.allclose(got[b, : part.length], want, rtol=1e-5, atol=1e-5)
            assert not bool(got[b, part.length :].any())


@NATIVE
@pytest.mark.parametrize("start", [0, 5, 9])
def test_rows_are_stored_where_they_belong(start: int) -> None:
    """In a ring of ten, across its end, from any row of a larger array; nothing else is touched."""
    ring, made = normal(1, 10, 3, seed=1), normal(2, 4, 3, seed=2)
    mx.eval(ring)
    want = cast("list[list[float]]", ring[0].tolist())
    flat = numbers(made.reshape(-1, 3))
    for row in range(4):
        want[(start + row) % 10] = flat[3 + row]
    sparse.store_rows(Timeline(ring, ring, start, 4), made, 3)
    assert numbers(ring[0]) == want
    with pytest.raises(ValueError, match=r"\[store_rows\] rows must be 9"):
        sparse.store_rows(Timeline(ring, ring, start, 4), made, 5)
    with pytest.raises(ValueError, match=r"\[store_rows\] rows must fit"):
        sparse.store_rows(Timeline(ring, ring, start, 4), normal(4, 2, seed=3), 0)


@NATIVE
def test_arrays_are_written_at_once() -> None:
    array, made = mx.zeros((4, 3)), normal(2, 2, 3, seed=2)
    native.store(array, 1, made, 1, 2)
    assert numbers(array) == [[0.0] * 3, *numbers(made.reshape(-1, 3))[1:3], [0.0] * 3]
    for row, first, count in ((3, 0, 2), (0, 3, 2)):
        with pytest.raises(ValueError, match=r"\[store\]"):
            native.store(array, row, made, first, count)


@NATIVE
def test_whole_memory_is_read_as_its_used_part_is() -> None:
    """Capacity beyond what is used, with an axis for heads, changes no bit."""
    (q, rows, entries, sinks), where = arrays(20, 4, 6, 4, 3, 16, 0)
    want = cpu_sparse.sparse_attention_cpu(q, rows, entries, sinks, **where)
    more = mx.concatenate([entries, mx.full((9, 16), mx.nan)])[None]
    ring = mx.full((40, 16), mx.nan)
    ring[mx.arange(where["key_start"], 24) % 40] = rows
    assert mx.array_equal(cpu_sparse.sparse_attention_cpu(q, ring[None], more, sinks, ring=True, **where), want)
    keys, weights = normal(6, 16, seed=1), normal(4, 3, seed=2)
    picking: dict[str, Any] = {"scale": 1.0, "query_start": 20, "rate": 4, "top_k": 3}
    whole = mx.concatenate([keys, mx.full((9, 16), mx.nan)])[None]
    assert mx.array_equal(
        cpu_sparse.pick_entries_cpu(q, weights, whole, **picking),
        cpu_sparse.pick_entries_cpu(q, weights, keys, **picking),
    )


@NATIVE
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_rows_are_read_as_they_are(dtype: mx.Dtype) -> None:
    """Widened exactly: the bits of the same rows in float32, for rows, entries and the indexer's keys alike."""
    (q, rows, entries, sinks), where = arrays(20, 4, 6, 4, 19, 40, 0)
    narrow = [rows.astype(dtype), entries.astype(dtype)]
    wide = [part.astype(mx.float32) for part in narrow]
    for variant in native.variants():
        native.choose(variant)
        want = cpu_sparse.sparse_attention_cpu(q, wide[0], wide[1], sinks, **where)
        assert mx.array_equal(cpu_sparse.sparse_attention_cpu(q, narrow[0], narrow[1], sinks, **where), want)
        assert mx.array_equal(cpu_sparse.sparse_attention_cpu(q, wide[0], narrow[1], sinks, **where), want)
        keys, weights = normal(6, 40, seed=1).astype(dtype), normal(4, 19, seed=2)
        picking: dict[str, Any] = {"scale": 1.0, "query_start": 20, "rate": 4, "top_k": 3}
        picks = cpu_sparse.pick_entries_cpu(q, weights, keys, **picking)
        assert mx.array_equal(picks, cpu_sparse.pick_entries_cpu(q, weights, keys.astype(mx.float32), **picking))


@NATIVE
def test_rows_are_narrowed_as_a_cast_does() -> None:
    values = [1.0, -0.0, 1.00390625, 1.01171875, 3.4e38, -mx.inf, mx.nan, 1e-40, 0.1]
    made = mx.concatenate([mx.array(values), normal(991, seed=3) * 1e3]).reshape(100, 10)
    ring = mx.zeros((1, 128, 10), mx.bfloat16)
    sparse.store_rows(Timeline(ring, ring, 100, 100), made)
    got, want = ring[0, mx.arange(100, 200) % 128], made.astype(mx.bfloat16)
    assert mx.array_equal(got.astype(mx.float32), want.astype(mx.float32), equal_nan=True)
