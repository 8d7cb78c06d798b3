"""What an install of a quantised checkpoint consists of, byte for byte, before anything is written."""

from collections.abc import Iterator, Mapping
from hashlib import sha256

from attrs import frozen

from mference_core.checkpoint import HF, Checkpoint, Peek
from mference_core.errors import InstallError
from mference_core.gturbo.index import Resident, ResidentIndex, encode_index, plan_index
from mference_core.gturbo.layout import PART_NAMES, Layout, encode_layout, plan_layout, plan_parts
from mference_core.gturbo.model import EXPERTS_DIR
from mference_core.install.ranges import CHUNK_BYTES, Copy, RangePlan, plan_ranges
from mference_core.manifest import (
    ABSENT,
    SLOT_DEFAULT_BITS,
    SLOT_ROWS,
    UNQUANTIZED,
    WEIGHTS_NAME,
    QuantSlot,
    affine,
    check_quant,
)
from mference_core.placement import ROLES, InstallPlan
from mference_core.placement import Resident as ResidentPlace
from mference_core.tensors import ExpertLayer, Quant, Span, Weight

BASE_GROUP = 64
INSTALL_COMPANIONS = "BF16"
_FLOAT_REMEDY = "quantise it first to 4 bits in groups of 64, for example with 'mlx_lm.convert --quantize'"


@frozen(kw_only=True)
class Outputs:
    """The planned files: resident weights in order, index and layout with their bytes, quantisation rows."""

    weights: tuple[Weight, ...]
    index: ResidentIndex
    index_image: bytes
    layout: Layout
    layout_image: bytes
    quant: Mapping[str, QuantSlot]

    @property
    def total_bytes(self) -> int:
        """Bytes of index, payload, layer files and layout; tokenizer files and metadata not counted."""
        routed = sum(bool(layer.parts) for layer in self.layout.layers)
        experts = routed * self.layout.experts_per_layer * self.layout.expert_stride
        return self.index.file_size + experts + len(self.layout_image)


def check_quantised(found: Peek) -> None:
    """Raise `InstallError` for a source in float: an install holds quantised weights."""
    if found.kind == HF:
        raise InstallError(what=str(found.path), got="in float", expected="quantised weights", remedy=_FLOAT_REMEDY)


def plan_outputs(checkpoint: Checkpoint, plan: InstallPlan) -> Outputs:
    """Lay out the install of a checkpoint; raises `ManifestError` or `InstallError` for what the format cannot hold."""
    _check_companions(checkpoint)
    _check_values(checkpoint)
    weights = sorted(checkpoint.weights.values(), key=lambda weight: _order(weight, plan))
    index = plan_index([Resident(name=w.name, dtype=w.dtype, shape=w.shape, quant=w.quant) for w in weights])
    parts = {number: plan_parts(plan.experts[number], _quants(layer)) for number, layer in checkpoint.experts.items()}
    count = checkpoint.arch.num_experts
    layout = plan_layout(parts, num_layers=checkpoint.arch.num_layers, count=count)
    return Outputs(
        weights=tuple(weights),
        index=index,
        index_image=encode_index(index),
        layout=layout,
        layout_image=encode_layout(layout),
        quant=_quant_rows(checkpoint, plan),
    )


def _check_companions(checkpoint: Checkpoint) -> None:
    kinds = {weight.name: weight.companions for weight in checkpoint.weights.values() if weight.quant}
    for layer in checkpoint.experts.values():
        kinds |= {f"layer {layer.layer} {p.name}": p.dtype for p in layer.parts if p.name not in ROLES}
    for name, kind in kinds.items():
        if kind != INSTALL_COMPANIONS:
            raise InstallError(
                what=f"companions of {name}",
                got=kind,
                expected=f"{INSTALL_COMPANIONS}, the only kind an install holds",
                remedy="run the directory as it is",
            )


