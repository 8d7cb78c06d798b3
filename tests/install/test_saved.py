"""The saved state of a download, and what lies beside it: another program's format too, made here from its text alone."""

import json
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from mference_core.errors import InstallError
from mference_core.install.planning import RemotePlan
from mference_core.install.ranges import RangeRequest
from mference_core.install.saved import DoneRange, Saved, decode_saved, encode_saved
from mference_core.testing.fake_hub import FakeHub
from mference_core.testing.toy_installs import beside, install_from, install_toy, open_whole, planned_toy

from .pausing import DONE, partial, pause, recorded, saved_path


def stream(*values: str | int) -> bytes:
    """Return length-prefixed strings and 64-bit integers, as digests are made of."""
    pieces = [v.to_bytes(8, "little") if isinstance(v, int) else struct.pack("<Q", len(v)) + v.encode() for v in values]
    return b"".join(pieces)


def digest_of(request: RangeRequest, read: Callable[[str, int, int], bytes]) -> str:
    copies = sorted(request.copies, key=lambda c: (c.dest_path, c.dest_offset, c.offset))
    digest = sha256(stream("Mference.RemoteRangeDestination.v1", request.ident, len(copies)))
    for copy in copies:
        digest.update(stream(copy.dest_path, copy.dest_offset, copy.offset - request.offset, copy.size))
        digest.update(read(copy.dest_path, copy.dest_offset, copy.size))
    return digest.hexdigest()


def fingerprint_of(plan: RemotePlan) -> str:
    requests = plan.requests
    parts = [stream("Mference.RemoteInstallPlan.v1", 1, 0, requests.chunk_bytes, "identity", "")]
    parts.append(stream(sha256(plan.outputs.index_image).hexdigest(), len(requests.outputs)))
    parts += [stream(path, size) for path, size in sorted(requests.outputs.items())]
    parts.append(stream(len(requests.ranges)))
    for request in requests.ranges:
        parts.append(stream(request.ident, request.shard, request.offset, request.size, len(request.copies)))
        copies = sorted(request.copies, key=lambda c: (c.dest_path, c.dest_offset, c.offset))
        parts += [stream(c.dest_path, c.dest_offset, c.offset - request.offset, c.size) for c in copies]
    return sha256(b"".join(parts)).hexdigest()


def reader(folder: Path) -> Callable[[str, int, int], bytes]:
    return lambda path, offset, size: (folder / path).read_bytes()[offset : offset + size]


GOLDEN = (
    '{"completedRanges":[{"destinationBytes":8,"destinationDigest":"' + "d" * 64 + '","id":"range-00000000",'
    '"sourceBytes":8}],"planFingerprint":"' + "f" * 64 + '","repoID":"o/n","requestedRevision":"main",'
    '"resolvedCommit":"' + "c" * 40 + '","schema":1,"sourceIndexSHA256":"' + "a" * 64 + '","totalSourceBytes":9}'
).encode()


def golden() -> Saved:
    done = DoneRange(ident="range-00000000", source_bytes=8, destination_bytes=8, digest="d" * 64)
    return Saved(
        repo="o/n",
        revision="main",
        commit="c" * 40,
        index_sha256="a" * 64,
        fingerprint="f" * 64,
        total_source_bytes=9,
        ranges={done.ident: done},
    )


def test_saved_state_golden() -> None:
    """Compact JSON, sorted keys: written and read, with slashes escaped or not."""
    assert encode_saved(golden()) == GOLDEN
    for data in (GOLDEN, GOLDEN.replace(b"o/n", b"o\\/n"), json.dumps(json.loads(GOLDEN), indent=2).encode()):
        assert decode_saved(data, Path("x")) == golden()


BROKEN = {
    "schema": ('"schema":1', '"schema":2', "schema is 2; expected 1"),
    "commit": ("c" * 40, "c" * 39, "resolvedCommit is 'c+'; expected 40 hexadecimal digits"),
    "digest": ("d" * 64, "x" * 64, "range-00000000 destinationDigest"),
    "no bytes": ('"sourceBytes":8', '"sourceBytes":0', "range-00000000 bytes is 0"),
    "more than all": ('"totalSourceBytes":9', '"totalSourceBytes":7', "bytes done is 8 of 7"),
    "empty name": ('"repoID":"o/n"', '"repoID":""', "repoID is empty"),
    "no key": ('"schema":1,', "", "schema is missing"),
    "not JSON": ('{"completed', "{", "malformed"),
}


