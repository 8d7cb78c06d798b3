"""Who may import whom, read from the sources; and what a bare import may cost, measured."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE, KERNELS, GATE = "mference_core", "mference_kernels", "mference_acceptance"
SOURCES = {
    CORE: ROOT / "mference_core",
    KERNELS: ROOT / "kernels" / "mference_kernels",
    GATE: ROOT / "acceptance" / "mference_acceptance",
    **{path.name: path for path in sorted((ROOT / "families").glob("mference_*"))},
}
FAMILIES = sorted(set(SOURCES) - {CORE, KERNELS, GATE})

LIBRARIES = {
    CORE: {
        "attrs",
        "click",
        "httpcore",
        "httpx",
        "jinja2",
        "llguidance",
        "mlx",
        "platformdirs",
        "pluggy",
        "rich",
        "starlette",
        "tokenizers",
        "uvicorn",
    },
    KERNELS: {"mlx", "attrs"},
    GATE: {"mlx", "attrs", "pytest"},
}
ONLY_IN = {
    "click": ("cli",),
    "rich": ("cli",),
    "jinja2": ("chat",),
    "httpx": ("install",),
    "llguidance": ("grammar",),
    "starlette": ("server",),
    "uvicorn": ("server",),
    "tokenizers": ("tokens.py",),
    "pytest": ("pytest_plugin.py",),
}
"""Libraries of core and gate that one part alone may import, even late."""

LIGHT = (
    "mference_core",
    "mference_core.errors",
    "mference_core.arch",
    "mference_core.manifest",
    "mference_core.gturbo",
    "mference_core.gturbo.model",
    "mference_core.tensors",
    "mference_core.placement",
    "mference_core.family",
    "mference_core.hookspecs",
    "mference_core.records",
    "mference_core.plugins",
    "mference_core.checkpoint",
    "mference_core.install",
    "mference_core.kv",
    "mference_core.cli",
    "mference_acceptance",
    *FAMILIES,
)
"""Modules whose import must not load the array library."""

FORBIDDEN = {"numpy", "torch", "transformers", "safetensors"}

Imported = tuple[Path, str, bool]


def imports(package: str) -> Iterator[Imported]:
    """Yield (file, module, for types alone) of every import in a package, however late."""
    for path in sorted(SOURCES[package].rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        typing_only = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, alias.name, id(node) in typing_only
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                yield path, node.module or "", id(node) in typing_only


def ours(module: str) -> bool:
    return module.startswith("mference_")


def outside(package: str) -> set[tuple[str, str]]:
    """Return (file, module) of every import that is neither ours nor the standard library's."""
    found = set()
    for path, module, _ in imports(package):
        top = module.split(".")[0]
        if not ours(top) and top not in sys.stdlib_module_names:
            found.add((path.relative_to(SOURCES[package]).as_posix(), top))
    return found


def test_there_is_something_to_read() -> None:
    assert FAMILIES
    for package in SOURCES:
        assert len(list(imports(package))) > 5


def allowed(package: str) -> set[str]:
    """Return our packages that a package may import, itself aside."""
    if package == KERNELS:
        return set()
    if package == CORE:
        return {KERNELS}
    return {CORE, KERNELS}


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_imports_point_down(package: str) -> None:
    """Kernels know nobody, core knows kernels, families and the gate know core and kernels and not each other."""
    for path, module, _ in imports(package):
        top = module.split(".")[0]
        if ours(top) and top != package:
            assert top in allowed(package), f"{path} imports {module}"


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_libraries_are_the_listed_ones(package: str) -> None:
    listed = LIBRARIES.get(package, {"mlx", "attrs"})
    for name, top in outside(package):
        assert top in listed, f"{package}/{name} imports {top}"
        assert top not in FORBIDDEN, f"{package}/{name} imports {top}"
        homes = ONLY_IN.get(top)
        if homes is not None:
            assert name.startswith(homes), f"{package}/{name} imports {top}, which only {homes} may"


@pytest.mark.parametrize("package", [CORE, KERNELS, GATE])
def test_no_familys_name_stands_below_families(package: str) -> None:
    """Neither in code nor in comments: what is written once for all knows none of them."""
    names = {point.name for point in entry_points(group="mference.families") if ours(point.value)}
    spelt = names | {"gemma", "qwen", "deepseek", "inkling", "maple", "hy3", "hunyuan"}
    pattern = re.compile("|".join(sorted(spelt)), re.IGNORECASE)
    assert {"gemma4"} <= names
    sources = [
        path for path in SOURCES[package].rglob("*") if path.suffix in {".py", ".c", ".h", ".metal", ".cu", ".md"}
    ]
    assert sources
    for path in sources:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            assert not pattern.search(line), f"{path}:{number}: {line.strip()}"


def test_in_tree_families_are_registered_and_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    registered = project["project"]["entry-points"]["mference.families"]
    assert sorted(registered.values()) == FAMILIES
    assert all(module == f"mference_{name}" for name, module in registered.items())
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {Path(path).name for path in shipped} >= set(SOURCES)


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_stays_light(module: str) -> None:
    heavy = ("mlx", "numpy", "jinja2", "tokenizers", "httpx", "rich", "pytest", "torch")
    spared = ("rich",) if module == "mference_core.cli" else ()
    code = (
        f"import sys\nimport {module}\n"
        f"loaded = [name for name in {heavy!r} if name in sys.modules and name not in {spared!r}]\n"
        "print(*loaded)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_nothing_needs_the_forbidden_at_run_time() -> None:
    """A whole run, from files to a token, with numpy and friends made impossible to import."""
    code = f"""
import sys
for name in {sorted(FORBIDDEN - {"safetensors"})!r}:
    sys.modules[name] = None
from mference_core import plugins
from mference_core.engine import Engine, LoadOptions
family = plugins.load("gemma4")
with Engine.load(family, family.family.reference / "mlx", LoadOptions(context=64, chunk=8, slots=4)) as engine:
    session = engine.session()
    session.prefill([1, 2, 3]).tolist()
    session.decode(4).tolist()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_files_are_short(package: str) -> None:
    for path in SOURCES[package].rglob("*.py"):
        assert len(path.read_text("utf-8").splitlines()) <= 400, path


def test_only_known_names_stand_at_the_top() -> None:
    """Source roots hold import packages of ours, and are none themselves."""
    for root in ("families", "kernels", "acceptance"):
        assert not (ROOT / root / "__init__.py").exists()
