"""A sound family, and how to break it and have a case judge it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from mference_acceptance.cases import CASES
from mference_acceptance.context import Context
from mference_acceptance.gate import run_case
from mference_core import plugins
from mference_core.plugins import LoadedFamily

BY_NAME = {case.name: case for case in CASES}


class Hooks:
    """A family's hooks, some of which are replaced."""

    def __init__(self, real: Any, replaced: Mapping[str, Callable[..., Any]]) -> None:
        self._real, self._replaced = real, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._real, name)


@pytest.fixture(scope="module")
def sound() -> LoadedFamily:
    return plugins.load("gemma4")


@pytest.fixture
def broken(sound: LoadedFamily) -> Callable[..., LoadedFamily]:
    """Return a function that replaces what hooks of the sound family answer: hook name -> answer -> other answer."""

    def make(**changes: Callable[[Any], Any]) -> LoadedFamily:
        def replaced(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
            return lambda **arguments: change(getattr(sound.hooks, name)(**arguments))

        return attrs.evolve(sound, hooks=Hooks(sound.hooks, {k: replaced(k, v) for k, v in changes.items()}))

    return make


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[str, LoadedFamily], str]:
    """Return a function that says why a case fails, in one line."""

    def judge(name: str, family: LoadedFamily) -> str:
        result = run_case(BY_NAME[name], Context(family=family, folder=tmp_path))
        assert not result.passed, f"{name} did not notice"
        reason = str(result.figures["reason"])
        assert reason
        assert "\n" not in reason
        return reason

    return judge


@pytest.fixture
def figures(tmp_path: Path) -> Callable[[str, LoadedFamily], Mapping[str, Any]]:
    """Return a function that gives the figures of a case that must pass."""

    def judge(name: str, family: LoadedFamily) -> Mapping[str, Any]:
        result = run_case(BY_NAME[name], Context(family=family, folder=tmp_path))
        assert result.passed, result.figures
        return result.figures

    return judge
