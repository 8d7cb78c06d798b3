"""Servers on the demo checkpoints, one of each family for the whole run, and a scripted one."""

from collections.abc import Iterator
from importlib.metadata import entry_points

import anthropic
import openai
import pytest

from mference_core import plugins
from mference_core.scheduler.scheduler import SchedulerOptions
from mference_core.testing.serving import Running, serving_demo


def with_demo() -> list[str]:
    """Return the families that have a demo checkpoint."""
    names = sorted(point.name for point in entry_points(group="mference.families"))
    loaded = [plugins.load(name).family for name in names]
    return [family.name for family in loaded if family.demo is not None and family.demo.is_dir()]


@pytest.fixture(scope="session", params=with_demo())
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server of each family's demo."""
    with serving_demo(request.param, options=SchedulerOptions(cache_bytes=64 << 20)) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which tries nothing twice."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def claude(running: Running) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client, which tries nothing twice."""
    with anthropic.Anthropic(base_url=running.url, api_key="unused", max_retries=0, timeout=60) as made:
        yield made
