"""manifest.json of an install, as a value: what it must say, whatever family it is for (gturbo-format 7, 10, 11)."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from attrs import field, frozen

from mference_core.errors import ManifestError, UnknownFlag, UnsupportedVersion
from mference_core.jsondata import (
    encode_object,
    is_hex,
    is_safe_relative,
    member,
    parse_object,
    read_capped,
    size_member,
    typed,
)

MAGIC = "GTURBO"
VERSION_MAJOR = 1
MANIFEST_NAME = "manifest.json"
RECEIPT_NAME = "verified-install.json"
WEIGHTS_NAME = "model_weights.bin"
LAYOUT_NAME = "packed_experts/layout.json"
MANIFEST_CAP_BYTES = 4 << 20
FLAGS = {"streamingPresent": True, "turboQuantKV": False, "aneSharedExpert": False}
UNKNOWN_MODEL_ID = "unknown/snapshot"


@frozen(kw_only=True)
class QuantSlot:
    """One row of the manifest's `quant` object: widths in bits, groups in inputs."""

    weight_bits: int
    scheme: str
    scale_type: str
    bias_type: str
    group_size: int


def affine(bits: int, group_size: int = 64) -> QuantSlot:
    """Return the row of an affine-quantised slot."""
    return QuantSlot(weight_bits=bits, scheme="affine", scale_type="BF16", bias_type="BF16", group_size=group_size)


ABSENT = QuantSlot(weight_bits=0, scheme="none", scale_type="none", bias_type="none", group_size=0)
UNQUANTIZED = QuantSlot(weight_bits=16, scheme="unquantized", scale_type="none", bias_type="none", group_size=0)

# What each slot may say. The rows are the union over the published families; a family's own rows are narrower,
# but nothing depends on them: bit widths and groups of real tensors are read from the index and the layout.
SLOT_ROWS: dict[str, tuple[QuantSlot, ...]] = {
    "embedding": (affine(4),),
    "attention": (affine(4),),
    "router": (affine(8), UNQUANTIZED, ABSENT),
    "sharedExpert": (affine(4), affine(8), ABSENT),
    "routedExpert": (affine(2), affine(4), ABSENT),
}
# Written when a slot's tensor is not quantised: the format's writer starts from these.
SLOT_DEFAULT_BITS = {"embedding": 4, "attention": 4, "router": 8, "sharedExpert": 8, "routedExpert": 4}
_SLOT_KEYS = {
    "weight_bits": ("weightBits", int),
    "scheme": ("scheme", str),
    "scale_type": ("scaleType", str),
    "bias_type": ("biasType", str),
    "group_size": ("groupSize", int),
}


@frozen(kw_only=True)
class FileEntry:
    """Size in bytes and lower-case SHA-256 of one file of an install."""

    size: int
    sha256: str


def check_files(files: Mapping[str, FileEntry], where: str) -> None:
    """Raise `ManifestError` on an unsafe path, a negative size or a digest that is not lower-case hex."""
    for name, entry in files.items():
        if not is_safe_relative(name):
            raise ManifestError(what=f"{where} path", got=repr(name), expected="a relative path without '.' or '..'")
        if not is_hex(entry.sha256, 64):
            raise ManifestError(what=f"{where} {name} sha256", got=repr(entry.sha256), expected="64 lower-case hex")


def check_quant(quant: Mapping[str, QuantSlot]) -> None:
    """Raise `ManifestError` naming the first slot and member that no row of `SLOT_ROWS` allows."""
    for slot, rows in SLOT_ROWS.items():
        if slot not in quant:
            raise ManifestError(what=f"manifest quant.{slot}", got="missing", expected="a quantisation row")
        row = quant[slot]
        if row in rows:
            continue
        same = [r for r in rows if r.scheme == row.scheme]
        if not same:
            expected = " or ".join(sorted({r.scheme for r in rows}))
            raise ManifestError(what=f"manifest quant.{slot}.scheme", got=repr(row.scheme), expected=expected)
        for name, (key, _) in _SLOT_KEYS.items():
            allowed = sorted({getattr(r, name) for r in same})
            if getattr(row, name) not in allowed:
                raise ManifestError(
                    what=f"manifest quant.{slot}.{key}",
                    got=repr(getattr(row, name)),
                    expected=" or ".join(map(str, allowed)),
                )


def _check_flags(_: object, __: object, flags: Mapping[str, bool]) -> None:
    for flag in flags:
        if flag not in FLAGS:
            raise UnknownFlag(what=f"manifest flag {flag!r}", got="unknown", expected=f"only {', '.join(FLAGS)}")
    if flags.get("turboQuantKV"):
        raise ManifestError(what="manifest flags.turboQuantKV", got="true", expected="false")


def _check_files(_: object, __: object, files: Mapping[str, FileEntry]) -> None:
    check_files(files, "manifest files")
    for name in (WEIGHTS_NAME, LAYOUT_NAME):
        if name not in files:
            raise ManifestError(what=f"manifest files {name}", got="missing", expected="its size and sha256")
    for name in (MANIFEST_NAME, RECEIPT_NAME):
        if name in files:
            raise ManifestError(what=f"manifest files {name}", got="listed", expected="no entry for itself")


def _check_slots(_: object, __: object, quant: Mapping[str, QuantSlot] | None) -> None:
    if quant is not None:
        check_quant(quant)


