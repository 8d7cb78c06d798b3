"""The prefix cache: whatever it finds, the rest goes on as a cold run does, bit for bit on CPUs, for every family."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions
from mference_core.prefix.cache import PrefixCache
from mference_core.prefix.tree import bytes_of
from mference_core.session import Session

CONTEXT, CHUNK = 700, 96
FAMILIES = [name for name in plugins.installed() if plugins.load(name).family.reference is not None]
PROMPT = [(37 * i + 11) % 250 for i in range(400)]
MUCH = 1 << 30


def load(name: str, **options: Any) -> Engine:
    family = plugins.load(name)
    assert family.family.reference is not None
    usual = LoadOptions(dtype="float32", slots="resident", chunk=CHUNK, context=CONTEXT)
    return Engine.load(family, family.family.reference / "mlx", attrs.evolve(usual, **options))


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with load(request.param) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def rows() -> Iterator[Engine]:
    """An engine whose layers all keep rows, some in rings."""
    with load("gemma4") as loaded:
        yield loaded


def equal(got: mx.array, want: mx.array) -> bool:
    if mx.default_device() == mx.Device(mx.cpu):
        return bool(mx.array_equal(got, want))
    return bool(mx.allclose(got, want, rtol=5e-5, atol=5e-5))


def cold(engine: Engine, prompt: Sequence[int], decoded: Sequence[int] = ()) -> tuple[Session, mx.array]:
    session = engine.session()
    logits = session.prefill(prompt)
    for token in decoded:
        logits = session.decode(token)
    return session, logits


def take(cache: PrefixCache, session: Session, prompt: Sequence[int]) -> mx.array:
    """Take a prompt by the engine's cuts, keeping all that may be kept."""
    engine, logits = cache.engine, None
    while session.length < len(prompt):
        end = cache.end(session.length, prompt)
        logits = engine.forward([session], [prompt[session.length : end]])
        cache.keep(session, prompt)
    assert logits is not None
    return logits[0]


def changed(prompt: Sequence[int], at: int) -> list[int]:
    return [*prompt[:at], (prompt[at] + 1) % 250, *prompt[at + 1 :]]


def test_all_a_prompt_begins_with_is_reused(engine: Engine) -> None:
    """The same prompt, longer and shorter ones, and ones that differ early and late."""
    cache = PrefixCache(engine=engine, limit_bytes=MUCH, point_tokens=1)
    take(cache, engine.session(), PROMPT)
    reused = {}
    for name, prompt in {
        "same": PROMPT,
        "longer": [*PROMPT, *PROMPT[:150]],
        "shorter": PROMPT[:300],
        "late": changed(PROMPT, 390),
        "middle": changed(PROMPT, 200),
        "early": changed(PROMPT, 30),
        "first": changed(PROMPT, 0),
        "short": PROMPT[:9],
    }.items():
        session = engine.session()
        reused[name] = cache.restore(session, prompt)
        assert session.tokens == prompt[: reused[name]]
        assert {state.length for state in session.states} == {reused[name]}
        want, logits = cold(engine, prompt)
        assert equal(session.prefill(prompt[session.length :]), logits), name
        assert session.nbytes == want.nbytes
        for token in (5, 6, 7):
            assert equal(session.decode(token), want.decode(token)), name
    wanted = (399, 400, 299, 390, 200, 30, 0, 8) if cache.anywhere else (384, 384, 256, 384, 192, 0, 0, 0)
    assert tuple(reused.values()) == wanted


def test_what_was_answered_is_reused_where_nothing_is_carried(rows: Engine) -> None:
    cache = PrefixCache(engine=rows, limit_bytes=MUCH)
    session = rows.session()
    take(cache, session, PROMPT[:100])
    for token in range(90):
        session.decode(token)
    cache.keep(session, session.tokens)
    prompt = [*PROMPT[:100], *range(90), 3, 4, 5]
    again = rows.session()
    assert cache.restore(again, prompt) == 190
    assert equal(again.prefill(prompt[190:]), cold(rows, prompt)[1])


@pytest.mark.parametrize("pieces", [1, 7, 50, 96])
def test_rings_lose_what_was_not_kept_in_time(rows: Engine, pieces: int) -> None:
    """A timeline that is kept only at its end gives what its rings still hold; what can be restored is exact."""
    cache = PrefixCache(engine=rows, limit_bytes=MUCH)
    session = rows.session()
    for start in range(0, 300, pieces):
        session.prefill(PROMPT[start : min(300, start + pieces)])
    cache.keep(session, session.tokens)
    capacity = max(session.states[layer].capacity_rows for layer in cache.parts.ring)
    assert capacity < 200
    found = 0
    for at in range(1, 300, 13):
        prompt = changed(PROMPT[:300], at)
        again = rows.session()
        reused = cache.restore(again, prompt)
        assert reused in (0, at)
        assert reused == 0 or at >= 300 - capacity
        found += reused > 0
        if reused:
            assert equal(again.prefill(prompt[reused:]), cold(rows, prompt)[1])
    assert found > 0


