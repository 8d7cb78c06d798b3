"""One output, one writer: what an install refuses, and what is left when it is stopped."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mference_core.errors import InstallError, InstallLocked, ManifestError, MferenceError
from mference_core.install import InstallProgress, discard
from mference_core.install.transaction import check_disk, locked, swap, target_of
from mference_core.testing.toy_installs import beside, install_toy, open_whole
from mference_core.testing.toys import (
    mlx_tensors,
    toy_arch,
    write_safetensors,
    write_toy,
)

ARCH = toy_arch()


# --- what it refuses


def refused(kind: type[MferenceError], text: str, source: Path, output: Path, **options: Any) -> None:
    """Installing raises one line of `kind` that holds `text`, and changes nothing beside the output."""
    before = beside(output)
    with pytest.raises(kind) as caught:
        install_toy(source, output, **options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert beside(output) == before


def test_float_source_is_refused_with_a_remedy(output: Path, tmp_path: Path) -> None:
    source = write_toy(tmp_path / "float", ARCH, quantised=False)
    refused(InstallError, "is in float; expected quantised weights; quantise it first", source, output)


def test_float_experts_are_refused(source: Path, output: Path) -> None:
    specs = {name: spec for name, spec in mlx_tensors(ARCH).items() if "layers.2.experts" not in name}
    for role in ("gate", "up", "down"):
        specs[f"trunk.layers.2.experts.{role}.weight"] = ("BF16", (4, 64, 64))
    write_safetensors(source / "model.safetensors", specs)
    refused(InstallError, "layer 2 gate experts is in float; expected quantised experts", source, output)


def test_install_as_source_is_refused(source: Path, output: Path, tmp_path: Path) -> None:
    install_toy(source, tmp_path / "first.gturbo")
    refused(InstallError, "is an install already", tmp_path / "first.gturbo", output)


def test_broken_source_is_refused(source: Path, output: Path) -> None:
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-6000])
    refused(ManifestError, "expected a span inside the file's", source, output)
    assert not list(output.parent.iterdir())


@pytest.mark.parametrize("inside", ["source/toy.gturbo", "source/deep/toy.gturbo", "source", ""])
def test_output_and_source_must_lie_apart(source: Path, tmp_path: Path, inside: str) -> None:
    before = sorted(source.rglob("*"))
    with pytest.raises(InstallError, match="is not apart from the source"):
        install_toy(source, tmp_path / inside)
    assert sorted(source.rglob("*")) == before


def test_output_inside_the_source_by_a_link_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(InstallError, match="is not apart from the source"):
        install_toy(source, tmp_path / "link" / "toy.gturbo")


def test_existing_output_is_refused_without_overwrite(source: Path, output: Path) -> None:
    install_toy(source, output)
    refused(InstallError, "is already there; expected a new path; or give --overwrite", source, output)
    open_whole(output)


def test_name_of_a_staging_directory_is_refused(source: Path, output: Path) -> None:
    refused(InstallError, "expected a directory name not ending in .partial", source, output.with_suffix(".partial"))


UNSAFE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "output a file": (lambda out: out.write_bytes(b""), "toy.gturbo is of another kind; expected a directory"),
    "output a link": (lambda out: out.symlink_to(out.parent), "toy.gturbo is a symbolic link; expected a directory"),
    "partial a file": (lambda out: Path(f"{out}.partial").write_bytes(b""), "toy.gturbo.partial is of another kind"),
    "partial a link": (lambda out: Path(f"{out}.partial").symlink_to("/"), "toy.gturbo.partial is a symbolic link"),
    "checkpoint a directory": (lambda out: Path(f"{out}.resume.json").mkdir(), "resume.json is of another kind"),
    "lock a directory": (lambda out: Path(f"{out}.install.lock").mkdir(), "install.lock is of another kind"),
    "lock a link": (lambda out: Path(f"{out}.install.lock").symlink_to("x"), "install.lock is a symbolic link"),
    "saved download": (lambda out: Path(f"{out}.resume.json").write_bytes(b""), "toy.gturbo is half downloaded"),
    "partial of someone else": (
        lambda out: Path(f"{out}.partial/thesis").mkdir(parents=True),
        "thesis is not from an install; move it away",
    ),
}


@pytest.mark.parametrize(("prepare", "text"), UNSAFE.values(), ids=UNSAFE)
@pytest.mark.parametrize("overwrite", [False, True])
def test_unsafe_entries_are_refused(
    source: Path, output: Path, prepare: Callable[[Path], Any], text: str, *, overwrite: bool
) -> None:
    prepare(output)
    refused(InstallError, text, source, output, overwrite=overwrite)


def test_parent_that_is_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InstallError, match=r"writing .* is refused \((File exists|Not a directory)\)"):
        install_toy(source, tmp_path / "file" / "toy.gturbo")


def test_read_only_parent_is_refused_in_one_line(source: Path) -> None:
    root = Path(tempfile.mkdtemp())
    try:
        copy = shutil.copytree(source, root / "source")
        parent = root / "locked"
        parent.mkdir()
        root.chmod(0o755)
        parent.chmod(0o555)
        as_root = os.geteuid() == 0
        if as_root:
            os.seteuid(65534)  # the superuser may write anywhere
        try:
            with pytest.raises(
                InstallError, match=r"locked/toy\.gturbo\.install\.lock is refused \(Permission denied\)"
            ):
                install_toy(copy, parent / "toy.gturbo")
        finally:
            if as_root:
                os.seteuid(0)
        assert not list(parent.iterdir())
    finally:
        shutil.rmtree(root)


def test_second_installer_is_refused_while_one_runs(source: Path, output: Path) -> None:
    with locked(output):
        refused(InstallLocked, "is being installed by another process; wait for it", source, output)
        with pytest.raises(InstallLocked):
            discard(output)
    install_toy(source, output)


# --- disk space


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr("mference_core.install.transaction.shutil.disk_usage", lambda _: usage)


def test_too_little_space_is_refused_with_both_numbers(
    source: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needed: the output itself and one chunk of 64 MiB; exactly that is enough."""
    events = list[InstallProgress]()
    install_toy(source, tmp_path / "other.gturbo", progress=events.append)
    needed = events[-1].total_bytes + (64 << 20)
    disk(monkeypatch, needed - 1)
    refused(InstallError, f"is {needed - 1} bytes; expected at least {needed}; free some space", source, output)
    disk(monkeypatch, needed)
    install_toy(source, output)


