"""docs/writing-a-family.md, followed to the letter in an environment of its own."""

import doctest
import re
from pathlib import Path

from mference_core.testing.throwaway import Venv

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-family.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = {"sh": ("bash", "-euo", "pipefail", "-c"), "python": ("python", "-c")}
TOGETHER = {"sh": "exec 2>&1\n", "python": ""}
"""Makes a block's errors come among its output, as a reader sees them."""


def matches(wanted: str, said: str) -> bool:
    """Say whether output is what the page shows, `...` standing for anything."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(wanted.strip(), said.strip(), flags)


def test_every_block_does_what_the_page_says(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    env = Venv(tmp_path / "venv", tmp_path / "data")
    blocks = [(found[1], found[2]) for found in FENCE.finditer(PAGE.read_text("utf-8"))]
    ran, shown, said = 0, 0, ""
    for language, text in blocks:
        if language == "text":
            assert matches(text, said), f"the page shows\n{text}\nbut it says\n{said}"
            shown += 1
            continue
        done = env.run(*COMMANDS[language], TOGETHER[language] + text, cwd=folder)
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"{text}\n{said}"
        ran += 1
    assert (ran, shown) == (12, 9)
    assert "<title>mine is accepted</title>" in (folder / "verdict.html").read_text("utf-8")


def test_the_comparison_can_fail() -> None:
    assert matches("a ... c\nd", "a 1 c\nd\n")
    assert not matches("a ... c\nd", "a 1 c\ne\n")
