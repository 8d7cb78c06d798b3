"""An install from a hub: the same bytes as from a folder, each fetched once, and whom the token is shown to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mference_core.checkpoint import open_checkpoint, peek
from mference_core.errors import DigestMismatch, InstallError, ManifestError, SourceError
from mference_core.install import InstallProgress
from mference_core.jsondata import hash_file
from mference_core.safetensors_index import INDEX_NAME
from mference_core.testing.fake_hub import LARGE_BYTES, REPO, Answer, FakeHub, serving
from mference_core.testing.toy_installs import (
    beside,
    hub_of,
    install_from,
    install_toy,
    open_whole,
    shards_of,
)
from mference_core.testing.toys import toy_arch, toy_contract, toy_plan, write_toy

TOKEN = "hf_secret"  # noqa: S105  nobody's


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file of an install but the receipt, which names its place and its source."""
    files = {item.relative_to(folder).as_posix(): item for item in folder.rglob("*") if item.is_file()}
    return {name: item.read_bytes() for name, item in files.items() if name != "verified-install.json"}


@pytest.mark.parametrize("connections", [1, 4, 16])
def test_same_bytes_as_from_a_folder(hub: FakeHub, output: Path, tmp_path: Path, connections: int) -> None:
    """Whatever the number of connections, files and manifest equal those of a local install."""
    report = install_from(hub, output, connections=connections)
    install_toy(hub.folder, tmp_path / "local.gturbo")
    assert tree(output) == tree(tmp_path / "local.gturbo")
    assert beside(output) == ["toy.gturbo"]
    open_whole(output)
    assert open_checkpoint(peek(output), toy_contract(), toy_plan, verify="trusted-receipt").weights
    assert (report.commit, report.checked_files, report.reused_bytes) == (hub.commit, 2, 0)
    assert report.files == sum(item.is_file() for item in output.rglob("*"))
    assert report.size_bytes == sum(item.stat().st_size for item in output.rglob("*") if item.is_file())


def test_receipt_names_the_source(hub: FakeHub, output: Path) -> None:
    install_from(hub, output)
    receipt = json.loads((output / "verified-install.json").read_text())
    assert (receipt["sourceRepoID"], receipt["sourceRevision"]) == (REPO, hub.commit)
    assert receipt["modelDirectoryPath"] == str(output)


def test_every_byte_is_sent_once(hub: FakeHub, output: Path) -> None:
    """Headers, ranges, and for the hub's digest the rest: each byte of a shard leaves the storage exactly once."""
    report = install_from(hub, output)
    total = 0
    for name in shards_of(hub.folder):
        assert set(hub.coverage(name)) == {1}
        assert len(hub.sent(name)) > 5
        total += (hub.folder / name).stat().st_size
    small = sum(size for name in ("config.json", INDEX_NAME, "tokenizer.json") for _, size in hub.sent(name))
    template = (hub.folder / "chat_template.jinja").stat().st_size
    # "moved": the body of a redirect, one per shard.
    assert report.downloaded_bytes == total + small + template


def test_without_digests_nothing_more_than_ranges_is_sent(hub: FakeHub, output: Path) -> None:
    hub.digests = False
    report = install_from(hub, output)
    assert report.checked_files == 0
    assert any(set(hub.coverage(name)) == {0, 1} for name in shards_of(hub.folder))
    open_whole(output)


def test_single_file_repository(tmp_path: Path, output: Path) -> None:
    """Without an index the digest of the one header names the source, as in a local install."""
    folder = write_toy(tmp_path / "single", toy_arch())
    with serving(FakeHub(folder)) as hub:
        install_from(hub, output)
    install_toy(folder, tmp_path / "local.gturbo")
    assert tree(output) == tree(tmp_path / "local.gturbo")


def test_progress_goes_through_the_stages_and_counts_every_byte(hub: FakeHub, output: Path) -> None:
    events = list[InstallProgress]()
    install_from(hub, output, progress=events.append)
    stages = list(dict.fromkeys(event.stage for event in events))
    assert stages == ["metadata", "reserving", "copying", "checking", "hashing", "finishing"]
    for stage in ("copying", "hashing", "finishing"):
        done = [event.done_bytes for event in events if event.stage == stage]
        assert done == sorted(done)
        assert done[-1] == [event.total_bytes for event in events if event.stage == stage][-1] > 0


# --- who sees the token


def test_token_goes_to_the_hub_alone(hub: FakeHub, output: Path) -> None:
    hub.token = TOKEN
    install_from(hub, output, hub=hub_of(hub, token=TOKEN))
    at_hub = hub.endpoint.removeprefix("http://")
    shown = {(asked.host == at_hub, asked.authorization) for asked in hub.asked}
    assert shown == {(True, f"Bearer {TOKEN}"), (False, None)}


def test_token_does_not_come_back_after_it_was_dropped(hub: FakeHub, output: Path) -> None:
    """The storage redirects to the hub: another origin was in between, so the hub gets no token that way."""
    hub.token = TOKEN
    name = shards_of(hub.folder)[0]

    def bounce(answer: Answer) -> None:
        if answer.storage and answer.name == name:
            answer.status = 302
            answer.headers["Location"] = f"{hub.endpoint}/{REPO}/resolve/main/config.json"

    hub.faults.append(bounce)
    with pytest.raises(SourceError, match="answered with status 401 GatedRepo"):
        install_from(hub, output, hub=hub_of(hub, token=TOKEN))
    assert [a.authorization for a in hub.asked if a.name == "config.json"][-1] is None


