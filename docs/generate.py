#!/usr/bin/env python3
"""Write the pages and tables that are made from code: `python docs/generate.py`. A test compares them."""

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

import mference_core
from mference_core import errors, hookspecs
from mference_core.arch import Arch
from mference_core.cli import cli
from mference_core.experts.plan import format_bytes, slot_rungs
from mference_core.kv import KVLayout

DOCS = Path(__file__).parent
NOTE = "<!-- written by docs/generate.py from the code; do not edit -->"
BEGIN, END = "<!-- generated: {} -->", "<!-- end -->"
NOT_HOOKS = {"mference_core.engine", "mference_core.session", "mference_core.errors"}
CONTEXTS = (4096, 16_384, 65_536, 262_144)
CHUNK = 512

CLI_HEAD = """# Command line

Text goes to stdout, notices and figures to stderr. Every error is one line; [errors.md](errors.md) lists the exit codes.
"""

HOOKS_HEAD = """# Hooks

What a family answers, in call order. Hooks run when a model is loaded and return values or plain functions; the token
loop calls those and never a hook. A family imports `hookimpl` and the values below from `mference_core`; nothing else of
the core is public to a family.
"""

ERRORS_HEAD = """# Errors and exit codes

An error is one line on stderr that begins with `error: ` and says what is wrong, what was found, what was expected and
what to do, as far as each is known. A file that a command writes is there whole or not at all.

| Exit code | Meaning |
| --- | --- |
| 0 | done |
| 1 | failed |
| 2 | usage: an option, a prompt or a family name that cannot be meant |
| 3 | the gate has not accepted the family: see [acceptance.md](acceptance.md) |
| 130 | interrupted with Ctrl-C |

`MFERENCE_DEBUG=1` shows the traceback of an error that mference did not foresee (`error: unexpected ...`).

## Classes

For programs that use mference as a library; all are in `mference_core.errors`.
"""


def cli_page() -> str:
    """Return cli.md: every command, argument and option."""
    parts = [CLI_HEAD, NOTE, ""]
    assert isinstance(cli, click.Group)
    for name, command in sorted(cli.commands.items()):
        parts += _command(name, command)
    return "\n".join(parts).rstrip() + "\n"


def _command(name: str, command: click.Command) -> Iterator[str]:
    yield f"## mference {name}\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    arguments = [param.name.upper() for param in command.params if isinstance(param, click.Argument) and param.name]
    yield "`" + " ".join(["mference", name, "[OPTIONS]", *arguments]) + "`\n"
    options = [param for param in command.params if isinstance(param, click.Option)]
    yield from (_option(option) for option in options)
    yield ""


def _option(option: click.Option) -> str:
    kind = option.type
    value = ""
    if not option.is_flag:
        value = " " + ("|".join(map(str, kind.choices)) if isinstance(kind, click.Choice) else kind.name.upper())
    notes = [
        *([option.help] if option.help else []),
        *(["Required."] if option.required else []),
        *([f"Default: {option.default}."] if option.show_default else []),
    ]
    names = ", ".join(f"`{name}{value}`" for name in option.opts)
    return f"- {names}" + (f": {' '.join(notes)}" if notes else "")


def hooks_page() -> str:
    """Return hooks.md: every hook with its exact signature, and the values that hooks take and return."""
    tree = ast.parse(inspect.getsource(hookspecs))
    parts = [HOOKS_HEAD, f"Contract version {hookspecs.CONTRACT_VERSION}.\n", NOTE, ""]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("mference_"):
            parts += [f"## {node.name}\n", "```python", _signature(node) + ": ...", "```\n"]
            parts += [] if node.name in hookspecs.REQUIRED else ["Optional.\n"]
            parts += [_docstring(node), ""]
    parts += ["## Values\n", "Written as their classes are; `= ...` marks a field that may be left out.\n"]
    for name in dir(mference_core):
        value = getattr(mference_core, name)
        if inspect.isclass(value) and value.__module__ not in NOT_HOOKS:
            parts += _value(value)
    return "\n".join(parts).rstrip() + "\n"


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}".replace("'", '"')


def _docstring(node: ast.FunctionDef) -> str:
    """Return a docstring with its fields as a list."""
    lines = (ast.get_docstring(node) or "").replace(":return:", "- returns").splitlines()
    return "\n".join(f"- `{line[7:].replace(':', '`:', 1)}" if line.startswith(":param ") else line for line in lines)


