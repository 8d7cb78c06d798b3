"""What is incomplete, damaged or unknown is refused before it is used."""

import json
import shutil
import struct
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from mference_acceptance.case import CaseFailed, Figures, require
from mference_acceptance.cases.contract import reference_arch
from mference_acceptance.context import Context
from mference_core.engine import open_model
from mference_core.errors import (
    ArchMismatch,
    DigestMismatch,
    ManifestError,
    MferenceError,
    PartialInstall,
    UnknownFlag,
    UnsupportedVersion,
    UsageError,
)
from mference_core.manifest import MANIFEST_NAME, WEIGHTS_NAME
from mference_core.placement import Dropped


def too_few_slots(context: Context) -> Figures:
    """One expert slot per layer is enough; none is refused before anything is read."""
    with context.engine("mlx", slots=1) as engine:
        session = engine.session()
        session.prefill(context.longest.ids)
        session.decode(context.longest.ids[0])
    tried = (0, -1)
    for slots in tried:
        error = _refusal(partial(context.engine, "mlx", slots=slots), f"{slots} expert slots")
        require(isinstance(error, UsageError), f"{slots} expert slots: {error}")
    return {"least": 1, "refused": len(tried)}


def _refusal(act: Callable[[], object], what: str) -> MferenceError:
    """Return the error of an act that must be refused in one line."""
    try:
        act()
    except MferenceError as error:
        require("\n" not in str(error), f"{what}: the error has several lines")
        return error
    except Exception as error:
        raise CaseFailed(f"{what} raises {type(error).__name__}: {error}") from error
    raise CaseFailed(f"{what} is accepted")


def missing_tensors(context: Context) -> Figures:
    """Each tensor a checkpoint needs is missed by name when it alone is left out."""
    folder, tried = context.fresh_folder(), 0
    source = context.reference / "mlx"
    shutil.copyfile(source / "config.json", folder / "config.json")
    plan = context.plan(reference_arch(context))
    data = (source / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, payload = json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :]
    for name in [name for name in header if name != "__metadata__"]:
        if isinstance(plan.place(_owner(name)), Dropped):
            continue
        write_safetensors(folder / "model.safetensors", {k: v for k, v in header.items() if k != name}, payload)
        error = _refusal(partial(open_model, context.family, folder, "full-sha256"), f"a checkpoint without {name}")
        require(isinstance(error, ManifestError), f"a checkpoint without {name}: {error}")
        require(_named(name, str(error)), f"a checkpoint without {name} is refused for another reason: {error}")
        tried += 1
    return {"tensors": tried}


def _owner(name: str) -> str:
    for companion in (".scales", ".biases"):
        if name.endswith(companion):
            return name.removesuffix(companion) + ".weight"
    return name


def _named(name: str, error: str) -> bool:
    """Say whether an error speaks of a tensor, under its full name or at least of its layer's experts."""
    layer = next((part for part in name.split(".") if part.isdigit()), None)
    tail = _owner(name).removesuffix(".weight").split(".")[-1]
    return tail in error or (layer is not None and f"layer {layer} " in f"{error} ")


def write_safetensors(path: Path, header: dict[str, Any], payload: memoryview) -> None:
    """Write the tensors of a header, closing up the bytes of those that are left out."""
    entries, pieces, at = dict[str, Any](), [], 0
    tensors = {k: v for k, v in header.items() if k != "__metadata__"}
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        entries[name] = {**entry, "data_offsets": [at, at + last - first]}
        pieces.append(payload[first:last])
        at += last - first
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(pieces)


def damaged_installs(context: Context) -> Figures:
    """Each unknown flag, other version, changed byte or lost part of an install is refused for what it is."""
    good = context.directory("gturbo")
    damages = _DAMAGES + (_EXPERT_DAMAGES if reference_arch(context).num_experts else ())
    for what, expected, spoil in damages:
        copy = context.fresh_folder() / "copy.gturbo"
        shutil.copytree(good, copy)
        spoil(copy)
        error = _refusal(partial(_load, context, copy), f"an install with {what}")
        require(isinstance(error, expected), f"an install with {what} is refused for another reason: {error}")
        shutil.rmtree(copy)
    _load(context, good)
    return {"damages": len(damages)}


def _load(context: Context, path: Path) -> None:
    """Open an install and touch every layer, as a load of all experts does."""
    checkpoint = open_model(context.family, path, "full-sha256")
    for layer in checkpoint.experts:
        checkpoint.touch(layer)


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((path / MANIFEST_NAME).read_text("utf-8"))
    change(values)
    (path / MANIFEST_NAME).write_text(json.dumps(values), "utf-8")


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def _layer_file(path: Path) -> Path:
    return max((path / "packed_experts").glob("layer_*.bin"))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _rename_tensor(path: Path) -> None:
    """Rename a resident tensor and record the new digest, so that only the name can give it away."""
    weights = path / WEIGHTS_NAME
    data = weights.read_bytes()
    at = data.index(b".weight")
    data = data[:at] + b".weighs" + data[at + 7 :]
    weights.write_bytes(data)
    _edit(path, lambda m: m["files"][WEIGHTS_NAME].update(sha256=sha256(data).hexdigest()))


Damage = tuple[str, type[MferenceError], Callable[[Path], object]]

_DAMAGES: tuple[Damage, ...] = (
    ("an unknown flag", UnknownFlag, lambda p: _edit(p, lambda m: m["flags"].update(notKnownYet=True))),
    ("another major version", UnsupportedVersion, lambda p: _edit(p, lambda m: m.update(versionMajor=2))),
    ("an arch key of another type", ArchMismatch, lambda p: _edit(p, lambda m: m["arch"].update(hiddenSize="64"))),
    ("an arch key missing", ArchMismatch, lambda p: _edit(p, lambda m: m["arch"].pop("hiddenSize"))),
    ("another hidden size", ManifestError, lambda p: _edit(p, lambda m: m["arch"].update(hiddenSize=128))),
    ("another expert count", ManifestError, lambda p: _edit(p, lambda m: m.update(expertsPerLayer=1))),
    ("no manifest", PartialInstall, lambda p: (p / MANIFEST_NAME).unlink()),
    ("a file nobody lists", ManifestError, lambda p: (p / "extra.bin").write_bytes(b"x")),
    ("a resident byte changed", DigestMismatch, lambda p: _flip(p / WEIGHTS_NAME, -1)),
    ("a tensor under another name", ManifestError, _rename_tensor),
)

_EXPERT_DAMAGES: tuple[Damage, ...] = (
    ("an expert byte changed", DigestMismatch, lambda p: _flip(_layer_file(p), 5)),
    ("a layer cut short", MferenceError, lambda p: _cut(_layer_file(p))),
    ("a layer lost", ManifestError, lambda p: _layer_file(p).unlink()),
)
"""What can happen only to an install with experts."""
