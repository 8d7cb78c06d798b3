"""The scheduler: one thread that owns a loaded model and serves every request on it."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Condition, Thread, current_thread
from typing import Self

import mlx.core as mx
from attrs import define, field, frozen
from attrs.validators import ge, gt

from mference_core.engine import Engine
from mference_core.errors import Busy, MferenceError, RequestError
from mference_core.generate import Answer, check_prompt
from mference_core.prefix.cache import PrefixCache
from mference_core.rows import Row, as_error, in_memory, make_tokens, take_tokens
from mference_core.sampling import MAX_LOGPROBS, Sampler
from mference_core.scheduler.pace import Pace
from mference_core.scheduler.request import Deliver, Request, Ticket
from mference_core.scheduler.task import Task

THREAD = "mference-scheduler"


@frozen(kw_only=True)
class SchedulerOptions:
    """Limits: requests served at once and waiting, bytes of all their states, seconds one call may take from others.

    `state_bytes` None is as much as `max_active` timelines of the whole context need; one request is always served.
    `cache_bytes` is what beginnings of earlier prompts and answers may take in memory; 0 keeps none.
    """

    max_active: int = field(default=8, validator=ge(1))
    max_waiting: int = field(default=64, validator=ge(0))
    state_bytes: int | None = None
    cache_bytes: int = field(default=0, validator=ge(0))
    call_seconds: float = field(default=0.1, validator=gt(0))


@frozen(kw_only=True)
class Load:
    """What is going on: requests, bytes of states, and totals since the start in tokens, requests and seconds."""

    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0
    state_bytes: int = 0
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    decode_steps: int = 0


@define(kw_only=True, eq=False)
class Scheduler:
    """Serves many requests on one model; its thread is the only one that uses `engine` from now on.

    An array that is not computed yet can only be computed on the thread it was written on, so an engine is best loaded
    by `loading`; one that was loaded here takes a token here first, so that nothing is left to compute.
    Tokens of all running requests are made together, one call a step. Prompts are taken by pieces between such steps:
    while both are wanted each has half of the time. A request's answer is what it would be alone, to the bit where the
    backend's products do not depend on the number of rows.
    """

    engine: Engine
    options: SchedulerOptions = field(factory=SchedulerOptions)
    cache: PrefixCache | None = field(init=False)
    _thread: Thread | None = field(default=None, repr=False)
    _changed: Condition = field(factory=Condition, init=False, repr=False)
    _waiting: deque[Task] = field(factory=deque, init=False, repr=False)
    _prefilling: deque[Task] = field(factory=deque, init=False, repr=False)
    _decoding: list[Task] = field(factory=list, init=False, repr=False)
    _twins: dict[tuple[int, ...], list[Task]] = field(factory=dict, init=False, repr=False)
    _pace: Pace = field(init=False, repr=False)
    _owed_seconds: float = field(default=0.0, init=False)
    _mean_seconds: float = field(default=1.0, init=False)
    _totals: dict[str, int] = field(factory=dict, init=False)
    _closing: bool = field(default=False, init=False)
    _stop: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.cache = None
        if self.options.cache_bytes:
            self.cache = PrefixCache(engine=self.engine, limit_bytes=self.options.cache_bytes)
        self._pace = Pace(self.options.call_seconds)
        self._totals = dict.fromkeys(
            ("requests", "failed", "prompt_tokens", "cached_tokens", "new_tokens", "decode_steps"), 0
        )
        if self._thread is None:
            mx.eval(self.engine.session().prefill([0]))
            self._thread = Thread(target=self._run, name=THREAD, daemon=True)
            self._thread.start()

    @classmethod
    def loading(cls, load: Callable[[], Engine], options: SchedulerOptions | None = None) -> "Scheduler":
        """Load a model on the thread that will use it, and serve it; it is closed with the scheduler.

        Raises what `load` does.
        """
        ready: Future[Scheduler] = Future()

        def serve() -> None:
            try:
                engine = load()
                scheduler = cls(engine=engine, options=options or SchedulerOptions(), thread=current_thread())
            except BaseException as error:  # noqa: BLE001  it is raised where it was asked for
                ready.set_exception(error)
                return
            ready.set_result(scheduler)
            with engine:
                scheduler._run()

        Thread(target=serve, name=THREAD, daemon=True).start()
        return ready.result()

    # Called from any thread.

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        """Take a request. Raises `Busy` when the queue is full or closed, `RequestError` for one that cannot run."""
        answer = Answer(options=request.options, stop_ids=request.stop_ids, decoder=request.decoder)
        answer.limit = min(answer.limit, check_prompt(self.engine, request.prompt))
        if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
            got = str(request.logprobs)
            raise RequestError(what="top_logprobs", got=got, expected=f"an integer from 0 to {MAX_LOGPROBS}")
        if request.constraint is not None and not request.stop_ids:
            raise RequestError(what="a constrained answer", got="without stop ids", expected="at least one")
        task = Task(
            request=request,
            deliver=deliver,
            answer=answer,
            sampler=Sampler(
                options=request.options.sampling,
                vocab_size=self.engine.graph.vocab_size,
                prompt=request.prompt,
            ),
            need_bytes=self.engine.layout.bytes_at(len(request.prompt) + answer.limit),
            wake=self._wake,
        )
        task.figures.prompt_tokens = len(request.prompt)
        with self._changed:
            if self._closing:
                raise Busy(what="the scheduler", got="closing", remedy="ask another server")
            if len(self._waiting) >= self.options.max_waiting and not self._idle():
                raise self._busy()
            self._waiting.append(task)
            self._changed.notify()
        return task

    def load(self) -> Load:
        """Return what is going on now."""
        with self._changed:
            active = [*self._prefilling, *self._decoding]
            sessions = [task.session for task in active]
            return Load(
                waiting=len(self._waiting) + sum(map(len, self._twins.values())),
                prefilling=len(self._prefilling),
                decoding=len(self._decoding),
                state_bytes=sum(session.nbytes for session in sessions if session is not None),
                **self._totals,
            )

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones end for so long, cancel the rest, stop the thread. Again is harmless."""
        with self._changed:
            self._closing = True
            for task in self._waiting:
                task.cancelled = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._active(), timeout=drain_seconds)
            self._stop = True
            self._changed.notify_all()
        assert self._thread is not None
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _busy(self) -> Busy:
        ahead = len(self._waiting) + 1
        seconds = math.ceil(self._mean_seconds * ahead / self.options.max_active)
        return Busy(
            what="the queue",
            got=f"full with {len(self._waiting)} requests",
            remedy="ask again later",
            retry_after_seconds=max(1, min(seconds, 60)),
        )

    def _idle(self) -> bool:
        return not self._active() and not self._waiting

    def _active(self) -> int:
        return len(self._prefilling) + len(self._decoding) + sum(map(len, self._twins.values()))

    # Called on the scheduler's thread.

    def _run(self) -> None:
        while self._rest():
            try:
                self._drop_overdue()
                self._admit()
                self._turn()
            except Exception as error:  # noqa: BLE001  one request's fault, or ours, must not end the thread
                self._fail([*self._prefilling, *self._decoding], error)
        self._drop_all()
        if self.cache is not None:
            self.cache.close()

    def _rest(self) -> bool:
        """Wait until there is something to do; return whether to go on."""
        with self._changed:
            while not self._stop and not self._active() and not self._waiting:
                self._changed.notify_all()
                self._changed.wait()
            return not self._stop

    def _everyone(self) -> list[Task]:
        twins = [task for group in self._twins.values() for task in group]
        return [*self._waiting, *twins, *self._prefilling, *self._decoding]

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        with self._changed:
            found = [(task, reason) for task in self._everyone() if (reason := task.overdue(now)) is not None]
        for task, reason in found:
            self._end(task, reason)

    def _drop_all(self) -> None:
        for task in self._everyone():
            task.cancelled = True
        self._drop_overdue()

    def _end(self, task: Task, reason: str | None = None, error: MferenceError | None = None) -> None:
        """Take a task out of everything, hand its place on, and tell the outcome."""
        prompt = task.request.prompt
        with self._changed:
            for held in (self._waiting, self._prefilling, self._decoding, self._twins.get(prompt, [])):
                if task in held:
                    held.remove(task)
            leads = prompt in self._twins and all(other.request.prompt != prompt for other in self._prefilling)
            heirs = self._twins.pop(prompt, []) if leads else []
            if heirs:
                first, *rest = heirs
                first.session = task.session if error is None else None
                if first.session is None:
                    first.session = self.engine.session()
                task.session = None
                self._prefilling.appendleft(first)
                if rest:
                    self._twins[prompt] = rest
            self._totals["requests"] += 1
            self._totals["failed"] += error is not None
            self._totals["new_tokens"] += task.figures.new_tokens
            self._totals["prompt_tokens"] += task.figures.prompt_tokens
            self._totals["cached_tokens"] += task.figures.cached_tokens
        session = task.row.session if task.row is not None and error is None else None
        if task.started:
            self._mean_seconds += 0.2 * (time.monotonic() - task.started - self._mean_seconds)
        task.finish(reason, error)
        if self.cache is not None and self.cache.anywhere and session is not None:
            self.cache.keep(session, session.length)
        with self._changed:
            self._changed.notify_all()

    def _fail(self, tasks: Iterable[Task], error: Exception) -> None:
        for task in tasks:
            self._end(task, error=as_error(error))

    def _admit(self) -> None:
        """Let waiting requests in, first come first served, while their states fit."""
        limit = self.options.state_bytes
        if limit is None:
            limit = self.options.max_active * self.engine.layout.bytes_at(self.engine.context)
        while self._waiting:
            with self._changed:
                task, count = self._waiting[0], self._active()
                twins = [other for group in self._twins.values() for other in group]
                taken = sum(other.need_bytes for other in (*self._prefilling, *self._decoding, *twins))
                if count >= self.options.max_active or (count and taken + task.need_bytes > limit):
                    return
                self._waiting.popleft()
                task.started = time.monotonic()
                prompt = task.request.prompt
                if any(other.request.prompt == prompt for other in self._prefilling):
                    self._twins.setdefault(prompt, []).append(task)
                    continue
                task.session = self.engine.session()
                self._prefilling.append(task)
            task.tell_prefilled()

    def _turn(self) -> None:
        """Take one call's worth of prompts, or make one token of each answer."""
        if self._decoding and (self._owed_seconds > 0 or not self._prefilling):
            started = time.monotonic()
            self._decode(list(self._decoding))
            self._owed_seconds = max(0.0, self._owed_seconds - (time.monotonic() - started))
        elif self._prefilling:
            started = time.monotonic()
            self._prefill()
            self._owed_seconds = time.monotonic() - started if self._decoding else 0.0

    def _pieces(self) -> tuple[list[Task], list[int]]:
        """Choose whose prompts go on, in turn, and up to where: together at most one chunk, padding included."""
        cuts = self.engine.cuts
        most = self._pace.tokens(cuts.chunk_tokens) if self._decoding else cuts.chunk_tokens
        tasks, ends, sizes = list[Task](), list[int](), list[int]()
        for task in self._prefilling:
            self._catch_up(task)
            end = (self.cache or cuts).end(task.position, len(task.request.prompt), most)
            together = [*sizes, end - task.position]
            if tasks and (max(together) * len(together) > most or max(together) > 2 * min(together)):
                continue
            tasks.append(task)
            ends.append(end)
            sizes = together
        return tasks, ends

    def _catch_up(self, task: Task) -> None:
        """Take over what others have computed of the same prompt since it was last looked for."""
        if self.cache is None or task.seen_changes == self.cache.changes:
            return
        assert task.session is not None
        before = task.position
        task.figures.cached_tokens += self.cache.restore(task.session, task.request.prompt) - before
        task.seen_changes = self.cache.changes
        if task.position > before:
            task.tell_prefilled()

    def _prefill(self) -> None:
        tasks, ends = self._pieces()
        for task in tasks:  # their turn is over: they go to the end of the line
            self._prefilling.remove(task)
            self._prefilling.append(task)
        self._apart(self._advance, tasks, ends)

    def _advance(self, tasks: Sequence[Task], ends: Sequence[int]) -> None:
        """Take each prompt up to its end in one call; those that are complete begin to answer."""
        started = time.monotonic()
        sessions = [task.session for task in tasks if task.session is not None]
        parts = [
            task.request.prompt[session.length : end] for task, session, end in zip(tasks, sessions, ends, strict=True)
        ]
        complete = [end == len(task.request.prompt) for task, end in zip(tasks, ends, strict=True)]
        logits = self.engine.forward(sessions, parts, want_logits=any(complete))
        if logits is not None:
            mx.eval(logits)
        self._pace.observe(len(parts) * max(map(len, parts)), time.monotonic() - started)
        for at, task in enumerate(tasks):
            if self.cache is not None:
                self.cache.keep(sessions[at], len(task.request.prompt))
            task.tell_prefilled()
            if complete[at]:
                assert logits is not None
                self._begin(task, logits[at])

    def _begin(self, task: Task, logits: mx.array) -> None:
        """Let a task, and those with the very same prompt, answer from the logits (V,) after it."""
        assert task.session is not None
        twins = self._twins.pop(task.request.prompt, [])
        for twin in twins:
            twin.session = task.session.fork()
            twin.figures.cached_tokens = len(twin.request.prompt)
            twin.tell_prefilled()
        with self._changed:
            self._prefilling.remove(task)
            for one in (task, *twins):
                assert one.session is not None
                one.row = Row(
                    session=one.session,
                    sampler=one.sampler,
                    left=one.answer.limit,
                    logits=logits,
                    logprobs=one.request.logprobs,
                    constraint=one.request.constraint,
                    stop_ids=tuple(one.request.stop_ids),
                )
                one.figures.prefill_seconds = time.monotonic() - one.started
                self._decoding.append(one)

    def _decode(self, tasks: Sequence[Task]) -> None:
        """Make one token of each answer and advance those that go on.

        Where that only queues work it is done before anyone is told, so that both overlap; else nobody waits for it.
        """
        made = make_tokens(self.engine, [task.row for task in tasks if task.row is not None])
        self._totals["decode_steps"] += 1
        ahead = in_memory(self.engine)
        if ahead:
            going = [task for task, token in zip(tasks, made, strict=True) if goes_on(task, token)]
            self._apart(self._take, going)
        for task, token in zip(tasks, made, strict=True):
            if task.done:
                continue
            if isinstance(token, MferenceError):
                self._end(task, error=token)
                continue
            task.take(token)
            if task.answer.ended:
                self._end(task)
        if not ahead:
            self._apart(self._take, [task for task in tasks if not task.done])

    def _take(self, tasks: Sequence[Task]) -> None:
        take_tokens(self.engine, [task.row for task in tasks if task.row is not None])

    def _apart(self, call: Callable[..., None], *columns: Sequence[object]) -> None:
        """Make a call for several tasks; should it fail, once for each, so that only those end that cannot go on."""
        tasks: Sequence[Task] = columns[0]  # type: ignore[assignment]
        if not tasks:
            return
        try:
            call(*columns)
        except Exception as error:  # noqa: BLE001  whatever it is, it is this request's
            if len(tasks) == 1:
                self._fail(tasks, error)
                return
            for one in zip(*columns, strict=True):
                self._apart(call, *([value] for value in one))


def goes_on(task: Task, token: int | MferenceError) -> bool:
    """Say whether an answer needs what comes after `token`, as far as can be told before its text is known."""
    assert task.row is not None
    return not isinstance(token, MferenceError) and token not in task.request.stop_ids and task.row.left > 0
