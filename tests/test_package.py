"""The built wheel: what is in it, what is not, and that it stays small."""

import configparser
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = ("families", "kernels", "acceptance")
LIMIT_BYTES = 64 << 20
"""Package indexes refuse files above 100 MB; demo checkpoints must leave room for more families."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the tree, so that a build leaves nothing behind in it."""
    tree, out = tmp_path_factory.mktemp("tree") / "mference", tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "dist")
    shutil.copytree(ROOT, tree, ignore=ignored)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def packages() -> dict[str, Path]:
    """Import packages of the source tree by name."""
    found = {"mference_core": ROOT / "mference_core"}
    for root in SOURCE_ROOTS:
        found |= {init.parent.name: init.parent for init in (ROOT / root).glob("*/__init__.py")}
    return found


def families() -> list[str]:
    return sorted(init.parent.name for init in (ROOT / "families").glob("mference_*/__init__.py"))


def entry_points(wheel: zipfile.ZipFile) -> configparser.ConfigParser:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(name).decode())
    return parser


def test_top_level_names(wheel: zipfile.ZipFile) -> None:
    """Installed bare, a package called `kernels` or `families` would overwrite somebody else's."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    (info,) = [top for top in tops if top.endswith(".dist-info")]
    assert tops - {info} == set(packages())
    assert all(top.startswith("mference_") for top in tops - {info})
    assert {"mference_core", "mference_kernels", "mference_acceptance", "mference_gemma4"} <= tops


def test_every_family_and_the_gate_are_listed(wheel: zipfile.ZipFile) -> None:
    listed = entry_points(wheel)
    expected = {package.removeprefix("mference_"): package for package in families()}
    assert dict(listed["mference.families"]) == expected
    assert dict(listed["mference.acceptance"]) == {"gate": "mference_acceptance"}
    assert dict(listed["console_scripts"]) == {"mference": "mference_core.cli:main"}


def test_everything_a_package_needs_is_there(wheel: zipfile.ZipFile) -> None:
    """Code, templates, reference and demo checkpoints, records: what the tree has, the wheel has, byte for byte."""
    held = set(wheel.namelist())
    for name, folder in packages().items():
        for path in folder.rglob("*"):
            if path.is_dir() or "__pycache__" in path.parts or path.suffix in (".pyc", ".so", ".dylib"):
                continue
            inside = f"{name}/{path.relative_to(folder).as_posix()}"
            assert inside in held, inside
            assert wheel.getinfo(inside).file_size == path.stat().st_size, inside


def test_every_family_brings_its_checkpoints(wheel: zipfile.ZipFile) -> None:
    held = set(wheel.namelist())
    for family in families():
        reference = f"{family}/reference"
        assert {f"{reference}/config.json", f"{reference}/model.safetensors"} <= held
        assert {f"{reference}/mlx/config.json", f"{reference}/mlx/model.safetensors"} <= held
        assert any(name.startswith(f"{reference}/goldens/") and name.endswith(".safetensors") for name in held)
        records = [name for name in held if name.startswith("mference_acceptance/records/")]
        assert any(json.loads(wheel.read(name))["family"] == family.removeprefix("mference_") for name in records)


def test_nothing_else_is_there(wheel: zipfile.ZipFile) -> None:
    for name in wheel.namelist():
        parts = name.split("/")
        assert not {"tests", "docs", "training", "__pycache__", ".git", ".venv"} & set(parts[:2]), name
        assert not name.endswith((".pyc", ".part", ".tmp", ".lock")), name


def test_the_licence_is_there(wheel: zipfile.ZipFile) -> None:
    (licence,) = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_size(wheel: zipfile.ZipFile, record_property: Callable[[str, object], None]) -> None:
    """Keep the figure in the test report, and below the limit."""
    assert wheel.filename is not None
    size = Path(wheel.filename).stat().st_size
    record_property("wheel_bytes", size)
    assert size <= LIMIT_BYTES, f"the wheel has {size} bytes"
