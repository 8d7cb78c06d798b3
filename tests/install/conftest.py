"""A toy repository on a fake hub, a place to install it, and no settings of the developer's own."""

import os
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest

from mference_core.testing.fake_hub import FakeHub, serving
from mference_core.testing.toy_installs import write_toy_repo


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the system has one: what is tested here syncs often."""
    shared = Path("/dev/shm")  # noqa: S108
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    folder = Path(mkdtemp(prefix="mference-", dir=shared))
    yield folder
    rmtree(folder)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return write_toy_repo(tmp_path / "repo")


@pytest.fixture
def hub(repo: Path) -> Iterator[FakeHub]:
    with serving(FakeHub(repo)) as fake:
        yield fake


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "toy.gturbo"
