"""The scheduler: one thread that owns a loaded model and serves every request on it."""

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Condition, Thread, current_thread
from typing import Self

from attrs import define, field, frozen
from attrs.validators import ge, gt

from mference_core.engine import Engine
from mference_core.errors import Busy, MferenceError, RequestError
from mference_core.generate import CANCELLED, Answer, check_prompt
from mference_core.prefix.cache import CacheFigures, PrefixCache
from mference_core.prefix.disk import DiskPieces
from mference_core.prefix.key import cache_key
from mference_core.sampling import MAX_LOGPROBS, Sampler
from mference_core.scheduler.pace import Pace
from mference_core.scheduler.request import Deliver, Request, Ticket
from mference_core.scheduler.task import Task
from mference_core.scheduler.work import Work

THREAD = "mference-scheduler"


@frozen(kw_only=True)
class SchedulerOptions:
    """Limits: requests served at once and waiting, bytes of all their states, seconds one call may take from others.

    `state_bytes` None is what the model's memory budget leaves for states; without a budget, as much as `max_active`
    timelines of the whole context need. One request is always served.
    `cache_bytes` is what beginnings of earlier prompts and answers may take in memory, 0 for none. With a `cache_folder`
    they are also kept there, at most `disk_bytes` of all models together, and outlive the process; `notice` is told once
    if that cannot be done.
    """

    max_active: int = field(default=8, validator=ge(1))
    max_waiting: int = field(default=64, validator=ge(0))
    state_bytes: int | None = None
    call_seconds: float = field(default=0.1, validator=gt(0))
    cache_bytes: int = field(default=0, validator=ge(0))
    cache_folder: Path | None = None
    disk_bytes: int = field(default=0, validator=ge(0))
    notice: Callable[[str], None] = lambda _: None


@frozen(kw_only=True)
class Load:
    """What is going on: requests, bytes of states, and totals since the start of requests, tokens and decode steps.

    Totals of tokens are those of requests that have ended.
    """

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
    cache: CacheFigures = field(factory=CacheFigures)


