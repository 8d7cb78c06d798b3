"""Shared folders and a data directory of each test's own."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from mference_core.cli import run_cli


@pytest.fixture(scope="session")
def gemma4_reference() -> Path:
    """The first family's tiny reference checkpoint, from the installed package."""
    spec = find_spec("mference_gemma4")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "reference"


@pytest.fixture(scope="session")
def shared_data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data directory for the whole run, so that a gate which has to run does so once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def data_dir(shared_data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user data directory of a test."""
    monkeypatch.setenv("MFERENCE_DATA_DIR", str(shared_data_dir))
    return shared_data_dir


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> Cli:  # noqa: ARG001  set for its effect
    """Run the command line in this process: arguments -> (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = run_cli([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run
