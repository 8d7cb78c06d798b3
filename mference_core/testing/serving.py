"""A server in this process, on a free port, for tests and measurements."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import define, field

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions
from mference_core.generate import GenerateOptions
from mference_core.sampling import SamplingOptions
from mference_core.scheduler.request import Scheduling
from mference_core.scheduler.scheduler import Scheduler, SchedulerOptions
from mference_core.server.app import build
from mference_core.server.exchange import State
from mference_core.server.figures import shelf_figures
from mference_core.server.metrics import Metrics
from mference_core.server.running import Address, Draining, serve_on
from mference_core.server.safety import Policy
from mference_core.server.served import Served
from mference_core.server.shelf import Shelf
from mference_core.tokens import Tokenizer

ALIAS = "default"
GREEDY = GenerateOptions(max_new=64, sampling=SamplingOptions(temperature=0.0))


@define(kw_only=True, eq=False)
class Running:
    """A server that runs in a thread: where it is, what it holds, and the lines of its log."""

    url: str
    port: int
    state: State
    server: Draining
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    log: list[str] = field(factory=list)

    def drain(self) -> None:
        """Begin to end, as a signal does."""
        self.loop.call_soon_threadsafe(self.server.drain)


def demo_of(family: str) -> Path:
    """Return a family's embedded demo checkpoint."""
    demo = plugins.load(family).family.demo
    assert demo is not None, f"{family} has no demo"
    return demo


def served_demo(family: str, scheduler: Scheduling, *, context: int, vocab_size: int) -> Served:
    """Return what a server serves of a demo, greedy unless asked otherwise."""
    loaded = plugins.load(family)
    chat = loaded.ask("mference_chat_format")
    return Served(
        model_id=f"{family}-demo",
        tokenizer=Tokenizer.load(demo_of(family), control=chat.control),
        chat=chat,
        context=context,
        vocab_size=vocab_size,
        scheduler=scheduler,
        defaults=GREEDY,
    )


@contextmanager
def serving(state: State, policy: Policy | None = None, drain_seconds: float = 5.0) -> Iterator[Running]:
    """Serve until the end of the block, then drain; raises if the thread does not end."""
    address = Address(port=0)
    listening = address.listen()
    started, held, log = threading.Event(), list[Running](), list[str]()
    port = listening.getsockname()[1]

    async def run() -> None:
        server = Draining(build(state, policy or Policy(), log.append), state, drain_seconds)
        held.append(
            Running(
                url=address.url(port),
                port=port,
                state=state,
                server=server,
                loop=asyncio.get_running_loop(),
                thread=thread,
                log=log,
            )
        )
        await serve_on(server, listening, started.set)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="mference-server", daemon=True)
    thread.start()
    if not started.wait(30):
        raise TimeoutError("the server did not start")
    try:
        yield held[0]
    finally:
        if thread.is_alive():
            held[0].drain()
            thread.join(drain_seconds + 20)
        listening.close()
        if thread.is_alive():
            raise TimeoutError("the server did not end")


@contextmanager
def serving_demo(
    family: str,
    load: LoadOptions | None = None,
    options: SchedulerOptions | None = None,
    policy: Policy | None = None,
    change: Callable[[State], None] = lambda _: None,
) -> Iterator[Running]:
    """Serve a family's demo until the end of the block; `change` adjusts the state before it is served."""
    loaded = plugins.load(family)
    options = options or SchedulerOptions()
    with Scheduler.loading(
        lambda: Engine.load(loaded, demo_of(family), load or LoadOptions(context=1024)), options
    ) as scheduler:
        engine = scheduler.engine
        shelf = Shelf(
            loaded=served_demo(family, scheduler, context=engine.context, vocab_size=engine.graph.vocab_size),
            aliases=(ALIAS,),
        )
        state = State(
            shelf=shelf,
            metrics=Metrics(lambda: shelf_figures(shelf)),
            held=options.max_active + options.max_waiting,
        )
        change(state)
        with serving(state, policy) as running:
            yield running
