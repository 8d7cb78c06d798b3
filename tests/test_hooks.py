"""Every hook says when it is called, what it gets and returns; the reference page says the same."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mference_acceptance.cases import CASES, contract
from mference_core import hookspecs, plugins

HOOKS: dict[str, Callable[..., Any]] = {
    name: value for name, value in vars(hookspecs).items() if name.startswith("mference_") and callable(value)
}
PAGE = Path(__file__).parent.parent / "docs" / "hooks.md"


def documentation(name: str) -> str:
    return inspect.getdoc(HOOKS[name]) or ""


def test_hooks_are_named_after_what_they_return() -> None:
    assert len(HOOKS) == 9
    assert set(hookspecs.REQUIRED) <= set(HOOKS)
    assert len(set(hookspecs.REQUIRED)) == len(hookspecs.REQUIRED)


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_the_docstring_is_the_contract(name: str) -> None:
    """When it is called, each argument, what to return, in this order."""
    text = documentation(name)
    arguments = list(inspect.signature(HOOKS[name]).parameters)
    assert re.search(r"^Called ", text, re.MULTILINE), "when it is called"
    assert re.findall(r":param (\w+):", text) == arguments
    assert text.count(":return:") == 1
    positions = [text.index("Called "), *(text.index(f":param {a}:") for a in arguments), text.index(":return:")]
    assert positions == sorted(positions)


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_signatures_are_typed_and_may_answer_nothing(name: str) -> None:
    signature = inspect.signature(HOOKS[name])
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())
    assert str(signature.return_annotation).endswith("| None")


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_a_host_calls_the_first_answer_only(name: str) -> None:
    assert HOOKS[name].mference_spec["firstresult"] is True  # type: ignore[attr-defined]


def plain(text: str) -> str:
    """Drop quotes and line breaks, which say nothing."""
    return re.sub(r",? ?\)", ")", re.sub(r"\( ", "(", " ".join(re.sub(r"[\"']", "", text).split())))


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_the_reference_page_has_the_exact_signature(name: str) -> None:
    assert f"def {name}{plain(str(inspect.signature(HOOKS[name])))}: ..." in plain(PAGE.read_text("utf-8"))


@pytest.mark.parametrize("name", hookspecs.REQUIRED)
def test_the_gate_asks_every_required_hook(name: str) -> None:
    """What a family must answer is what its acceptance is about."""
    asked = inspect.getsource(contract) + inspect.getsource(plugins.register)
    from_context = {
        "mference_install_plan": "context.plan",
        "mference_family": "family",
        "mference_manifest_contract": "contract",
    }
    assert name in asked or from_context[name] in asked
    assert "hooks-answer" in [case.name for case in CASES]
