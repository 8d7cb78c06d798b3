"""What tests of an embedded demo checkpoint need: an answer through the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_BYTES = 6_000_000

Cli = Callable[..., tuple[int, str, str]]
"""Runs a command; returns its exit code and what it wrote to stdout and stderr."""


def answer(cli: Cli, folder: Path, family: str, messages: Any, tools: Any = None, *more: object) -> dict[str, Any]:
    """Return the facts of a family's greedy answer to a conversation, of at most 200 tokens."""
    (folder / "messages.json").write_text(json.dumps(messages))
    (folder / "tools.json").write_text(json.dumps(tools))
    extra = ("--tools-file", folder / "tools.json") if tools else ()
    where = ("--family", family, "--messages-file", folder / "messages.json", *extra)
    code, out, err = cli("run", *where, "--temperature", 0, "--max-new", 200, "--json", "--quiet", *more)
    assert code == 0, err
    facts: dict[str, Any] = json.loads(out)
    return facts


def check_shape(demo: Path) -> None:
    """Assert that a demo is small and that nothing in it belongs to one place."""
    assert sum(path.stat().st_size for path in demo.rglob("*") if path.is_file()) <= MAX_BYTES
    assert not (demo / "verified-install.json").exists()
