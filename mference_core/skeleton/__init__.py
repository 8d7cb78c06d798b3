"""The skeleton of a family's distribution: text files beside this module, and a reference made when they are written."""

import re
import runpy
import shutil
import tempfile
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from mference_core import plugins
from mference_core.errors import MferenceError, UsageError
from mference_core.family import NAME

MAX_NAME_CHARACTERS = 32
FILES = {
    "pyproject.toml": "pyproject",
    "README.md": "readme",
    ".gitignore": "gitignore",
    ".github/workflows/test.yml": "workflow",
    "mference_@name@/__init__.py": "init",
    "mference_@name@/arch.py": "arch",
    "mference_@name@/install.py": "install",
    "mference_@name@/model.py": "model",
    "mference_@name@/chat.py": "chat",
    "mference_@name@/chat_template.jinja": "chat_template",
    "mference_@name@/reference/chat.json": "chat_json",
    "mference_@name@/py.typed": "empty",
    "scripts/make_reference.py": "make_reference",
    "tests/test_@name@.py": "test",
}
"""File of the distribution -> template; `@name@` and `@Name@` are put in both."""


class SkeletonError(MferenceError):
    """A distribution that could not be written."""


def check_name(name: str) -> None:
    """Raise `UsageError` unless a new family can have this name."""
    if not re.fullmatch(NAME, name) or len(name) > MAX_NAME_CHARACTERS:
        expected = f"up to {MAX_NAME_CHARACTERS} lower-case letters and digits, a letter first"
        raise UsageError(what="family name", got=repr(name), expected=expected)
    families = plugins.installed()
    if name in families:
        what = f"a family of distribution {families[name].distribution}"
        raise UsageError(what=f"family name '{name}'", got=what, expected="a name no installed family has")
    if find_spec(f"mference_{name}") is not None:
        what = f"taken: package mference_{name} is installed"
        raise UsageError(what=f"family name '{name}'", got=what, expected="a name of its own")


def write_skeleton(name: str, output: Path) -> list[Path]:
    """Write the distribution of a new family into the folder `output`, complete or not at all; return its files.

    Raises `UsageError` for a name or folder that cannot be meant, `SkeletonError` when writing fails.
    """
    check_name(name)
    output = output.absolute()
    try:
        _check_output(output)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
        try:
            staging.chmod(0o755)
            _fill(name, staging)
            staging.replace(output)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise SkeletonError(
            what=str(output), got=f"not written ({error.strerror})", expected="a writable folder"
        ) from error
    return sorted(path for path in output.rglob("*") if path.is_file())


def _check_output(output: Path) -> None:
    if not output.parent.is_dir():
        raise UsageError(what="--output", got=f"'{output}'", expected="a new folder inside one that exists")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UsageError(what="--output", got=f"'{output}', not a folder", expected="a new or empty folder")
    if output.is_dir() and any(output.iterdir()):
        raise UsageError(what="--output", got=f"'{output}', not empty", expected="a new or empty folder")


def _fill(name: str, folder: Path) -> None:
    """Write every file, then let the distribution's own script make its reference."""
    for target, template in FILES.items():
        path = folder / _named(target, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "" if template == "empty" else files(__name__).joinpath(f"{template}.txt").read_text("utf-8")
        path.write_text(_named(text, name), "utf-8")
    script = runpy.run_path(str(folder / "scripts" / "make_reference.py"), run_name="make_reference")
    script["main"](folder / f"mference_{name}" / "reference")


def _named(text: str, name: str) -> str:
    return text.replace("@name@", name).replace("@Name@", name.capitalize())
