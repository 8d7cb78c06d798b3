"""The AI SDK's openai-compatible provider, as JavaScript programs use it, against every demo."""

import fcntl
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mference_core.testing.serving import Running

FOLDER = Path(__file__).parent / "ai_sdk"

pytestmark = pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")), reason="node and npm are not installed; they run the AI SDK"
)


@pytest.fixture(scope="session")
def modules() -> Path:
    """The SDK, installed as the lock file says where it is not there yet."""
    with (FOLDER / "package-lock.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of the same run wait for the one that installs
        if not (FOLDER / "node_modules" / ".package-lock.json").is_file():
            npm = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
            subprocess.run(npm, cwd=FOLDER, check=True, timeout=120)
    return FOLDER


def test_the_sdk_hears_what_the_model_says(modules: Path, running: Running) -> None:
    done = subprocess.run(
        ["node", "talk.mjs", f"{running.url}/v1", "unused"],  # noqa: S607
        cwd=modules,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    heard: dict[str, Any] = json.loads(done.stdout)
    assert "Paris" in heard["whole"]["text"]
    assert heard["streamed"]["text"] == heard["whole"]["text"]
    assert heard["streamed"]["finish"] == heard["whole"]["finish"] == "stop"
    assert heard["streamed"]["usage"]["outputTokens"] == heard["whole"]["usage"]["outputTokens"] > 0
    assert heard["loop"]["call"] == {"city": "Paris"}
    assert heard["loop"]["steps"] == 2
    assert "sunny" in heard["loop"]["text"]
    assert heard["kinds"] == ["tool-call", "tool-result", "finish"]
    assert heard["loopText"] == heard["loop"]["text"]
    assert heard["shaped"]["city"] in ("Paris", "Rome")
    assert isinstance(heard["shaped"]["big"], bool)
    assert heard["refused"] == {"known": True, "status": 404, "message": heard["refused"]["message"]}
    assert "no model 'nothing'" in heard["refused"]["message"]
    assert heard["legacy"]
