"""verified-install.json: what was verified, where, and the rule that lets a load trust it (gturbo-format 9, 10)."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from attrs import frozen

from mference_core.errors import DigestMismatch, MferenceError
from mference_core.jsondata import encode_object, member, parse_object, read_capped, standard_path
from mference_core.manifest import (
    MANIFEST_NAME,
    RECEIPT_NAME,
    FileEntry,
    Manifest,
    check_files,
    decode_files,
    encode_files,
)

SCHEMA_VERSION = 1
RECEIPT_CAP_BYTES = 4 << 20
# Two tool names are all that the format's other program accepts, so they are part of the format.
TOOL_INSTALL, TOOL_VERIFY = "MferenceRepack", "MferenceRepack verify-install"


@frozen(kw_only=True)
class Receipt:
    """A verified install: digests in lower-case hex, `model_directory` the absolute final directory."""

    manifest_sha256: str
    model_directory: str
    files: Mapping[str, FileEntry]
    source_repo_id: str | None = None
    source_revision: str | None = None
    verification_timestamp: str = ""
    tool_version: str = TOOL_INSTALL


def make_receipt(
    manifest: Manifest,
    directory: Path,
    *,
    source_repo_id: str | None = None,
    source_revision: str | None = None,
    tool_version: str = TOOL_INSTALL,
) -> Receipt:
    """Return the receipt of an install whose manifest was read back from (or written to) disk."""
    own = FileEntry(size=manifest.size_bytes, sha256=manifest.digest)
    return Receipt(
        manifest_sha256=manifest.digest,
        model_directory=standard_path(directory),
        files={MANIFEST_NAME: own, **manifest.files},
        source_repo_id=source_repo_id,
        source_revision=source_revision,
        verification_timestamp=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        tool_version=tool_version,
    )


def encode_receipt(receipt: Receipt) -> bytes:
    """Return verified-install.json."""
    values = {
        "schemaVersion": SCHEMA_VERSION,
        "manifestSha256": receipt.manifest_sha256,
        "modelDirectoryPath": receipt.model_directory,
        "verificationTimestamp": receipt.verification_timestamp,
        "toolVersion": receipt.tool_version,
        "files": encode_files(receipt.files),
    }
    if receipt.source_repo_id is not None:
        values["sourceRepoID"] = receipt.source_repo_id
    if receipt.source_revision is not None:
        values["sourceRevision"] = receipt.source_revision
    return encode_object(values)


def decode_receipt(data: bytes) -> Receipt:
    """Return the receipt in `data`, or raise `ManifestError` naming the key."""
    values = parse_object(data, RECEIPT_NAME)
    schema = member(values, "schemaVersion", int, "receipt")
    if schema != SCHEMA_VERSION:
        raise _untrusted("schemaVersion", str(schema), str(SCHEMA_VERSION))
    optional = {key: member(values, key, str, "receipt") for key in ("sourceRepoID", "sourceRevision") if key in values}
    files = decode_files(member(values, "files", dict, "receipt"), "receipt files")
    check_files(files, "receipt files")
    return Receipt(
        manifest_sha256=member(values, "manifestSha256", str, "receipt").lower(),
        model_directory=member(values, "modelDirectoryPath", str, "receipt"),
        files=files,
        source_repo_id=optional.get("sourceRepoID"),
        source_revision=optional.get("sourceRevision"),
        verification_timestamp=member(values, "verificationTimestamp", str, "receipt"),
        tool_version=member(values, "toolVersion", str, "receipt"),
    )


def check_receipt(directory: Path, manifest: Manifest) -> Receipt:
    """Read the receipt of `directory` and hold it against the manifest read there.

    Raises `DigestMismatch` when it is missing, of other bytes, of another directory, or lists other files.
    """
    path = directory / RECEIPT_NAME
    if not path.is_file():
        raise _untrusted("", "missing", RECEIPT_NAME)
    try:
        receipt = decode_receipt(read_capped(path, RECEIPT_CAP_BYTES, "receipt"))
    except DigestMismatch:
        raise
    except MferenceError as error:
        raise DigestMismatch(what=str(error), remedy=_REMEDY) from error
    if receipt.manifest_sha256 != manifest.digest:
        raise _untrusted("manifestSha256", receipt.manifest_sha256, f"the manifest's {manifest.digest}")
    here = standard_path(directory)
    if receipt.model_directory != here:
        raise _untrusted("modelDirectoryPath", receipt.model_directory, here)
    expected = {MANIFEST_NAME: FileEntry(size=manifest.size_bytes, sha256=manifest.digest), **manifest.files}
    for name in sorted(expected.keys() | receipt.files.keys()):
        if receipt.files.get(name) != expected.get(name):
            got = "missing" if name not in receipt.files else "unlike the manifest's"
            raise _untrusted(f"files {name}", got, "the manifest's entry" if name in expected else "no such entry")
    return receipt


_REMEDY = "use full-sha256, or run 'mference verify --write-receipt' where it is now"


def _untrusted(what: str, got: str, expected: str) -> DigestMismatch:
    return DigestMismatch(what=f"receipt {what}".rstrip(), got=got, expected=expected, remedy=_REMEDY)