def _check_values(checkpoint: Checkpoint) -> None:
    """Refuse a source whose values would have to be changed: an install moves bytes."""
    for weight in checkpoint.weights.values():
        if weight.add:
            raise InstallError(
                what=f"tensor {weight.name}",
                got=f"stored less {weight.add:g}",
                expected="whole, as in a quantised conversion",
                remedy="run the directory as it is",
            )


def _order(weight: Weight, plan: InstallPlan) -> tuple[tuple[int, int, int], str]:
    place = plan.place(weight.name)
    if not isinstance(place, ResidentPlace):
        raise InstallError(what=f"tensor {weight.name}", got="without a place", expected="its place in an install")
    return place.order, weight.name


def _quants(layer: ExpertLayer) -> dict[str, Quant]:
    quants = {part.name: part.quant for part in layer.parts if part.name in ROLES}
    for name, quant in quants.items():
        if quant is None:
            raise InstallError(what=f"layer {layer.layer} {name} experts", got="in float", expected="quantised experts")
    return {name: quant for name, quant in quants.items() if quant is not None}


def _quant_rows(checkpoint: Checkpoint, plan: InstallPlan) -> dict[str, QuantSlot]:
    """Return the manifest's five rows: absent without a tensor; default bits, or unquantised, for a plain one."""
    rows = dict.fromkeys(SLOT_ROWS, ABSENT)
    for slot, name in plan.quant_slots.items():
        quant = checkpoint.weights[name].quant
        plain = UNQUANTIZED if slot in plan.plain_slots else affine(SLOT_DEFAULT_BITS[slot])
        rows[slot] = affine(quant.bits, quant.group_size) if quant else plain
    for layer in checkpoint.experts.values():
        # Width of the first routed layer; a narrower group of its gate is read from the layout, not from here.
        rows["routedExpert"] = affine(_quants(layer)["gate"].bits)
        break
    check_quant(rows)
    return rows


def expert_spans(layer: ExpertLayer, expert: int) -> Iterator[Span]:
    """Return the source bytes of one expert's sub-tensors, in the order of a blob."""
    sizes, found = {part.name: part.size for part in layer.parts}, dict[str, Span]()
    for extent in layer.extents(expert):
        offset = extent.span.offset
        for name in extent.parts:
            found[name] = Span(path=extent.span.path, offset=offset, size=sizes[name])
            offset += sizes[name]
    return (found[name] for name in PART_NAMES)


def plan_requests(checkpoint: Checkpoint, outputs: Outputs, chunk_bytes: int = CHUNK_BYTES) -> RangePlan:
    """Return the requests that fill the payload files; index, layout and tokenizer are written without them."""
    stride, count = outputs.layout.expert_stride, outputs.layout.experts_per_layer
    layers = {n: f"{EXPERTS_DIR}/{outputs.layout.layers[n].file}" for n in sorted(checkpoint.experts)}
    sizes = {WEIGHTS_NAME: outputs.index.file_size, **dict.fromkeys(layers.values(), stride * count)}
    copies = [*_resident_copies(outputs), *_expert_copies(checkpoint, layers, stride)]
    return plan_ranges(copies, sizes, sha256(outputs.index_image).hexdigest(), chunk_bytes)


def _resident_copies(outputs: Outputs) -> Iterator[Copy]:
    at = outputs.index.index_size
    for weight in outputs.weights:
        for span in (weight.data, weight.scales, weight.biases):
            if span is not None:
                yield from _copy(span, WEIGHTS_NAME, at)
                at += span.size


def _expert_copies(checkpoint: Checkpoint, layers: Mapping[int, str], stride: int) -> Iterator[Copy]:
    for number, file in layers.items():
        layer = checkpoint.experts[number]
        for expert in range(layer.count):
            at = expert * stride
            for span in expert_spans(layer, expert):
                yield from _copy(span, file, at)
                at += span.size


def _copy(span: Span, path: str, offset: int) -> Iterator[Copy]:
    if span.size:
        yield Copy(shard=span.path.name, offset=span.offset, size=span.size, dest_path=path, dest_offset=offset)
