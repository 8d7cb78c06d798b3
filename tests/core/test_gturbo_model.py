"""An installed directory under both verify policies: what opens, and one refusal per rule of the format."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import pytest

from mference_core.errors import DigestMismatch, ManifestError, UsageError
from mference_core.gturbo.model import GturboModel, open_gturbo
from mference_core.install import install_local
from mference_core.manifest import LAYOUT_NAME, WEIGHTS_NAME, read_manifest
from mference_core.tensors import Quant
from mference_core.testing.toys import toy_arch, toy_contract, toy_plan, write_toy

Json = dict[str, Any]
Q4 = Quant(bits=4, group_size=64)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an install nobody changes: layers 1 and 2 routed."""
    root = tmp_path_factory.mktemp("pristine")
    source = write_toy(root / "source", toy_arch())
    install_local(source, root / "toy.gturbo", toy_contract(), toy_plan)
    return root / "toy.gturbo"


@pytest.fixture
def install(pristine: Path, tmp_path: Path) -> Path:
    """Return an install to be changed; as a copy, its receipt names another directory."""
    copy = tmp_path / "toy.gturbo"
    shutil.copytree(pristine, copy)
    return copy


def opened(path: Path, policy: str = "full-sha256") -> GturboModel:
    return open_gturbo(path, read_manifest(path / "manifest.json"), policy)


