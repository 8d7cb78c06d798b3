"""Several models on one server: loaded one at a time, never from under a request, in the order they are asked for."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from attrs import define, field

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions
from mference_core.errors import StreamError
from mference_core.scheduler.scheduler import Scheduler
from mference_core.server.errors import ApiError
from mference_core.server.exchange import State
from mference_core.server.figures import shelf_figures
from mference_core.server.metrics import Metrics
from mference_core.server.served import Served
from mference_core.server.shelf import Shelf
from mference_core.testing.serving import demo_of, served_demo, serving


@define
class Book:
    """Stands for a model; notes what happens to it."""

    model_id: str
    events: list[str]
    context: int = 10
    created: int = 1
    scheduler: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.scheduler = self

    def close(self) -> None:
        self.events.append(f"close {self.model_id}")


def shelf_of(events: list[str], *names: str, broken: str = "") -> Shelf:
    def loader(name: str) -> Callable[[], Any]:
        def load() -> Any:
            events.append(f"load {name}")
            if name == broken:
                raise StreamError(what="/secret/place cannot be read")
            return Book(name, events)

        return load

    made: Any = Book(names[0], events)
    return Shelf(loaded=made, aliases=("default",), loaders={name: loader(name) for name in names})


def test_the_loaded_model_is_taken_as_it_is() -> None:
    events: list[str] = []
    shelf = shelf_of(events, "a", "b")

    async def use() -> None:
        for name in ("a", "default"):
            assert (await shelf.take(name)).served.model_id == "a"

    asyncio.run(use())
    assert events == []
    assert shelf.names == ["a", "default", "b"]


def test_another_is_loaded_when_nobody_uses_the_first_and_later_requests_wait_behind() -> None:
    events: list[str] = []
    shelf = shelf_of(events, "a", "b")

    async def ask(name: str) -> None:
        lease = await shelf.take(name)
        events.append(f"use {lease.served.model_id}")
        await asyncio.sleep(0)
        lease.give_back()
        lease.give_back()  # again is harmless

    async def use() -> None:
        first = await shelf.take("a")
        waiting = [asyncio.create_task(ask(name)) for name in ("b", "a", "b")]
        await asyncio.sleep(0.05)
        assert events == []  # b waits for the lease, the rest behind it
        first.give_back()
        await asyncio.gather(*waiting)

    asyncio.run(use())
    switch = [f"{verb} {name}" for verb, name in (("close", "a"), ("load", "b"), ("use", "b"))]
    back = ["close b", "load a", "use a"]
    assert events == [*switch, *back, *switch]


def test_unknown_names_are_404_and_change_nothing() -> None:
    events: list[str] = []
    shelf = shelf_of(events, "a", "b")
    with pytest.raises(ApiError, match="no model 'x' here; this server has a, default, b") as refused:
        asyncio.run(shelf.take("x"))
    assert refused.value.status == 404
    assert events == []


def test_a_model_that_cannot_be_loaded_is_503_without_internals_and_the_others_still_work() -> None:
    events: list[str] = []
    shelf = shelf_of(events, "a", "b", broken="b")

    async def use() -> None:
        with pytest.raises(ApiError) as refused:
            await shelf.take("b")
        assert refused.value.status == 503
        assert "secret" not in refused.value.message
        assert "secret" in str(refused.value.__cause__)
        assert shelf.served is None
        assert (await shelf.take("a")).served.model_id == "a"

    asyncio.run(use())
    assert events == ["close a", "load b", "load a"]


def test_who_goes_away_while_a_model_is_loaded_leaves_it_whole() -> None:
    events: list[str] = []
    shelf = shelf_of(events, "a", "b")
    begun, go_on = threading.Event(), threading.Event()
    load = shelf.loaders["b"]

    def slow() -> Served:
        begun.set()
        assert go_on.wait(10)
        return load()

    shelf.loaders = {**shelf.loaders, "b": slow}

    async def use() -> None:
        gone = asyncio.create_task(shelf.take("b"))
        await asyncio.to_thread(begun.wait)
        gone.cancel()
        next_one = asyncio.create_task(shelf.take("b"))
        await asyncio.sleep(0.05)
        assert not next_one.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert (await next_one).served.model_id == "b"

    asyncio.run(use())
    assert events == ["close a", "load b"]


def served(family: str) -> Served:
    loaded = plugins.load(family)
    scheduler = Scheduler.loading(lambda: Engine.load(loaded, demo_of(family), LoadOptions(context=512)))
    engine = scheduler.engine
    return served_demo(family, scheduler, context=engine.context, vocab_size=engine.graph.vocab_size)


def test_clients_get_the_model_they_name() -> None:
    """Requests for two families' models, at once and in turn; each is answered by its own, as alone."""
    shelf = Shelf(
        loaded=served("gemma4"),
        loaders={f"{name}-demo": lambda name=name: served(name) for name in ("gemma4", "qwen36")},  # type: ignore[misc]
    )
    state = State(shelf=shelf, metrics=Metrics(lambda: shelf_figures(shelf)))
    with serving(state) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [entry["id"] for entry in listed] == ["gemma4-demo", "qwen36-demo"]
        assert "context_length" in listed[0]
        assert "context_length" not in listed[1]
        said: dict[str, set[str]] = {}
        for name in ("gemma4-demo", "qwen36-demo", "gemma4-demo", "qwen36-demo"):
            body = {"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert answer["model"] == name
            said.setdefault(name, set()).add(answer["choices"][0]["message"]["content"])
            assert client.get("/figures").json()["array_bytes"] > 0
        assert all(len(texts) == 1 for texts in said.values())
    shelf.close()
