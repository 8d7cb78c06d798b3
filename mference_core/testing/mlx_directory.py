"""A synthetic MLX-quantised directory: sharded safetensors, index and config, as published checkpoints are."""

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from shutil import rmtree
from time import monotonic
from typing import Any

from attrs import frozen

from mference_core.arch import Arch
from mference_core.checkpoint import CONFIG_NAME
from mference_core.errors import InstallError, UsageError
from mference_core.install.report import InstallReport, Progress
from mference_core.install.transaction import install_errors
from mference_core.placement import ROLES
from mference_core.plugins import LoadedFamily
from mference_core.safetensors_index import INDEX_NAME
from mference_core.tensors import DTYPE_BYTES, ExpertLayer, Quant, Weight
from mference_core.testing.config_fit import fit_config
from mference_core.testing.filler import Filler
from mference_core.testing.forms import BASE_GROUP
from mference_core.testing.plan import Synthetic, part_pieces, plan_synthetic, weight_parts
from mference_core.testing.writing import Piece, Writer

SHARD_BYTES = 5 << 30
BASE = Quant(bits=4, group_size=BASE_GROUP)


@frozen(kw_only=True)
class _Stored:
    """A tensor of the directory: its bytes on demand."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Piece]]

    @property
    def size(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def write_synthetic_mlx(
    family: LoadedFamily,
    output: Path,
    *,
    arch: Arch | None = None,
    layers: int | None = None,
    seed: int = 0,
    routed_bits: int | None = None,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> InstallReport:
    """Write a directory that `install_local` turns into what `write_synthetic` writes from the same arguments.

    `config` is the config.json, without its quantisation; left out, the one of the family's reference checkpoint is
    changed to describe the arch. Raises: UsageError, ManifestError, InstallError; `output` appears complete or not.
    """
    started = monotonic()
    made = plan_synthetic(family, arch=arch, layers=layers, routed_bits=routed_bits)
    config = _config(made, config)
    tensors = _tensors(made, Filler(seed))
    shards = _shards(tensors, shard_bytes)
    total = sum(tensor.size for tensor in tensors.values())
    if output.exists():
        raise InstallError(what=str(output), got="already there", expected="a new path")
    partial = output.with_name(output.name + ".partial")
    with install_errors(output):
        partial.mkdir(parents=True)
        try:
            writer = Writer(root=partial, total_bytes=total, progress=progress, hashed=False)
            listed = dict[str, str]()
            for number, names in enumerate(shards, start=1):
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                writer.write(file, _shard({name: tensors[name] for name in names}))
                listed |= dict.fromkeys(names, file)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(listed.items()))}
            (partial / INDEX_NAME).write_text(json.dumps(index, indent=2))
            (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2))
            partial.rename(output)
        except BaseException:
            rmtree(partial, ignore_errors=True)
            raise
    return InstallReport(
        path=output,
        model_id=made.model_id,
        files=len(writer.files) + 2,
        size_bytes=sum(path.stat().st_size for path in output.iterdir()),
        resident_tensors=len(made.checkpoint.weights),
        routed_layers=len(made.checkpoint.experts),
        dropped={},
        seconds=monotonic() - started,
    )


def _config(made: Synthetic, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return config.json with the quantisation of every tensor."""
    if config is None:
        if made.forms.config is None:
            name = made.family.family.name
            raise UsageError(
                what=f"config of family {name}", got="unknown", expected="a reference checkpoint or config"
            )
        config = fit_config(made.forms.config, made.family.contract, made.arch)
    quants = {name: weight.quant for name, weight in made.checkpoint.weights.items() if weight.quant is not None}
    for number, layer in made.checkpoint.experts.items():
        roles = {part.name: part.quant for part in layer.parts if part.quant is not None}
        quants |= {made.forms.stack(role, number, made.plan): quant for role, quant in roles.items()}
    overrides = {
        name.removesuffix(".weight"): {"bits": quant.bits, "group_size": quant.group_size}
        for name, quant in quants.items()
        if quant != BASE
    }
    table = {"bits": BASE.bits, "group_size": BASE.group_size, "mode": "affine", **overrides}
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    return {**kept, "quantization": table}


def _tensors(made: Synthetic, filler: Filler) -> dict[str, _Stored]:
    """Return every stored tensor by name, in name order."""
    found = dict[str, _Stored]()
    for weight in made.checkpoint.weights.values():
        found |= _resident(made, filler, weight)
    for number, layer in made.checkpoint.experts.items():
        for role in ROLES:
            found |= _stack(filler, layer, role, made.forms.stack(role, number, made.plan))
    return dict(sorted(found.items()))


def _resident(made: Synthetic, filler: Filler, weight: Weight) -> dict[str, _Stored]:
    stem, quant = weight.name.removesuffix(".weight"), weight.quant
    pieces = weight_parts(made, filler, weight)
    if quant is None:
        return {weight.name: _Stored(dtype=weight.dtype, shape=weight.shape, pieces=pieces["data"])}
    words = (*weight.shape[:-1], weight.shape[-1] * quant.bits // 32)
    groups = (*weight.shape[:-1], weight.shape[-1] // quant.group_size)
    return {
        weight.name: _Stored(dtype="U32", shape=words, pieces=pieces["data"]),
        f"{stem}.scales": _Stored(dtype="BF16", shape=groups, pieces=pieces["scales"]),
        f"{stem}.biases": _Stored(dtype="BF16", shape=groups, pieces=pieces["biases"]),
    }


def _stack(filler: Filler, layer: ExpertLayer, role: str, name: str) -> dict[str, _Stored]:
    def pieces(part: str) -> Callable[[], Iterator[Piece]]:
        return lambda: (piece for e in range(layer.count) for piece in part_pieces(filler, layer, e, part))

    stem = name.removesuffix(".weight")
    names = {role: name, f"{role}_scales": f"{stem}.scales", f"{role}_biases": f"{stem}.biases"}
    return {
        names[part.name]: _Stored(dtype=part.dtype, shape=(layer.count, *part.shape), pieces=pieces(part.name))
        for part in layer.parts
        if part.name in names
    }


def _shards(tensors: Mapping[str, _Stored], shard_bytes: int) -> list[list[str]]:
    """Split names, in order, into files of at most `shard_bytes` each where a single tensor is not larger."""
    shards, held = list[list[str]](), 0
    for name, tensor in tensors.items():
        if not shards or held + tensor.size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += tensor.size
    return shards


def _shard(tensors: Mapping[str, _Stored]) -> Iterator[Piece]:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.size
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield from tensor.pieces()
