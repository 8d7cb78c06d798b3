"""Digests of experts made by an install itself: those that a verification would add, in one reading."""

import json
from pathlib import Path

import pytest
from attrs import evolve

from mference_core.gturbo.digests import DIGESTS_NAME
from mference_core.install import install_local
from mference_core.install.files import OutputFiles
from mference_core.install.verify import verify_install
from mference_core.testing.fake_hub import FakeHub
from mference_core.testing.toy_installs import install_from, install_toy, planned_toy
from mference_core.testing.toys import toy_contract, toy_plan


def files_of(folder: Path) -> dict[str, bytes]:
    found = {item.relative_to(folder).as_posix(): item for item in folder.rglob("*") if item.is_file()}
    return {name: item.read_bytes() for name, item in found.items() if name != "verified-install.json"}


@pytest.fixture
def verified(hub: FakeHub, tmp_path: Path) -> dict[str, bytes]:
    """What a plain install is once a verification has added digests."""
    path = tmp_path / "plain.gturbo"
    install_toy(hub.folder, path)
    assert verify_install(path, expert_digests=True).digests
    return files_of(path)


def test_a_download_makes_them(hub: FakeHub, output: Path, verified: dict[str, bytes]) -> None:
    report = install_from(hub, output, expert_digests=True)
    assert files_of(output) == verified
    assert report.files == len(verified) + 1
    assert report.size_bytes == sum(item.stat().st_size for item in output.rglob("*") if item.is_file())
    assert not verify_install(output).damages
    plan = evolve(planned_toy(hub), expert_digests=True)
    assert plan.output_bytes == sum(map(len, verified.values())) - len(verified["manifest.json"])


def test_a_local_install_makes_them(hub: FakeHub, output: Path, verified: dict[str, bytes]) -> None:
    install_local(hub.folder, output, toy_contract(), toy_plan, expert_digests=True)
    assert files_of(output) == verified
    assert len(json.loads(verified[DIGESTS_NAME])["files"]) > 1


def test_no_payload_is_read_again_for_them(hub: FakeHub, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, hash_whole = list[str](), OutputFiles.hash

    def counted(self: OutputFiles, name: str, *parts: object) -> object:
        read.append(name)
        return hash_whole(self, name, *parts)  # type: ignore[arg-type]

    monkeypatch.setattr(OutputFiles, "hash", counted)
    install_from(hub, output, expert_digests=True)
    payload = json.loads((output / DIGESTS_NAME).read_bytes())["files"]
    assert sorted(read) == sorted(payload)
