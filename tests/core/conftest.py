"""A toy source and a place to install it."""

from pathlib import Path

import pytest

from mference_core.testing.toys import toy_arch, write_toy


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_toy(tmp_path / "source", toy_arch())


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "toy.gturbo"
