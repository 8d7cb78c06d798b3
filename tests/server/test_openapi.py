"""The description and the server agree: schemathesis asks what the description allows, and what it does not."""

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.config import SchemathesisConfig

from mference_core.chat import Text
from mference_core.scheduler.request import Request, Sampled
from mference_core.server.openapi import description
from mference_core.testing.scripted import outcome, serving_script
from mference_core.testing.serving import Running


def hello(_: Request) -> list[Any]:
    return [Sampled(1), Text("Hello."), outcome()]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving_script(hello, "gemma4", held=8) as (server, _):
        yield server


LONG = bool(os.environ.get("MFERENCE_LONG_TESTS"))
EXAMPLES = 200 if LONG else 12
CONFIG = SchemathesisConfig.from_dict({"phases": {"coverage": {"enabled": LONG}}})
NAMES = ["gemma4-demo", "default"]
schema = schemathesis.openapi.from_dict(description(NAMES), config=CONFIG)


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_server_does_what_its_description_says(case: schemathesis.Case, running: Running) -> None:
    """No fault of the server, no undescribed status, content type or shape; what is not allowed is refused."""
    case.call_and_validate(
        base_url=running.url,
        excluded_checks=[
            schemathesis.checks.positive_data_acceptance,  # a model's name, a tool's schema: more than a shape
        ],
    )


def test_the_description_is_served_and_names_every_field(running: Running) -> None:
    served = httpx.get(f"{running.url}/openapi.json").json()
    assert served == description(NAMES)
    chat = served["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["required"] == ["model", "messages"]
    assert "temperature" in chat["properties"]
    assert chat["properties"]["audio"]["type"] == "null"
