"""`mference serve` as a process: it says where it is, ends on a signal, and refuses what cannot be meant in one line."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

Cli = Callable[..., tuple[int, str, str]]


@contextmanager
def serve(data_dir: Path, *more: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [str(Path(sys.executable).parent / "mference"), "serve", "--family", "gemma4", "--port", "0", *more]
    env = os.environ | {"MFERENCE_DATA_DIR": str(data_dir)} | environment
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving (\S+) at (http://\S+)\n", line)
        assert found, process.communicate(timeout=10)
        yield process, found[2]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_ends_on_a_signal(data_dir: Path, number: signal.Signals) -> None:
    with serve(data_dir, "--max-context", "256", "--model-id", "tiny") as (process, url):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=30).status_code == 200
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "POST '/v1/chat/completions' 200" in said
        assert said.endswith("stopped\n")
        assert "Traceback" not in said


def test_a_token_from_the_environment_is_asked_for(data_dir: Path) -> None:
    token = "correct-horse"  # noqa: S105  a test's own
    with serve(data_dir, "--bind", "0.0.0.0", MFERENCE_TOKEN=token) as (_, url):  # noqa: S104
        models = f"{url}/v1/models".replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        assert httpx.get(models).status_code == 401
        assert httpx.get(models, headers={"x-api-key": token}).status_code == 200


def test_what_was_read_is_kept_on_disk(data_dir: Path) -> None:
    """A second server goes on from what the first computed."""
    prompt = f"{secrets.token_hex(8)} is new. " + "Once upon a time there was a fox. " * 20
    ask = {"model": "gemma4-demo", "prompt": prompt, "max_tokens": 2}
    cached = []
    for _ in range(2):
        with serve(data_dir, "--prefix-cache", "64MiB", "--prefix-cache-disk", "64MiB") as (process, url):
            answer = httpx.post(f"{url}/v1/completions", json=ask, timeout=60).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
    assert cached[0] == 0 < cached[1]


def test_a_port_in_use_is_said_in_one_line(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = cli("serve", "--family", "gemma4", "--port", port)
    assert (code, out) == (1, "")
    assert err == f"error: http://127.0.0.1:{port} cannot be served: Address already in use; give another --port\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--family", "gemma5"), 2, "gemma5"),
        ((), 2, "no model named"),
        (("--family", "gemma4", "--port", "99999"), 2, "--port is 99999"),
        (("--family", "gemma4", "--bind", "0.0.0.0"), 2, "without a token"),  # noqa: S104
        (("--family", "gemma4", "--bind", "no such host"), 2, "--bind"),
        (("--family", "gemma4", "--token", "x"), 2, "--token"),
        (("--family", "gemma4", "--allow-origin", "*"), 2, "--allow-origin"),
        (("--family", "gemma4", "--max-active", "0"), 2, "--max-active is 0"),
        (("--family", "gemma4", "--deadline", "-1"), 2, "--deadline"),
        (("--family", "gemma4", "--top-p", "2"), 2, "top_p is 2"),
        (("--family", "gemma4", "--prefix-cache", "much"), 2, "'much'"),
        (("--family", "gemma4", "--prefix-cache", "0", "--prefix-cache-disk", "1GiB"), 2, "--prefix-cache-disk"),
        (("--family", "gemma4", "--model-id", " "), 2, "--model-id"),
        (("--model", "/nowhere"), 1, "/nowhere"),
    ],
)
def test_what_cannot_be_meant_is_refused(cli: Cli, arguments: tuple[str, ...], code: int, said: str) -> None:
    more = () if "--port" in arguments else ("--port", "0")
    got, out, err = cli("serve", *arguments, *more)
    assert (got, out) == (code, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err


def test_there_is_no_way_around_the_gate(cli: Cli) -> None:
    code, _, err = cli("serve", "--family", "gemma4", "--unaccepted")
    assert code == 2
    assert "--unaccepted" in err
