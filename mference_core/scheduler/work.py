"""The requests being served: whose prompts go on, who answers, and whose turn it is. Belongs to one thread."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import mlx.core as mx
from attrs import define, field

from mference_core.engine import Engine
from mference_core.errors import MferenceError
from mference_core.prefix.cache import PrefixCache
from mference_core.prefix.disk import Name, Raw
from mference_core.rows import Made, Row, as_error, make_tokens, only_queues, take_tokens
from mference_core.scheduler.pace import Pace
from mference_core.scheduler.task import Task

End = Callable[[Task, MferenceError | None], None]


@define(kw_only=True, eq=False)
class Work:
    """Tasks by what they wait for: `reading` pieces of their prompts, `prefilling`, `decoding`, and `twins` of others.

    Twins have a prompt that another is already taking. `end` is told of each task that has ended, and calls `drop`.
    """

    engine: Engine
    cache: PrefixCache | None
    pace: Pace
    end: End
    steps: int = field(default=0, init=False)
    prefilling: list[Task] = field(factory=list, init=False)
    decoding: list[Task] = field(factory=list, init=False)
    reading: dict[Task, "Future[dict[Name, Raw]]"] = field(factory=dict, init=False)
    twins: dict[tuple[int, ...], list[Task]] = field(factory=dict, init=False)
    _owed_seconds: float = field(default=0.0, init=False)

    def tasks(self) -> list[Task]:
        """Return all tasks; from any thread."""
        twins = [task for group in list(self.twins.values()) for task in group]
        return [*self.reading, *self.prefilling, *self.decoding, *twins]

    @property
    def ready(self) -> bool:
        """Say whether there is a turn to take."""
        return bool(self.prefilling or self.decoding or any(future.done() for future in self.reading.values()))

    def add(self, task: Task, wake: Callable[[], None]) -> None:
        """Begin to serve a task; `wake` is called when something it waits for is there."""
        prompt = task.request.prompt
        if any(other.request.prompt == prompt for other in (*self.prefilling, *self.reading)):
            self.twins.setdefault(prompt, []).append(task)
            return
        task.session = self.engine.session()
        future = self.cache.fetch(prompt) if self.cache is not None else None
        if future is None:
            self.prefilling.append(task)
        else:
            self.reading[task] = future
            future.add_done_callback(lambda _: wake())
        task.tell_prefilled()

    def drop(self, task: Task, *, sound: bool) -> None:
        """Forget a task; one that waits for the same prompt goes on from where it was, if that is `sound`."""
        prompt = task.request.prompt
        for held in (self.prefilling, self.decoding, self.twins.get(prompt, [])):
            if task in held:
                held.remove(task)
        self.reading.pop(task, None)
        led = any(other.request.prompt == prompt for other in (*self.prefilling, *self.reading))
        waiting = [] if led else self.twins.pop(prompt, [])
        if not waiting:
            return
        first, *rest = waiting
        first.session = task.session if sound and task.session is not None else self.engine.session()
        task.session = None
        self.prefilling.insert(0, first)
        if rest:
            self.twins[prompt] = rest

    def turn(self) -> None:
        """Take one call's worth of prompts, or make one token of each answer: while both are wanted, half and half."""
        self._receive()
        started = time.monotonic()
        if self.decoding and (self._owed_seconds > 0 or not self.prefilling):
            self._decode(list(self.decoding))
            self._owed_seconds = max(0.0, self._owed_seconds - (time.monotonic() - started))
        elif self.prefilling:
            self._prefill()
            self._owed_seconds = time.monotonic() - started if self.decoding else 0.0

    def fail(self, error: Exception) -> None:
        """End every task with an error."""
        for task in self.tasks():
            self.end(task, as_error(error))

    def _receive(self) -> None:
        """Let those go on whose pieces have been read."""
        for task in [task for task, future in self.reading.items() if future.done()]:
            future = self.reading.pop(task)
            self.prefilling.append(task)
            if self.cache is not None and future.exception() is None:
                self.cache.adopt(task.request.prompt, future.result())

    def _catch_up(self, task: Task) -> None:
        """Take over what was computed of the same prompt before, and by others since it was last looked for."""
        if self.cache is None or task.seen_changes == self.cache.changes:
            return
        assert task.session is not None
        before = task.position
        task.figures.cached_tokens += self.cache.restore(task.session, task.request.prompt) - before
        task.seen_changes = self.cache.changes
        if task.position > before:
            task.tell_prefilled()

    def _prefill(self) -> None:
        """Choose whose prompts go on, in turn, and up to where: together at most one chunk, padding included."""
        cuts = self.engine.cuts
        most = self.pace.tokens(cuts.chunk_tokens) if self.decoding else cuts.chunk_tokens
        tasks, ends, sizes = list[Task](), list[int](), list[int]()
        for task in self.prefilling:
            self._catch_up(task)
            at, prompt = task.position, task.request.prompt
            end = self.cache.end(at, prompt, most) if self.cache is not None else cuts.end(at, len(prompt), most)
            together = [*sizes, end - at]
            if tasks and (max(together) * len(together) > most or max(together) > 2 * min(together)):
                continue
            tasks.append(task)
            ends.append(end)
            sizes = together
        self.prefilling = [task for task in self.prefilling if task not in tasks] + tasks  # to the end of the line
        self._apart(self._advance, tasks, ends)

    def _advance(self, tasks: Sequence[Task], ends: Sequence[int]) -> None:
        """Take each prompt up to its end in one call; those that are complete begin to answer."""
        started = time.monotonic()
        sessions = [task.session for task in tasks if task.session is not None]
        if any(session.length >= end for session, end in zip(sessions, ends, strict=True)):
            raise MferenceError(what="this request", got="failed after a call", remedy="try again")
        prompts = [task.request.prompt for task in tasks]
        parts = [prompt[s.length : end] for prompt, s, end in zip(prompts, sessions, ends, strict=True)]
        complete = [end == len(prompt) for prompt, end in zip(prompts, ends, strict=True)]
        logits = self.engine.forward(sessions, parts, want_logits=any(complete))
        if logits is not None:
            mx.eval(logits)
        self.pace.observe(len(parts) * max(map(len, parts)), time.monotonic() - started)
        for at, task in enumerate(tasks):
            if self.cache is not None:
                self.cache.keep(sessions[at], prompts[at], wanted=self._wanted(task, ends[at]))
            task.tell_prefilled()
            if complete[at]:
                assert logits is not None
                self._begin(task, logits, at)

    def _wanted(self, task: Task, end: int) -> bool:
        """Say whether another prompt begins with the first `end` tokens of this one and has not come so far."""
        beginning = task.request.prompt[:end]
        others = (other for other in self.prefilling if other is not task and other.position < end)
        return any(other.request.prompt[:end] == beginning for other in others)

    def _begin(self, task: Task, logits: mx.array, at: int) -> None:
        """Let a task, and those with the very same prompt, answer from row `at` of logits (B, V)."""
        assert task.session is not None
        twins = self.twins.pop(task.request.prompt, [])
        for twin in twins:
            twin.session = task.session.fork()
            twin.figures.cached_tokens = len(twin.request.prompt)
            twin.tell_prefilled()
        self.prefilling.remove(task)
        for one in (task, *twins):
            assert one.session is not None
            one.row = Row(
                session=one.session,
                sampler=one.sampler,
                left=one.answer.limit,
                logprobs=one.request.logprobs,
                constraint=one.request.constraint,
                stop_ids=tuple(one.request.stop_ids),
            )
            one.row.place(logits, at)
            one.figures.prefill_seconds = time.monotonic() - one.started
            self.decoding.append(one)

    def _decode(self, tasks: Sequence[Task]) -> None:
        """Make one token of each answer and advance those that go on.

        Where that only queues work it is done before anyone is told, so that both overlap; else nobody waits for it.
        """
        made = make_tokens(self.engine, [task.row for task in tasks if task.row is not None])
        self.steps += 1
        ahead = only_queues(self.engine)
        if ahead:
            self._apart(self._take, [task for task, token in zip(tasks, made, strict=True) if goes_on(task, token)])
        for task, token in zip(tasks, made, strict=True):
            if task.done:
                continue
            if isinstance(token, MferenceError):
                self.end(task, token)
                continue
            task.take(token)
            if task.answer.ended:
                self._finish(task)
        if not ahead:
            self._apart(self._take, [task for task in tasks if not task.done])

    def _finish(self, task: Task) -> None:
        """End a task whose answer is complete, then keep what was computed of it."""
        session = task.session
        self.end(task, None)
        if self.cache is not None and self.cache.anywhere and session is not None:
            self.cache.keep(session, session.tokens)

    def _take(self, tasks: Sequence[Task]) -> None:
        take_tokens(self.engine, [task.row for task in tasks if task.row is not None])

    def _apart(self, call: Callable[..., None], *columns: Sequence[Any]) -> None:
        """Make a call for several tasks; should it fail, once for each, so that only those end that cannot go on."""
        if not columns[0]:
            return
        try:
            call(*columns)
        except Exception as error:  # noqa: BLE001  whatever it is, it is this request's
            if len(columns[0]) == 1:
                self.end(columns[0][0], as_error(error))
                return
            for one in zip(*columns, strict=True):
                self._apart(call, *([value] for value in one))


def goes_on(task: Task, token: Made) -> bool:
    """Say whether an answer needs what comes after `token`, as far as can be told before its text is known."""
    assert task.row is not None
    return not isinstance(token, MferenceError) and token not in task.request.stop_ids and task.row.left > 0