def test_a_restored_timeline_rewinds_as_far_as_it_really_can(rows: Engine) -> None:
    """Rows of a ring that were not restored are not pretended to be there."""
    cache = PrefixCache(engine=rows, limit_bytes=MUCH)
    take(cache, rows.session(), PROMPT)
    for length in (10, 17, 100, 399):
        session = rows.session()
        assert cache.restore(session, PROMPT[: length + 1]) == length
        possible = [n for n in range(1, length + 1) if all(state.can_truncate(n) for state in session.states)]
        for n in {possible[0], possible[len(possible) // 2], length}:
            twin = session.fork()
            twin.rewind(n)
            assert equal(twin.prefill([9, 8]), cold(rows, [*PROMPT[:n], 9, 8])[1])


def test_nothing_is_shared(engine: Engine) -> None:
    """What goes on from a restored timeline leaves what is kept as it was."""
    cache = PrefixCache(engine=engine, limit_bytes=MUCH)
    take(cache, engine.session(), PROMPT)
    for _ in range(3):
        session = engine.session()
        cache.restore(session, PROMPT)
        assert equal(session.prefill(PROMPT[session.length :]), cold(engine, PROMPT)[1])
        for token in range(30):
            session.decode(token)


def test_bytes_are_bounded_and_the_least_used_goes_first(engine: Engine) -> None:
    """Of many conversations the one that is used again and again stays, and the newest."""
    cache = PrefixCache(engine=engine, limit_bytes=MUCH)
    take(cache, engine.session(), PROMPT[:150])
    limit = 3 * cache.tree.nbytes
    assert cache.tree.nbytes == held_bytes(cache)
    cache = PrefixCache(engine=engine, limit_bytes=limit)
    talks = [changed(PROMPT[:150], at) for at in range(8)]
    whole = engine.cuts.last(150) if not cache.anywhere else 149
    for talk in talks:
        take(cache, engine.session(), talk)
        assert cache.tree.nbytes == held_bytes(cache) <= limit
        assert cache.figures().stretches == len(every(cache))
        assert cache.restore(engine.session(), talks[0]) == whole
    assert cache.restore(engine.session(), talks[-1]) == whole
    assert [cache.restore(engine.session(), talk) for talk in talks[1:5]] == [0] * 4
    cache.close()
    assert (cache.figures().nbytes, cache.figures().stretches) == (0, 0)
    assert cache.restore(engine.session(), talks[0]) == 0


def test_no_room_keeps_nothing_and_harms_nothing(engine: Engine) -> None:
    cache = PrefixCache(engine=engine, limit_bytes=1)
    take(cache, engine.session(), PROMPT)
    assert (cache.tree.nbytes, every(cache)) == (0, [])


def test_where_prompts_part_the_third_goes_on_from_there(engine: Engine) -> None:
    """A common beginning is found by any layers, once two prompts have had it; points lie there, not only at ends."""
    cache = PrefixCache(engine=engine, limit_bytes=MUCH)
    reused = []
    for salt in range(3):
        prompt = [*PROMPT[:210], *((salt + 3 * i) % 250 for i in range(150))]
        session = engine.session()
        reused.append(cache.restore(session, prompt))
        assert equal(take(cache, session, prompt), cold(engine, prompt)[1])
    assert reused == ([0, 210, 210] if cache.anywhere else [0, 0, 192])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_rows_in_fewer_bits_come_back_as_they_were(kv_dtype: str) -> None:
    with load("gemma4", kv_dtype=kv_dtype) as engine:
        cache = PrefixCache(engine=engine, limit_bytes=MUCH)
        take(cache, engine.session(), PROMPT[:150])
        session = engine.session()
        assert cache.restore(session, PROMPT[:150]) == 149
        assert session.nbytes == cold(engine, PROMPT[:149])[0].nbytes
        assert equal(session.decode(PROMPT[149]), cold(engine, PROMPT[:150])[1])


def test_what_begins_alike_is_kept_once(rows: Engine) -> None:
    cache = PrefixCache(engine=rows, limit_bytes=MUCH)
    take(cache, rows.session(), PROMPT)
    before = cache.tree.nbytes
    prompt = changed(PROMPT, 390)
    session = rows.session()
    cache.restore(session, prompt)
    take(cache, session, prompt)
    assert cache.tree.nbytes - before < before / 4


def held_bytes(cache: PrefixCache) -> int:
    return sum(bytes_of(kind, piece) for stretch in every(cache) for kind, piece in stretch.pieces.items())


def every(cache: PrefixCache) -> list[Any]:
    found, waiting = [], list(cache.tree.root.after.values())
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].after.values()
    return found


@given(
    turns=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.integers(1, 130)), min_size=1, max_size=5),
    share=st.floats(0.05, 3),
)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_conversations_stay_exact(engine: Engine, turns: list[tuple[int, int, int]], share: float) -> None:
    """Prompts that go back to any token of earlier ones and on otherwise, under any bound."""
    limit = int(share * engine.layout.bytes_at(300))
    cache = PrefixCache(engine=engine, limit_bytes=limit, point_tokens=128)
    said = PROMPT[:2]
    for keep, salt, count in turns:
        said = [*said[: max(1, keep)], *((salt + 7 * i) % 250 for i in range(count))][:430]
        session = engine.session()
        reused = cache.restore(session, said)
        assert reused < len(said)
        assert equal(take(cache, session, said), cold(engine, said)[1])
        assert cache.tree.nbytes <= limit
