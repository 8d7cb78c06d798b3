"""The scheduler with its prefix cache: what is reused is what is said to be, and every answer is a cold one's."""

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import attrs
import mlx.core as mx
import pytest

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions
from mference_core.errors import StreamError
from mference_core.generate import GenerateOptions, Generation
from mference_core.sampling import SamplingOptions
from mference_core.scheduler.request import Request
from mference_core.scheduler.scheduler import Scheduler, SchedulerOptions
from mference_core.session import Session
from mference_core.testing.asking import Asked

CHUNK, MUCH = 128, 1 << 28
GREEDY = SamplingOptions(temperature=0)
FAMILIES = [name for name in plugins.installed() if plugins.load(name).family.reference is not None]


def load(name: str, **options: Any) -> Engine:
    family = plugins.load(name)
    assert family.family.reference is not None
    usual = LoadOptions(dtype="float32", slots="resident", chunk=CHUNK, context=700)
    return Engine.load(family, family.family.reference / "mlx", attrs.evolve(usual, **options))


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with load(request.param) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def rows() -> Iterator[Engine]:
    with load("gemma4") as loaded:
        yield loaded


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((37 * i + 11 * salt + 5) % 250 for i in range(length))


def request(tokens: Sequence[int], new: int = 6, **more: Any) -> Request:
    return Request(prompt=tuple(tokens), options=GenerateOptions(max_new=new, sampling=GREEDY), **more)


def alone(engine: Engine, wanted: Request) -> list[int]:
    generation = Generation(session=engine.session(), prompt=wanted.prompt, options=wanted.options)
    list(generation)
    return generation.token_ids


def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that will hold the tokens of every call that takes more than one of a timeline."""
    taken: list[int] = []
    run = Engine.forward

    def forward(self: Engine, sessions: Sequence[Session], tokens: Sequence[Sequence[int]], **more: Any) -> Any:
        taken.extend(len(part) for part in tokens if len(part) > 1)
        return run(self, sessions, tokens, **more)

    monkeypatch.setattr(Engine, "forward", forward)
    return taken


def test_a_conversation_computes_only_what_is_new(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns, then the second one edited; cached tokens are those that no call took."""
    taken, said = computed(monkeypatch), list(prompt(200))
    with Scheduler(engine=engine, options=SchedulerOptions(cache_bytes=MUCH)) as scheduler:
        prompts, cached, answers = [], [], []
        for turn in range(3):
            prompts.append(tuple(said))
            taken.clear()
            asked = Asked.of(scheduler, request(said, 20))
            cached.append(asked.outcome().figures.cached_tokens)
            assert sum(taken) + cached[-1] in (len(said), len(said) - 1)
            answers.append(asked.tokens)
            assert asked.prefilled[-1] == len(said)
            said += [*asked.tokens, *prompt(30, turn + 1)]
        edited = [*prompts[1][:-10], *prompt(40, 9)]
        again = Asked.of(scheduler, request(edited, 5))
        cached.append(again.outcome().figures.cached_tokens)
        load = scheduler.load()
        assert load.cached_tokens == sum(cached)
        assert load.cache.nbytes > 0
    rows_only = len(set(map(type, engine.layout.layers))) > 0 and engine.cuts.unit_tokens == 1
    assert cached == ([0, 219, 269, 240] if rows_only else [0, 128, 192, 192])
    for tokens, answer in zip(prompts, answers, strict=True):
        assert answer == alone(engine, request(tokens, 20))
    assert again.tokens == alone(engine, request(edited, 5))


