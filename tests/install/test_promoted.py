"""An install that was stopped after it had got its name: the next one clears up, and says that it is installed."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from mference_core.errors import InstallError
from mference_core.install import InstallProgress, sidecars, transaction
from mference_core.testing.fake_hub import FakeHub, commit_of
from mference_core.testing.toy_installs import beside, install_from, open_whole, shards_of

from .pausing import partial, pause, saved_path

REMOVALS = ["_remove_metadata", "forget"]


def stop_at(hub: FakeHub, output: Path, name: str, **options: Any) -> None:
    """Install until this function would be called."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sidecars, name, stop)
        with pytest.raises(KeyboardInterrupt):
            install_from(hub, output, **options)
    hub.clear()


def assert_clean(output: Path) -> None:
    assert beside(output) == [output.name]
    assert not (output / ".remote-metadata").exists()
    open_whole(output)


@pytest.mark.parametrize("name", REMOVALS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_same_install_is_reported_once(hub: FakeHub, output: Path, name: str, *, overwrite: bool) -> None:
    """With what is there, and without a request; the one after that finds an install like any other."""
    stop_at(hub, output, name)
    report = install_from(hub, output, overwrite=overwrite)
    assert not hub.asked
    assert (report.path, report.commit, report.downloaded_bytes) == (output, hub.commit, 0)
    files = [item for item in output.rglob("*") if item.is_file()]
    assert (report.files, report.size_bytes) == (len(files), sum(item.stat().st_size for item in files))
    assert_clean(output)
    with pytest.raises(InstallError, match="is already there"):
        install_from(hub, output)
    assert install_from(hub, output, overwrite=True).downloaded_bytes > 0


def test_old_install_is_removed_and_the_new_one_reported(hub: FakeHub, output: Path) -> None:
    """Stopped after the swap, before the old install went."""
    install_from(hub, output)
    (output / "mark").write_bytes(b"")
    swap = transaction.swap

    def stop(first: Path, second: Path) -> None:
        swap(first, second)
        if second == output:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transaction, "swap", stop)
        with pytest.raises(KeyboardInterrupt):
            install_from(hub, output, overwrite=True)
    assert (partial(output) / "mark").exists()
    hub.clear()
    install_from(hub, output, overwrite=True)
    assert not hub.asked
    assert_clean(output)
    assert not (output / "mark").exists()


@pytest.mark.parametrize("name", REMOVALS)
def test_stopped_before_it_could_be_reported(hub: FakeHub, output: Path, name: str) -> None:
    """Nothing is cleared up before the report is made, so the next one can still make it."""
    stop_at(hub, output, name)
    stop_at(hub, output, name)
    install_from(hub, output)
    assert not hub.asked
    assert_clean(output)


def test_other_spelling_of_the_path(hub: FakeHub, output: Path, tmp_path: Path) -> None:
    stop_at(hub, output, "forget")
    (tmp_path / "link").symlink_to(output.parent)
    assert install_from(hub, tmp_path / "link" / output.name).path == tmp_path / "link" / output.name
    assert_clean(output)


@pytest.mark.parametrize("name", REMOVALS)
def test_what_was_not_asked_for_is_not_reported(hub: FakeHub, output: Path, name: str) -> None:
    """Another revision, or another pinned index: what was left is cleared up, and the output is in the way."""
    for options in ({"revision": hub.commit}, {"index_sha256": "0" * 64}):
        stop_at(hub, output, name)
        with pytest.raises(InstallError, match="is already there"):
            install_from(hub, output, **options)
        assert not hub.asked
        assert_clean(output)
        shutil.rmtree(output)
    stop_at(hub, output, name)
    assert install_from(hub, output, revision=hub.commit, overwrite=True).downloaded_bytes > 0
    assert_clean(output)


@pytest.mark.parametrize("damage", [b"", b"{}"])
def test_state_that_says_nothing(hub: FakeHub, output: Path, damage: bytes) -> None:
    stop_at(hub, output, "_remove_metadata")
    saved_path(output).write_bytes(damage)
    with pytest.raises(InstallError, match="is already there"):
        install_from(hub, output)
    assert_clean(output)


@pytest.mark.parametrize("name", ["manifest.json", "packed_experts/layout.json", "model_weights.bin"])
def test_install_that_was_damaged_since_is_not_reported(hub: FakeHub, output: Path, name: str) -> None:
    stop_at(hub, output, "_remove_metadata")
    (output / name).write_bytes(b"{}")
    with pytest.raises(InstallError, match="is already there"):
        install_from(hub, output)
    assert beside(output) == [output.name]


@pytest.mark.parametrize("name", ["packed_experts/layout.json", "model_weights.bin"])
def test_install_that_was_damaged_since_is_overwritten(hub: FakeHub, output: Path, name: str) -> None:
    stop_at(hub, output, "_remove_metadata")
    (output / name).write_bytes(b"{}")
    assert install_from(hub, output, overwrite=True).downloaded_bytes > 0
    assert_clean(output)


def publish_another(hub: FakeHub) -> None:
    """Change the weights, and with them the commit."""
    path = hub.folder / shards_of(hub.folder)[0]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    hub.stated.clear()
    hub.commit = commit_of(hub.folder)


def test_old_install_is_never_taken_for_the_new_one(hub: FakeHub, output: Path) -> None:
    """All of the new one was downloaded, and then its files were removed by hand."""
    install_from(hub, output)
    publish_another(hub)

    def progress(event: InstallProgress) -> None:
        if event.stage == "hashing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install_from(hub, output, overwrite=True, progress=progress)
    shutil.rmtree(partial(output))
    assert install_from(hub, output, overwrite=True).downloaded_bytes > 0
    assert_clean(output)


def test_half_a_download_is_never_taken_for_an_install(hub: FakeHub, output: Path) -> None:
    """Of the very commit that is installed, its files removed by hand."""
    install_from(hub, output)
    pause(hub, output, overwrite=True)
    shutil.rmtree(partial(output))
    with pytest.raises(InstallError, match="is already there"):
        install_from(hub, output)
    assert_clean(output)
