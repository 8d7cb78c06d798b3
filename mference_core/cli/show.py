"""`mference show`: what a model directory is, what it weighs, and what it needs in memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mference_core.cli.options import model_options, notice
from mference_core.errors import UsageError
from mference_core.experts.plan import format_bytes, slot_rungs
from mference_core.locate import Found, find_model

if TYPE_CHECKING:
    from mference_core.checkpoint import Checkpoint

CONTEXTS = (4096, 16_384, 65_536, 262_144)


def memory_rows(found: Found, checkpoint: "Checkpoint", dtype: str) -> list[dict[str, Any]]:
    """Return total bytes per context and slot count."""
    from mference_core import engine  # noqa: PLC0415

    limit = engine.context_limit(checkpoint.config)
    contexts = [n for n in CONTEXTS if limit is None or n <= limit] or [limit or CONTEXTS[0]]
    rows = []
    for context in contexts:
        options = engine.LoadOptions(context=context, dtype=dtype, slots="resident")
        layout, plan = engine.plan_for(found.family, checkpoint, options)
        rungs = slot_rungs(
            fixed_bytes=plan.total_bytes - plan.expert_bytes,
            expert_bytes_per_layer={i: layer.expert_bytes for i, layer in checkpoint.experts.items()},
            experts=checkpoint.arch.num_experts,
            top_k=checkpoint.arch.top_k_experts,
        )
        rows.append(
            {
                "context_tokens": context,
                "state_bytes": layout.bytes_at(context),
                "scratch_bytes": plan.scratch_bytes,
                "total_bytes_by_slots": {str(slots): total for slots, total in rungs},
            }
        )
    return rows


def describe(found: Found, dtype: str, verify: str) -> dict[str, Any]:
    """Return everything `show` prints, sizes in bytes."""
    from mference_core import engine  # noqa: PLC0415
    from mference_core.arch import encode_arch  # noqa: PLC0415
    from mference_core.weights import resident_bytes  # noqa: PLC0415

    checkpoint = engine.open_model(found.family, found.path, verify)
    dtype = engine.resolve_dtype(dtype)
    experts = {i: layer.expert_bytes * layer.count for i, layer in checkpoint.experts.items()}
    layout, _ = engine.plan_for(found.family, checkpoint, engine.LoadOptions(context=1, dtype=dtype, slots="resident"))
    automatic = _automatic(found, checkpoint, dtype)
    return {
        "path": str(found.path),
        "kind": checkpoint.kind,
        "family": found.family.family.name,
        "pinned": checkpoint.pinned,
        "digest": checkpoint.digest,
        "context_limit_tokens": engine.context_limit(checkpoint.config),
        "disk_bytes": sum(path.stat().st_size for path in found.path.rglob("*") if path.is_file()),
        "resident_tensors": len(checkpoint.weights),
        "resident_bytes": resident_bytes(checkpoint.weights, engine.product_dtype(dtype)),
        "routed_layers": len(checkpoint.experts),
        "experts_per_layer": checkpoint.arch.num_experts,
        "experts_per_token": checkpoint.arch.top_k_experts,
        "expert_bytes": max((layer.expert_bytes for layer in checkpoint.experts.values()), default=0),
        "all_experts_bytes": sum(experts.values()),
        "dtype": dtype,
        "state_bytes_per_token": layout.bytes_per_token,
        "tokenizer": checkpoint.tokenizer_dir is not None,
        "arch": encode_arch(checkpoint.arch),
        "memory": memory_rows(found, checkpoint, dtype),
        "automatic": automatic,
    }


def _automatic(found: Found, checkpoint: "Checkpoint", dtype: str) -> str:
    """Return what a load without options would hold here and now, or why it cannot be."""
    from mference_core import engine  # noqa: PLC0415

    limit = engine.context_limit(checkpoint.config) or engine.DEFAULT_CONTEXT
    options = engine.LoadOptions(dtype=dtype, context=min(engine.DEFAULT_CONTEXT, limit))
    try:
        return str(engine.plan_for(found.family, checkpoint, options)[1])
    except UsageError as error:
        return str(error)


@click.command("show")
@model_options
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True)
@click.option(
    "--verify", type=click.Choice(["full-sha256", "trusted-receipt"]), default="full-sha256", show_default=True
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, sizes in bytes.")
def command(family: str | None, model: Path | None, dtype: str, verify: str, *, as_json: bool) -> None:
    """Say what a model directory is, its sizes, and its memory plan per slot count and context."""
    facts = describe(find_model(family, model, notice), dtype, verify)
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    pinned = "a pinned checkpoint" if facts["pinned"] else "unpinned"
    click.echo(f"{facts['path']}: {facts['kind']} of family {facts['family']}, {pinned}")
    click.echo(f"  on disk           {format_bytes(facts['disk_bytes'])}")
    click.echo(f"  resident weights  {format_bytes(facts['resident_bytes'])} in {facts['resident_tensors']} tensors")
    click.echo(
        f"  routed experts    {facts['routed_layers']} layers x {facts['experts_per_layer']} of "
        f"{format_bytes(facts['expert_bytes'])}, {facts['experts_per_token']} per token; "
        f"{format_bytes(facts['all_experts_bytes'])} in all"
    )
    click.echo(f"  context           at most {facts['context_limit_tokens'] or 'unstated'} tokens")
    click.echo(f"  tokenizer         {'present' if facts['tokenizer'] else 'absent: use --tokens'}")
    click.echo(f"  automatic choice  {facts['automatic']}")
    for line in memory_lines(facts["memory"], facts["dtype"]):
        click.echo(line)


def memory_lines(rows: list[dict[str, Any]], dtype: str) -> Iterator[str]:
    """Return the table of `memory_rows`."""
    yield f"memory in {dtype} by expert slots per layer:"
    for row in rows:
        totals = "  ".join(f"{n}: {format_bytes(size)}" for n, size in row["total_bytes_by_slots"].items())
        yield f"  {row['context_tokens']:>7} tokens  state {format_bytes(row['state_bytes']):>9}   {totals}"
