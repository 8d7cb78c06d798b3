"""The page of a verdict: complete by itself, safe to open, and written whatever the verdict is."""

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mference_acceptance import page
from mference_acceptance.case import Case, CaseFailed, case_of
from mference_acceptance.cases import CASES
from mference_acceptance.context import Context
from mference_core.records import AcceptanceRecord, CaseResult, Environment

Cli = Callable[..., tuple[int, str, str]]
GOOD = CaseResult(name=CASES[0].name, passed=True, figures={"worst": 0.000123456, "kind": "a<b>", "seconds": 1.5})
BAD = CaseResult(name="made-up", passed=False, figures={"reason": "<script>alert(1)</script>", "seconds": 0.25})
RECORD = AcceptanceRecord(
    family="toy",
    digest="f" * 64,
    contract=1,
    gate=1,
    environment=Environment(mlx="0.0.1", backend="cpu", processor="abacus"),
    spellings=(None, "toy"),
    model_types=("toy_text",),
    cases=(GOOD,),
    written="2026-01-01T00:00:00+00:00",
)


class Reader(HTMLParser):
    """Collects text, tags and addresses, and sees that every tag is closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.words: list[str] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs} & {"src", "href", "onclick"}
        self.seen.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_an_accepted_family_has_its_record_on_the_page() -> None:
    read = Reader(page("toy", [GOOD], RECORD))
    text = " ".join(read.words)
    assert "Family toy:  accepted" in text
    for part in ("f" * 64, "cpu abacus, mlx 0.0.1", "(none), toy", "toy_text", "1 of 1 pass, 1.5 s", "2026-01-01"):
        assert part in text
    assert CASES[0].holds in text
    assert "worst 0.000123, kind a<b>" in text


def test_a_refused_family_has_the_reason_and_nothing_of_it_is_markup() -> None:
    read = Reader(page("toy", [GOOD, BAD], None, "family toy is refused & <b>gone</b>"))
    text = " ".join(read.words)
    assert "Family toy:  refused" in text
    assert "<script>alert(1)</script>" in text
    assert "& <b>gone</b>" in text
    assert "1 of 2 pass" in text
    assert not {"script", "b", "link", "img"} & set(read.seen)


def test_colours_follow_the_reader() -> None:
    text = page("toy", [GOOD], RECORD)
    assert "color-scheme: light dark" in text
    assert "prefers-color-scheme: dark" in text


@pytest.fixture
def two_cases(
    monkeypatch: pytest.MonkeyPatch, data_dir: Path, tmp_path: Path
) -> Callable[[Callable[[Context], dict[str, object]]], None]:
    """Replace the gate's cases, and the data directory that other tests share."""
    assert data_dir.is_dir()
    monkeypatch.setenv("MFERENCE_DATA_DIR", str(tmp_path / "data"))

    def use(run: Callable[[Context], dict[str, object]]) -> None:
        cases: tuple[Case, ...] = (CASES[0], case_of(run))
        monkeypatch.setattr("mference_acceptance.gate.CASES", cases)

    return use


def holds_nothing(context: Context) -> dict[str, object]:
    """It holds."""
    raise CaseFailed(f"it does not, in {context.folder.is_dir()}")


def holds(context: Context) -> dict[str, object]:
    """It holds."""
    return {"folder": context.folder.is_dir()}


def test_the_command_writes_the_page_whatever_the_verdict(cli: Cli, tmp_path: Path, two_cases: Callable) -> None:  # type: ignore[type-arg]
    two_cases(holds_nothing)
    code, out, err = cli("accept", "gemma4", "--html", tmp_path / "bad.html")
    assert code == 3
    assert out.splitlines()[-1].startswith("holds-nothing           FAIL")
    assert err.startswith("error: family gemma4 of distribution mference is refused by the gate in 1 of 2 cases")
    assert "Family gemma4:  refused" in " ".join(Reader((tmp_path / "bad.html").read_text()).words)
    two_cases(holds)
    code, out, err = cli("accept", "gemma4", "--html", tmp_path / "good.html", "--json")
    assert (code, out[0]) == (0, "{")
    assert err.splitlines()[-1].split()[:2] == ["holds", "pass"]
    assert "Family gemma4:  accepted" in " ".join(Reader((tmp_path / "good.html").read_text()).words)


def test_a_page_that_cannot_be_written_is_said_before_the_gate_runs(cli: Cli, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "page.html"):
        code, out, err = cli("accept", "gemma4", "--html", path)
        assert (code, out) == (2, "")
        assert err == f"error: --html is '{path}'; expected a file in a folder that exists\n"
