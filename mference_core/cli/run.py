"""`mference run`: one prompt, one answer."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mference_core.cli.figures import footer, summary
from mference_core.cli.options import (
    load_options,
    model_options,
    notice,
    quiet_notice,
    read_load,
    read_sampling,
    read_text,
    read_token_ids,
    sampling_options,
)
from mference_core.errors import RequestError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mference_core.chat import ChatFormat
    from mference_core.engine import Engine
    from mference_core.generate import GenerateOptions, Generation
    from mference_core.plugins import LoadedFamily

SOURCES = ("prompt", "prompt_file", "tokens", "messages_file")


@click.command("run")
@model_options
@click.option("--prompt", help="Text to continue, as it is.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="UTF-8 file of such text; - is stdin.")
@click.option("--tokens", type=click.Path(path_type=Path), help="JSON list of token ids to continue.")
@click.option("--messages-file", type=click.Path(path_type=Path), help="JSON list of chat messages to answer.")
@click.option("--tools-file", type=click.Path(path_type=Path), help="JSON list of tools, with --messages-file.")
@click.option("--think", is_flag=True, help="Let the model reason first, with --messages-file.")
@click.option("--show-reasoning", is_flag=True, help="Print the reasoning on stderr.")
@sampling_options
@load_options
@click.option("--unaccepted", is_flag=True, help="Run a family the gate has not accepted, with a warning.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", is_flag=True, help="No notices, no footer.")
def command(**values: Any) -> None:
    """Generate text from a prompt, token ids or chat messages."""
    given = [name for name in SOURCES if values[name] is not None]
    if len(given) != 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in SOURCES)
        raise UsageError(what="prompt options", got=f"{len(given)} of {names}", expected="exactly one")
    for name in ("tools_file", "think"):
        if values[name] and given[0] != "messages_file":
            option = f"--{name.replace('_', '-')}"
            raise UsageError(what=option, got="without messages", expected="--messages-file beside it")
    options, load = read_sampling(values), read_load(values)
    source = _read_source(given[0], values[given[0]])
    tools = None if values["tools_file"] is None else _read_tools(values["tools_file"])
    say = quiet_notice(values["quiet"])

    from mference_core.engine import Engine  # noqa: PLC0415
    from mference_core.locate import find_model  # noqa: PLC0415

    found = find_model(values["family"], values["model"], say, _loader(unaccepted=values["unaccepted"]))
    with Engine.load(found.family, found.path, load, say) as engine:
        generation = _generation(engine, source, options, tools=tools, think=values["think"])
        _print(generation, show_text=not values["as_json"], show_reasoning=values["show_reasoning"])
        if values["as_json"]:
            click.echo(json.dumps(summary(engine, generation), ensure_ascii=False))
        elif not values["quiet"]:
            notice("\n" + footer(engine, generation))


def _loader(*, unaccepted: bool) -> "Callable[[str, Callable[[str], None]], LoadedFamily]":
    from mference_core import plugins  # noqa: PLC0415

    if not unaccepted:
        return plugins.dispatch

    def load(name: str, _: "Callable[[str], None]") -> "LoadedFamily":
        notice(f"warning: running family {name} without an acceptance record; its output is unproven")
        return plugins.load(name)

    return load


def _read_source(name: str, value: Any) -> Any:
    """Return text, ids or messages, everything wrong with them having been said."""
    from mference_core.chat import read_messages  # noqa: PLC0415

    if name == "tokens":
        source: Any = read_token_ids(value)
    elif name == "messages_file":
        source = read_messages(value)
    else:
        source = value if name == "prompt" else read_text(value)
    if not source:
        raise RequestError(what=f"--{name.replace('_', '-')}", got="empty", expected="something to go on from")
    return source


def _read_tools(path: Path) -> Any:
    from mference_core.chat import read_tools  # noqa: PLC0415

    return read_tools(path)


def _generation(engine: "Engine", source: Any, options: "GenerateOptions", *, tools: Any, think: bool) -> "Generation":
    """Return the generation of a prompt text, a list of ids or a list of messages."""
    from mference_core.chat import StreamDecoder, TextDecoder, render  # noqa: PLC0415
    from mference_core.generate import Generation  # noqa: PLC0415
    from mference_core.tokens import Tokenizer  # noqa: PLC0415

    is_ids = isinstance(source, list) and isinstance(source[0], int)
    folder = engine.checkpoint.tokenizer_dir
    if folder is None:
        if not is_ids:
            raise RequestError(what=f"{engine.checkpoint.path}", got="without a tokenizer", remedy="use --tokens FILE")
        return Generation(session=engine.session(), prompt=source, options=options)
    chat = _chat_format(engine)
    tokenizer = Tokenizer.load(folder, control=chat.control)
    decoder: StreamDecoder = TextDecoder(tokenizer, None)
    if isinstance(source, str):
        prompt = chat.raw_prompt(tokenizer, source)
    elif is_ids:
        prompt = source
    else:
        thinking = chat.thinking(enable_thinking=think or None)
        prompt = render(tokenizer, chat, source, tools=tools, enable_thinking=thinking)
        decoder = chat.decoder(tokenizer, tools, prompt)
    return Generation(
        session=engine.session(), prompt=prompt, options=options, stop_ids=chat.stop_ids(tokenizer), decoder=decoder
    )


def _chat_format(engine: "Engine") -> "ChatFormat":
    chat: ChatFormat = engine.family.ask("mference_chat_format")
    return chat


def _print(generation: "Generation", *, show_text: bool, show_reasoning: bool) -> None:
    """Write visible text to stdout as it comes, calls as one JSON line each."""
    from mference_core.chat import Malformed, Reasoning, Text, ToolCall  # noqa: PLC0415

    for event in generation:
        match event:
            case Text(text) if show_text:
                click.echo(text, nl=False)
            case Reasoning(text) if show_reasoning:
                click.echo(text, nl=False, err=True)
            case ToolCall(_, name, arguments) if show_text:
                click.echo(f'{{"tool_call":{{"name":{json.dumps(name)},"arguments":{arguments}}}}}')
            case Malformed(reason):
                notice(f"warning: unreadable tool call: {reason}")
    if show_text:
        click.echo()
