"""Options that several commands share, spelt the same everywhere."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mference_core.errors import RequestError, UsageError
from mference_core.experts.plan import parse_bytes, parse_slots

if TYPE_CHECKING:
    from mference_core.engine import LoadOptions
    from mference_core.generate import GenerateOptions

F = TypeVar("F", bound=Callable[..., Any])


def notice(text: str) -> None:
    """Say one line on stderr."""
    click.echo(text, err=True)


def quiet_notice(quiet: bool) -> Callable[[str], None]:  # noqa: FBT001
    """Return `notice`, or a function that says nothing."""
    return (lambda _: None) if quiet else notice


def _stack(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def model_options(function: F) -> F:
    """Add --family and --model."""
    return _stack(
        click.option("--family", help="Family by name; alone: its installed or embedded demo checkpoint."),
        click.option("--model", type=click.Path(path_type=Path), help="Model directory: .gturbo, MLX or float."),
    )(function)


def install_argument(function: F) -> F:
    """Add DIRECTORY and --family: a finished install."""
    return _stack(
        click.argument("directory", required=False, type=click.Path(path_type=Path)),
        click.option("--family", help="Family whose pinned checkpoint is meant, instead of a directory."),
    )(function)


def installed_directory(directory: Path | None, family: str | None) -> Path:
    """Return the install that is meant. Raises `UsageError` unless it is named once."""
    from mference_core.locate import installed_path  # noqa: PLC0415

    if (directory is None) == (family is None):
        raise UsageError(what="DIRECTORY and --family", got="both or neither given", expected="one of them")
    return directory if directory is not None else installed_path(str(family))


def load_options(function: F) -> F:
    """Add what decides how a model is loaded."""
    return _stack(
        click.option("--max-context", type=int, help="Tokens, prompt and answer; 4096 unless the model allows less."),
        click.option("--prefill-chunk", default="auto", show_default=True, help="Tokens per prefill call, or auto."),
        click.option("--memory", help="Budget for everything, such as 6GiB; picks the expert slots."),
        click.option(
            "--expert-slots",
            default="auto",
            show_default=True,
            help="Slots per layer: a number, resident, mapped or auto.",
        ),
        click.option(
            "--lookahead",
            type=click.Choice(["off", "on", "auto"]),
            default="auto",
            show_default=True,
            help="Read experts that the next layer is expected to miss.",
        ),
        click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True),
        click.option(
            "--kv-dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
            default="auto",
            show_default=True,
            help="How keys and values are kept; auto is --dtype.",
        ),
        click.option(
            "--verify",
            type=click.Choice(["full-sha256", "trusted-receipt"]),
            default="full-sha256",
            show_default=True,
            help="Hash an install's files, or trust its receipt.",
        ),
    )(function)


def sampling_options(function: F) -> F:
    """Add what decides how tokens are picked."""
    return _stack(
        click.option("--max-new", default=1024, show_default=True, help="Most tokens to generate."),
        click.option("--temperature", default=0.2, show_default=True, help="0 is greedy."),
        click.option("--top-k", default=64, show_default=True, help="Candidates kept; 0 is off."),
        click.option("--top-p", default=0.95, show_default=True, help="Probability mass kept; 1 is off."),
        click.option("--repetition-penalty", default=1.0, show_default=True, help="1 is off."),
        click.option("--presence-penalty", default=0.0, show_default=True, help="0 is off."),
        click.option("--frequency-penalty", default=0.0, show_default=True, help="0 is off."),
        click.option("--seed", type=int, help="Makes sampling repeatable."),
        click.option("--stop", multiple=True, help="End before this text; may be repeated."),
    )(function)


def read_load(values: dict[str, Any]) -> "LoadOptions":
    """Take the load options out of a command's arguments. Raises `UsageError`."""
    from mference_core.engine import DEFAULT_CHUNK, LoadOptions  # noqa: PLC0415

    chunk = values.pop("prefill_chunk")
    if chunk != "auto" and not (chunk.isascii() and chunk.isdigit() and int(chunk) > 0):
        raise UsageError(what="--prefill-chunk", got=f"'{chunk}'", expected="a positive number or 'auto'")
    memory = values.pop("memory")
    return LoadOptions(
        dtype=values.pop("dtype"),
        kv_dtype=values.pop("kv_dtype"),
        context=values.pop("max_context"),
        chunk=DEFAULT_CHUNK if chunk == "auto" else int(chunk),
        slots=parse_slots(values.pop("expert_slots")),
        memory_bytes=None if memory is None else parse_bytes(memory),
        verify=values.pop("verify"),
        lookahead=values.pop("lookahead"),
    )


def read_sampling(values: dict[str, Any]) -> "GenerateOptions":
    """Take the sampling options out of a command's arguments. Raises `RequestError`."""
    from mference_core.generate import GenerateOptions  # noqa: PLC0415
    from mference_core.sampling import SamplingOptions  # noqa: PLC0415

    top_k, top_p = values.pop("top_k"), values.pop("top_p")
    names = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
    return GenerateOptions(
        max_new=values.pop("max_new"),
        stop=values.pop("stop"),
        sampling=SamplingOptions(
            top_k=top_k or None, top_p=None if top_p == 1 else top_p, **{name: values.pop(name) for name in names}
        ),
    )


def read_text(path: Path) -> str:
    """Read a UTF-8 file, or stdin for `-`. Raises `RequestError` where it is neither there nor UTF-8."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            what=f"{path}", got=f"not UTF-8 at byte {error.start}", remedy="convert it to UTF-8"
        ) from error
    except OSError as error:
        raise RequestError(what=f"{path} cannot be read: {error.strerror}") from error


def read_token_ids(path: Path) -> list[int]:
    """Read a JSON list of token ids. Raises `RequestError`."""
    import json  # noqa: PLC0415

    try:
        ids = json.loads(read_text(path))
    except ValueError as error:
        raise RequestError(what=f"{path}", got=f"not JSON: {error}", expected="a list of token ids") from error
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RequestError(what=f"{path}", got="something else", expected="a JSON list of integer token ids")
    return ids
