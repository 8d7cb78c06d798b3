"""Verifying an install: all damage, in lines; what is written, and that nothing is where nothing was asked for."""

import os
import shutil
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from mference_core.checkpoint import open_checkpoint, peek
from mference_core.errors import InstallError, InstallLocked, ManifestError, MferenceError, PartialInstall
from mference_core.gturbo.receipt import check_receipt
from mference_core.install import hashing, verify
from mference_core.install.report import VERIFYING, InstallProgress
from mference_core.install.transaction import locked, undisturbed
from mference_core.install.verify import verify_install
from mference_core.jsondata import encode_object, parse_object
from mference_core.manifest import read_manifest
from mference_core.testing.toy_installs import install_toy, open_whole
from mference_core.testing.toys import toy_contract, toy_plan

from .damaging import CONFIG, DIGESTS, LAYER_1, LAYER_2, LAYOUT, STRIDE, WEIGHTS, flip, tree

RECEIPT = "verified-install.json"


@pytest.fixture
def install(repo: Path, output: Path) -> Path:
    install_toy(repo, output)
    return output


def lines(path: Path) -> list[str]:
    return [str(damage).replace(f"{path}/", "") for damage in verify_install(path).damages]


def test_good_install_and_nothing_written(install: Path) -> None:
    """Also where nothing may be written; progress ends with all bytes."""
    before, seen = tree(install.parent), list[InstallProgress]()
    report = verify_install(install, progress=seen.append)
    files = read_manifest(install / "manifest.json").files
    assert (report.damages, report.files, report.receipt, report.digests) == ((), len(files), False, False)
    assert report.size_bytes == sum(entry.size for entry in files.values())
    assert {event.stage for event in seen} == {VERIFYING}
    assert seen[-1].done_bytes == seen[-1].total_bytes == report.size_bytes
    assert tree(install.parent) == before


def test_every_kind_of_damage_is_a_line_of_its_own(install: Path) -> None:
    flip(install / WEIGHTS, 20_000)
    (install / LAYER_1).unlink()
    with (install / LAYER_2).open("ab") as file:
        file.write(b"x")
    (install / CONFIG).unlink()
    (install / CONFIG).mkdir()
    (install / "stray").touch()
    found = lines(install)
    assert len(found) == 5
    for number, text in enumerate(
        [
            "packed_experts/layer_01.bin is missing; expected the file the manifest lists; repair it with 'mference rep",
            f"packed_experts/layer_02.bin size is {4 * STRIDE + 1} bytes; expected {4 * STRIDE}; repair",
            "tokenizer/config.json is not a regular file",
            "model_weights.bin sha256 is ",
            "stray is not in the manifest; expected listed files only; remove it",
        ]
    ):
        assert found[number].startswith(text), found[number]
    assert not [line for line in found if "\n" in line]


def test_digests_tell_which_expert(install: Path) -> None:
    verify_install(install, expert_digests=True)
    for expert in (0, 3):
        flip(install / LAYER_2, expert * STRIDE + 5)
    flip(install / WEIGHTS, 20_000)
    found = lines(install)
    assert [line.split(" sha256 is")[0] for line in found] == [
        f"{WEIGHTS} block 0 (bytes 0 to 41638)",
        f"{LAYER_2} expert 0 (bytes 0 to 6912)",
        f"{LAYER_2} expert 3 (bytes 49152 to 56064)",
    ]


def test_padding_counts(install: Path) -> None:
    """Bytes after an expert are part of no expert's digest, but of the file's."""
    verify_install(install, expert_digests=True)
    flip(install / LAYER_1, STRIDE - 1)
    assert [line.split(" is ")[0] for line in lines(install)] == [f"{LAYER_1} sha256"]


def test_digests_are_listed_and_the_rest_is_as_before(install: Path) -> None:
    before = tree(install)
    report = verify_install(install, expert_digests=True)
    after = tree(install)
    assert report.digests
    assert after.keys() - before.keys() == {DIGESTS}
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"}
    old, new = (parse_object(files["manifest.json"], "") for files in (before, after))
    entry = new["files"].pop(DIGESTS)
    assert old == new
    assert entry["size"] == len(after[DIGESTS])
    check_receipt(install, read_manifest(install / "manifest.json"))
    open_whole(install)
    again = verify_install(install, expert_digests=True)
    assert (again.digests, tree(install)) == (False, after)


def test_no_receipt_appears_with_digests(install: Path) -> None:
    """One that did not hold before is not made to hold."""
    (install / RECEIPT).unlink()
    assert verify_install(install, expert_digests=True).receipt is False
    assert not (install / RECEIPT).exists()


def test_receipt_is_written_where_it_was_moved_to(install: Path) -> None:
    moved = install.with_name("moved.gturbo")
    install.rename(moved)
    with pytest.raises(MferenceError, match="receipt modelDirectoryPath"):
        open_checkpoint(peek(moved), toy_contract(), toy_plan, "trusted-receipt")
    assert verify_install(moved, write_receipt=True).receipt
    assert open_checkpoint(peek(moved), toy_contract(), toy_plan, "trusted-receipt").experts
    assert parse_object((moved / RECEIPT).read_bytes(), "")["toolVersion"] == "MferenceRepack verify-install"


def test_receipt_keeps_the_source_that_was_recorded(install: Path) -> None:
    path = install / RECEIPT
    named = {"sourceRepoID": "owner/toy", "sourceRevision": "c" * 40}
    path.write_bytes(encode_object(parse_object(path.read_bytes(), "") | named))
    verify_install(install, write_receipt=True)
    assert parse_object(path.read_bytes(), "").items() >= named.items()
    other = parse_object(path.read_bytes(), "") | {"manifestSha256": "0" * 64}
    path.write_bytes(encode_object(other))
    verify_install(install, write_receipt=True)
    assert "sourceRepoID" not in parse_object(path.read_bytes(), "")


