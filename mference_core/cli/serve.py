"""`mference serve`: one model for the clients of OpenAI and Anthropic."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mference_core.cli.options import load_options, model_options, notice, quiet_notice, read_load
from mference_core.errors import RequestError, UsageError
from mference_core.experts.plan import parse_bytes
from mference_core.records import data_dir

if TYPE_CHECKING:
    from mference_core.engine import LoadOptions
    from mference_core.generate import GenerateOptions
    from mference_core.locate import Found
    from mference_core.scheduler.scheduler import Scheduler
    from mference_core.server.exchange import State
    from mference_core.server.served import Served


@click.command("serve")
@model_options
@click.option(
    "--bind", default="127.0.0.1", show_default=True, help="Address to listen on; beyond this machine it needs a token."
)
@click.option("--port", default=8080, show_default=True, help="Port to listen on; 0 is any free one.")
@click.option(
    "--token", envvar="MFERENCE_TOKEN", help="Bearer token that clients must send; better given as MFERENCE_TOKEN."
)
@click.option("--allow-host", multiple=True, help="Further name in Host headers; may be repeated.")
@click.option("--allow-origin", multiple=True, help="Web origin whose pages may ask; may be repeated.")
@click.option("--model-id", help="Name of the model for clients; that of its directory or family unless given.")
@click.option(
    "--only",
    is_flag=True,
    help="This model alone; else a request may name any other installed one, loaded in its place.",
)
@click.option("--alias", multiple=True, help="Further name of the model; may be repeated.")
@click.option(
    "--max-new", default=4096, show_default=True, help="Most tokens of an answer where a request does not say."
)
@click.option("--temperature", default=0.2, show_default=True, help="Where a request does not say; 0 is greedy.")
@click.option("--top-k", default=64, show_default=True, help="Where a request does not say; 0 is off.")
@click.option("--top-p", default=0.95, show_default=True, help="Where a request does not say; 1 is off.")
@click.option("--max-active", default=8, show_default=True, help="Requests served at once.")
@click.option(
    "--max-waiting", default=32, show_default=True, help="Requests that may wait; one more is told to come again."
)
@click.option(
    "--prefix-cache",
    default="512MiB",
    show_default=True,
    help="Memory for beginnings of earlier prompts and answers, beside --memory; 0 for none.",
)
@click.option(
    "--prefix-cache-disk",
    default="0",
    show_default=True,
    help="Disk space for them, in the data directory; kept when the server ends.",
)
@click.option("--deadline", type=float, help="Most seconds of a request, waiting included.")
@click.option(
    "--drain", default=30.0, show_default=True, help="Seconds that running answers have to finish at the end."
)
@load_options
@click.option("--quiet", is_flag=True, help="No notices, no log of requests.")
def command(**values: Any) -> None:
    """Serve a model over HTTP: OpenAI Chat Completions, Responses and Completions, Anthropic Messages."""
    from mference_core.server.running import Address  # noqa: PLC0415
    from mference_core.server.safety import Policy  # noqa: PLC0415

    load, cache = read_load(values), _cache(values)
    check_name(values["model_id"])
    _defaults(values)  # what is wrong with them is said before anything is loaded
    for name in ("max_active", "max_waiting", "deadline", "drain"):
        least = 1 if name == "max_active" else 0
        if values[name] is not None and not least <= values[name] < 1e6:
            raise UsageError(what=f"--{name.replace('_', '-')}", got=str(values[name]), expected=f"at least {least}")
    policy = Policy.of(values["bind"], values["allow_host"], values["allow_origin"], values["token"] or None)
    address = Address(bind=values["bind"], port=values["port"])
    say = quiet_notice(values["quiet"])
    listening = address.listen()  # before the model is loaded: a port in use is said at once

    from mference_core.locate import find_model, others  # noqa: PLC0415
    from mference_core.server.exchange import State  # noqa: PLC0415
    from mference_core.server.figures import shelf_figures  # noqa: PLC0415
    from mference_core.server.metrics import Metrics  # noqa: PLC0415
    from mference_core.server.shelf import Shelf  # noqa: PLC0415

    with listening:
        found = find_model(values["family"], values["model"], say)
        first = model_name(found, values["model_id"])

        def loader(name: str, path: Path) -> Callable[[], "Served"]:
            return lambda: _load(name, find_model(None, path, say), load, cache, values)

        beside = {} if values["only"] else others(found)
        shelf = Shelf(
            loaded=_load(first, found, load, cache, values),
            aliases=values["alias"],
            loaders={name: loader(name, path) for name, path in ({first: found.path} | beside).items()},
            say=say,
        )
        held = values["max_active"] + values["max_waiting"]
        state = State(shelf=shelf, metrics=Metrics(lambda: shelf_figures(shelf)), held=held)
        with contextlib.closing(shelf):
            _run(state, policy, listening, address.url(listening.getsockname()[1]), values)


def _defaults(values: dict[str, Any]) -> "GenerateOptions":
    from mference_core.generate import GenerateOptions  # noqa: PLC0415
    from mference_core.sampling import SamplingOptions  # noqa: PLC0415

    sampling = SamplingOptions(
        temperature=values["temperature"],
        top_k=values["top_k"] or None,
        top_p=None if values["top_p"] == 1 else values["top_p"],
    )
    return GenerateOptions(max_new=values["max_new"], sampling=sampling)


def _cache(values: dict[str, Any]) -> dict[str, Any]:
    """Return the scheduler's options of the prefix cache. Raises `UsageError`."""
    memory, disk = (
        0 if text.strip() == "0" else parse_bytes(text)
        for text in (values["prefix_cache"], values["prefix_cache_disk"])
    )
    if disk and not memory:
        raise UsageError(
            what="--prefix-cache-disk",
            got="set without memory",
            remedy="give --prefix-cache, what is on disk passes it",
        )
    folder = data_dir() / "prefixes" if disk else None
    return {"cache_bytes": memory, "disk_bytes": disk, "cache_folder": folder}


