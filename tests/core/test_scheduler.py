"""Many requests on one model: each is what it would be alone, each can end, fail or leave, and nothing is kept."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import attrs
import mlx.core as mx
import pytest

from mference_core import plugins
from mference_core.chat.format import Event as ChatEvent
from mference_core.chat.format import Text
from mference_core.engine import Engine, LoadOptions
from mference_core.errors import Busy, ManifestError, RequestError, StreamError
from mference_core.generate import GenerateOptions, Generation
from mference_core.sampling import SamplingOptions, log_probs
from mference_core.scheduler.pace import Pace
from mference_core.scheduler.request import Delivery, Outcome, Prefilled, Request, Sampled
from mference_core.scheduler.scheduler import THREAD, Load, Scheduler, SchedulerOptions, state_limit
from mference_core.session import Session
from mference_core.testing.asking import Asked

CONTEXT, CHUNK = 512, 96
GREEDY = SamplingOptions(temperature=0)
WARM = SamplingOptions(temperature=0.8, seed=7)
FAMILIES = [name for name in plugins.installed() if plugins.load(name).family.reference is not None]


def load(name: str, **options: Any) -> Engine:
    family = plugins.load(name)
    assert family.family.reference is not None
    usual = LoadOptions(dtype="float32", slots="resident", chunk=CHUNK, context=CONTEXT)
    return Engine.load(family, family.family.reference / "mlx", attrs.evolve(usual, **options))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load("gemma4") as loaded:
        yield loaded


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    with Scheduler(engine=engine) as running:
        yield running


def prompt(length: int, salt: int = 0, vocab: int = 256) -> tuple[int, ...]:
    return tuple((37 * i + 11 * salt + 5) % vocab for i in range(length))


def request(length: int = 20, salt: int = 0, new: int = 8, sampling: SamplingOptions = GREEDY, **more: Any) -> Request:
    return Request(prompt=prompt(length, salt), options=GenerateOptions(max_new=new, sampling=sampling), **more)


def alone(engine: Engine, wanted: Request) -> Generation:
    generation = Generation(
        session=engine.session(),
        prompt=wanted.prompt,
        options=wanted.options,
        stop_ids=wanted.stop_ids,
        decoder=wanted.decoder,
    )
    list(generation)
    return generation


class Spelling:
    """A decoder that spells each token out."""

    def push(self, token: int) -> list[ChatEvent]:
        return [Text(f"<{token}>")]

    def finish(self, reason: str) -> list[ChatEvent]:
        return [Text(f"[{reason}]")]


class Held:
    """A request whose deliveries the scheduler's thread waits in, from one of a kind on, until it is released."""

    def __init__(self, scheduler: Scheduler, wanted: Request, kind: type[Delivery] = Sampled) -> None:
        self.asked, self.reached, self.free, self.kind = Asked(), Event(), Event(), kind
        self.asked.ticket = scheduler.submit(wanted, self.hear)
        assert self.reached.wait(30)

    def hear(self, delivery: Delivery) -> None:
        self.asked.hear(delivery)
        if isinstance(delivery, self.kind):
            self.reached.set()
            assert self.free.wait(30)


