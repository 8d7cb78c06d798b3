"""The local installer: the bytes it writes, and the quantisation rows it states."""

import json
import os
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from mference_core.checkpoint import open_checkpoint, peek
from mference_core.errors import ManifestError
from mference_core.install import InstallProgress, install_local, transaction
from mference_core.manifest import UNQUANTIZED, QuantSlot, affine, read_manifest
from mference_core.safetensors_index import INDEX_NAME
from mference_core.testing.toy_installs import beside, install_toy, open_whole
from mference_core.testing.toys import (
    Spec,
    mlx_tensors,
    toy_arch,
    toy_config,
    toy_contract,
    toy_plan,
    write_safetensors,
    write_toy,
)

ARCH = toy_arch()
LAYER_ORDER = ("attn.weight", "router.weight", "shared.weight", "norm.weight", "scalar")


class Blob:
    """A safetensors file taken apart with nothing but its JSON header."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        self.entries = json.loads(data[8 : 8 + length])
        self.payload = data[8 + length :]
        self.header = data[: 8 + length]

    def __getitem__(self, name: str) -> bytes:
        begin, end = self.entries[name]["data_offsets"]
        return self.payload[begin:end]


def test_files_byte_for_byte(source: Path, output: Path) -> None:
    """Each file equals one put together here, from the format's text alone."""
    report = install_toy(source, output)
    blob, layers = Blob(source / "model.safetensors"), range(3)
    names = ["trunk.embed.weight"]
    names += [f"trunk.layers.{i}.{rest}" for i in layers for rest in LAYER_ORDER if i or rest != "router.weight"]
    names.append("trunk.norm.weight")
    payload = b""
    for name in names:
        stem = name.removesuffix(".weight")
        payload += blob[name]
        if stem + ".scales" in blob.entries:
            payload += blob[stem + ".scales"] + blob[stem + ".biases"]
    weights = (output / "model_weights.bin").read_bytes()
    assert struct.unpack_from("<3Q", weights) == (16384, len(payload), 16)
    assert weights[16384:] == payload
    assert "".join(names).encode() in weights[:16384]
    assert not (output / "packed_experts/layer_00.bin").exists()
    for i in (1, 2):
        expected = b""
        for expert in range(4):
            piece = b""
            for role in ("gate", "up", "down"):
                for kind in (".weight", ".scales", ".biases"):
                    stack = blob[f"trunk.layers.{i}.experts.{role}{kind}"]
                    piece += stack[expert * len(stack) // 4 : (expert + 1) * len(stack) // 4]
            expected += piece.ljust(16384, b"\0")
        assert (output / f"packed_experts/layer_{i:02d}.bin").read_bytes() == expected
    assert (output / "tokenizer/config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (report.resident_tensors, report.routed_layers, report.path) == (16, 2, output)
    assert report.size_bytes == sum(item.stat().st_size for item in output.rglob("*") if item.is_file())
    assert report.files == sum(item.is_file() for item in output.rglob("*"))
    assert beside(output) == ["toy.gturbo"]


def test_manifest_and_receipt(source: Path, output: Path) -> None:
    install_toy(source, output)
    manifest = json.loads((output / "manifest.json").read_text())
    row = {"scheme": "affine", "scaleType": "BF16", "biasType": "BF16", "groupSize": 64}
    bits = {"embedding": 4, "attention": 4, "router": 8, "sharedExpert": 4, "routedExpert": 4}
    files = {
        item.relative_to(output).as_posix(): {
            "size": item.stat().st_size,
            "sha256": sha256(item.read_bytes()).hexdigest(),
        }
        for item in output.rglob("*")
        if item.is_file() and item.name not in ("manifest.json", "verified-install.json")
    }
    assert manifest == {
        "magic": "GTURBO",
        "versionMajor": 1,
        "versionMinor": 0,
        "flags": {"streamingPresent": True, "turboQuantKV": False, "aneSharedExpert": False},
        "modelID": "unknown/snapshot",
        "sourceSnapshotHash": "sha256:" + sha256(Blob(source / "model.safetensors").header).hexdigest(),
        "arch": toy_config(ARCH, quantised=True)["toy"],
        "quant": {slot: {**row, "weightBits": width} for slot, width in bits.items()},
        "files": files,
        "expertsPerLayer": 4,
        "numLayers": 3,
        "expertStride": 16384,
        "bitWidthOverridesHonored": 2,
    }
    data = (output / "manifest.json").read_bytes()
    receipt = json.loads((output / "verified-install.json").read_text())
    assert receipt.pop("verificationTimestamp").endswith("Z")
    assert receipt == {
        "schemaVersion": 1,
        "manifestSha256": sha256(data).hexdigest(),
        "modelDirectoryPath": str(output),
        "toolVersion": "MferenceRepack",
        "files": {**files, "manifest.json": {"size": len(data), "sha256": sha256(data).hexdigest()}},
    }


def test_receipt_is_trusted_where_it_was_installed(source: Path, output: Path) -> None:
    install_toy(source, output)
    assert open_checkpoint(peek(output), toy_contract(), toy_plan, verify="trusted-receipt").weights


def test_known_source_gets_its_published_id(source: Path, output: Path) -> None:
    """Two shards with an index: the index's digest names the source."""
    specs, half = mlx_tensors(ARCH), len(mlx_tensors(ARCH)) // 2
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts = [dict(list(specs.items())[:half]), dict(list(specs.items())[half:])]
    for name, part in zip(names, parts, strict=True):
        write_safetensors(source / name, part)
    (source / "model.safetensors").unlink()
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (source / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    digest = sha256((source / INDEX_NAME).read_bytes()).hexdigest()
    report = install_toy(source, output, known_ids={digest: "someone/toy"})
    manifest = read_manifest(output / "manifest.json")
    assert (report.model_id, manifest.model_id) == ("someone/toy", "someone/toy")
    assert manifest.source_snapshot_hash == f"sha256:{digest}"
    open_whole(output)


def test_tokenizer_files_are_copied_when_there(source: Path, output: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "chat_template.jinja").write_text("{{ x }}")
    (source / "README.md").write_text("not ours")
    install_toy(source, output)
    assert sorted(item.name for item in (output / "tokenizer").iterdir()) == ["chat_template.jinja", "config.json"]
    open_whole(output)


def test_source_of_links_is_followed(source: Path, output: Path, tmp_path: Path) -> None:
    """A download cache keeps its files as links into a store."""
    (tmp_path / "snapshot").mkdir()
    for item in source.iterdir():
        (tmp_path / "snapshot" / item.name).symlink_to(item)
    install_toy(tmp_path / "snapshot", output)
    assert not any(item.is_symlink() for item in output.rglob("*"))
    open_whole(output)


def test_progress_counts_every_byte(source: Path, output: Path) -> None:
    events = list[InstallProgress]()
    report = install_toy(source, output, progress=events.append)
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert done[-1] == events[-1].total_bytes
    metadata = sum((output / name).stat().st_size for name in ("manifest.json", "verified-install.json"))
    assert done[-1] == report.size_bytes - metadata


def test_missing_parents_are_made_and_the_path_is_tidied(source: Path, tmp_path: Path) -> None:
    report = install_toy(source, tmp_path / "a" / "b" / ".." / "b" / "toy.gturbo")
    assert report.path == tmp_path / "a/b/toy.gturbo"
    open_whole(report.path)


# --- quantisation rows


def rewritten(source: Path, specs: dict[str, Spec], overrides: dict[str, Any], **base: Any) -> None:
    config = toy_config(ARCH, quantised=True)
    config["quantization"].update(overrides, **base)
    (source / "config.json").write_text(json.dumps(config))
    write_safetensors(source / "model.safetensors", mlx_tensors(ARCH) | specs)


def at_bits(name: str, bits: int, rows: int, columns: int = 64) -> tuple[dict[str, Spec], dict[str, Any]]:
    return {name + ".weight": ("U32", (rows, columns * bits // 32))}, {name: {"bits": bits, "group_size": 64}}


def test_rows_say_what_was_found(source: Path, output: Path) -> None:
    rewritten(source, *at_bits("trunk.layers.0.shared", 8, 128))
    install_toy(source, output)
    quant = read_manifest(output / "manifest.json").quant
    assert quant is not None
    assert quant["sharedExpert"].weight_bits == 8
    open_whole(output)


@pytest.mark.parametrize(
    ("plain_slots", "row"), [((), affine(8)), (("router",), UNQUANTIZED)], ids=["as the format's writer", "as it is"]
)
def test_row_of_an_unquantised_router(source: Path, output: Path, plain_slots: tuple[str, ...], row: QuantSlot) -> None:
    specs = mlx_tensors(ARCH)
    for layer in (1, 2):
        for kind in (".scales", ".biases"):
            del specs[f"trunk.layers.{layer}.router{kind}"]
        specs[f"trunk.layers.{layer}.router.weight"] = ("BF16", (4, 64))
    write_safetensors(source / "model.safetensors", specs)
    install_local(
        source, output, toy_contract(), lambda arch: evolve(toy_plan(arch), plain_slots=frozenset(plain_slots))
    )
    quant = read_manifest(output / "manifest.json").quant
    assert quant is not None
    assert quant["router"] == row
    assert quant["sharedExpert"] == affine(4)
    open_whole(output)


def test_a_quantised_router_states_its_width_whatever_is_allowed(source: Path, output: Path) -> None:
    install_local(
        source, output, toy_contract(), lambda arch: evolve(toy_plan(arch), plain_slots=frozenset(["router"]))
    )
    quant = read_manifest(output / "manifest.json").quant
    assert quant is not None
    assert quant["router"] == affine(8)


def test_width_the_format_cannot_state_is_refused_before_a_byte(source: Path, output: Path) -> None:
    rewritten(source, *at_bits("trunk.embed", 8, 96))
    with pytest.raises(ManifestError, match=r"manifest quant\.embedding\.weightBits is 8; expected 4"):
        install_toy(source, output)
    assert not list(output.parent.iterdir())


def test_dense_model_has_no_layer_files(tmp_path: Path, output: Path) -> None:
    arch = toy_arch(num_layers=1, full_attention_layer_mask=(1,), num_experts=0, top_k_experts=0)
    install_toy(write_toy(tmp_path / "dense", arch), output)
    manifest = read_manifest(output / "manifest.json")
    assert (manifest.experts_per_layer, manifest.expert_stride) == (0, 0)
    assert manifest.quant is not None
    assert {manifest.quant[slot].scheme for slot in ("router", "routedExpert")} == {"none"}
    assert [item.name for item in (output / "packed_experts").iterdir()] == ["layout.json"]
    open_whole(output)


def test_every_file_is_durable_before_the_name_is_final(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and folders of the staging directory are synced before the rename, its parent after."""
    synced, real_sync, real_promote = list[int](), os.fsync, transaction.promote

    def fsync(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        real_sync(handle)

    def promote(target: transaction.Target, *, overwrite: bool) -> None:
        staged = [target.partial, *target.partial.rglob("*")]
        assert {item.stat().st_ino for item in staged} <= set(synced)
        assert (target.partial / "verified-install.json").exists()
        synced.clear()
        real_promote(target, overwrite=overwrite)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("mference_core.install.local.promote", promote)
    install_toy(source, output)
    assert synced == [output.parent.stat().st_ino]
