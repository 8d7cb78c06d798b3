"""Installing moves bytes and changes none."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

from mference_acceptance.case import Figures, require
from mference_acceptance.context import Context
from mference_core.checkpoint import Checkpoint
from mference_core.engine import open_model
from mference_core.install import install_local
from mference_core.manifest import RECEIPT_NAME
from mference_core.tensors import ExpertLayer, Span, Weight

POLICIES = ("full-sha256", "trusted-receipt")


def install_round_trip(context: Context) -> Figures:
    """Every value of the quantised source is in its install byte for byte, and a second install equals the first."""
    source = open_model(context.family, context.directory("mlx"), POLICIES[0])
    install = context.directory("gturbo")
    for policy in POLICIES:
        made = open_model(context.family, install, policy)
        require(made.arch == source.arch, f"opened under {policy} the install has another arch than its source")
        tensors, size = _compare(source, made, policy)
    again = context.fresh_folder() / "again.gturbo"
    install_local(context.directory("mlx"), again, context.family.contract, context.plan)
    first, second = _digests(install), _digests(again)
    require(first.keys() == second.keys(), f"a second install has other files: {sorted(first.keys() ^ second.keys())}")
    other = [name for name in first if first[name] != second[name]]
    require(not other, f"a second install differs from the first in {', '.join(other)}")
    return {"tensors": tensors, "bytes": size, "files": len(first), "policies": ", ".join(POLICIES)}


def _compare(source: Checkpoint, made: Checkpoint, policy: str) -> tuple[int, int]:
    """Hold an install against its source; return the numbers of stored tensors and of bytes."""
    want, got = dict(_stored(source)), dict(_stored(made))
    lost = sorted(want.keys() ^ got.keys())
    require(not lost, f"source and install disagree on {', '.join(lost[:3])}")
    size = 0
    for name, read in want.items():
        data = read()
        require(got[name]() == data, f"{name} of the install ({policy}) is not what the source has, byte for byte")
        size += len(data)
    return len(want), size


def _stored(checkpoint: Checkpoint) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield what a checkpoint stores, named and with kind, shape and quantisation in the name, and its bytes."""
    for weight in checkpoint.weights.values():
        yield from _resident(weight)
    for layer in checkpoint.experts.values():
        for expert in range(layer.count):
            checkpoint.touch(layer.layer)
            yield from _expert(layer, expert)


def _resident(weight: Weight) -> Iterator[tuple[str, Callable[[], bytes]]]:
    kind = f"{weight.dtype} {list(weight.shape)}" + (f" {weight.quant} {weight.companions}" if weight.quant else "")
    for what, span in (("values", weight.data), ("scales", weight.scales), ("biases", weight.biases)):
        if span is not None:
            yield f"tensor {weight.name} ({kind}) {what}", lambda span=span: _read(span)  # type: ignore[misc]


def _expert(layer: ExpertLayer, expert: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    parts = {part.name: part for part in layer.parts}
    for extent in layer.extents(expert):
        offset = extent.span.offset
        for name in extent.parts:
            part = parts[name]
            span = Span(path=extent.span.path, offset=offset, size=part.size)
            kind = f"{part.dtype} {list(part.shape)}" + (f" {part.quant}" if part.quant else "")
            yield f"layer {layer.layer} expert {expert} {name} ({kind})", lambda span=span: _read(span)  # type: ignore[misc]
            offset += part.size


def _read(span: Span) -> bytes:
    with span.path.open("rb") as file:
        file.seek(span.offset)
        return file.read(span.size)


def _digests(install: Path) -> dict[str, str]:
    """Return the digest of each file but the receipt, which says where and when."""
    files = (path for path in install.rglob("*") if path.is_file() and path.name != RECEIPT_NAME)
    return {path.relative_to(install).as_posix(): sha256(path.read_bytes()).hexdigest() for path in sorted(files)}