def _value(value: type) -> Iterator[str]:
    node = ast.parse(inspect.getsource(value)).body[0]
    assert isinstance(node, ast.ClassDef)
    bases = [
        base.__name__ for base in value.__bases__ if base not in (object, Exception) and base.__name__ != "Protocol"
    ]
    yield f"### {value.__name__}\n"
    yield f"`{value.__module__}`" + (f", a `{bases[0]}`" if bases else "") + "\n"
    yield f"```text\n{inspect.getdoc(value)}\n```\n"
    members = [line for item in node.body if (line := _member(item))]
    yield from members
    if members:
        yield ""


def _member(item: ast.stmt) -> str | None:
    """Return one line on a public field, property or method."""
    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
        if isinstance(item.value, ast.Call) and any(k.arg == "init" for k in item.value.keywords):
            return None
        default = _default(item.value)
        return f"- `{item.target.id}: {ast.unparse(item.annotation)}{' = ' + default if default else ''}`"
    if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
        summary = (ast.get_docstring(item) or "").split("\n", 1)[0]
        is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in item.decorator_list)
        returns = ast.unparse(item.returns) if item.returns else "None"
        shape = f"{item.name}: {returns}" if is_property else f"{item.name}({_own(item)}) -> {returns}"
        return f"- `{shape.replace(chr(39), chr(34))}`: {summary}"
    return None


def _own(item: ast.FunctionDef) -> str:
    return ast.unparse(item.args).removeprefix("self").removeprefix("cls").removeprefix(", ")


def _default(value: ast.expr | None) -> str:
    """Return how a field's default reads: itself where it is a plain value, `...` where code makes it."""
    if value is None:
        return ""
    if not isinstance(value, ast.Call):
        return ast.unparse(value)
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    if "default" in given and not isinstance(given["default"], ast.Call):
        return ast.unparse(given["default"])
    return "..." if {"default", "factory"} & set(given) else ""


def errors_page() -> str:
    """Return errors.md: exit codes, and every error class with its meaning."""
    rows = ["| Class | Exit code | Meaning |", "| --- | --- | --- |"]
    for node in ast.parse(inspect.getsource(errors)).body:
        if isinstance(node, ast.ClassDef):
            kind = getattr(errors, node.name)
            depth = len([base for base in kind.__mro__ if base.__module__ == errors.__name__]) - 1
            meaning = (ast.get_docstring(node) or "").split("\n", 1)[0]
            rows.append(f"| {'— ' * depth}`{node.name}` | {kind.exit_code} | {meaning} |")
    return "\n".join([ERRORS_HEAD, NOTE, "", *rows]) + "\n"


def gate_cases() -> str:
    """Return the gate's cases and what each says must hold."""
    from mference_acceptance.cases import CASES  # noqa: PLC0415

    rows = ["| Case | What must hold |", "| --- | --- |", *(f"| `{case.name}` | {case.holds} |" for case in CASES)]
    return "\n".join(rows)


def family_memory(name: str) -> str:
    """Return the memory plans of a family's pinned checkpoint, as `mference show` counts them."""
    import mlx.core as mx  # noqa: PLC0415

    from mference_core import plugins  # noqa: PLC0415
    from mference_core.engine import scratch_bytes  # noqa: PLC0415
    from mference_core.testing.synthetic import plan_synthetic  # noqa: PLC0415
    from mference_core.weights import resident_bytes  # noqa: PLC0415

    family = plugins.load(name)
    made = plan_synthetic(family)
    arch = made.arch
    one = {layer: experts.expert_bytes for layer, experts in made.checkpoint.experts.items()}
    lines = []
    # Native kernels read half-precision scales as they are, so the weights take the same on CPUs and GPUs.
    residents = resident_bytes(made.checkpoint.weights, mx.bfloat16)
    for title, dtype in (("float32, on CPUs", "float32"), ("bfloat16, on GPUs", "bfloat16")):
        lines.append(f"In {title}; resident weights {format_bytes(residents)}.\n")
        rows = []
        for context in CONTEXTS:
            layout = family.ask("mference_kv_layout", arch=arch, context=context, chunk=CHUNK, dtype=dtype)
            rows.append(_row(arch, layout, residents + scratch_bytes(arch, CHUNK), one))
        slots = [str(slots) for slots, _ in rows[0][1]]
        lines += ["| Context | State | " + " | ".join(slots) + " |", "| --- " * (len(slots) + 2) + "|"]
        for context, (state, totals) in zip(CONTEXTS, rows, strict=True):
            cells = [f"{context:,}", format_bytes(state), *(format_bytes(total) for _, total in totals)]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _row(
    arch: Arch, layout: KVLayout, fixed_bytes: int, one: Mapping[int, int]
) -> tuple[int, tuple[tuple[int | str, int], ...]]:
    """Return the state's bytes and (slots, total bytes) at the layout's context; `one` is an expert's bytes by layer."""
    state = layout.bytes_at(layout.context)
    rungs = slot_rungs(
        fixed_bytes=fixed_bytes + state,
        expert_bytes_per_layer=one,
        experts=arch.num_experts,
        top_k=arch.top_k_experts,
    )
    return state, rungs