@pytest.mark.parametrize(("old", "new", "text"), BROKEN.values(), ids=BROKEN)
def test_broken_saved_state_is_refused_with_a_remedy(old: str, new: str, text: str) -> None:
    with pytest.raises(InstallError, match=f"{text}.*mference discard"):
        decode_saved(GOLDEN.replace(old.encode(), new.encode()), Path("x"))


def test_range_twice_is_refused() -> None:
    values = json.loads(GOLDEN)
    values["completedRanges"] *= 2
    values["totalSourceBytes"] = 99
    with pytest.raises(InstallError, match="range-00000000 is there twice"):
        decode_saved(json.dumps(values).encode(), Path("x"))


def test_paused_install_is_what_the_format_says(hub: FakeHub, output: Path) -> None:
    """Another program can go on from it: every file at full size, digests and fingerprint as the format defines them."""
    pause(hub, output)
    plan, values = planned_toy(hub), recorded(output)
    assert len(values["completedRanges"]) >= DONE - 1
    for done, request in zip(values["completedRanges"], plan.requests.ranges, strict=False):
        size = sum(copy.size for copy in request.copies)
        assert done == {
            "id": request.ident,
            "sourceBytes": request.size,
            "destinationBytes": size,
            "destinationDigest": digest_of(request, reader(partial(output))),
        }
    del values["completedRanges"]
    assert values == {
        "schema": 1,
        "repoID": "owner/toy",
        "requestedRevision": "main",
        "resolvedCommit": hub.commit,
        "sourceIndexSHA256": sha256((hub.folder / "model.safetensors.index.json").read_bytes()).hexdigest(),
        "planFingerprint": fingerprint_of(plan),
        "totalSourceBytes": plan.requests.source_bytes,
    }
    names = {item.name for item in partial(output).iterdir()}
    assert names == {"model_weights.bin", "packed_experts", ".remote-metadata"}
    for path, size in plan.requests.outputs.items():
        assert (partial(output) / path).stat().st_size == size
    image = plan.outputs.index_image
    assert (partial(output) / "model_weights.bin").read_bytes()[: len(image)] == image
    assert not saved_path(output).read_bytes().endswith(b"\n")


def test_install_paused_by_another_program_goes_on(hub: FakeHub, output: Path, tmp_path: Path) -> None:
    """Its state is made here from the format: it kept nothing between copies, and left files of its own."""
    install_toy(hub.folder, tmp_path / "whole.gturbo")
    plan, folder = planned_toy(hub), partial(output)
    hub.clear()
    (folder / "packed_experts").mkdir(parents=True)
    (folder / ".remote-metadata").mkdir()
    (folder / ".remote-metadata" / "header").write_bytes(b"theirs")
    (folder / ".range.tmp").write_bytes(b"theirs")
    for path, size in plan.requests.outputs.items():
        with (folder / path).open("wb") as file:
            if path == "model_weights.bin":
                file.write(plan.outputs.index_image)
            file.truncate(size)
    read, done = reader(tmp_path / "whole.gturbo"), list[dict[str, Any]]()
    for request in plan.requests.ranges[:DONE]:
        for copy in request.copies:
            with (folder / copy.dest_path).open("r+b") as file:
                file.seek(copy.dest_offset)
                file.write(read(copy.dest_path, copy.dest_offset, copy.size))
        sizes = {"sourceBytes": request.size, "destinationBytes": sum(copy.size for copy in request.copies)}
        done.append({"id": request.ident, "destinationDigest": digest_of(request, read), **sizes})
    values = {
        "schema": 1,
        "repoID": "owner/toy",
        "requestedRevision": "main",
        "resolvedCommit": hub.commit,
        "sourceIndexSHA256": sha256((hub.folder / "model.safetensors.index.json").read_bytes()).hexdigest(),
        "planFingerprint": fingerprint_of(plan),
        "totalSourceBytes": plan.requests.source_bytes,
        "completedRanges": done,
    }
    saved_path(output).write_text(json.dumps(values, separators=(",", ":"), sort_keys=True))
    report = install_from(hub, output)
    assert report.reused_bytes == sum(request.size for request in plan.requests.ranges[:DONE])
    for request in plan.requests.ranges[:DONE]:
        for copy in request.copies:
            assert not any(hub.coverage(copy.shard)[copy.offset : copy.offset + copy.size])
    open_whole(output)
    assert (output / "manifest.json").read_bytes() == (tmp_path / "whole.gturbo/manifest.json").read_bytes()
    assert beside(output) == ["toy.gturbo"]
    assert not [item.name for item in output.iterdir() if item.name.startswith(".")]