@pytest.mark.parametrize("slots", ["resident", "fewest", "ahead"])
@pytest.mark.parametrize("name", FAMILIES)
def test_together_each_is_what_it_is_alone(name: str, slots: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than a chunk, of every size, greedy and not, ending one after the other.

    Also where calls only queue work, as on GPUs, and the step after is queued before tokens are read.
    """
    if slots == "ahead":
        for module in ("rows", "scheduler.work"):
            monkeypatch.setattr(f"mference_core.{module}.only_queues", lambda _: True)
    with load(name) as probe:
        few = probe.checkpoint.arch.top_k_experts + 1
    with load(name, slots=few if slots == "fewest" else "resident") as engine:
        wanted = [
            request(length, salt, new, sampling)
            for salt, (length, new, sampling) in enumerate(
                [(5, 12, GREEDY), (200, 6, WARM), (97, 9, GREEDY), (1, 14, WARM), (64, 3, GREEDY), (130, 8, GREEDY)]
            )
        ]
        if slots == "ahead":
            wanted = [attrs.evolve(one, options=attrs.evolve(one.options, sampling=GREEDY)) for one in wanted]
        want = [alone(engine, one).token_ids for one in wanted]
        with Scheduler(engine=engine, options=SchedulerOptions(max_active=5)) as scheduler:
            asked = [Asked.of(scheduler, one) for one in wanted]
            for one in asked:
                assert one.outcome().reason == "max_tokens"
            assert [one.tokens for one in asked] == want
            assert scheduler.load().decode_steps < sum(map(len, want))


def test_what_is_told(scheduler: Scheduler, engine: Engine) -> None:
    """Progress by chunks, then each token before what it completes, then the outcome, last."""
    wanted = request(200, new=3, decoder=Spelling())
    asked = Asked.of(scheduler, wanted)
    outcome = asked.outcome()
    a, b, c = alone(engine, wanted).token_ids
    assert asked.told == [
        *(Prefilled(done, 200) for done in (0, 96, 192, 200)),
        *(Sampled(a), Text(f"<{a}>"), Sampled(b), Text(f"<{b}>"), Sampled(c), Text(f"<{c}>"), Text("[max_tokens]")),
        outcome,
    ]
    assert (outcome.reason, outcome.finish_reason, outcome.error) == ("max_tokens", "length", None)
    assert outcome.text == f"<{a}><{b}><{c}>[max_tokens]"
    figures = outcome.figures
    assert (figures.prompt_tokens, figures.cached_tokens, figures.new_tokens) == (200, 0, 3)
    assert figures.prefill_seconds > 0
    assert asked.ticket is not None
    assert asked.ticket.done


def test_stops(scheduler: Scheduler, engine: Engine) -> None:
    """A stop id ends an answer and has no text; so does a stop string, which may be spread over tokens."""
    tokens = alone(engine, request(new=6)).token_ids
    last = next(token for token in tokens if tokens.index(token) >= 2)
    before = tokens[: tokens.index(last)]
    asked = Asked.of(scheduler, request(new=6, stop_ids={last: "eos"}, decoder=Spelling()))
    outcome = asked.outcome()
    assert (outcome.reason, outcome.finish_reason) == ("eos", "stop")
    assert asked.tokens == [*before, last]
    assert outcome.text == "".join(f"<{token}>" for token in before) + "[eos]"
    wanted = request(new=6, decoder=Spelling())
    options = GenerateOptions(max_new=6, sampling=GREEDY, stop=(f"><{last}",))
    asked = Asked.of(scheduler, attrs.evolve(wanted, options=options))
    shown = "".join(f"<{token}>" for token in before)[:-1]
    assert (asked.outcome().reason, asked.outcome().text) == ("stop_string", shown)
    assert asked.tokens == [*before, last]


def test_logprobs_are_the_models_own(scheduler: Scheduler, engine: Engine) -> None:
    wanted = request(30, new=4, sampling=WARM, logprobs=3)
    others = [Asked.of(scheduler, request(40, salt, 6)) for salt in (1, 2)]
    asked = Asked.of(scheduler, wanted)
    asked.outcome()
    session = engine.session()
    for one in others:
        one.outcome()
    scheduler.close()
    logits = session.prefill(wanted.prompt)
    told = [delivery for delivery in asked.told if isinstance(delivery, Sampled)]
    assert len(told) == 4
    for delivery in told:
        assert delivery.logprobs == log_probs(logits, delivery.token, 3)
        logits = session.decode(delivery.token)


class Counting:
    """Allows one id at a time, ten, eleven, twelve, and is finished then."""

    def __init__(self, size: int, broken: str = "") -> None:
        self.size, self.next, self.broken = size, 10, broken

    def allowed(self) -> mx.array | None:
        if self.broken == "allowed":
            raise RuntimeError("no grammar")
        return mx.arange(self.size) == self.next

    def accept(self, token: int) -> None:
        assert token == self.next
        if self.broken == "accept":
            raise RuntimeError("no grammar")
        self.next += 1

    def finished(self) -> bool:
        return self.next > 12


def test_a_constraint_decides_what_may_come(scheduler: Scheduler) -> None:
    """Then only a stop id may, the better of them; others beside it are free."""
    free = Asked.of(scheduler, request(30, 1, 12))
    asked = Asked.of(scheduler, request(constraint=Counting(256), sampling=WARM, stop_ids={7: "eos", 9: "end_of_turn"}))
    assert asked.outcome().finish_reason == "stop"
    assert asked.tokens[:3] == [10, 11, 12]
    assert asked.tokens[3] in (7, 9)
    assert free.outcome().reason == "max_tokens"
    with pytest.raises(RequestError, match="a constrained answer is without stop ids"):
        scheduler.submit(request(constraint=Counting(256)), print)


@pytest.mark.parametrize("broken", ["allowed", "accept"])
def test_a_failing_constraint_ends_only_its_own(scheduler: Scheduler, engine: Engine, broken: str) -> None:
    others = [Asked.of(scheduler, request(30, salt, 10)) for salt in (1, 2)]
    asked = Asked.of(scheduler, request(constraint=Counting(256, broken), stop_ids={7: "eos"}))
    error = asked.outcome().error
    assert str(error) == "this request is failed: RuntimeError: no grammar; ask for less, or try again"
    assert asked.outcome().finish_reason == "error"
    for salt, one in enumerate(others, start=1):
        assert one.outcome().error is None
        assert one.tokens == alone(engine, request(30, salt, 10)).token_ids


def failing(monkeypatch: pytest.MonkeyPatch, engine: Engine, token: int, error: Exception) -> None:
    """Let every call fail that takes `token`, half way through."""
    run = engine.forward

    def forward(sessions: Sequence[Session], tokens: Sequence[Sequence[int]], **more: Any) -> mx.array | None:
        def observe(index: int, *_: object) -> None:
            if index == 1 and any(token in part for part in tokens):
                raise error

        return run(sessions, tokens, **{**more, "observe": observe})

    monkeypatch.setattr(Engine, "forward", lambda self, *a, **k: forward(*a, **k))  # noqa: ARG005


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StreamError(what="layer 3", got="unreadable"), "layer 3 is unreadable"),
        (MemoryError("no room"), "this request is failed: MemoryError: no room; ask for less, or try again"),
    ],
)
def test_a_failed_call_ends_only_whom_it_must(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    """In a prompt and in an answer; the others go on as if nothing had been."""
    want = {salt: alone(engine, request(30, salt, 10)).token_ids for salt in (1, 2, 3)}
    bad = 250
    assert all(bad not in (*prompt(30, salt), *want[salt]) for salt in want)
    failing(monkeypatch, engine, bad, error)
    with Scheduler(engine=engine) as scheduler:
        held = Held(scheduler, request(5, 9, 1, WARM), Prefilled)
        asked = {salt: Asked.of(scheduler, request(30, salt, 10, GREEDY, logprobs=0)) for salt in want}
        in_prompt = Asked.of(scheduler, Request(prompt=(*prompt(29, 4), bad)))
        forced = GenerateOptions(sampling=SamplingOptions(temperature=0, logit_bias={bad: 100}))
        in_answer = Asked.of(scheduler, Request(prompt=prompt(28, 5), options=forced))
        held.free.set()
        assert str(in_prompt.outcome().error) == text
        assert str(in_answer.outcome().error) == text
        for salt, one in asked.items():
            assert one.outcome().error is None
            assert one.tokens == want[salt]
        monkeypatch.undo()
        again = Asked.of(scheduler, request(30, 1, 10))
        assert again.outcome().error is None
        assert again.tokens == want[1]
        assert scheduler.load().failed == 2


def test_one_who_raises_while_being_told_is_cancelled(scheduler: Scheduler, engine: Engine) -> None:
    seen: list[Delivery] = []

    def deliver(delivery: Delivery) -> None:
        seen.append(delivery)
        if isinstance(delivery, Sampled):
            raise OSError("gone")

    other = Asked.of(scheduler, request(30, 1, 10))
    ticket = scheduler.submit(request(new=400), deliver)
    assert other.outcome().error is None
    deadline = time.monotonic() + 20
    while not ticket.done and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(seen[-1], Outcome)
    assert seen[-1].reason == "cancelled"
    assert other.tokens == alone(engine, request(30, 1, 10)).token_ids


@pytest.mark.parametrize("kind", [Prefilled, Sampled])
def test_cancelling_what_runs(scheduler: Scheduler, kind: type[Delivery]) -> None:
    """Within one chunk or token, and others go on."""
    other = Asked.of(scheduler, request(30, 1, 30))
    held = Held(scheduler, request(400, 2, 100), kind)
    assert held.asked.ticket is not None
    held.asked.ticket.cancel()
    held.asked.ticket.cancel()
    held.free.set()
    outcome = held.asked.outcome()
    assert (outcome.reason, outcome.finish_reason, outcome.error) == ("cancelled", "cancelled", None)
    assert outcome.figures.new_tokens <= 1
    assert len(held.asked.prefilled) <= (2 if kind is Prefilled else 6)
    assert other.outcome().reason == "max_tokens"
    held.asked.ticket.cancel()
    assert [type(delivery) for delivery in held.asked.told].count(Outcome) == 1


def test_the_queue_is_bounded(engine: Engine) -> None:
    """What waits can be cancelled; what is refused is told when to ask again; first come is first served."""
    options = SchedulerOptions(max_active=1, max_waiting=2)
    with Scheduler(engine=engine, options=options) as scheduler:
        held = Held(scheduler, request(5, 1, 4))
        first, second = (Asked.of(scheduler, request(5, salt, 2)) for salt in (2, 3))
        with pytest.raises(Busy, match="the queue is full with 2 requests; ask again later") as caught:
            scheduler.submit(request(), print)
        assert 1 <= caught.value.retry_after_seconds <= 60
        assert scheduler.load().waiting == 2
        assert first.ticket is not None
        first.ticket.cancel()
        third_ready = threading.Timer(0.05, held.free.set)
        third_ready.start()
        assert first.outcome().reason == "cancelled"
        assert first.outcome().figures.new_tokens == 0
        assert second.outcome().reason == "max_tokens"
        assert held.asked.outcome().reason == "max_tokens"
        third_ready.join()


def test_a_queue_of_no_places_serves_as_many_as_run_at_once(engine: Engine) -> None:
    with Scheduler(engine=engine, options=SchedulerOptions(max_active=2, max_waiting=0)) as scheduler:
        held = Held(scheduler, request(5))
        other = Asked.of(scheduler, request(5, 1))
        with pytest.raises(Busy):
            scheduler.submit(request(), print)
        held.free.set()
        assert held.asked.outcome().reason == "max_tokens"
        assert other.outcome().reason == "max_tokens"


def test_deadlines_count_from_submission(engine: Engine) -> None:
    """One that waits too long never starts; one that runs too long keeps what it has, flushed."""
    with Scheduler(engine=engine, options=SchedulerOptions(max_active=1)) as scheduler:
        held = Held(scheduler, request(5, 1, 400, decoder=Spelling(), deadline_seconds=0.2))
        waiting = Asked.of(scheduler, request(5, 2, deadline_seconds=0.05))
        time.sleep(0.25)
        held.free.set()
        assert (waiting.outcome().reason, waiting.tokens) == ("deadline", [])
        outcome = held.asked.outcome()
        assert (outcome.reason, outcome.finish_reason) == ("deadline", "length")
        assert outcome.text.endswith(">[max_tokens]")
        assert outcome.figures.new_tokens == len(held.asked.tokens) <= 2


def test_decoding_goes_on_beside_a_long_prompt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two pieces of a prompt those who decode have a token each, and the pieces are as short as told."""
    monkeypatch.setattr(Pace, "tokens", lambda *_: 20)
    with Scheduler(engine=engine) as scheduler:
        order: list[tuple[str, Delivery]] = []
        done = Event()
        for name in ("a", "b"):
            Asked.of(scheduler, request(8, 1 + (name == "b"), 8))
        held = Held(scheduler, request(4, 3, 400))
        chatter = scheduler.submit(request(4, 4, 400), lambda d: order.append(("chat", d)))

        def hear(delivery: Delivery) -> None:
            order.append(("long", delivery))
            if isinstance(delivery, Sampled):
                done.set()

        scheduler.submit(request(400, 5, 1), hear)
        held.free.set()
        assert done.wait(60)
        chatter.cancel()
        assert held.asked.ticket is not None
        held.asked.ticket.cancel()
        held.asked.outcome()
    marks = [at for at, (name, d) in enumerate(order) if name == "long" and isinstance(d, Prefilled)]
    gaps = [b - a for a, b in pairwise(marks)]
    first = next(at for at, (name, d) in enumerate(order) if name == "chat" and isinstance(d, Sampled))
    beside = [at for at in marks if at > first]
    assert len(beside) >= 400 // 20
    assert all(gap > 1 for gap, at in zip(gaps, marks, strict=False) if at > first)


def test_the_same_prompt_is_computed_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four answers to one prompt: one prefill, four timelines; each draws for itself."""
    taken: list[int] = []
    run = Engine.forward

    def forward(self: Engine, sessions: Sequence[Session], tokens: Sequence[Sequence[int]], **more: Any) -> Any:
        taken.extend(len(part) for part in tokens if len(part) > 1)
        return run(self, sessions, tokens, **more)

    monkeypatch.setattr(Engine, "forward", forward)
    wanted = [request(200, 1, 8, attrs.evolve(WARM, seed=seed)) for seed in range(4)]
    with Scheduler(engine=engine) as scheduler:
        held = Held(scheduler, request(1, 2, 1))
        asked = [Asked.of(scheduler, one) for one in wanted]
        held.free.set()
        cached = [one.outcome().figures.cached_tokens for one in asked]
    assert sum(taken) == 200
    assert cached == [0, 200, 200, 200]
    assert [one.tokens for one in asked] == [alone(engine, one).token_ids for one in wanted]


def test_who_waits_for_the_same_prompt_inherits_it(engine: Engine) -> None:
    """The one who computes it leaves half way; the next goes on from there."""
    with Scheduler(engine=engine) as scheduler:
        free = Event()
        asked: list[Asked] = []

        def hear(delivery: Delivery) -> None:
            asked[0].hear(delivery)
            if isinstance(delivery, Prefilled) and delivery.done == CHUNK:
                while len(asked) < 3:
                    time.sleep(0.001)
                assert free.wait(30)

        asked.append(Asked())
        asked[0].ticket = scheduler.submit(request(300, 1, 8), hear)
        asked += [Asked.of(scheduler, request(300, 1, 8)) for _ in range(2)]
        asked[0].ticket.cancel()
        free.set()
        assert asked[0].outcome().reason == "cancelled"
        for one in asked[1:]:
            assert one.outcome().reason == "max_tokens"
            assert one.tokens == alone(engine, request(300, 1, 8)).token_ids
        assert sum(one.outcome().figures.cached_tokens for one in asked) == 300


def test_states_are_bounded_by_bytes(engine: Engine) -> None:
    """As many run as fit; one always does; all are served."""
    each = engine.layout.bytes_at(28)
    options = SchedulerOptions(state_bytes=2 * each)
    with Scheduler(engine=engine, options=options) as scheduler:
        most = 0

        def hear(asked: Asked, delivery: Delivery) -> None:
            nonlocal most
            load = scheduler.load()
            most = max(most, load.prefilling + load.decoding)
            assert load.state_bytes <= 2 * each
            asked.hear(delivery)

        asked = [Asked() for _ in range(5)]
        for salt, one in enumerate(asked):
            scheduler.submit(request(20, salt, 8), lambda d, one=one: hear(one, d))
        assert [one.outcome().reason for one in asked] == ["max_tokens"] * 5
        assert most == 2
        assert Asked.of(scheduler, request(400, 1, 4)).outcome().error is None


def test_a_memory_budget_bounds_states_too() -> None:
    """Without a limit of its own the scheduler keeps to what the plan of the load left for states."""
    with load("gemma4", memory_bytes=200 << 20) as engine:
        plan = engine.memory
        assert state_limit(engine, SchedulerOptions()) == plan.state_bytes + (200 << 20) - plan.total_bytes
        assert state_limit(engine, SchedulerOptions(state_bytes=7)) == 7
    with load("gemma4", memory_bytes=200 << 20, slots=3, state_bytes=5 << 20) as engine:
        assert engine.memory.state_bytes == 5 << 20 > engine.layout.bytes_at(CONTEXT)
        assert state_limit(engine, SchedulerOptions()) >= 5 << 20
    with load("gemma4") as engine:
        assert engine.memory.state_bytes == engine.layout.bytes_at(CONTEXT)
        assert state_limit(engine, SchedulerOptions(max_active=3)) == 3 * engine.layout.bytes_at(CONTEXT)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (Request(prompt=()), "prompt is empty"),
        (Request(prompt=(1,) * CONTEXT), f"prompt is {CONTEXT} tokens; expected at most {CONTEXT - 1}"),
        (Request(prompt=(1, 256)), "token id is 256; expected 0 to 255"),
        (Request(prompt=(1,), logprobs=21), "top_logprobs is 21"),
        (
            Request(prompt=(1,), options=GenerateOptions(sampling=SamplingOptions(logit_bias={300: 1}))),
            "a key of logit_bias is 300",
        ),
    ],
)
def test_what_cannot_run_is_refused_at_once(scheduler: Scheduler, wanted: Request, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        scheduler.submit(wanted, print)
    assert scheduler.load() == Load()


def test_an_answer_fills_the_context_and_no_more(scheduler: Scheduler) -> None:
    asked = Asked.of(scheduler, request(CONTEXT - 3, 1, 100))
    assert (asked.outcome().reason, len(asked.tokens)) == ("max_tokens", 3)


def test_under_streaming_the_experts_of_a_batch_are_read_once() -> None:
    """Four timelines that say the same ask each layer for one timeline's experts: not a byte more is read."""
    with load("gemma4", slots=3) as engine:
        before = engine.stats
        alone(engine, request(40, 1, 12))
        single = engine.stats.bytes_read - before.bytes_read
    with Scheduler.loading(lambda: load("gemma4", slots=3)) as scheduler:
        held = Held(scheduler, request(40, 1, 12), Prefilled)
        asked = [Asked.of(scheduler, request(40, 1, 12)) for _ in range(3)]
        held.free.set()
        for one in (held.asked, *asked):
            assert one.outcome().error is None
        assert scheduler.engine.stats.bytes_read == single > 0


def test_what_loading_raises_is_raised_where_it_was_asked_for() -> None:
    with pytest.raises(ManifestError, match="missing"):
        Scheduler.loading(lambda: Engine.load(plugins.load("gemma4"), Path("/nowhere")))


def test_closing_lets_the_running_end_and_refuses_the_rest(engine: Engine) -> None:
    scheduler = Scheduler(engine=engine, options=SchedulerOptions(max_active=1))
    held = Held(scheduler, request(10, 1, 5))
    waiting = Asked.of(scheduler, request(10, 2, 5))
    closer = threading.Thread(target=scheduler.close, args=(30.0,))
    closer.start()
    while not scheduler._closing:
        time.sleep(0.001)
    with pytest.raises(Busy, match="the scheduler is closing"):
        scheduler.submit(request(), print)
    held.free.set()
    closer.join(30)
    assert not closer.is_alive()
    assert held.asked.outcome(0).reason == "max_tokens"
    assert waiting.outcome(0).reason == "cancelled"
    scheduler.close()


def test_closing_without_patience_cancels(engine: Engine) -> None:
    scheduler = Scheduler(engine=engine)
    asked = [Asked.of(scheduler, request(100, salt, 400)) for salt in range(3)]
    scheduler.close()
    assert {one.outcome(0).reason for one in asked} == {"cancelled"}
    assert not any(thread.name == THREAD for thread in threading.enumerate())


def test_nothing_is_kept(engine: Engine) -> None:
    """Served, cancelled, failed and refused: no session, thread or byte is left."""
    seen = weakref.WeakSet[Session]()
    with Scheduler(engine=engine) as scheduler:
        make = engine.session

        def session() -> Session:
            made = make()
            seen.add(made)
            return made

        for salt in range(3):  # what mlx and the kernels keep for good is there after this
            Asked.of(scheduler, request(60, salt, 3)).outcome()
        gc.collect()
        before, threads = mx.get_active_memory(), threading.active_count()
        engine_session = type(engine).session
        type(engine).session = lambda _: session()  # type: ignore[method-assign,assignment,misc]
        try:
            for salt in range(12):
                asked = Asked.of(
                    scheduler, request(60 + salt, salt, 6, deadline_seconds=0.0 if salt % 5 == 4 else None)
                )
                if salt % 3 == 0 and asked.ticket is not None:
                    asked.ticket.cancel()
                asked.outcome()
        finally:
            type(engine).session = engine_session  # type: ignore[method-assign]
        gc.collect()
        assert len(seen) == 0
        assert scheduler.load().state_bytes == 0
        assert mx.get_active_memory() <= before + 4096
        assert threading.active_count() == threads
    assert threading.active_count() == threads - 1
