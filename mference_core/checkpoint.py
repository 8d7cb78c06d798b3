"""One view over the three kinds of model directory: installs (.gturbo), MLX-quantised and float safetensors."""

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

from mference_core.arch import Arch, ManifestContract
from mference_core.errors import ManifestError, MferenceError, PartialInstall
from mference_core.gturbo.model import FULL_SHA256, missing_manifest, open_gturbo
from mference_core.gturbo.verification import LayerFiles, Verification
from mference_core.jsondata import parse_object, read_capped, standard_path, typed
from mference_core.manifest import MANIFEST_NAME, RECEIPT_NAME, WEIGHTS_NAME, Manifest, read_manifest
from mference_core.placement import Dropped, InstallPlan, Resident
from mference_core.safetensors_index import INDEX_NAME, Source, read_source
from mference_core.source_weights import place_tensors, read_quant_table
from mference_core.tensors import FLOATS, INTEGERS, ExpertLayer, Weight

CONFIG_NAME, TOKENIZER_NAME = "config.json", "tokenizer.json"
CONFIG_CAP_BYTES = 1 << 20
GTURBO, MLX, HF = "gturbo", "mlx", "hf"


@frozen(kw_only=True)
class Peek:
    """What a directory says it is, before any family is loaded.

    `kind` is gturbo, mlx or hf; `spelling` the manifest's `arch.family`, `model_type` the root one of config.json,
    `config_data` the bytes of a source's config.json.
    """

    path: Path
    kind: str
    spelling: str | None = None
    model_type: str | None = None
    config: Mapping[str, Any] | None = None
    manifest: Manifest | None = None
    config_data: bytes = b""


@frozen(kw_only=True)
class Checkpoint:
    """A complete model on disk: every resident present in its logical shape, every routed layer complete.

    `digest` is that of the manifest, which covers every file, or of config and shard headers, which do not cover
    values; `touch(layer)` must be called before a layer's experts are first read, and then whoever reads an expert owes
    it the check of its layer's `proof`, if that has one. `pinned` says whether `arch` is a published one; `dropped`
    names what is unused. `verification` counts what was hashed of an install, `files` hashes its layer files ahead.
    `source_sha256` is the digest of a directory's index file, or of its one header; None for an install.
    """

    path: Path
    kind: str
    arch: Arch
    pinned: bool
    config: Mapping[str, Any] | None
    weights: Mapping[str, Weight]
    experts: Mapping[int, ExpertLayer]
    tokenizer_dir: Path | None
    digest: str
    touch: Callable[[int], None]
    dropped: Mapping[str, str]
    source_sha256: str | None = None
    verification: Verification | None = field(default=None, eq=False)
    files: LayerFiles | None = field(default=None, eq=False)


def peek(path: Path) -> Peek:
    """Say what kind of model directory `path` is.

    Raises `PartialInstall` for an unfinished install, `ManifestError` for anything that is no model directory.
    """
    path = Path(standard_path(path))
    check_directory(path)
    if (path / MANIFEST_NAME).exists():
        manifest = read_manifest(path / MANIFEST_NAME)
        kept = path / "tokenizer" / CONFIG_NAME
        data = read_capped(kept, CONFIG_CAP_BYTES, "config") if kept.exists() else None
        config = None if data is None else MappingProxyType(parse_object(data, str(kept)))
        return Peek(path=path, kind=GTURBO, spelling=manifest.spelling, config=config, manifest=manifest)
    if not (path / CONFIG_NAME).exists():
        raise _no_config(path)
    seen = peek_config(path, read_capped(path / CONFIG_NAME, CONFIG_CAP_BYTES, "config"))
    if not any(path.glob("*.safetensors")) and not (path / INDEX_NAME).exists():
        raise _no_weights(path)
    return seen


def peek_config(path: Path, data: bytes) -> Peek:
    """Say what a source is whose config.json holds `data`; `path` names it and need not be there."""
    config = parse_object(data, str(path / CONFIG_NAME))
    model_type = config.get("model_type")
    if model_type is not None:
        typed(model_type, str, f"{path / CONFIG_NAME} model_type")
    kind = HF if read_quant_table(config) is None else MLX
    return Peek(path=path, kind=kind, model_type=model_type, config=MappingProxyType(config), config_data=data)


