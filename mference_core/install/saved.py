"""The saved state of a download: which ranges are durable, written down after they are (gturbo-format 18)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from mference_core.errors import InstallError, ManifestError, MferenceError
from mference_core.install.finish import write_small
from mference_core.install.transaction import Target, pending_path, sync_directory
from mference_core.jsondata import is_hex, member, parse_object, read_capped, size_member, typed

SCHEMA = 1
SAVED_CAP_BYTES = 8 << 20
_REMEDY = "remove it with 'mference discard' and start again"


@frozen(kw_only=True)
class DoneRange:
    """A range whose bytes are durable in the output files; sizes in bytes."""

    ident: str
    source_bytes: int
    destination_bytes: int
    digest: str


@frozen(kw_only=True)
class Saved:
    """A paused download: its source, its plan, and the ranges that are done, by identifier."""

    repo: str
    revision: str
    commit: str
    index_sha256: str
    fingerprint: str
    total_source_bytes: int
    ranges: Mapping[str, DoneRange]

    @property
    def done_source_bytes(self) -> int:
        """Source bytes of the ranges that are done."""
        return sum(done.source_bytes for done in self.ranges.values())

    @property
    def done_destination_bytes(self) -> int:
        """Bytes of the output files that the ranges which are done have filled."""
        return sum(done.destination_bytes for done in self.ranges.values())


def encode_saved(saved: Saved) -> bytes:
    """Return the file: compact JSON with sorted keys, ranges in order."""
    ranges = [
        {
            "destinationBytes": done.destination_bytes,
            "destinationDigest": done.digest,
            "id": done.ident,
            "sourceBytes": done.source_bytes,
        }
        for _, done in sorted(saved.ranges.items())
    ]
    values = {
        "completedRanges": ranges,
        "planFingerprint": saved.fingerprint,
        "repoID": saved.repo,
        "requestedRevision": saved.revision,
        "resolvedCommit": saved.commit,
        "schema": SCHEMA,
        "sourceIndexSHA256": saved.index_sha256,
        "totalSourceBytes": saved.total_source_bytes,
    }
    return json.dumps(values, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()


def decode_saved(data: bytes, path: Path) -> Saved:
    """Return the saved state in `data`, or raise `InstallError` naming `path` and what is wrong."""
    try:
        return _decode(parse_object(data, str(path)), str(path))
    except ManifestError as error:
        raise InstallError(what=str(error), remedy=_REMEDY) from error


def _decode(values: dict[str, Any], where: str) -> Saved:
    if (schema := member(values, "schema", int, where)) != SCHEMA:
        raise ManifestError(what=f"{where} schema", got=str(schema), expected=str(SCHEMA))
    total = size_member(values, "totalSourceBytes", where)
    ranges = dict[str, DoneRange]()
    for item in member(values, "completedRanges", list, where):
        done = _decode_range(typed(item, dict, f"{where} completedRanges"), f"{where} range")
        if done.ident in ranges:
            raise ManifestError(what=f"{where} {done.ident}", got="there twice", expected="once")
        ranges[done.ident] = done
    saved = Saved(
        repo=_word(values, "repoID", where),
        revision=_word(values, "requestedRevision", where),
        commit=_hex(values, "resolvedCommit", 40, where),
        index_sha256=_hex(values, "sourceIndexSHA256", 64, where),
        fingerprint=_hex(values, "planFingerprint", 64, where),
        total_source_bytes=total,
        ranges=ranges,
    )
    if not total or saved.done_source_bytes > total:
        got = f"{saved.done_source_bytes} of {total}"
        raise ManifestError(what=f"{where} bytes done", got=got, expected="at most a total above 0")
    return saved


def _decode_range(values: dict[str, Any], where: str) -> DoneRange:
    ident = _word(values, "id", where)
    sizes = [size_member(values, key, f"{where} {ident}") for key in ("sourceBytes", "destinationBytes")]
    if 0 in sizes:
        raise ManifestError(what=f"{where} {ident} bytes", got="0", expected="above 0")
    digest = _hex(values, "destinationDigest", 64, f"{where} {ident}")
    return DoneRange(ident=ident, source_bytes=sizes[0], destination_bytes=sizes[1], digest=digest)


def _word(values: dict[str, Any], key: str, where: str) -> str:
    text = str(member(values, key, str, where))
    if not text:
        raise ManifestError(what=f"{where} {key}", got="empty", expected="a name")
    return text


def _hex(values: dict[str, Any], key: str, digits: int, where: str) -> str:
    text = str(member(values, key, str, where)).lower()
    if not is_hex(text, digits):
        raise ManifestError(what=f"{where} {key}", got=repr(text[:80]), expected=f"{digits} hexadecimal digits")
    return text


def read_saved(target: Target) -> Saved | None:
    """Return the saved state beside an output, or None where there is none; raises `InstallError`."""
    if not target.checkpoint.exists():
        return None
    try:
        data = read_capped(target.checkpoint, SAVED_CAP_BYTES, "saved download")
    except ManifestError as error:
        raise InstallError(what=str(error), remedy=_REMEDY) from error
    return decode_saved(data, target.checkpoint)


def kept_bytes(output: Path, repo: str, revision: str) -> tuple[int, int] | None:
    """Return source bytes done and in all of a paused download to `output`, None if there is none of that source."""
    try:
        saved = decode_saved(
            read_capped(output.with_name(output.name + ".resume.json"), SAVED_CAP_BYTES, "saved download"), output
        )
    except MferenceError:
        return None
    if (saved.repo, saved.revision) != (repo, revision):
        return None
    return saved.done_source_bytes, saved.total_source_bytes


def write_saved(target: Target, saved: Saved) -> None:
    """Replace the saved state in one step, durable when this returns; raises `OSError`."""
    replace_file(target.checkpoint, encode_saved(saved))


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under another name, give it its own, durable when this returns; raises `OSError`."""
    pending = pending_path(path)
    pending.unlink(missing_ok=True)
    write_small(pending, data)
    pending.rename(path)
    sync_directory(path.parent)
