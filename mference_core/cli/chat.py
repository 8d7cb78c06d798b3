"""`mference chat`: a conversation in the terminal."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mference_core.cli.figures import footer
from mference_core.cli.options import (
    load_options,
    model_options,
    notice,
    quiet_notice,
    read_load,
    read_sampling,
    sampling_options,
)
from mference_core.errors import MferenceError, RequestError

if TYPE_CHECKING:
    from mference_core.chat import ChatFormat
    from mference_core.conversation import Conversation
    from mference_core.engine import Engine

HELP = "/clear starts again, /history shows all turns, /save FILE and /load FILE keep them, /quit ends"


@click.command("chat")
@model_options
@click.option("--system", multiple=True, help="System message; repeats are joined by newlines.")
@sampling_options
@load_options
@click.option("--quiet", is_flag=True, help="No notices, no footers.")
def command(**values: Any) -> None:
    """Talk with a model; Ctrl-C ends an answer, Ctrl-D or /quit the chat."""
    options, load = read_sampling(values), read_load(values)
    say = quiet_notice(values["quiet"])

    from mference_core.conversation import Conversation  # noqa: PLC0415
    from mference_core.engine import Engine  # noqa: PLC0415
    from mference_core.locate import find_model  # noqa: PLC0415
    from mference_core.tokens import Tokenizer  # noqa: PLC0415

    found = find_model(values["family"], values["model"], say)
    with Engine.load(found.family, found.path, load, say) as engine:
        if engine.checkpoint.tokenizer_dir is None:
            raise RequestError(what=f"{found.path}", got="without a tokenizer", remedy="use 'mference run --tokens'")
        dialect: ChatFormat = engine.family.ask("mference_chat_format")
        talk = Conversation(
            session=engine.session(),
            tokenizer=Tokenizer.load(engine.checkpoint.tokenizer_dir, control=dialect.control),
            chat=dialect,
            options=options,
            system="\n".join(values["system"]) or None,
        )
        say(HELP)
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                if not _obey(talk, line):
                    return
            elif line.strip():
                _answer(engine, talk, line, quiet=values["quiet"])


def _read_line() -> str | None:
    """Return a line of input, or None at its end; Ctrl-C forgets the line."""
    while True:
        try:
            click.echo("you> ", nl=False, err=True)
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            click.echo(err=True)
            continue
        except UnicodeDecodeError:
            notice("error: that line is not UTF-8")
            continue
        if not line:
            click.echo(err=True)
            return None
        return line.rstrip("\n")


def _obey(talk: "Conversation", line: str) -> bool:
    """Carry out a command; return whether the chat goes on."""
    word, _, rest = line.partition(" ")
    target = rest.strip()
    try:
        match word:
            case "/quit" | "/exit":
                return False
            case "/clear":
                talk.clear()
                notice("cleared")
            case "/history":
                for message in talk.messages:
                    click.echo(f"{message['role']}: {message['content']}")
            case "/save" | "/load" if not target:
                notice(f"error: {word} needs a file name")
            case "/save":
                talk.save(Path(target).expanduser())
                notice(f"saved {len(talk.messages)} messages to {target}")
            case "/load":
                talk.load(Path(target).expanduser())
                notice(f"loaded {len(talk.messages)} messages from {target}")
            case _:
                notice(f"error: no command {word}; {HELP}")
    except MferenceError as error:
        notice(f"error: {error}")
    return True


def _answer(engine: "Engine", talk: "Conversation", line: str, *, quiet: bool) -> None:
    """Print one answer as it comes; Ctrl-C ends it and keeps what was shown."""
    from mference_core.chat import Text  # noqa: PLC0415

    events = talk.ask(line)
    try:
        for event in events:
            if isinstance(event, Text):
                click.echo(event.text, nl=False)
        click.echo()
    except KeyboardInterrupt:
        events.close()  # type: ignore[attr-defined]
        click.echo()
        notice("[interrupted]")
        return
    except MferenceError as error:
        click.echo()
        notice(f"error: {error}")
        return
    if talk.dropped:
        notice(f"[{talk.dropped} oldest messages left out to fit the context]")
    if not quiet and talk.last is not None:
        notice(footer(engine, talk.last))