@define(kw_only=True, eq=False)
class Scheduler:
    """Serves many requests on one model; its thread is the only one that uses `engine` from now on.

    Tokens of all running requests are made together, one call a step. Prompts are taken by pieces between such steps:
    while both are wanted each has half of the time. A request's answer is what it would be alone, to the bit where the
    backend's products do not depend on the number of rows.
    """

    engine: Engine
    options: SchedulerOptions = field(factory=SchedulerOptions)
    _thread: Thread | None = field(default=None, repr=False)
    _work: Work = field(init=False, repr=False)
    _waiting: deque[Task] = field(factory=deque, init=False, repr=False)
    _changed: Condition = field(factory=Condition, init=False, repr=False)
    _totals: dict[str, int] = field(init=False)
    _mean_seconds: float = field(default=1.0, init=False)
    _closing: bool = field(default=False, init=False)
    _stop: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._totals = dict.fromkeys(("requests", "failed", "prompt_tokens", "cached_tokens", "new_tokens"), 0)
        self._work = Work(
            engine=self.engine,
            cache=open_cache(self.engine, self.options),
            pace=Pace(self.options.call_seconds),
            end=lambda task, error: self._end(task, error=error),
        )
        if self._thread is None:
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
                with load() as engine:
                    scheduler = cls(engine=engine, options=options or SchedulerOptions(), thread=current_thread())
                    ready.set_result(scheduler)
                    scheduler._run()
            except BaseException as error:
                if ready.done():
                    raise
                ready.set_exception(error)  # raised where it was asked for

        Thread(target=serve, name=THREAD, daemon=True).start()
        return ready.result()

    # Called from any thread.

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        """Take a request. Raises `Busy` when the queue is full or closed, `RequestError` for one that cannot run."""
        task = self._task(request, deliver)
        with self._changed:
            if self._closing:
                raise Busy(what="the scheduler", got="closing", remedy="ask another server")
            free = max(0, self.options.max_active - len(self._work.tasks()))
            if len(self._waiting) >= self.options.max_waiting + free:
                raise self._busy()
            self._waiting.append(task)
            self._changed.notify_all()
        return task

    def load(self) -> Load:
        """Return what is going on now."""
        work, tasks = self._work, self._work.tasks()
        sessions = [task.session for task in tasks]
        return Load(
            waiting=len(self._waiting),
            prefilling=len(tasks) - len(work.decoding),
            decoding=len(work.decoding),
            state_bytes=sum(session.nbytes for session in sessions if session is not None),
            decode_steps=work.steps,
            cache=work.cache.figures() if work.cache is not None else CacheFigures(),
            **self._totals,
        )

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones end for so long, cancel the rest, stop the thread. Again is harmless."""
        with self._changed:
            self._closing = True
            for task in self._waiting:
                task.cancelled = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._work.tasks(), timeout=drain_seconds)
            self._stop = True
            self._changed.notify_all()
        assert self._thread is not None
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _task(self, request: Request, deliver: Deliver) -> Task:
        answer = Answer(options=request.options, stop_ids=request.stop_ids, decoder=request.decoder)
        answer.limit = min(answer.limit, check_prompt(self.engine, request.prompt))
        if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
            got = str(request.logprobs)
            raise RequestError(what="top_logprobs", got=got, expected=f"an integer from 0 to {MAX_LOGPROBS}")
        if request.constraint is not None and not request.stop_ids:
            raise RequestError(what="a constrained answer", got="without stop ids", expected="at least one")
        size, sampling = self.engine.graph.vocab_size, request.options.sampling
        task = Task(
            request=request,
            deliver=deliver,
            answer=answer,
            sampler=Sampler(options=sampling, vocab_size=size, prompt=request.prompt),
            need_bytes=self.engine.layout.bytes_at(len(request.prompt) + answer.limit),
            wake=self._wake,
        )
        task.figures.prompt_tokens = len(request.prompt)
        return task

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

    # Called on the scheduler's thread.

    def _run(self) -> None:
        while not self._stop:
            try:
                overdue = self._overdue()
                for task, reason in overdue:
                    self._end(task, reason)
                self._admit()
                if self._work.ready:
                    self._work.turn()
                elif not overdue:
                    self._rest()
            except Exception as error:  # noqa: BLE001  our own fault, but it must not end the thread
                self._work.fail(error)
        for task in [*self._waiting, *self._work.tasks()]:
            self._end(task, CANCELLED)
        if self._work.cache is not None:
            self._work.cache.close()

    def _rest(self) -> None:
        """Wait until there may be something to do."""
        with self._changed:
            self._changed.notify_all()
            tasks = [*self._waiting, *self._work.tasks()]
            if self._stop or self._work.ready or self._startable() or any(task.cancelled for task in tasks):
                return
            expiries = [task.expires for task in tasks if task.expires is not None]
            self._changed.wait(max(0.0, min(expiries) - time.monotonic()) if expiries else None)

    def _overdue(self) -> list[tuple[Task, str]]:
        """Return those who must end now, and why."""
        now = time.monotonic()
        with self._changed:
            tasks = [*self._waiting, *self._work.tasks()]
        return [(task, reason) for task in tasks if (reason := task.overdue(now)) is not None]

    def _end(self, task: Task, reason: str | None = None, error: MferenceError | None = None) -> None:
        """Take a task out of everything, count it, and tell the outcome."""
        with self._changed:
            if task in self._waiting:
                self._waiting.remove(task)
        self._work.drop(task, sound=error is None)
        figures = task.figures
        counted = {"requests": 1, "failed": int(error is not None), "new_tokens": figures.new_tokens}
        if task.started:
            counted |= {"prompt_tokens": figures.prompt_tokens, "cached_tokens": figures.cached_tokens}
            self._mean_seconds += 0.2 * (time.monotonic() - task.started - self._mean_seconds)
        for name, count in counted.items():
            self._totals[name] += count
        task.finish(reason, error)
        self._wake()

    def _startable(self) -> bool:
        """Say whether the request that has waited longest may start: its state fits, or nobody else runs."""
        if not self._waiting:
            return False
        tasks, limit = self._work.tasks(), state_limit(self.engine, self.options)
        taken = sum(task.need_bytes for task in tasks)
        fits = len(tasks) < self.options.max_active and taken + self._waiting[0].need_bytes <= limit
        return fits or not tasks

    def _admit(self) -> None:
        """Let waiting requests in, first come first served."""
        while self._startable():
            with self._changed:
                task = self._waiting.popleft()
            task.started = time.monotonic()
            self._work.add(task, self._wake)


def state_limit(engine: Engine, options: SchedulerOptions) -> int:
    """Return the bytes that states of all timelines may take together."""
    if options.state_bytes is not None:
        return options.state_bytes
    plan = engine.memory
    if plan.budget_bytes is not None:
        return plan.state_bytes + max(0, plan.budget_bytes - plan.total_bytes)
    return options.max_active * engine.layout.bytes_at(engine.context)


def open_cache(engine: Engine, options: SchedulerOptions) -> PrefixCache | None:
    """Return the prefix cache that the options ask for."""
    if not options.cache_bytes:
        return None
    disk = None
    if options.cache_folder is not None and options.disk_bytes:
        disk = DiskPieces(options.cache_folder, cache_key(engine), options.disk_bytes, options.notice)
    return PrefixCache(engine=engine, limit_bytes=options.cache_bytes, disk=disk)