def sign(path: Path, *names: str) -> None:
    """Make the manifest say what the named files now are; one that is gone is no longer listed."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in names:
        if (path / name).exists():
            data = (path / name).read_bytes()
            manifest["files"][name] = {"size": len(data), "sha256": sha256(data).hexdigest()}
        else:
            manifest["files"].pop(name, None)
    (path / "manifest.json").write_text(json.dumps(manifest))


LAYER = "packed_experts/layer_01.bin"


def test_a_valid_install_opens_and_every_layer_can_be_touched(install: Path) -> None:
    model = opened(install)
    for layer in model.expert_layers():
        model.touch_layer(layer)
    assert sorted(model.expert_layers()) == [1, 2]
    weights = model.weights()
    assert weights["trunk.embed.weight"].quant == Q4
    assert weights["trunk.layers.1.router.weight"].quant == Quant(bits=8, group_size=64)
    assert weights["trunk.layers.1.scalar"].data.size == 2


def test_expert_extents_hold_the_nine_parts_in_one_run(install: Path) -> None:
    layer = opened(install).expert_layers()[2]
    (extent,) = layer.extents(3)
    assert extent.parts == tuple(part.name for part in layer.parts)
    assert (extent.span.offset, extent.span.size) == (3 * 16384, layer.expert_bytes)
    assert extent.span.path.name == "layer_02.bin"


def test_unknown_policy_is_a_usage_error(install: Path) -> None:
    with pytest.raises(UsageError, match="--verify is 'none'; expected full-sha256 or trusted-receipt"):
        opened(install, "none")


def cut(name: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-2])


def flip(name: str, offset: int = -1) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[offset] ^= 1
        (path / name).write_bytes(data)

    return change


def gone(name: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).unlink()


def unlisted(name: str) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        (path / name).unlink()
        sign(path, name)

    return change


def extra(name: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_bytes(b"x")


def manifest_says(key: str, value: Any) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        manifest[key] = value
        (path / "manifest.json").write_text(json.dumps(manifest))

    return change


def longer_layer(path: Path) -> None:
    (path / LAYER).write_bytes((path / LAYER).read_bytes() + bytes(16384))
    sign(path, LAYER)


def emptied_layer(path: Path) -> None:
    top = json.loads((path / LAYOUT_NAME).read_text())
    top["layers"][1]["experts"] = []
    (path / LAYOUT_NAME).write_text(json.dumps(top))
    sign(path, LAYOUT_NAME)


def lying_weights(path: Path) -> None:
    flip(WEIGHTS_NAME, 8)(path)
    sign(path, WEIGHTS_NAME)


def directory_in_place_of(name: str) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return change


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights missing": (gone(WEIGHTS_NAME), "model_weights.bin is missing"),
    "layout missing": (gone(LAYOUT_NAME), "layout.json is missing"),
    "layer missing": (gone(LAYER), "layer_01.bin is missing"),
    "tokenizer file missing": (gone("tokenizer/tokenizer.json"), "tokenizer.json is missing"),
    "layer not listed": (unlisted(LAYER), "manifest files packed_experts/layer_01.bin is missing"),
    "weights a directory": (directory_in_place_of(WEIGHTS_NAME), "model_weights.bin is not a regular file"),
    "weights cut": (cut(WEIGHTS_NAME), "model_weights.bin size is"),
    "layout cut": (cut(LAYOUT_NAME), "layout.json size is"),
    "layer cut": (cut(LAYER), "layer_01.bin size is 65534 bytes; expected 65536"),
    "weights flipped": (flip(WEIGHTS_NAME), "model_weights.bin sha256 is"),
    "layout flipped": (flip(LAYOUT_NAME), "layout.json"),
    "tokenizer flipped": (flip("tokenizer/config.json", 2), "tokenizer/config.json sha256 is"),
    "weights lie, signed": (lying_weights, "expected indexSize + residentSize"),
    "extra file": (extra("packed_experts/layer_00.bin"), "layer_00.bin is not in the manifest"),
    "extra tokenizer file": (extra("tokenizer/chat_template.jinja"), "chat_template.jinja is not in the manifest"),
    "stride unlike the layout's": (
        manifest_says("expertStride", 32768),
        "layout.json expertStride is 16384; expected the manifest's 32768",
    ),
    "experts unlike the layout's": (manifest_says("expertsPerLayer", 5), "layout.json expertsPerLayer is 4"),
    "layers unlike the layout's": (manifest_says("numLayers", 4), "layout.json numLayers is 3"),
    "layer longer, signed": (longer_layer, "layer_01.bin size is 81920 bytes; expected 65536, experts x stride"),
    "layer empty in the layout": (emptied_layer, "layout.json layer 1 experts is empty"),
}


@pytest.mark.parametrize(("change", "text"), BROKEN.values(), ids=BROKEN)
def test_broken_install_is_refused(install: Path, change: Callable[[Path], Any], text: str) -> None:
    change(install)
    with pytest.raises((ManifestError, DigestMismatch)) as caught:
        opened(install)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_file_managers_are_tolerated(install: Path) -> None:
    (install / ".DS_Store").write_bytes(b"x")
    (install / "packed_experts" / ".DS_Store").write_bytes(b"x")
    assert opened(install).index.entries


def test_layer_file_may_carry_its_short_name(install: Path) -> None:
    (install / LAYER).rename(install / "packed_experts/layer_1.bin")
    sign(install, LAYER, "packed_experts/layer_1.bin")
    model = opened(install)
    model.touch_layer(1)
    assert model.expert_layers()[1].extents(0)[0].span.path.name == "layer_1.bin"


def test_layer_is_hashed_at_first_touch_and_only_then(install: Path) -> None:
    """A flipped byte is found by the first touch; after a good touch the file is not read again."""
    flip(LAYER)(install)
    model = opened(install)
    model.touch_layer(2)
    for _ in range(2):
        with pytest.raises(DigestMismatch, match=r"layer_01\.bin sha256 is"):
            model.touch_layer(1)
    flip(LAYER)(install)
    model.touch_layer(1)
    flip(LAYER)(install)
    model.touch_layer(1)


def test_touch_from_many_threads_hashes_once(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    model = opened(install)

    def slow_check(*args: Any) -> None:
        calls.append(args[1])
        sleep(0.02)

    monkeypatch.setattr("mference_core.gturbo.model.check_file", slow_check)
    threads = [Thread(target=model.touch_layer, args=(1,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls.count(LAYER) == 1


# --- the receipt


def test_trusted_receipt_opens_where_it_was_installed(pristine: Path) -> None:
    model = opened(pristine, "trusted-receipt")
    model.touch_layer(1)
    assert opened(pristine.parent / "." / "source" / ".." / pristine.name, "trusted-receipt").index == model.index


def test_trusted_receipt_compares_a_layer_by_size_only(pristine: Path) -> None:
    flip(LAYER)(pristine)
    try:
        opened(pristine, "trusted-receipt").touch_layer(1)
    finally:
        flip(LAYER)(pristine)


def receipt_says(**changes: Any) -> Callable[[Json], Any]:
    return lambda receipt: receipt.update(changes)


RECEIPT_LIES: dict[str, tuple[Callable[[Json], Any], str]] = {
    "schema": (receipt_says(schemaVersion=2), "receipt schemaVersion is 2; expected 1"),
    "manifest digest": (receipt_says(manifestSha256="0" * 64), "receipt manifestSha256 is 000"),
    "directory": (receipt_says(modelDirectoryPath="/elsewhere"), "receipt modelDirectoryPath is /elsewhere"),
    "digest missing": (lambda r: r.pop("manifestSha256"), "receipt manifestSha256 is missing"),
    "tool missing": (lambda r: r.pop("toolVersion"), "receipt toolVersion is missing"),
    "files missing": (lambda r: r.pop("files"), "receipt files is missing"),
    "a file short": (lambda r: r["files"].pop(LAYER), "layer_01.bin is missing; expected the manifest's entry"),
    "a file too many": (
        lambda r: r["files"].update(x={"size": 1, "sha256": "0" * 64}),
        "receipt files x is unlike the manifest's; expected no such entry",
    ),
    "another size": (lambda r: r["files"][LAYER].update(size=1), "layer_01.bin is unlike the manifest's"),
    "another digest": (lambda r: r["files"][LAYER].update(sha256="0" * 64), "layer_01.bin is unlike the manifest's"),
    "manifest's own entry": (lambda r: r["files"]["manifest.json"].update(size=1), "manifest.json is unlike"),
    "digest in capitals": (lambda r: r["files"][LAYER].update(sha256="A" * 64), "expected 64 lower-case hex"),
}


@pytest.fixture
def homed(install: Path) -> Path:
    """Return an install whose receipt names the directory it is in."""
    rewrite(install, receipt_says(modelDirectoryPath=str(install)))
    return install


def rewrite(path: Path, change: Callable[[Json], Any]) -> None:
    receipt = json.loads((path / "verified-install.json").read_text())
    change(receipt)
    (path / "verified-install.json").write_text(json.dumps(receipt))


def test_receipt_digest_may_be_written_in_capitals(homed: Path) -> None:
    rewrite(homed, lambda receipt: receipt.update(manifestSha256=receipt["manifestSha256"].upper()))
    assert opened(homed, "trusted-receipt").index.entries


@pytest.mark.parametrize(("change", "text"), RECEIPT_LIES.values(), ids=RECEIPT_LIES)
def test_receipt_that_does_not_fit_is_refused(homed: Path, change: Callable[[Json], Any], text: str) -> None:
    rewrite(homed, change)
    with pytest.raises(DigestMismatch) as caught:
        opened(homed, "trusted-receipt")
    assert text in str(caught.value)
    assert "use full-sha256, or run 'mference verify --write-receipt' where it is now" in str(caught.value)
    assert opened(homed).index.entries


def test_moved_or_missing_receipt_is_refused_by_trusted_receipt_only(install: Path) -> None:
    with pytest.raises(DigestMismatch, match="receipt modelDirectoryPath is"):
        opened(install, "trusted-receipt")
    (install / "verified-install.json").unlink()
    with pytest.raises(DigestMismatch, match=r"receipt is missing; expected verified-install\.json"):
        opened(install, "trusted-receipt")
    assert opened(install).index.entries


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (flip(WEIGHTS_NAME), "model_weights.bin sha256 is"),
        (cut(LAYER), "layer_01.bin size is"),
        (flip("tokenizer/config.json", 2), "tokenizer/config.json sha256 is"),
    ],
)
def test_trusted_receipt_still_verifies_the_files(homed: Path, change: Callable[[Path], Any], text: str) -> None:
    change(homed)
    with pytest.raises(DigestMismatch, match=text):
        opened(homed, "trusted-receipt")