def check_directory(path: Path) -> None:
    """Raise `ManifestError` or `PartialInstall` for a path that plainly holds no model."""
    expected = "a model directory"
    if not path.exists():
        if path.with_name(f"{path.name}.partial").is_dir():
            remedy = "run the install again"
            raise PartialInstall(what=str(path), got="half installed", expected="a finished install", remedy=remedy)
        raise ManifestError(what=str(path), got="missing", expected=expected, remedy="see 'mference install'")
    if not path.is_dir():
        if path.suffix == ".gguf":
            raise _gguf(path)
        remedy = "give the directory that holds it" if path.suffix == ".safetensors" else ""
        raise ManifestError(what=str(path), got="a file", expected=expected, remedy=remedy)
    if path.suffix == ".partial":
        remedy = "resume the install or discard it"
        raise PartialInstall(what=str(path), got="a partial install", expected="a finished one", remedy=remedy)
    try:
        names = sorted(item.name for item in path.iterdir())
    except OSError as error:
        raise ManifestError(what=str(path), got=f"unreadable ({error.strerror})", expected=expected) from error
    if not names:
        raise ManifestError(what=str(path), got="empty", expected=expected)
    if MANIFEST_NAME not in names and {WEIGHTS_NAME, "packed_experts", RECEIPT_NAME} & set(names):
        raise missing_manifest(path)


def _no_config(path: Path) -> ManifestError:
    if any(path.glob("*.gguf")):
        return _gguf(path)
    if (path / "snapshots").is_dir():
        found = sorted(item.name for item in (path / "snapshots").iterdir())
        remedy = f"give {path / 'snapshots' / (found[0] if found else 'REVISION')}"
        return ManifestError(what=str(path), got="a cache entry", expected="one of its snapshots", remedy=remedy)
    got = "without config.json" if any(path.glob("*.safetensors")) else "without manifest.json or config.json"
    return ManifestError(what=str(path), got=got, expected="an install, or a model directory of safetensors")


def _no_weights(path: Path) -> ManifestError:
    if any(path.glob("*.gguf")):
        return _gguf(path)
    if any(path.glob("*.bin")):
        return ManifestError(what=str(path), got="a checkpoint of pickled .bin files", expected="safetensors files")
    return ManifestError(what=str(path), got="without .safetensors files", expected="a model directory with weights")


def _gguf(path: Path) -> ManifestError:
    return ManifestError(
        what=str(path), got="in GGUF", expected="safetensors or an install", remedy="use the MLX or float checkpoint"
    )


def open_checkpoint(
    peek: Peek,
    contract: ManifestContract,
    plan_for: Callable[[Arch], InstallPlan],
    verify: str = FULL_SHA256,
    source: Source | None = None,
) -> Checkpoint:
    """Open what `peek` found, as the family of `contract` understands it.

    `verify` is full-sha256 or trusted-receipt, and means something for installs only. `source` gives the headers of
    a source that is elsewhere; left out, they are read from its directory. Raises `ArchMismatch`,
    `ManifestError` or `DigestMismatch`: nothing incomplete, misshapen or unknown is ever returned.
    """
    if peek.manifest is not None:
        return _open_install(peek, peek.manifest, contract, plan_for, verify)
    config = peek.config or {}
    arch = _arch_of(config, contract, peek.path)
    plan = plan_for(arch)
    source = source or read_source(peek.path)
    placed = place_tensors(source, read_quant_table(config), plan)
    _check_complete(peek.path, arch, plan, placed.residents, placed.experts)
    digest = sha256(peek.config_data)
    for shard in source.shards:
        digest.update(f"\0{shard.path.name}\0{shard.header_sha256}".encode())
    return Checkpoint(
        path=peek.path,
        kind=peek.kind,
        arch=arch,
        pinned=contract.is_pinned(arch),
        config=config,
        weights=MappingProxyType(dict(placed.residents)),
        experts=MappingProxyType(dict(placed.experts)),
        tokenizer_dir=peek.path if (peek.path / TOKENIZER_NAME).is_file() else None,
        digest=digest.hexdigest(),
        touch=_no_touch,
        dropped=MappingProxyType(dict(placed.dropped)),
        source_sha256=source.snapshot_sha256,
    )


def _no_touch(_layer: int) -> None:
    """Do nothing: a plain directory has no recorded digests to hold a layer against."""


