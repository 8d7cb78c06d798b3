"""Where a hub is and who asks, from the environment; what of it is ever shown."""

from pathlib import Path

import pytest

from mference_core.errors import InstallError, UsageError
from mference_core.install.http import HubClient
from mference_core.install.hub import Hub, check_repo, hub_from_environment
from mference_core.testing.fake_hub import REPO, FakeHub, serving
from mference_core.testing.toy_installs import install_from

WORD = "hf_word"


def test_defaults(tmp_path: Path) -> None:
    hub = hub_from_environment({"HF_HOME": str(tmp_path)})
    assert (hub.endpoint, hub.token) == ("https://huggingface.co", None)
    assert hub.file_url("o/n", "refs/pr/1", "a b.json") == "https://huggingface.co/o/n/resolve/refs%2Fpr%2F1/a%20b.json"


def test_token_comes_from_the_variable_then_from_the_file(tmp_path: Path) -> None:
    files = {name: f"word_of_{name}" for name in ("token", "other", "cache")}
    (tmp_path / "token").write_text(files["token"] + "\n")
    (tmp_path / "other").write_text(files["other"])
    home = {"HF_HOME": str(tmp_path)}
    assert hub_from_environment({**home, "HF_TOKEN": f" {WORD}\n"}).token == WORD
    assert hub_from_environment(home).token == files["token"]
    assert hub_from_environment({**home, "HF_TOKEN_PATH": str(tmp_path / "other")}).token == files["other"]
    assert hub_from_environment({"XDG_CACHE_HOME": str(tmp_path / "none")}).token is None
    assert hub_from_environment({**home, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}).token is None
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "token").write_text(files["cache"])
    assert hub_from_environment({"XDG_CACHE_HOME": str(tmp_path)}).token == files["cache"]


def test_token_is_not_shown(tmp_path: Path) -> None:
    assert WORD not in repr(hub_from_environment({"HF_TOKEN": WORD}))
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    assert hub_from_environment({"HF_HOME": str(tmp_path)}).token is None
    with pytest.raises(UsageError, match="HF_TOKEN is not a token") as caught:
        hub_from_environment({"HF_TOKEN": f"{WORD}\r\nX-Other: 1"})
    assert WORD not in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "sent"),
    [
        ("https://mirror.example", True),
        ("http://mirror.example", False),
        ("http://127.0.0.1:8080", True),
        ("http://localhost", True),
        ("http://127.0.0.1.example", False),
    ],
)
def test_token_does_not_travel_in_the_clear(endpoint: str, *, sent: bool) -> None:
    assert Hub(endpoint=endpoint, token=WORD).token_to_send == (WORD if sent else None)


@pytest.mark.parametrize(
    "endpoint", ["ftp://x", "mirror.example", "https://", "https://u:p@x", "https://x:port", "a?b"]
)
def test_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(UsageError, match=r"HF_ENDPOINT is .*; expected an address such as"):
        hub_from_environment({"HF_ENDPOINT": endpoint})


def test_endpoint_without_its_slash() -> None:
    assert hub_from_environment({"HF_ENDPOINT": "https://mirror.example/hub/"}).endpoint == "https://mirror.example/hub"


def test_offline() -> None:
    with pytest.raises(InstallError, match=r"HF_HUB_OFFLINE is set; expected a network; unset it, or .* --source"):
        hub_from_environment({"HF_HUB_OFFLINE": "1"})
    assert hub_from_environment({"HF_HUB_OFFLINE": "0"})


@pytest.mark.parametrize("repo", ["name", "a/b/c", "../x", "a/..", "/a", "a/", "a b/c", "a/b?x", "a/b#x", ""])
def test_repositories_that_cannot_be(repo: str) -> None:
    with pytest.raises(UsageError, match="--repo is"):
        check_repo(repo, "main")


def test_proxies_are_honoured(monkeypatch: pytest.MonkeyPatch, hub: FakeHub, output: Path) -> None:
    """A proxy that is not there is asked all the same; `NO_PROXY` spares the host."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(InstallError, match="unreachable"):
        install_from(hub, output)
    assert not hub.asked
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    install_from(hub, output)


def test_bytes_come_in_large_pieces(tmp_path: Path) -> None:
    """Small ones cost more in Python than their bytes do, which is what bounds a fast line."""
    (tmp_path / "large.bin").write_bytes(bytes(8 << 20))
    with serving(FakeHub(tmp_path)) as fake, HubClient(hub=Hub(endpoint=fake.endpoint), repo=REPO) as client:
        file = client.head("large.bin", "main")
        assert file is not None
        pieces = [len(piece) for piece in client.read_range(file, 0, 8 << 20)]
    assert sum(pieces) == 8 << 20
    assert max(pieces) > 64 << 10