def served_fields() -> dict[str, Any]:
    """Return what each dialect of the server takes, as the server itself checks it."""
    from mference_core.server import chat_completions, completions, messages_fields, responses_fields  # noqa: PLC0415

    return {
        "chat_completions": chat_completions.REQUEST,
        "completions": completions.REQUEST,
        "messages": messages_fields.REQUEST,
        "responses": responses_fields.REQUEST,
    }


def fields_table(record: Any) -> str:
    """Return a request's fields, and what of the protocol is refused."""
    rows = ["| Field | Value | |", "| --- | --- | --- |"]
    for name, known in record.fields.items():
        notes = ["Required."] if known.required else []
        notes += ["Without effect."] if known.inert else []
        notes += [known.note] if known.note else []
        rows.append(f"| `{name}` | {_kind(known.kind)} | {' '.join(notes)} |")
    refused = [f"`{name}` ({why})" for name, why in sorted(record.refuses.items())]
    return "\n".join(rows) + "\n\nNot supported: " + ", ".join(refused) + "."


def _kind(kind: Any) -> str:  # noqa: C901, PLR0911  one return per kind
    """Return what a value must be, in a few words."""
    from mference_core.server import fields  # noqa: PLC0415

    match kind:
        case fields.Text(choices=choices) if choices:
            return "; ".join(f"`{choice}`" for choice in choices)
        case fields.Text():
            return "text"
        case fields.Truth(only=only):
            return "true or false" if only is None else f"`{str(only).lower()}` only"
        case fields.Whole() | fields.Number():
            word = "integer" if isinstance(kind, fields.Whole) else "number"
            low, high = (None if edge is None else f"{edge:,}" for edge in (kind.low, kind.high))
            if high is None:
                return f"{word} from {low}"
            above = f"above {low.removesuffix('.0')}, up to" if getattr(kind, "above", False) and low else f"{low} to"
            return f"{word}, {above} {high}".replace(".0", "")
        case fields.ListOf():
            return f"list of {_kind(kind.kind)}"
        case fields.Either():
            return kind.what
        case fields.Tagged():
            return "; ".join(f"`{kind.tag}: {tag}`" for tag in kind.records)
        case fields.MapOf():
            return f"object of {kind.what}: {_kind(kind.kind)}"
        case fields.Record():
            return "object of " + ", ".join(f"`{name}`" for name in kind.fields)
        case _:
            return "object"


def insert(page: str, name: str, text: str) -> str:
    """Return `page` with what stands between its marks of `name` replaced."""
    head, begin, rest = page.partition(BEGIN.format(name))
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no marks of {name}")
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def pages() -> dict[Path, str]:
    """Return every page that has generated text, complete."""
    acceptance, serving = DOCS / "acceptance.md", DOCS / "serving.md"
    served = serving.read_text("utf-8")
    for name, record in served_fields().items():
        served = insert(served, name, fields_table(record))
    families = {
        path: insert(path.read_text("utf-8"), "memory", family_memory(path.stem))
        for path in sorted((DOCS / "families").glob("*.md"))
    }
    return {
        DOCS / "cli.md": cli_page(),
        DOCS / "hooks.md": hooks_page(),
        DOCS / "errors.md": errors_page(),
        serving: served,
        acceptance: insert(acceptance.read_text("utf-8"), "cases", gate_cases()),
        **families,
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf-8")