def test_many_at_once_with_a_common_beginning_share_its_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes over what the others have computed meanwhile: together they take little more than one would."""
    taken, common = computed(monkeypatch), prompt(512)
    wanted = [request([*common, *prompt(20 + salt, salt)], 8) for salt in range(4)]
    with Scheduler(engine=engine, options=SchedulerOptions(cache_bytes=MUCH)) as scheduler:
        asked = [Asked.of(scheduler, one) for one in wanted]
        cached = [one.outcome().figures.cached_tokens for one in asked]
        tokens = [one.tokens for one in asked]
    total = sum(len(one.prompt) for one in wanted)
    assert sum(taken) == total - sum(cached)
    assert sum(taken) < 512 * 2
    assert tokens == [alone(engine, one) for one in wanted]


def test_it_serves_a_prompt_under_any_bound(engine: Engine) -> None:
    """Evictions in the middle of what is being computed harm nothing."""
    with Scheduler(engine=engine, options=SchedulerOptions(cache_bytes=60_000, max_active=3)) as scheduler:
        wanted = [request(prompt(150 + 31 * n, n % 3), 5) for n in range(9)]
        asked = [Asked.of(scheduler, one) for one in wanted]
        for one in asked:
            assert one.outcome().error is None
            assert scheduler.load().cache.nbytes <= 60_000
        tokens = [one.tokens for one in asked]
    assert tokens == [alone(engine, one) for one in wanted]


@pytest.mark.parametrize("seed", [1, 2])
def test_any_mixture_of_requests_is_served_exactly(rows: Engine, tmp_path: Path, seed: int) -> None:
    """Prompts that share and part, cancelled, late and failing ones, small caches, a disk: what is told is never wrong."""
    draw, run, made = Random(seed), Engine.forward, dict[tuple[int, ...], list[int]]()  # noqa: S311 (test data)
    limits = SchedulerOptions(
        max_active=4, max_waiting=99, cache_bytes=80_000 * seed, cache_folder=tmp_path, disk_bytes=200_000
    )

    def wanted() -> Request:
        tokens = prompt(draw.randint(1, 300), draw.randrange(2)) + prompt(draw.randint(0, 60), draw.randrange(2))
        return request(tokens, draw.randint(1, 10), deadline_seconds=draw.choice([None] * 5 + [0.02]))

    asked = []
    with Scheduler(engine=rows, options=limits) as scheduler:
        for _ in range(40):
            one = wanted()
            asked.append((one, Asked.of(scheduler, one)))
            ticket = asked[-1][1].ticket
            if draw.random() < 0.2 and ticket is not None:
                threading.Timer(draw.random() / 10, ticket.cancel).start()
            if draw.random() < 0.1:
                Engine.forward = _failing_once(run)  # type: ignore[method-assign]
            time.sleep(draw.random() / 200)
        outcomes = [one.outcome() for _, one in asked]
    Engine.forward = run  # type: ignore[method-assign]
    for (one, heard), outcome in zip(asked, outcomes, strict=True):
        if one.prompt not in made:
            made[one.prompt] = alone(rows, request(one.prompt, 10))
        assert heard.tokens == made[one.prompt][: len(heard.tokens)]
        assert outcome.reason != "max_tokens" or len(heard.tokens) == one.options.max_new
        assert outcome.error is None or str(outcome.error) == "disk is gone"
    assert {outcome.reason for outcome in outcomes} >= {"max_tokens", "cancelled"}


def _failing_once(run: Any) -> Any:
    def forward(*_: object, **__: object) -> Any:
        Engine.forward = run  # type: ignore[method-assign]
        raise StreamError(what="disk", got="gone")

    return forward


def test_it_survives_a_restart(engine: Engine, tmp_path: Path) -> None:
    options = SchedulerOptions(cache_bytes=MUCH, cache_folder=tmp_path, disk_bytes=MUCH)
    wanted = request(prompt(300), 6)
    seen = []
    for _ in range(2):
        with Scheduler(engine=engine, options=options) as scheduler:
            asked = Asked.of(scheduler, wanted)
            seen.append((asked.outcome().figures.cached_tokens, asked.tokens))
            other = Asked.of(scheduler, request(prompt(290), 6))
            other.outcome()
    want = alone(engine, wanted)
    assert seen == [(0, want), (256, want)]
    assert other.tokens == alone(engine, request(prompt(290), 6))


def test_reading_from_the_disk_holds_up_nobody(rows: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one waits for its pieces others are served; it can be cancelled meanwhile."""
    options = SchedulerOptions(cache_bytes=MUCH, cache_folder=tmp_path, disk_bytes=MUCH)
    with Scheduler(engine=rows, options=options) as scheduler:
        Asked.of(scheduler, request(prompt(300), 2)).outcome()
    free = threading.Event()
    read = __import__("mference_core.prefix.disk", fromlist=["read_piece"]).read_piece

    def slow(*arguments: Any) -> Any:
        assert free.wait(30)
        return read(*arguments)

    monkeypatch.setattr("mference_core.prefix.disk.read_piece", slow)
    with Scheduler(engine=rows, options=options) as scheduler:
        waiting = Asked.of(scheduler, request(prompt(300), 4))
        twin = Asked.of(scheduler, request(prompt(300), 4))
        leaving = Asked.of(scheduler, request(prompt(301), 4))
        assert Asked.of(scheduler, request(prompt(100, 5), 5)).outcome().reason == "max_tokens"
        assert leaving.ticket is not None
        leaving.ticket.cancel()
        assert leaving.outcome().reason == "cancelled"
        assert not waiting.tokens
        free.set()
        assert (waiting.outcome().figures.cached_tokens, twin.outcome().figures.cached_tokens) == (256, 300)
        tokens = waiting.tokens, twin.tokens
    assert tokens == (alone(rows, request(prompt(300), 4)),) * 2


def test_cancelled_work_is_not_lost(rows: Engine) -> None:
    """What a cancelled request had computed of its prompt serves the next."""
    with Scheduler(engine=rows, options=SchedulerOptions(cache_bytes=MUCH)) as scheduler:
        asked = Asked()
        asked.ticket = scheduler.submit(
            request(prompt(600), 4),
            lambda d: (asked.hear(d), asked.ticket and len(asked.told) > 2 and asked.ticket.cancel()),
        )
        asked.outcome()
        again = Asked.of(scheduler, request(prompt(600), 4))
        assert again.outcome().figures.cached_tokens >= CHUNK


def test_nothing_is_left_when_it_is_closed(rows: Engine, tmp_path: Path) -> None:
    gc.collect()
    before, threads = mx.get_active_memory(), threading.active_count()
    options = SchedulerOptions(cache_bytes=MUCH, cache_folder=tmp_path, disk_bytes=MUCH)
    with Scheduler(engine=rows, options=options) as scheduler:
        for salt in range(4):
            Asked.of(scheduler, request(prompt(200, salt), 4)).outcome()
        assert mx.get_active_memory() > before
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    del scheduler
    gc.collect()
    assert threading.active_count() == threads
    assert mx.get_active_memory() <= before + 4096