def _arch_of(config: Mapping[str, Any], contract: ManifestContract, path: Path) -> Arch:
    try:
        values = contract.from_config(config)
    except MferenceError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        got = f"not of {contract.family} ({type(error).__name__}: {error})"
        raise ManifestError(what=str(path / CONFIG_NAME), got=got, expected="its published keys") from error
    return contract.accept(values)


def _open_install(
    peek: Peek,
    manifest: Manifest,
    contract: ManifestContract,
    plan_for: Callable[[Arch], InstallPlan],
    verify: str,
) -> Checkpoint:
    arch = contract.accept(manifest.arch)
    pinned = contract.is_pinned(arch)
    if pinned and manifest.quant is None:
        raise ManifestError(what="manifest quant", got="missing", expected="its five slots for a published shape")
    if manifest.num_layers != arch.num_layers:
        got = str(manifest.num_layers)
        raise ManifestError(what="manifest numLayers", got=got, expected=f"arch.numLayers {arch.num_layers}")
    plan = plan_for(arch)
    model = open_gturbo(peek.path, manifest, verify)
    weights, dropped = dict[str, Weight](), dict[str, str]()
    for name, weight in model.weights().items():
        place = plan.place(name)
        if isinstance(place, Dropped):
            dropped[name] = place.reason
        elif isinstance(place, Resident) and place.name == name:
            weights[name] = weight
        else:
            raise ManifestError(what=f"model_weights.bin {name}", got="unknown to the family", expected="a resident")
    experts = model.expert_layers()
    _check_complete(peek.path, arch, plan, weights, experts)
    tokenizer = peek.path / "tokenizer"
    return Checkpoint(
        path=peek.path,
        kind=peek.kind,
        arch=arch,
        pinned=pinned,
        config=peek.config,
        weights=MappingProxyType(weights),
        experts=MappingProxyType(experts),
        tokenizer_dir=tokenizer if (tokenizer / TOKENIZER_NAME).is_file() else None,
        digest=manifest.digest,
        touch=model.touch_layer,
        dropped=MappingProxyType(dropped),
        verification=model.verification,
        files=model.files,
    )


def _check_complete(
    path: Path,
    arch: Arch,
    plan: InstallPlan,
    weights: Mapping[str, Weight],
    experts: Mapping[int, ExpertLayer],
) -> None:
    """Hold what was found against the plan, name by name and shape by shape."""
    for name, shape in plan.residents.items():
        if name not in weights:
            raise ManifestError(what=f"{path} tensor {name}", got="missing", expected=f"shape {list(shape)}")
        _check_resident(f"{path} tensor {name}", weights[name], tuple(shape), integers=name in plan.integers)
    for name in weights:
        if name not in plan.residents:
            raise ManifestError(what=f"{path} tensor {name}", got="there", expected="no such tensor at this shape")
    for layer in sorted(plan.experts.keys() | experts.keys()):
        _check_layer(f"{path} layer {layer} experts", arch, plan.experts.get(layer), experts.get(layer))


def _check_resident(where: str, weight: Weight, shape: tuple[int, ...], *, integers: bool) -> None:
    if weight.shape != shape:
        raise ManifestError(what=where, got=f"of shape {list(weight.shape)}", expected=f"{list(shape)}")
    kinds = INTEGERS if integers else FLOATS
    if weight.dtype not in kinds and (integers or weight.quant is None):
        raise ManifestError(what=where, got=weight.dtype, expected=" or ".join(kinds))


def _check_layer(
    where: str, arch: Arch, shapes: Mapping[str, tuple[int, int]] | None, layer: ExpertLayer | None
) -> None:
    if layer is None or shapes is None:
        got, expected = ("missing", "those of a routed layer") if layer is None else ("there", "none in this layer")
        raise ManifestError(what=where, got=got, expected=expected)
    if layer.count != arch.num_experts:
        raise ManifestError(what=where, got=f"{layer.count} in number", expected=f"{arch.num_experts}")
    for part in layer.parts:
        if part.name not in shapes:
            continue
        rows, columns = part.shape
        logical = (rows, columns * 32 // part.quant.bits if part.quant else columns)
        if logical != tuple(shapes[part.name]):
            got = f"of shape {list(logical)}"
            raise ManifestError(what=f"{where} {part.name}", got=got, expected=f"{list(shapes[part.name])}")
