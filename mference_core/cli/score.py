"""`mference score`: logits of given tokens, for comparing with other programs."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mference_core.cli.options import load_options, model_options, notice, read_load, read_token_ids
from mference_core.errors import InstallError, RequestError, UsageError

if TYPE_CHECKING:
    import mlx.core as mx

    from mference_core.engine import Engine

HEAD_BYTES = 64 << 20


def score(engine: "Engine", tokens: list[int], *, top: int | None, details: bool) -> "dict[str, mx.array]":
    """Return `logits` [T, V] float32, or with `top` `top_ids`, `top_logprobs` [T, top] and `tail_mass` [T].

    `details` adds `layer.i` (rows after layer i), and `router.i.experts` [T, k] int32 in ascending order with
    `router.i.weights` in the same order.
    """
    import mlx.core as mx  # noqa: PLC0415

    from mference_core.scoring import Collector, top_columns  # noqa: PLC0415

    seen = Collector(engine=engine, details=details)
    engine.session().prefill(tokens, observe=seen)
    rows = max(1, HEAD_BYTES // (4 * engine.graph.vocab_size))
    parts = []
    for start in range(0, len(tokens), rows):
        logits = seen.logits(start, start + rows)
        part = {"logits": logits} if top is None else top_columns(logits, top)
        mx.eval(part)
        parts.append(part)
    out = {name: mx.concatenate([part[name] for part in parts]) for name in parts[0]}
    return out | seen.details_out()


@click.command("score")
@model_options
@click.option("--tokens", type=click.Path(path_type=Path), help="JSON list of token ids.")
@click.option("--text", help="Text to tokenize, as it is.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The .safetensors file to write.")
@click.option("--details", is_flag=True, help="Also write layers and router choices.")
@click.option("--top", type=click.IntRange(1), help="Write the best columns instead of all logits.")
@load_options
def command(
    output: Path, text: str | None, tokens: Path | None, *, details: bool, top: int | None, **values: Any
) -> None:
    """Write the logits of every position of some tokens."""
    from mference_core.engine import Engine  # noqa: PLC0415
    from mference_core.locate import find_model  # noqa: PLC0415
    from mference_core.tokens import Tokenizer  # noqa: PLC0415

    if (text is None) == (tokens is None):
        raise UsageError(what="score", got="both or neither of --tokens and --text", expected="exactly one")
    if output.suffix != ".safetensors":
        raise UsageError(what="--output", got=f"'{output}'", expected="a name ending in .safetensors")
    if not output.parent.is_dir():
        raise UsageError(what=f"folder {output.parent}", got="missing", remedy="create it first")
    options = read_load(values)
    ids = read_token_ids(tokens) if tokens is not None else []
    found = find_model(values["family"], values["model"], notice)
    with Engine.load(found.family, found.path, options) as engine:
        if text is not None:
            if engine.checkpoint.tokenizer_dir is None:
                raise RequestError(what=f"{found.path}", got="without a tokenizer", remedy="use --tokens FILE")
            control = found.family.ask("mference_chat_format").control
            ids = Tokenizer.load(engine.checkpoint.tokenizer_dir, control=control).encode(text)
        _write(output, score(engine, ids, top=top, details=details))
    notice(f"wrote {output}: {len(ids)} tokens")


def _write(output: Path, arrays: "dict[str, mx.array]") -> None:
    """Write the file whole or not at all."""
    import mlx.core as mx  # noqa: PLC0415

    staged = output.with_name(f".{output.stem}.{os.getpid()}.safetensors")
    try:
        mx.save_safetensors(str(staged), arrays)
        staged.replace(output)
    except (OSError, RuntimeError) as error:
        raise InstallError(what=f"{output} cannot be written: {error}") from error
    finally:
        staged.unlink(missing_ok=True)
