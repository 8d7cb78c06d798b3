"""Ways to stop a download in the middle, and to look at what is kept, that the tests of going on share."""

import json
from pathlib import Path
from typing import Any

import pytest

from mference_core.install import InstallProgress
from mference_core.install.planning import RemotePlan
from mference_core.testing.fake_hub import FakeHub
from mference_core.testing.toy_installs import install_from, planned_toy

DONE = 5


def partial(output: Path) -> Path:
    return Path(f"{output}.partial")


def saved_path(output: Path) -> Path:
    return Path(f"{output}.resume.json")


def pause(hub: FakeHub, output: Path, after: int = DONE, **options: Any) -> None:
    """Install over one connection and interrupt it after some ranges were copied; all but the last are recorded."""
    interrupt(hub, output, planned_toy(hub), after, **options)
    hub.clear()


def interrupt(hub: FakeHub, output: Path, plan: RemotePlan, after: int, **options: Any) -> None:
    """Pause without asking the hub for anything else, and leave written down what it was asked for."""
    limit = sum(request.size for request in plan.requests.ranges[:after])

    def progress(event: InstallProgress) -> None:
        if event.stage == "copying" and event.done_bytes >= limit:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install_from(hub, output, progress=progress, connections=1, **options)
    hub.settle()


def recorded(output: Path) -> dict[str, Any]:
    """Return the saved state as JSON."""
    values = json.loads(saved_path(output).read_bytes())
    assert isinstance(values, dict)
    return values


def idents(output: Path) -> list[str]:
    return [done["id"] for done in recorded(output)["completedRanges"]]
