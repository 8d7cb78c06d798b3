"""manifest.json: what round-trips, and one refusal per rule of the format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mference_core.errors import ManifestError, UnknownFlag, UnsupportedVersion
from mference_core.manifest import (
    ABSENT,
    LAYOUT_NAME,
    MANIFEST_CAP_BYTES,
    SLOT_ROWS,
    UNQUANTIZED,
    WEIGHTS_NAME,
    FileEntry,
    Manifest,
    affine,
    encode_manifest,
    read_manifest,
)

Json = dict[str, Any]
HEX = "0123456789abcdef" * 4


def valid() -> Json:
    row = {"weightBits": 4, "scheme": "affine", "scaleType": "BF16", "biasType": "BF16", "groupSize": 64}
    return {
        "magic": "GTURBO",
        "versionMajor": 1,
        "versionMinor": 0,
        "flags": {"streamingPresent": True, "turboQuantKV": False, "aneSharedExpert": False},
        "modelID": "someone/something",
        "sourceSnapshotHash": "sha256:" + HEX,
        "arch": {"hiddenSize": 64, "family": "toy", "a key of tomorrow": 1},
        "quant": {slot: {**row, "weightBits": 8} if slot == "router" else dict(row) for slot in SLOT_ROWS},
        "files": {name: {"size": 10, "sha256": HEX} for name in (WEIGHTS_NAME, LAYOUT_NAME)},
        "expertsPerLayer": 4,
        "numLayers": 2,
        "expertStride": 16384,
        "bitWidthOverridesHonored": 1,
    }


def encoded(values: Json) -> bytes:
    return json.dumps(values).encode()


def put(path: str, value: Any) -> Callable[[Json], None]:
    """Set the member at a dotted path."""

    def change(values: Json) -> None:
        *parents, last = path.split("|")
        for parent in parents:
            values = values[parent]
        values[last] = value

    return change


def drop(path: str) -> Callable[[Json], None]:
    """Remove the member at a dotted path."""

    def change(values: Json) -> None:
        *parents, last = path.split("|")
        for parent in parents:
            values = values[parent]
        del values[last]

    return change


def test_a_valid_manifest_reads_as_written() -> None:
    manifest = read_manifest(encoded(valid()))
    assert (manifest.spelling, manifest.model_id, manifest.expert_stride) == ("toy", "someone/something", 16384)
    assert manifest.quant is not None
    assert manifest.quant["router"] == affine(8)
    assert manifest.files[WEIGHTS_NAME] == FileEntry(size=10, sha256=HEX)
    assert read_manifest(encode_manifest(manifest)) == manifest


def test_encoding_is_pretty_sorted_and_keeps_slashes() -> None:
    text = encode_manifest(read_manifest(encoded(valid()))).decode()
    assert '"packed_experts/layout.json": {\n' in text
    assert list(json.loads(text)) == sorted(json.loads(text))


TOLERATED = {
    "family missing": drop("arch|family"),
    "snapshot missing": drop("sourceSnapshotHash"),
    "quant missing, as toy installs may": drop("quant"),
    "minor version of tomorrow": put("versionMinor", 7),
    "a flag that is false and left out": drop("flags|aneSharedExpert"),
    "known flag true": put("flags|aneSharedExpert", True),  # noqa: FBT003 (a JSON value)
    "unknown top-level key": put("provenance", {"tool": "x"}),
    "integral float": put("numLayers", 2.0),
    "scheme in capitals": put("quant|router|scheme", "AFFINE"),
    "scale type in lower case": put("quant|router|scaleType", "bf16"),
    "shared expert at 8 bits": put("quant|sharedExpert|weightBits", 8),
    "routed experts at 2 bits": put("quant|routedExpert|weightBits", 2),
    "empty file": put("files|tokenizer/x", {"size": 0, "sha256": HEX}),
}


@pytest.mark.parametrize("change", TOLERATED.values(), ids=TOLERATED)
def test_tolerated(change: Callable[[Json], None]) -> None:
    values = valid()
    change(values)
    assert read_manifest(encoded(values)).num_layers == 2


def test_missing_family_is_none() -> None:
    values = valid()
    drop("arch|family")(values)
    assert read_manifest(encoded(values)).spelling is None


@pytest.mark.parametrize(
    ("slot", "row"),
    [("router", ABSENT), ("router", UNQUANTIZED), ("sharedExpert", ABSENT), ("routedExpert", ABSENT)],
)
def test_absent_and_unquantised_rows(slot: str, row: Any) -> None:
    values = valid()
    values["quant"][slot] = {
        "weightBits": row.weight_bits,
        "scheme": row.scheme,
        "scaleType": row.scale_type,
        "biasType": row.bias_type,
        "groupSize": row.group_size,
    }
    quant = read_manifest(encoded(values)).quant
    assert quant is not None
    assert quant[slot] == row


REFUSED: dict[str, tuple[Callable[[Json], None], str]] = {
    "magic": (put("magic", "GGUF"), "manifest magic is 'GGUF'; expected GTURBO"),
    "magic missing": (drop("magic"), "manifest magic is None"),
    "flags missing": (drop("flags"), "manifest flags is missing"),
    "flag not a boolean": (put("flags|aneSharedExpert", 1), "manifest flags.aneSharedExpert is 1"),
    "turboQuantKV": (put("flags|turboQuantKV", True), "manifest flags.turboQuantKV is true; expected false"),  # noqa: FBT003
    "model id a number": (put("modelID", 3), "manifest modelID is 3; expected a string"),
    "arch a list": (put("arch", []), "manifest arch is []; expected an object"),
    "family a number": (put("arch|family", 3), "manifest arch family is 3; expected a string"),
    "layers a string": (put("numLayers", "2"), "manifest numLayers is '2'; expected an integer"),
    "layers true": (put("numLayers", True), "manifest numLayers is True; expected an integer"),  # noqa: FBT003
    "layers a fraction": (put("numLayers", 2.5), "manifest numLayers is 2.5; expected an integer"),
    "stride negative": (put("expertStride", -1), "manifest expertStride is -1"),
    "stride above 63 bits": (put("expertStride", 1 << 63), "manifest expertStride is 9223372036854775808"),
    "overrides missing": (drop("bitWidthOverridesHonored"), "manifest bitWidthOverridesHonored is missing"),
    "snapshot a number": (put("sourceSnapshotHash", 1), "manifest sourceSnapshotHash is 1"),
    "weights not listed": (drop("files|model_weights.bin"), "manifest files model_weights.bin is missing"),
    "layout not listed": (drop("files|packed_experts/layout.json"), "files packed_experts/layout.json is missing"),
    "manifest lists itself": (put("files|manifest.json", {"size": 1, "sha256": HEX}), "manifest.json is listed"),
    "file size missing": (put("files|x", {"sha256": HEX}), "manifest files x size is missing"),
    "file size negative": (put("files|x", {"size": -1, "sha256": HEX}), "manifest files x size is -1"),
    "digest in capitals": (put("files|x", {"size": 1, "sha256": HEX.upper()}), "expected 64 lower-case hex"),
    "digest short": (put("files|x", {"size": 1, "sha256": HEX[:-1]}), "expected 64 lower-case hex"),
    "path absolute": (put("files|/etc/x", {"size": 1, "sha256": HEX}), "manifest files path is '/etc/x'"),
    "path upwards": (put("files|a/../../x", {"size": 1, "sha256": HEX}), "manifest files path is 'a/../../x'"),
    "path of a dot": (put("files|./x", {"size": 1, "sha256": HEX}), "manifest files path is './x'"),
    "path with backslash": (put("files|a\\x", {"size": 1, "sha256": HEX}), "manifest files path is"),
    "path with NUL": (put("files|a\0x", {"size": 1, "sha256": HEX}), "manifest files path is"),
    "path not NFC": (put("files|e\u0301", {"size": 1, "sha256": HEX}), "manifest files path is"),
    "slot missing": (drop("quant|router"), "manifest quant router is missing"),
    "slot member missing": (drop("quant|router|groupSize"), "manifest quant.router groupSize is missing"),
    "embedding at 8 bits": (
        put("quant|embedding|weightBits", 8),
        "manifest quant.embedding.weightBits is 8; expected 4",
    ),
    "attention at 6 bits": (put("quant|attention|weightBits", 6), "manifest quant.attention.weightBits is 6"),
    "router at 4 bits": (put("quant|router|weightBits", 4), "manifest quant.router.weightBits is 4; expected 8"),
    "shared expert at 2 bits": (put("quant|sharedExpert|weightBits", 2), "quant.sharedExpert.weightBits is 2"),
    "routed experts at 8 bits": (put("quant|routedExpert|weightBits", 8), "quant.routedExpert.weightBits is 8"),
    "group 32": (put("quant|attention|groupSize", 32), "manifest quant.attention.groupSize is 32; expected 64"),
    "scheme of another kind": (put("quant|attention|scheme", "mxfp4"), "quant.attention.scheme is 'mxfp4'"),
    "attention absent": (put("quant|attention|scheme", "none"), "quant.attention.scheme is 'none'; expected affine"),
    "scales in F16": (put("quant|attention|scaleType", "F16"), "quant.attention.scaleType is 'F16'; expected BF16"),
    "biases in F32": (put("quant|attention|biasType", "F32"), "quant.attention.biasType is 'F32'; expected BF16"),
}


@pytest.mark.parametrize(("change", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(change: Callable[[Json], None], text: str) -> None:
    values = valid()
    change(values)
    with pytest.raises(ManifestError) as caught:
        read_manifest(encoded(values))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [True, False, None, "x"])
def test_unknown_flag_is_refused_whatever_its_value(value: Any) -> None:
    values = valid()
    values["flags"]["fasterSomehow"] = value
    with pytest.raises(UnknownFlag, match="fasterSomehow"):
        read_manifest(encoded(values))


@pytest.mark.parametrize("major", [0, 2])
def test_other_major_version_is_refused(major: int) -> None:
    values = valid()
    values["versionMajor"] = major
    with pytest.raises(UnsupportedVersion, match=f"versionMajor is {major}; expected 1"):
        read_manifest(encoded(values))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "malformed"),
        (b"[]", "expected a JSON object"),
        (b'{"magic": "GTURBO", "magic": "GTURBO"}', "key 'magic' appears twice"),
        (b'{"magic": NaN}', "NaN is not JSON"),
        (b'{"magic": "\xff"}', "malformed"),
        (b'{"a":' * 50_000, "nested too deeply"),
    ],
)
def test_bytes_that_are_no_json_object_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(ManifestError, match=text):
        read_manifest(data)


def test_file_above_the_cap_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(encoded(valid()).ljust(MANIFEST_CAP_BYTES + 1))
    with pytest.raises(ManifestError, match="above 4194304 bytes"):
        read_manifest(path)


def test_file_at_the_cap_is_read(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(encoded(valid()).ljust(MANIFEST_CAP_BYTES))
    assert read_manifest(path).size_bytes == MANIFEST_CAP_BYTES


NAMES = st.from_regex(r"[a-z_]{1,8}(/[a-z0-9_]{1,8}){0,2}", fullmatch=True)
ENTRIES = st.builds(
    FileEntry, size=st.integers(0, 1 << 62), sha256=st.text("0123456789abcdef", min_size=64, max_size=64)
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 60), 1 << 60)
    | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MANIFESTS = st.builds(
    Manifest,
    arch=st.dictionaries(st.text(max_size=6).filter(lambda key: key != "family"), JSON, max_size=4),
    files=st.dictionaries(NAMES, ENTRIES, max_size=4).map(
        lambda files: {**files, WEIGHTS_NAME: FileEntry(size=1, sha256=HEX), LAYOUT_NAME: FileEntry(size=2, sha256=HEX)}
    ),
    experts_per_layer=st.integers(0, 1 << 20),
    num_layers=st.integers(0, 1 << 20),
    expert_stride=st.integers(0, 1 << 40),
    quant=st.none() | st.fixed_dictionaries({slot: st.sampled_from(rows) for slot, rows in SLOT_ROWS.items()}),
    model_id=st.text(max_size=20),
    source_snapshot_hash=st.none() | st.text(max_size=20),
    bit_width_overrides_honored=st.integers(0, 100),
    extra=st.dictionaries(st.sampled_from(["provenance", "flashHead"]), JSON, max_size=2),
)


@given(MANIFESTS)
def test_any_manifest_round_trips(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    assert read_manifest(data) == manifest
    assert encode_manifest(read_manifest(data)) == data
