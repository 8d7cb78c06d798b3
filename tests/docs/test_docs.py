"""The documentation: every example runs, every link resolves, generated text is up to date.

A block that is not run says why in its first line (`# not run: ...`). A `text` block directly after one that runs is its
output, `...` standing for anything. Blocks of a page run in order in one empty folder, with `SOURCE` a quantised MLX
directory and a data directory of the page's own.
"""

import contextlib
import doctest
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import mlx.core as mx
import pytest
from attrs import frozen

import mference_gemma4
from mference_acceptance.cases import CASES
from mference_core import plugins
from mference_core.checkpoint import Checkpoint
from mference_core.cli import cli, run_cli, show
from mference_core.experts.plan import format_bytes
from mference_core.locate import Found
from mference_core.tensors import ExpertLayer, ExpertPart, Extent, Quant, Span, Weight

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FAMILY = Path(mference_gemma4.__file__).parent
PAGES = sorted([*DOCS.glob("*.md"), *(DOCS / "families").glob("*.md")])
NAMES = [str(page.relative_to(DOCS)) for page in PAGES]
ELSEWHERE = ("writing-a-family.md",)
"""Pages whose blocks install something: `test_writing_a_family.py` follows them in an environment of their own."""
HERE = [page for page in PAGES if page.name not in ELSEWHERE]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NOT_RUN = re.compile(r"# not run: \S")
ON_DEMO = "# on the demo checkpoint"
SHELL_SIGNS = re.compile(r"[|&;<>`]|\$\(")
LANGUAGES = {"sh", "python", "text", "json", "toml"}


@frozen(kw_only=True)
class Block:
    """A fenced block: its language, text, line number, and whether only blank lines part it from the one before."""

    language: str
    text: str
    line: int
    follows: bool

    @property
    def runs(self) -> bool:
        """Whether it is an example to run."""
        if self.text.startswith(ON_DEMO) and not (FAMILY / "demo").is_dir():
            return False
        return self.language in ("sh", "python") and not NOT_RUN.match(self.text)


def blocks_of(page: Path) -> list[Block]:
    """Return a page's blocks in order."""
    text, blocks, end = page.read_text("utf-8"), list[Block](), 0
    for found in FENCE.finditer(text):
        follows = bool(blocks) and not text[end : found.start()].strip()
        line = text.count("\n", 0, found.start()) + 2
        blocks.append(Block(language=found[1], text=found[2], line=line, follows=follows))
        end = found.end()
    return blocks


