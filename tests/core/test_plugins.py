"""Families as distributions on a path: found, checked, refused by name."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mference_core import plugins
from mference_core.errors import (
    ArchMismatch,
    ContractError,
    DuplicateFamily,
    FamilyNotFound,
    MferenceError,
    NotAccepted,
    PluginError,
)
from mference_core.hookspecs import REQUIRED

Install = Callable[..., Path]

WHOLE = """
from mference_core import Arch, Family, ManifestContract, hookimpl

@hookimpl
def mference_family():
    return Family(name="{name}", title="Test", spellings=("{name}",), model_types=("{name}",))

@hookimpl
def mference_manifest_contract():
    return ManifestContract(family="{name}", arch=Arch, pinned=(), from_config=lambda config: config)

@hookimpl
def mference_install_plan(arch):
    return "plan of " + arch

@hookimpl
def mference_kv_layout(arch, context):
    return (arch, context)

@hookimpl
def mference_router(arch, weights):
    return None

@hookimpl
def mference_layer_graph(arch, weights, router):
    raise ValueError("no\\nsuch graph")

@hookimpl
def mference_chat_format():
    return "chat"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with one module on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def put(distribution: str, name: str, source: str = WHOLE, module: str | None = None, target: str = "") -> Path:
        module = module or f"mference_{name}_{len(made)}"
        made.append(module)
        package = tmp_path / module
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(source.replace("{name}", name), "utf-8")
        info = tmp_path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n", "utf-8")
        (info / "entry_points.txt").write_text(f"[mference.families]\n{name} = {target or module}\n", "utf-8")
        return package

    yield put
    for module in made:
        sys.modules.pop(module, None)


def without(hook: str) -> str:
    """Return the source of a family that lacks one hook."""
    head, *parts = WHOLE.split("@hookimpl\n")
    return "@hookimpl\n".join([head, *(part for part in parts if f"def {hook}(" not in part)])


def refusal(name: str) -> str:
    with pytest.raises(ContractError) as caught:
        plugins.load(name)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.exit_code == 1
    return text


def test_a_distribution_is_listed_with_name_and_version(install: Install) -> None:
    package = install("mference-demo", "demo")
    entry = plugins.installed()["demo"]
    assert (entry.name, entry.distribution, entry.version) == ("demo", "mference-demo", "1.5")
    assert entry.folder == package
    assert list(plugins.installed()) == sorted(plugins.installed())


def test_listing_and_locating_import_nothing(install: Install) -> None:
    install("mference-bomb", "bomb", "raise RuntimeError('imported')")
    entry = plugins.installed()["bomb"]
    assert entry.folder.is_dir()
    assert entry.point.module not in sys.modules