def test_large_outputs_keep_a_gibibyte_free(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib, chunk = 1 << 30, 64 << 20
    target = target_of(output)
    for size, durable, reserve, needed in (
        (gib, 0, None, gib + chunk),
        (gib + 1, 0, None, 2 * gib + 1 + chunk),
        (5 * gib, 4 * gib, None, 2 * gib + chunk),
        (5 * gib, 0, 2 * gib, 7 * gib + chunk),
    ):
        disk(monkeypatch, needed)
        check_disk(target, size, durable, reserve)
        disk(monkeypatch, needed - 1)
        with pytest.raises(InstallError, match=f"expected at least {needed}"):
            check_disk(target, size, durable, reserve)


# --- stopped half-way


def test_disk_that_fills_leaves_nothing(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.write, []

    def write(handle: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data)

    monkeypatch.setattr("mference_core.install.local.os.write", write)
    refused(InstallError, "is stopped by a full disk; free some space and run it again", source, output)
    assert len(calls) == 3
    assert beside(output) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("a bug"), SystemExit])
def test_any_interruption_leaves_nothing(source: Path, output: Path, error: Any) -> None:
    def progress(event: InstallProgress) -> None:
        if event.file.endswith("layer_02.bin"):
            assert Path(f"{output}.partial/packed_experts/layer_01.bin").exists()
            raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        install_toy(source, output, progress=progress)
    assert beside(output) == []
    install_toy(source, output)
    open_whole(output)