@frozen(kw_only=True)
class Manifest:
    """manifest.json: sizes in bytes, `arch` as the JSON object a family's contract checks.

    `quant` is None when the file has none (only installs of no published shape may lack it). `extra` keeps the
    top-level keys this program does not know. `digest` and `size_bytes` are those of the file that was read.
    Raises `ManifestError`, `UnknownFlag` or `UnsupportedVersion` on values the format forbids.
    """

    arch: Mapping[str, Any]
    files: Mapping[str, FileEntry] = field(validator=_check_files)
    experts_per_layer: int
    num_layers: int
    expert_stride: int
    quant: Mapping[str, QuantSlot] | None = field(validator=_check_slots)
    model_id: str = UNKNOWN_MODEL_ID
    source_snapshot_hash: str | None = None
    bit_width_overrides_honored: int = 0
    flags: Mapping[str, bool] = field(factory=lambda: dict(FLAGS), validator=_check_flags)
    version_minor: int = 0
    extra: Mapping[str, Any] = field(factory=dict)
    digest: str = field(default="", eq=False)
    size_bytes: int = field(default=0, eq=False)

    @property
    def spelling(self) -> str | None:
        """The manifest's `arch.family`, or None when it is missing (one family claims that default)."""
        return self.arch.get("family")


_KEYS = {
    "magic": str,
    "versionMajor": int,
    "versionMinor": int,
    "flags": dict,
    "modelID": str,
    "sourceSnapshotHash": str,
    "arch": dict,
    "quant": dict,
    "files": dict,
    "expertsPerLayer": int,
    "numLayers": int,
    "expertStride": int,
    "bitWidthOverridesHonored": int,
}
_OPTIONAL = {"sourceSnapshotHash", "quant"}


def decode_files(values: Mapping[str, Any], where: str) -> dict[str, FileEntry]:
    """Return a `files` object as values; raises `ManifestError` on a member of the wrong type."""
    files = {}
    for name, entry in values.items():
        here = f"{where} {name}"
        typed(entry, dict, here)
        files[name] = FileEntry(size=size_member(entry, "size", here), sha256=member(entry, "sha256", str, here))
    return files


def encode_files(files: Mapping[str, FileEntry]) -> dict[str, Any]:
    """Return the JSON object of a `files` mapping."""
    return {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in files.items()}


def _decode_quant(values: Mapping[str, Any]) -> dict[str, QuantSlot]:
    rows = {}
    for slot in SLOT_ROWS:
        where = f"manifest quant.{slot}"
        row = member(values, slot, dict, "manifest quant")
        fields: dict[str, Any] = {name: member(row, key, kind, where) for name, (key, kind) in _SLOT_KEYS.items()}
        spelled = {text.lower(): text for r in (affine(4), UNQUANTIZED) for text in (r.scheme, r.scale_type)}
        fields |= {name: spelled.get(value.lower(), value) for name, value in fields.items() if isinstance(value, str)}
        rows[slot] = QuantSlot(**fields)
    return rows


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest in `data`, or raise a `ManifestError` naming the first key that cannot be meant."""
    values = parse_object(data, MANIFEST_NAME)
    if values.get("magic") != MAGIC:
        raise ManifestError(what="manifest magic", got=repr(values.get("magic")), expected=f"{MAGIC} of an install")
    major = member(values, "versionMajor", int, "manifest")
    if major != VERSION_MAJOR:
        raise UnsupportedVersion(what="manifest versionMajor", got=str(major), expected=str(VERSION_MAJOR))
    known: dict[str, Any] = {
        key: size_member(values, key, "manifest") if kind is int else member(values, key, kind, "manifest")
        for key, kind in _KEYS.items()
        if key in values or key not in _OPTIONAL
    }
    for flag, value in known["flags"].items():
        if flag in FLAGS:
            typed(value, bool, f"manifest flags.{flag}")
    if "family" in known["arch"]:
        member(known["arch"], "family", str, "manifest arch")
    return Manifest(
        arch=known["arch"],
        files=decode_files(known["files"], "manifest files"),
        experts_per_layer=known["expertsPerLayer"],
        num_layers=known["numLayers"],
        expert_stride=known["expertStride"],
        quant=_decode_quant(known["quant"]) if "quant" in known else None,
        model_id=known["modelID"],
        source_snapshot_hash=known.get("sourceSnapshotHash"),
        bit_width_overrides_honored=known["bitWidthOverridesHonored"],
        flags=known["flags"],
        version_minor=known["versionMinor"],
        extra={key: value for key, value in values.items() if key not in _KEYS},
        digest=sha256(data).hexdigest(),
        size_bytes=len(data),
    )


def read_manifest(source: bytes | Path) -> Manifest:
    """Read a manifest from its bytes or its file (at most 4 MiB); raises `ManifestError`."""
    if isinstance(source, bytes):
        return decode_manifest(source)
    return decode_manifest(read_capped(source, MANIFEST_CAP_BYTES, "manifest"))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return manifest.json: pretty, keys sorted, slashes not escaped."""
    values = {
        **manifest.extra,
        "magic": MAGIC,
        "versionMajor": VERSION_MAJOR,
        "versionMinor": manifest.version_minor,
        "flags": dict(manifest.flags),
        "modelID": manifest.model_id,
        "arch": dict(manifest.arch),
        "files": encode_files(manifest.files),
        "expertsPerLayer": manifest.experts_per_layer,
        "numLayers": manifest.num_layers,
        "expertStride": manifest.expert_stride,
        "bitWidthOverridesHonored": manifest.bit_width_overrides_honored,
    }
    if manifest.source_snapshot_hash is not None:
        values["sourceSnapshotHash"] = manifest.source_snapshot_hash
    if manifest.quant is not None:
        values["quant"] = {
            slot: {key: getattr(row, name) for name, (key, _) in _SLOT_KEYS.items()}
            for slot, row in manifest.quant.items()
        }
    return encode_object(values)