def run_shell(text: str) -> str:
    """Run shell lines, `mference` ones in this process where nothing in them needs a shell; return all output."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    if any(SHELL_SIGNS.search(line) or not line.startswith("mference ") for line in lines):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],  # noqa: S607
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout
    said = io.StringIO()
    for line in lines:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = run_cli(shlex.split(os.path.expandvars(line), comments=True)[1:])
        assert code == 0, f"{line}\nexit code {code}\n{said.getvalue()}"
    return said.getvalue()


def run_python(text: str, names: dict[str, object]) -> str:
    """Run Python lines with the names of the page so far; return their output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        exec(text, names)  # noqa: S102  our own pages
    return said.getvalue()


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's shell: an empty folder, the command on PATH, a model, and a gate of two cases."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "data" / "models").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MFERENCE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SOURCE", str(FAMILY / "reference" / "mlx"))
    quick = tuple(case for case in CASES if case.name in ("hooks-answer", "router-ties"))
    monkeypatch.setattr("mference_acceptance.gate.CASES", quick)
    return folder


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("page", HERE, ids=lambda page: page.name)
def test_every_example_runs(page: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    said, ran = "", False
    for block in blocks_of(page):
        where = f"{page.name}:{block.line}"
        if block.runs:
            try:
                said = run_python(block.text, names) if block.language == "python" else run_shell(block.text)
            except Exception as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            ran = True
        elif block.language == "text" and block.follows and ran:
            compare(said, block.text, where)
            ran = False
        else:
            ran = False


def compare(said: str, wanted: str, where: str) -> None:
    """Fail unless output is what a page shows, `...` standing for anything and white space for white space."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(wanted.strip(), said.strip(), flags), f"{where}: the output is\n{said}"


def test_the_comparison_can_fail() -> None:
    compare("a 1 c\nd", "a ... c\nd", "here")
    with pytest.raises(AssertionError, match="the output is"):
        compare("a 1 c\ne", "a ... c\nd", "here")


@pytest.mark.usefixtures("reader")
def test_a_failing_example_is_noticed() -> None:
    for text in ("mference show --model nothing\n", "false\n", "mference families | grep nobody\n"):
        with pytest.raises(AssertionError):
            run_shell(text)
    with pytest.raises(ZeroDivisionError):
        run_python("1 / 0", {})


def all_blocks() -> Iterator[tuple[str, Block]]:
    for name, page in zip(NAMES, PAGES, strict=True):
        yield from ((f"{name}:{block.line}", block) for block in blocks_of(page))


def test_every_block_is_of_a_known_kind() -> None:
    """Unknown languages would pass unrun; JSON must parse, and what is not run must say why."""
    for where, block in all_blocks():
        assert block.language in LANGUAGES, where
        if block.language == "json":
            json.loads(block.text)
        if block.text.startswith("# not run"):
            assert NOT_RUN.match(block.text), where


def test_examples_are_found() -> None:
    """The pattern that finds blocks misses none: every fence of a page belongs to one."""
    assert sum(block.runs for _, block in all_blocks()) > 15
    for page in PAGES:
        fences = [line for line in page.read_text("utf-8").splitlines() if line.startswith("```")]
        assert len(fences) == 2 * len(blocks_of(page)), page.name


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=[*NAMES, "README.md"])
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    links = [link for link in LINK.findall(text) if not link.startswith(("http://", "https://"))]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {link}"


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text("utf-8")
    missing = [name for name in NAMES if name != "index.md" and f"]({name})" not in index]
    assert missing == []


def test_generated_text_is_up_to_date() -> None:
    """Run `python docs/generate.py` after changing a command, a hook, an error, a case or a published shape."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.pages().items():
        assert path.read_text("utf-8") == text, f"run python docs/generate.py: {path.name} is stale"


def test_published_memory_is_what_show_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of families/gemma4.md, made from shapes, has the totals that `mference show` would print."""
    monkeypatch.setattr("mference_core.weights.keeps_companions", lambda *_: True)
    family = plugins.load("gemma4")
    (arch,) = family.contract.pinned
    plan = family.ask("mference_install_plan", arch=arch)
    weights = {name: weight_of(name, shape) for name, shape in plan.residents.items()}
    layers = {i: expert_layer(i, shapes, arch.num_experts) for i, shapes in plan.experts.items()}
    checkpoint = Checkpoint(
        path=DOCS,
        kind="gturbo",
        arch=arch,
        pinned=True,
        config={"text_config": {"max_position_embeddings": 262_144}},
        weights=weights,
        experts=layers,
        tokenizer_dir=None,
        digest="",
        touch=lambda _: None,
        dropped={},
    )
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    shown = show.memory_rows(Found(family=family, path=DOCS), checkpoint, "float32" if on_cpu else "bfloat16")
    page = (DOCS / "families" / "gemma4.md").read_text("utf-8")
    part = page.split("In bfloat16")[0 if on_cpu else 1]
    for row in shown:
        cells = [
            f"{row['context_tokens']:,}",
            format_bytes(row["state_bytes"]),
            *map(format_bytes, row["total_bytes_by_slots"].values()),
        ]
        assert f"| {' | '.join(cells)} |" in part


def span(size: int) -> Span:
    return Span(path=DOCS, offset=0, size=size)


def weight_of(name: str, shape: tuple[int, ...]) -> Weight:
    if len(shape) == 1:
        return Weight(name=name, dtype="BF16", shape=shape, data=span(2 * shape[0]))
    count, bits = shape[0] * shape[1], 8 if "router" in name else 4
    quant, groups = Quant(bits=bits, group_size=64), span(count // 64 * 2)
    data = span(count * bits // 8)
    return Weight(name=name, dtype="U32", shape=shape, data=data, quant=quant, scales=groups, biases=groups)


def expert_layer(layer: int, shapes: dict[str, tuple[int, int]], count: int) -> ExpertLayer:
    parts = []
    for role, (rows, columns) in shapes.items():
        parts.append(ExpertPart(name=role, dtype="U32", shape=(rows, columns // 8), size=rows * columns // 2))
        for kind in ("_scales", "_biases"):
            size = rows * columns // 64 * 2
            parts.append(ExpertPart(name=role + kind, dtype="BF16", shape=(rows, columns // 64), size=size))

    def extents(_: int) -> tuple[Extent, ...]:
        raise AssertionError("planning memory must not look for bytes")

    return ExpertLayer(layer=layer, count=count, parts=tuple(parts), extents=extents)


def test_the_readme_commands_parse() -> None:
    """The two marked commands are one line each, and their `mference` options are real."""
    text = (ROOT / "README.md").read_text("utf-8")
    commands = {}
    for name in ("run", "test"):
        found = re.search(rf"^<!-- {name} -->\n```sh\n(.+)\n```$", text, re.MULTILINE)
        assert found, f"README has no {name} command of one line"
        commands[name] = [shlex.split(part) for part in found[1].split(" && ")]
        done = subprocess.run(["bash", "-nc", found[1]], capture_output=True, text=True, check=False)  # noqa: S607
        assert done.returncode == 0, done.stderr
    assert commands["run"][-1][:4] == [".venv/bin/mference", "run", "--family", "gemma4"]
    assert commands["test"][-1][0] == ".venv/bin/pytest"
    assert isinstance(cli, click.Group)
    for line in re.findall(r"^(?:.*\.venv/bin/)?mference .+$", text, re.MULTILINE):
        _, word, *arguments = shlex.split(line.rpartition(" && ")[2], comments=True)
        cli.commands[word].make_context(word, arguments)