def test_listing_loads_no_array_library() -> None:
    code = (
        "import sys\nfrom mference_core import plugins\nnames = plugins.installed()\n"
        "assert 'gemma4' in names and names['gemma4'].folder.is_dir()\n"
        "sys.exit(any(name in sys.modules for name in ('mlx', 'mference_gemma4', 'numpy', 'jinja2', 'click')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_sound_family_loads_and_is_asked_by_name(install: Install) -> None:
    """Hooks take the arguments they name, and no others."""
    install("mference-demo", "demo")
    family = plugins.load("demo")
    assert family.family.title == "Test"
    assert family.contract.family == "demo"
    assert family.ask("mference_kv_layout", arch="a", context=9, chunk=1, dtype="float32") == ("a", 9)
    assert family.hooks.mference_prefill_step() is None


def test_a_hook_that_answers_nothing_is_named(install: Install) -> None:
    install("mference-demo", "demo")
    with pytest.raises(ContractError, match="mference-demo: hook mference_router is no answer; expected a value"):
        plugins.load("demo").ask("mference_router", arch=None, weights=None)


def test_a_hook_that_crashes_is_one_line(install: Install) -> None:
    install("mference-demo", "demo")
    family = plugins.load("demo")
    with pytest.raises(ContractError) as caught:
        family.ask("mference_layer_graph", arch=None, weights=None, router=None)
    text = "family demo of distribution mference-demo: hook mference_layer_graph is failing: ValueError: no such graph"
    assert str(caught.value).startswith(text)


def test_our_own_errors_pass_through_hooks(install: Install) -> None:
    refusing = without("mference_install_plan") + (
        "\n@hookimpl\ndef mference_install_plan(arch):\n"
        "    from mference_core import ArchMismatch\n    raise ArchMismatch(what='arch.x', got='1', expected='2')\n"
    )
    install("mference-demo", "demo", refusing)
    with pytest.raises(ArchMismatch, match=r"arch\.x is 1; expected 2"):
        plugins.load("demo").ask("mference_install_plan", arch=None)


@pytest.mark.parametrize("hook", REQUIRED)
def test_each_required_hook_is_missed(install: Install, hook: str) -> None:
    install("mference-demo", "demo", without(hook))
    assert f"family demo of distribution mference-demo: hook {hook} is missing" in refusal("demo")


@pytest.mark.parametrize(
    "extra",
    [
        "@hookimpl\ndef mference_layout(arch):\n    return 1\n",
        "def mference_kvlayout(arch):\n    return 1\n",
        "@hookimpl\ndef mference_decode_step(token):\n    return 1\n",
    ],
)
def test_a_misspelt_hook_or_argument_is_refused(install: Install, extra: str) -> None:
    install("mference-demo", "demo", WHOLE + extra)
    text = refusal("demo")
    assert "distribution mference-demo" in text
    assert extra.split("def ", 1)[1].split("(", maxsplit=1)[0] in text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_at_all", "import is failed: ModuleNotFoundError: No module named"),
        ("1 / 0", "import is failed: ZeroDivisionError"),
        ("def (", "import is failed: SyntaxError"),
        (WHOLE.replace('name="{name}"', 'name="other"'), "mference_family is 'other'; expected the name 'demo'"),
        (WHOLE.replace('name="{name}"', 'name="Bad Name"'), "mference_family is failing: ValueError"),
        (WHOLE.replace('return Family(name="{name}"', 'return dict(name="{name}"'), "mference_family is "),
        (WHOLE.replace("return ManifestContract(", "return dict("), "mference_manifest_contract is "),
        (without("mference_family") + "\n@hookimpl\ndef mference_family():\n    1 / 0\n", "ZeroDivisionError"),
    ],
)
def test_a_broken_package_is_one_line_naming_the_distribution(install: Install, source: str, reason: str) -> None:
    install("mference-demo", "demo", source)
    text = refusal("demo")
    assert "family demo of distribution mference-demo" in text
    assert reason in text


def test_an_entry_point_that_names_nothing_is_refused(install: Install) -> None:
    install("mference-demo", "demo", target="mference_not_there_at_all")
    assert "ModuleNotFoundError" in refusal("demo")
    with pytest.raises(PluginError, match="package mference_not_there_at_all of distribution mference-demo is missing"):
        _ = plugins.installed()["demo"].folder


def test_two_distributions_of_one_name_are_both_named(install: Install) -> None:
    install("mference-first", "twice")
    install("mference-second", "twice")
    for act in (plugins.installed, lambda: plugins.load("twice"), lambda: plugins.load("gemma4")):
        with pytest.raises(DuplicateFamily) as caught:
            act()
        text = str(caught.value)
        assert "family 'twice'" in text
        assert "mference-first" in text
        assert "mference-second" in text


def test_an_unknown_family_lists_what_is_installed(install: Install) -> None:
    install("mference-demo", "demo")
    with pytest.raises(FamilyNotFound, match=r"no family 'dmeo'; installed: .*demo, .*see 'mference families'"):
        plugins.find("dmeo")


@pytest.mark.usefixtures("data_dir")
def test_a_broken_stranger_does_not_stand_in_the_way_of_others(install: Install) -> None:
    """Only the family that is asked for is imported."""
    install("mference-bomb", "bomb", "raise RuntimeError('imported')")
    assert plugins.load("gemma4").family.name == "gemma4"
    with pytest.raises(NotAccepted, match="mference-bomb is never accepted") as caught:
        plugins.dispatch("bomb")
    assert caught.value.exit_code == 3


@pytest.mark.usefixtures("data_dir")
def test_nothing_is_dispatched_without_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "gate", lambda: None)
    with pytest.raises(NotAccepted, match="acceptance gate is not installed"):
        plugins.dispatch("gemma4")


def test_errors_are_our_own() -> None:
    assert issubclass(ContractError, MferenceError)
    assert issubclass(NotAccepted, PluginError)
