"""A tiny GGUF file made of the reference checkpoint, and where its maker's helpers are."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_gguf import metadata, tensors_of, write_gguf

from mference_smollm2 import mference_family


@pytest.fixture(scope="session")
def reference() -> Path:
    """Return the folder with the reference checkpoint and its goldens."""
    folder = mference_family().reference
    assert folder is not None
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, reference: Path) -> Path:
    """Return the reference checkpoint as a GGUF file."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_gguf(path, metadata(), tensors_of(reference))
    return path