def test_source_that_shrinks_meanwhile_is_refused(source: Path, output: Path) -> None:
    def progress(event: InstallProgress) -> None:
        if event.file == "model_weights.bin":
            os.truncate(source / "model.safetensors", 20_000)

    refused(InstallError, "cut short at", source, output, progress=progress)


# --- overwrite and discard


def test_overwrite_replaces_the_whole_install(source: Path, output: Path, tmp_path: Path) -> None:
    install_toy(source, output)
    old = (output / "model_weights.bin").read_bytes()
    (output / "leftover").write_bytes(b"")
    install_toy(write_toy(tmp_path / "other", ARCH, seed=1), output, overwrite=True)
    assert beside(output) == ["toy.gturbo"]
    assert not (output / "leftover").exists()
    install_toy(tmp_path / "other", tmp_path / "alone.gturbo")
    assert (output / "model_weights.bin").read_bytes() == (tmp_path / "alone.gturbo/model_weights.bin").read_bytes()
    assert (output / "model_weights.bin").read_bytes() != old
    open_whole(output)


def test_failed_overwrite_keeps_the_old_install(source: Path, output: Path) -> None:
    install_toy(source, output)

    def progress(event: InstallProgress) -> None:
        if event.file == "packed_experts/layout.json":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install_toy(source, output, overwrite=True, progress=progress)
    assert beside(output) == ["toy.gturbo"]
    open_whole(output)


def test_overwrite_of_what_is_no_install_is_refused(source: Path, output: Path) -> None:
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    refused(InstallError, "is not an install; expected one, to be overwritten", source, output, overwrite=True)
    assert (output / "thesis.txt").read_text() == "years of work"


def test_overwrite_of_an_empty_directory(source: Path, output: Path) -> None:
    output.mkdir()
    install_toy(source, output, overwrite=True)
    open_whole(output)


def test_file_system_without_swap_is_noticed_before_copying(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_toy(source, output)

    def no_swap(*_: Path) -> None:
        raise InstallError(what="swapping", got="impossible here", remedy="remove the old install first")

    monkeypatch.setattr("mference_core.install.transaction.swap", no_swap)
    events = list[InstallProgress]()
    refused(InstallError, "impossible here", source, output, overwrite=True, progress=events.append)
    assert not events
    open_whole(output)


def test_swap_fails_in_one_line_when_a_side_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(InstallError, match=r"swapping b is impossible here \(No such file or directory\)"):
        swap(tmp_path / "a", tmp_path / "b")


def test_stale_staging_directory_is_cleared_by_the_next_install(source: Path, output: Path) -> None:
    partial = Path(f"{output}.partial")
    (partial / "packed_experts").mkdir(parents=True)
    (partial / "model_weights.bin").write_bytes(b"half")
    install_toy(source, output)
    assert beside(output) == ["toy.gturbo"]
    open_whole(output)


def test_discard_removes_staging_and_saved_download(output: Path) -> None:
    partial = Path(f"{output}.partial")
    (partial / "tokenizer").mkdir(parents=True)
    Path(f"{output}.resume.json").write_text("{}")
    discard(output)
    assert beside(output) == []
    with pytest.raises(InstallError, match="is without a partial install; expected something to discard"):
        discard(output)


def test_discard_leaves_foreign_directories_alone(output: Path) -> None:
    Path(f"{output}.partial/thesis").mkdir(parents=True)
    with pytest.raises(InstallError, match="thesis is not from an install"):
        discard(output)
    assert Path(f"{output}.partial/thesis").is_dir()


def test_discard_does_not_make_directories(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="without a partial install"):
        discard(tmp_path / "none" / "toy.gturbo")
    assert not list(tmp_path.iterdir())
