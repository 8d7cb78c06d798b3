"""`--lookahead`: the same tokens, and what guesses came to in the figures."""

import json
import re
from pathlib import Path
from typing import Any

import pytest


def answer(cli: Any, reference: Path, folder: Path, *options: Any) -> tuple[dict[str, Any], str]:
    prompt = folder / "ids.json"
    prompt.write_text(json.dumps([1, 2, 3, 4, 5, 6, 7]))
    where = ("--model", reference / "mlx", "--tokens", prompt, "--expert-slots", 4, "--temperature", 0, "--max-new", 30)
    code, out, err = cli("run", *where, "--json", *options)
    assert code == 0, err
    facts: dict[str, Any] = json.loads(out)
    return facts, err


def test_guesses_change_figures_alone(cli: Any, gemma4_reference: Path, tmp_path: Path) -> None:
    off, _ = answer(cli, gemma4_reference, tmp_path, "--lookahead", "off", "--quiet")
    on, _ = answer(cli, gemma4_reference, tmp_path, "--lookahead", "on", "--quiet")
    assert on["token_ids"] == off["token_ids"]
    assert set(off["lookahead"].values()) == {0}
    figures = on["lookahead"]
    assert 0 < figures["confirmed"] < figures["predicted"]
    assert 0 <= figures["wasted_bytes"] <= figures["bytes_read"] < on["bytes_read"]
    assert figures["bytes_read"] > 0


@pytest.mark.parametrize(("value", "shown"), [("on", True), ("off", False)])
def test_the_footer_says_what_guesses_came_to(
    cli: Any, gemma4_reference: Path, tmp_path: Path, value: str, *, shown: bool
) -> None:
    prompt = tmp_path / "ids.json"
    prompt.write_text("[1, 2, 3, 4, 5, 6, 7]")
    where = ("--model", gemma4_reference / "mlx", "--tokens", prompt, "--expert-slots", 4, "--max-new", 30)
    code, _, err = cli("run", *where, "--lookahead", value)
    assert code == 0
    assert bool(re.search(r"/tok ahead=\d+% right, [\d.]+[KM]iB read, \d+% wasted", err)) == shown


def test_another_word_is_refused(cli: Any, gemma4_reference: Path) -> None:
    code, _, err = cli("run", "--model", gemma4_reference, "--lookahead", "maybe")
    assert code == 2
    assert "maybe" in err