def test_receipt_through_a_link_is_for_that_name(install: Path) -> None:
    link = install.with_name("link.gturbo")
    link.symlink_to(install)
    verify_install(link, write_receipt=True)
    assert open_checkpoint(peek(link), toy_contract(), toy_plan, "trusted-receipt").experts
    assert verify_install(link).damages == ()


def test_receipt_of_a_damaged_install(install: Path) -> None:
    """It is told to be stale, and removed where a receipt was asked for: a false one must not stay."""
    flip(install / LAYER_1, 1)
    assert verify_install(install).stale_receipt
    assert (install / RECEIPT).exists()
    report = verify_install(install, write_receipt=True)
    assert (report.receipt, report.stale_receipt, (install / RECEIPT).exists()) == (False, False, False)


def test_no_digests_of_a_damaged_install(install: Path) -> None:
    for name in (LAYER_1, LAYOUT):
        flip(install / name, 1)
        before = tree(install)
        assert not verify_install(install, expert_digests=True).digests
        assert tree(install) == before


def test_installs_that_are_none(install: Path, repo: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    file = tmp_path / "file"
    file.touch()
    (install / "manifest.json").unlink()
    cases: dict[Path, tuple[type[MferenceError], str]] = {
        tmp_path / "missing": (ManifestError, "is missing; expected a model directory; see 'mference install'"),
        empty: (ManifestError, "is empty"),
        file: (ManifestError, "is a file"),
        repo: (ManifestError, "is no install; expected one, with a manifest; install it with"),
        install: (PartialInstall, "is without manifest.json"),
    }
    for path, (kind, text) in cases.items():
        with pytest.raises(kind) as caught:
            verify_install(path)
        assert text in str(caught.value)
    assert not (tmp_path / "missing").exists()


def test_badly_written_install(install: Path) -> None:
    """Digests that are right do not make a layout right."""
    layout = parse_object((install / LAYOUT).read_bytes(), "")
    layout["layers"][1]["experts"][0]["offset"] = 1
    (install / LAYOUT).write_bytes(encode_object(layout))
    manifest = parse_object((install / "manifest.json").read_bytes(), "")
    data = (install / LAYOUT).read_bytes()
    manifest["files"][LAYOUT] = {"size": len(data), "sha256": hashing.sha256(data).hexdigest()}
    (install / "manifest.json").write_bytes(encode_object(manifest))
    with pytest.raises(ManifestError, match="expert offset is 1"):
        verify_install(install)


def test_one_writer(install: Path) -> None:
    """A verification that only reads minds writers, not other readers."""
    with locked(install):
        for options in ({}, {"write_receipt": True}):
            with pytest.raises(InstallLocked, match="by another process; wait for it"):
                verify_install(install, **options)
    with undisturbed(install):
        assert verify_install(install).damages == ()
        with pytest.raises(InstallLocked):
            verify_install(install, expert_digests=True)
    install.with_name(f"{install.name}.install.lock").unlink()
    assert verify_install(install).damages == ()
    assert not install.with_name(f"{install.name}.install.lock").exists()


def test_read_only(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert verify_install(install).damages == ()
    for options in ({"write_receipt": True}, {"expert_digests": True}):
        with pytest.raises(InstallError, match="is read-only; expected a directory to write a receipt or digests in"):
            verify_install(install, **options)


def test_interrupt_leaves_everything_and_ends_its_threads(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, began = tree(install), Event()
    real = hashing._hash

    def endless(*arguments: Any) -> None:
        began.set()
        assert arguments[4].wait(10), "the threads were not told to stop"
        real(*arguments)

    def interrupt(event: InstallProgress) -> None:
        if began.wait(5) and event.file:
            raise KeyboardInterrupt

    monkeypatch.setattr(hashing, "_hash", endless)
    with pytest.raises(KeyboardInterrupt):
        verify_install(install, write_receipt=True, expert_digests=True, progress=interrupt)
    assert tree(install) == before
    assert (install / RECEIPT).exists()


def test_kill_while_writing_digests(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every step the install opens, and the same call finishes the work."""
    for steps in range(20):
        copy = install.with_name(f"copy{steps}.gturbo")
        shutil.copytree(install, copy)
        left = [steps]

        class Killed(BaseException):
            pass

        def step(name: str, left: list[int] = left, killed: type[BaseException] = Killed) -> Any:
            real = getattr(verify, name)

            def counted(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise killed
                return real(*arguments, **options)

            return counted

        with monkeypatch.context() as patch:
            for name in ("write_small", "sync_directory", "put_file", "remove_receipt"):
                patch.setattr(verify, name, step(name))
            try:
                verify_install(copy, expert_digests=True)
                break
            except Killed:
                pass
        open_whole(copy)
        verify_install(copy, expert_digests=True)
        assert DIGESTS in read_manifest(copy / "manifest.json").files
        open_whole(copy)
    assert 5 < steps < 19


def test_parts_across_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of parts do not depend on how the file is cut while it is read."""
    data = os.urandom(1000)
    (tmp_path / "f").write_bytes(data)
    parts = [((700, 250), (950, 10)), ((0, 1),), ((1, 99), (150, 300)), ((960, 40),)]
    wanted = tuple(hashing.sha256(b"".join(data[o : o + n] for o, n in spans)).hexdigest() for spans in parts)
    for tile in (1, 7, 64, 333, 4096):
        monkeypatch.setattr(hashing, "TILE_BYTES", tile)
        found = hashing.hash_files(tmp_path, {"f": 1000}, lambda *_: None, {"f": parts})["f"]
        assert (found.parts, found.sha256) == (wanted, hashing.sha256(data).hexdigest())
