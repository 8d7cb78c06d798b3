"""A new family's skeleton: complete, accepted as written, refused when it computes something else."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mference_core import skeleton
from mference_core.errors import UsageError
from mference_core.testing.throwaway import Venv

Cli = Callable[..., tuple[int, str, str]]
LINTS = "E,F,W,I,N,UP,B,C4,SIM,RET,PTH,RUF,D1,D4,ANN"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution of a family `newcomer`, as written."""
    output = tmp_path_factory.mktemp("skeleton") / "mference-newcomer"
    skeleton.write_skeleton("newcomer", output)
    return output


@pytest.fixture(scope="module")
def env(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Venv]:
    root = tmp_path_factory.mktemp("env")
    made = Venv(root / "venv", root / "data")
    done = made.install(folder)
    assert done.returncode == 0, done.stderr
    yield made
    shutil.rmtree(root)


def test_every_file_is_there_and_named(folder: Path) -> None:
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    expected = {name.replace("@name@", "newcomer") for name in skeleton.FILES}
    reference = "mference_newcomer/reference"
    expected |= {f"{reference}/{part}" for part in ("config.json", "model.safetensors", "goldens/meta.json")}
    expected |= {f"{reference}/mlx/{part}" for part in ("config.json", "model.safetensors")}
    expected |= {f"{reference}/goldens/len{length}.safetensors" for length in (5, 21, 70)}
    assert written == expected
    for path in folder.rglob("*"):
        if path.suffix in (".py", ".toml", ".md", ".yml"):
            assert not re.search(r"@(name|Name)@", path.read_text("utf-8")), path


def test_templates_are_all_used() -> None:
    found = {path.stem for path in Path(skeleton.__file__).parent.glob("*.txt")}
    assert found == set(skeleton.FILES.values()) - {"empty"}


def test_its_code_is_clean(folder: Path) -> None:
    pytest.importorskip("ruff")
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--isolated", "--line-length=120", f"--select={LINTS}"], ["format", "--check"]):
        ignored = ["--ignore=N806,ANN401,D103,RUF002,D413"] if command[0] == "check" else []
        done = subprocess.run([*ruff, *command, *ignored], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_it_is_accepted_as_written(env: Venv, folder: Path) -> None:
    refused = env.mference("run", "--family", "newcomer", "--model", folder, "--prompt", "x")
    assert refused.returncode != 0
    accepted = env.mference("accept", "newcomer")
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    assert "FAIL" not in accepted.stdout
    ids = folder.parent / "ids.json"
    ids.write_text("[1, 2, 3]")
    model = env.site_packages / "mference_newcomer" / "reference"
    for directory in (model, model / "mlx"):
        ran = env.mference("run", "--model", directory, "--tokens", ids, "--max-new", 4, "--json")
        assert ran.returncode == 0, ran.stderr


def test_its_own_tests_and_the_gates_pass_together(env: Venv, folder: Path) -> None:
    selected = ("-k", "parity or hooks or test_")
    done = env.run("pytest", "-q", "-p", "no:cacheprovider", "--mference-family=newcomer", *selected, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed" in done.stdout


def test_a_model_that_computes_something_else_is_refused(env: Venv) -> None:
    """The goldens are not made by the code they judge."""
    model = env.site_packages / "mference_newcomer" / "model.py"
    text = model.read_text("utf-8")
    try:
        for right, wrong in (("self.head_dim**-0.5", "1.0"), ("p / p.sum(axis=-1, keepdims=True)", "p")):
            assert text.count(right) == 1
            model.write_text(text.replace(right, wrong), "utf-8")
            done = env.run("pytest", "-q", "-p", "no:cacheprovider", "--mference-family=newcomer", "-k", "parity-float")
            assert done.returncode == 1
            assert "reason: prompt len5 layer 0" in done.stdout
    finally:
        model.write_text(text, "utf-8")


@pytest.mark.parametrize("name", ["", "Big", "two words", "1st", "a-b", "../x", "é", "x" * 33])
def test_names_that_cannot_be_meant(cli: Cli, tmp_path: Path, name: str) -> None:
    code, _, err = cli("new-family", "--output", tmp_path / "out", "--", name)
    assert code == 2
    assert err.startswith("error: family name is ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "said"), [("gemma4", "distribution mference"), ("core", "package mference_core")])
def test_taken_names(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        skeleton.check_name(name)


def test_a_folder_in_use_is_left_alone(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mference-other").mkdir()
    (tmp_path / "mference-other" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for arguments in (("other",), ("other", "-o", "file"), ("other", "-o", "none/here")):
        code, out, err = cli("new-family", *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: --output is ")
        assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mference-other", "mine.txt"]


def test_an_empty_folder_is_filled(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    code, out, err = cli("new-family", "other", "-o", tmp_path / "here")
    assert (code, out) == (0, f"wrote {tmp_path / 'here'}: 22 files\n")
    assert "mference accept other" in err
    assert (tmp_path / "here" / "mference_other" / "__init__.py").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_leaves_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("runpy.run_path", fail)
    code, _, err = cli("new-family", "other", "-o", tmp_path / "out")
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