@pytest.mark.parametrize(
    ("token", "remedy"),
    [(None, "set HF_TOKEN"), ("hf_other", "check the token")],
)
def test_gated_repository_is_refused_with_a_remedy(hub: FakeHub, output: Path, token: str | None, remedy: str) -> None:
    hub.token = TOKEN
    with pytest.raises(
        SourceError,
        match=f"status 401 GatedRepo; .*accept the model's terms at http://127.0.0.1:.*/{REPO} and {remedy}",
    ):
        install_from(hub, output, hub=hub_of(hub, token=token))
    assert len(hub.asked) == 1
    assert beside(output) == []


def test_redirects_do_not_go_on_for_ever(hub: FakeHub, output: Path) -> None:
    def loop(answer: Answer) -> None:
        answer.status = 302
        answer.headers["Location"] = "/again"

    hub.faults.append(loop)
    with pytest.raises(SourceError, match=r"redirect is one of more than 5"):
        install_from(hub, output)


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/x", "file:///etc/passwd", "http://[bad/x"])
def test_redirects_to_elsewhere_are_refused(hub: FakeHub, output: Path, target: str) -> None:
    def away(answer: Answer) -> None:
        if answer.status == 302 and answer.method == "GET":
            answer.headers["Location"] = target

    hub.faults.append(away)
    with pytest.raises(SourceError, match=r"redirect is (to (ftp|file)://.*; expected https|malformed)"):
        install_from(hub, output)
    assert beside(output) == []


# --- what it refuses


def test_pinned_index_is_held_against_its_digest(hub: FakeHub, output: Path) -> None:
    install_from(hub, output, index_sha256=hash_file(hub.folder / INDEX_NAME))
    with pytest.raises(DigestMismatch, match=f"{INDEX_NAME} sha256 is .*; expected the pinned {'0' * 64}"):
        install_from(hub, output, index_sha256="0" * 64, overwrite=True)
    open_whole(output)


def test_pinned_repository_without_an_index_is_refused(tmp_path: Path, output: Path) -> None:
    with (
        serving(FakeHub(write_toy(tmp_path / "single", toy_arch()))) as hub,
        pytest.raises(ManifestError, match=f"{INDEX_NAME} is missing"),
    ):
        install_from(hub, output, index_sha256="0" * 64)


@pytest.mark.parametrize(
    ("revision", "text"),
    [("v2", "answered with status 404 RevisionNotFound; .*check repository and revision")],
)
def test_unknown_revision(hub: FakeHub, output: Path, revision: str, text: str) -> None:
    with pytest.raises(SourceError, match=text):
        install_from(hub, output, revision=revision)
    assert beside(output) == []


def test_float_repository_is_refused_before_a_byte_of_weights(tmp_path: Path, output: Path) -> None:
    folder = write_toy(tmp_path / "float", toy_arch(), quantised=False)
    with (
        serving(FakeHub(folder)) as hub,
        pytest.raises(InstallError, match="owner/toy is in float; expected quantised weights; quantise it first"),
    ):
        install_from(hub, output)
    assert beside(output) == []


@pytest.mark.parametrize("missing", ["config.json", "model-00002-of-00002.safetensors"])
def test_incomplete_repository_is_refused(hub: FakeHub, output: Path, missing: str) -> None:
    (hub.folder / missing).unlink()
    with pytest.raises(ManifestError, match=f"owner/toy {missing} is missing"):
        install_from(hub, output)
    assert beside(output) == []


LYING_HEADERS = {
    "cut": lambda data: data[:100],
    "not JSON": lambda data: data[:8] + b"x" + data[9:],
    "longer than the file": lambda data: (10**12).to_bytes(8, "little") + data[8:],
    "bytes after the end": lambda data: data + bytes(100),
    "6000 bytes short": lambda data: data[:-6000],
}


@pytest.mark.parametrize("change", LYING_HEADERS.values(), ids=LYING_HEADERS)
def test_lying_safetensors_are_refused_before_anything_is_written(hub: FakeHub, output: Path, change: object) -> None:
    path = hub.folder / "model-00001-of-00002.safetensors"
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ManifestError, match=r"owner/toy/model-00001-of-00002\.safetensors"):
        install_from(hub, output)
    assert beside(output) == []


def test_shards_are_large_enough_for_the_storage(hub: FakeHub) -> None:
    """The tests here mean to meet redirects."""
    assert all((hub.folder / name).stat().st_size >= LARGE_BYTES for name in shards_of(hub.folder))


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Installing more than 256 MiB raises the peak by less than 64 MiB over that of the imports."""
    arch = toy_arch(hidden_size=1024, moe_intermediate_size=512, vocab_size=1 << 17, num_experts=128)
    folder = write_toy(tmp_path / "large", arch, seed=None)
    script = """
import re, sys
from pathlib import Path
from mference_core.testing.fake_hub import FakeHub
from mference_core.testing.toy_installs import hub_of, install_from
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
fake = FakeHub(Path(sys.argv[1]), commit="c" * 40)
fake.endpoint = sys.argv[2]
before = peak()
report = install_from(fake, Path(sys.argv[3]), chunk_bytes=64 << 20)
print(report.size_bytes, peak() - before)
"""
    with serving(FakeHub(folder, commit="c" * 40, digests=False)) as hub:
        done = subprocess.run(
            [sys.executable, "-c", script, folder, hub.endpoint, tmp_path / "toy.gturbo"],
            check=True,
            capture_output=True,
            text=True,
        )
    size, growth = map(int, done.stdout.split())
    assert size > 256 << 20
    assert growth < 64 << 20