def check_name(given: str | None) -> None:
    """Raise `UsageError` for a name that no client can say."""
    if given is not None and (not given.isprintable() or not given.strip()):
        raise UsageError(what="--model-id", got=repr(given), expected="printable characters")


def model_name(found: "Found", given: str | None) -> str:
    """Return what clients call the model: as given, else its directory's name, an embedded demo after its family."""
    demo = found.family.family.demo
    if given is not None:
        return given
    if demo is not None and found.path.resolve() == demo.resolve():
        return f"{found.family.family.name}-demo"
    return found.path.resolve().name.removesuffix(".gturbo") or found.family.family.name


def _load(name: str, found: "Found", load: "LoadOptions", cache: dict[str, Any], values: dict[str, Any]) -> "Served":
    """Load a model and begin to serve it, with a scheduler of its own."""
    from mference_core.engine import Engine  # noqa: PLC0415
    from mference_core.scheduler.scheduler import Scheduler, SchedulerOptions  # noqa: PLC0415

    say = quiet_notice(values["quiet"])
    options = SchedulerOptions(max_active=values["max_active"], max_waiting=values["max_waiting"], notice=say, **cache)
    scheduler = Scheduler.loading(lambda: Engine.load(found.family, found.path, load, say), options)
    try:
        return _served(name, scheduler, values)
    except BaseException:
        scheduler.close()
        raise


def _served(name: str, scheduler: "Scheduler", values: dict[str, Any]) -> "Served":
    from mference_core.server.served import Served  # noqa: PLC0415
    from mference_core.tokens import Tokenizer  # noqa: PLC0415

    engine = scheduler.engine
    folder = engine.checkpoint.tokenizer_dir
    if folder is None:
        raise RequestError(
            what=f"{engine.checkpoint.path}", got="without a tokenizer", remedy="use 'mference run --tokens'"
        )
    chat = engine.family.ask("mference_chat_format")
    return Served(
        model_id=name,
        tokenizer=Tokenizer.load(folder, control=chat.control),
        chat=chat,
        context=engine.context,
        vocab_size=engine.graph.vocab_size,
        scheduler=scheduler,
        defaults=_defaults(values),
        deadline_seconds=values["deadline"],
    )


def _run(state: "State", policy: Any, listening: Any, url: str, values: dict[str, Any]) -> None:
    import asyncio  # noqa: PLC0415

    from mference_core.server.app import build, say  # noqa: PLC0415
    from mference_core.server.running import Draining, serve_on  # noqa: PLC0415

    log = (lambda _: None) if values["quiet"] else say
    server = Draining(build(state, policy, log), state, values["drain"])

    def ready() -> None:
        click.echo(f"serving {state.served.model_id} at {url}")

    asyncio.run(serve_on(server, listening, ready))
    if not values["quiet"]:
        notice("stopped")
