"""packed_experts/layout.json: where each expert of each layer lies, and its nine sub-tensors (gturbo-format 5, 6)."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from attrs import frozen

from mference_core.errors import ManifestError
from mference_core.gturbo import MIN_PAGE_BYTES, page_up
from mference_core.jsondata import member, parse_object, size_member, typed
from mference_core.placement import ROLES
from mference_core.tensors import ExpertPart, Quant

LAYOUT_CAP_BYTES = 64 << 20
PART_NAMES = tuple(role + suffix for role in ROLES for suffix in ("", "_scales", "_biases"))


@frozen(kw_only=True)
class SubTensor:
    """One sub-tensor of an expert: `offset` in its blob and `size` in bytes, `shape` unpacked, `bits` of codes."""

    name: str
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    bits: int | None = None


@frozen(kw_only=True)
class LayerLayout:
    """One layer file: `offsets[e]` is where expert `e` starts; all experts share `parts`. Empty when not routed."""

    file: str
    offsets: tuple[int, ...] = ()
    parts: tuple[SubTensor, ...] = ()

    @property
    def expert_parts(self) -> tuple[ExpertPart, ...]:
        """The parts with their stored shapes (packed words for codes)."""
        named = {part.name: part for part in self.parts}
        return tuple(_stored(part, named) for part in self.parts)


@frozen(kw_only=True)
class Layout:
    """The whole file; `layers` by position, `expert_stride` in bytes."""

    expert_stride: int
    experts_per_layer: int
    layers: tuple[LayerLayout, ...]


def layer_file(layer: int) -> str:
    """Return the name of a layer's file."""
    return f"layer_{layer:02d}.bin"


def _stored(part: SubTensor, named: Mapping[str, SubTensor]) -> ExpertPart:
    if part.bits is None:
        return ExpertPart(name=part.name, dtype=part.dtype, shape=part.shape, size=part.size)
    rows, columns = part.shape
    quant = Quant(bits=part.bits, group_size=columns // named[part.name + "_scales"].shape[1])
    shape = (rows, columns * part.bits // 32)
    return ExpertPart(name=part.name, dtype=part.dtype, shape=shape, size=part.size, quant=quant)


def plan_parts(shapes: Mapping[str, tuple[int, int]], quants: Mapping[str, Quant]) -> tuple[SubTensor, ...]:
    """Lay out one expert's nine sub-tensors without padding; `shapes` are [out, in] per role."""
    parts, offset = [], 0
    for role in ROLES:
        (rows, columns), quant = shapes[role], quants[role]
        groups = (rows, columns // quant.group_size)
        sizes = (rows * columns * quant.bits // 8, 2 * prod(groups), 2 * prod(groups))
        for suffix, size in zip(("", "_scales", "_biases"), sizes, strict=True):
            codes = not suffix
            part = SubTensor(
                name=role + suffix,
                offset=offset,
                size=size,
                dtype="U32" if codes else "BF16",
                shape=(rows, columns) if codes else groups,
                bits=quant.bits if codes else None,
            )
            parts.append(part)
            offset += size
    return tuple(parts)


def plan_layout(layers: Mapping[int, tuple[SubTensor, ...]], *, num_layers: int, count: int) -> Layout:
    """Return the layout of `count` experts per routed layer; the widest layer sets the one stride."""
    stride = page_up(max((sum(part.size for part in parts) for parts in layers.values()), default=0))
    planned = [
        LayerLayout(file=layer_file(i), offsets=tuple(e * stride for e in range(count)), parts=layers[i])
        if i in layers
        else LayerLayout(file=layer_file(i))
        for i in range(num_layers)
    ]
    layout = Layout(expert_stride=stride, experts_per_layer=count if layers else 0, layers=tuple(planned))
    check_layout(layout)
    return layout


def encode_layout(layout: Layout) -> bytes:
    """Return layout.json; raises `ManifestError` when it would pass 64 MiB."""
    layers = []
    for position, layer in enumerate(layout.layers):
        tensors = {part.name: _encode_part(part) for part in layer.parts}
        experts = [
            {"expert": e, "offset": offset, "size": layout.expert_stride, "tensors": tensors}
            for e, offset in enumerate(layer.offsets)
        ]
        layers.append({"layer": position, "file": layer.file, "experts": experts})
    top = {
        "expertStride": layout.expert_stride,
        "numLayers": len(layout.layers),
        "expertsPerLayer": layout.experts_per_layer,
        "layers": layers,
    }
    data = json.dumps(top, separators=(",", ":"), sort_keys=True).encode()
    if len(data) > LAYOUT_CAP_BYTES:
        raise ManifestError(what="layout.json", got=f"{len(data)} bytes", expected=f"at most {LAYOUT_CAP_BYTES}")
    return data


def _encode_part(part: SubTensor) -> dict[str, Any]:
    values: dict[str, Any] = {
        "offset": part.offset,
        "size": part.size,
        "dtype": part.dtype,
        "shape": list(part.shape),
    }
    return values if part.bits is None else {**values, "bits": part.bits}


def decode_layout(data: bytes) -> Layout:
    """Return the layout in `data`, fully checked, or raise a `ManifestError` naming layer, expert and tensor."""
    top = parse_object(data, "layout.json")
    stride = size_member(top, "expertStride", "layout.json")
    count = size_member(top, "expertsPerLayer", "layout.json")
    layers = member(top, "layers", list, "layout.json")
    if size_member(top, "numLayers", "layout.json") != len(layers):
        raise _bad("numLayers", str(top["numLayers"]), f"its {len(layers)} layers")
    layout = Layout(
        expert_stride=stride,
        experts_per_layer=count,
        layers=tuple(_decode_layer(layer, i, count, stride) for i, layer in enumerate(layers)),
    )
    check_layout(layout)
    return layout


def _decode_layer(value: Any, position: int, count: int, stride: int) -> LayerLayout:
    where = f"layout.json layer {position}"
    layer = typed(value, dict, where)
    if size_member(layer, "layer", where) != position:
        raise _bad(f"layer at position {position}", f"layer {layer['layer']}", "layers in order")
    file, experts = member(layer, "file", str, where), member(layer, "experts", list, where)
    if file not in (layer_file(position), f"layer_{position}.bin"):
        raise _bad(f"layer {position} file", repr(file), layer_file(position))
    if not experts:
        return LayerLayout(file=file)
    if len(experts) != count:
        raise _bad(f"layer {position} experts", str(len(experts)), f"expertsPerLayer {count}")
    offsets, tensors = dict[int, int](), None
    for ordinal, item in enumerate(experts):
        ident, offset, table = _decode_expert(item, ordinal, f"{where} expert {ordinal}", count, stride)
        if ident in offsets:
            raise _bad(f"layer {position} expert id {ident}", "there twice", f"each id from 0 to {count - 1} once")
        if tensors is None:
            tensors = table
        elif table != tensors:
            raise _bad(f"layer {position} expert {ident} tensors", "unlike the first's", "one table per layer")
        offsets[ident] = offset
    parts = _decode_parts(tensors or {}, where)
    return LayerLayout(file=file, offsets=tuple(offsets[e] for e in range(count)), parts=parts)


def _decode_expert(item: Any, ordinal: int, here: str, count: int, stride: int) -> tuple[int, int, dict[str, Any]]:
    expert = typed(item, dict, here)
    ident = size_member(expert, "expert", here) if "expert" in expert else ordinal
    for key in ("expert", "physicalRank"):
        if key in expert and size_member(expert, key, here) >= count:
            raise ManifestError(what=f"{here} {key}", got=str(expert[key]), expected=f"an integer under {count}")
    size = size_member(expert, "size", here)
    if size != stride:
        raise ManifestError(what=f"{here} size", got=str(size), expected=f"expertStride {stride}")
    return ident, size_member(expert, "offset", here), member(expert, "tensors", dict, here)


def _decode_parts(tensors: Mapping[str, Any], where: str) -> tuple[SubTensor, ...]:
    if set(tensors) != set(PART_NAMES):
        odd = ", ".join(sorted(set(tensors) ^ set(PART_NAMES)))
        raise ManifestError(what=f"{where} tensors", got=f"wrong in {odd}", expected="gate, up, down and companions")
    parts = []
    for name in PART_NAMES:
        here = f"{where} {name}"
        value = typed(tensors[name], dict, here)
        shape = tuple(typed(n, int, f"{here} shape") for n in member(value, "shape", list, here))
        part = SubTensor(
            name=name,
            offset=size_member(value, "offset", here),
            size=size_member(value, "size", here),
            dtype=member(value, "dtype", str, here),
            shape=shape,
            bits=size_member(value, "bits", here) if "bits" in value else None,
        )
        parts.append(part)
    return tuple(_check_part(part, parts, where) for part in parts)


def _check_part(part: SubTensor, parts: list[SubTensor], where: str) -> SubTensor:
    """Hold one sub-tensor's dtype, shape and size together; return it with its bits filled in."""
    here = f"{where} {part.name}"
    if len(part.shape) != 2 or min(part.shape) < 1:
        raise ManifestError(what=f"{here} shape", got=str(list(part.shape)), expected="two axes above 0")
    role, _, companion = part.name.partition("_")
    dtype = "BF16" if companion else "U32"
    if part.dtype != dtype:
        raise ManifestError(what=f"{here} dtype", got=part.dtype, expected=dtype)
    if companion:
        rows, columns = next(p.shape for p in parts if p.name == role)[:2]
        twin = next(p.shape for p in parts if p.name == role + "_scales")
        groups = part.shape[1]
        if part.shape != twin or part.shape[0] != rows or columns % groups or columns // groups not in (32, 64, 128):
            expected = f"[{rows}, {columns} in groups of 32, 64 or 128]"
            raise ManifestError(what=f"{here} shape", got=str(list(part.shape)), expected=expected)
        if part.size != 2 * prod(part.shape):
            raise ManifestError(what=f"{here} size", got=str(part.size), expected=f"{2 * prod(part.shape)} bytes")
        return part
    bits = part.size * 8 // prod(part.shape)
    if bits not in (2, 4, 8) or part.size * 8 != bits * prod(part.shape) or part.bits not in (None, bits):
        got = f"{part.size} bytes" + (f" at {part.bits} bits" if part.bits else "")
        raise ManifestError(what=f"{here} size", got=got, expected=f"{list(part.shape)} packed at 2, 4 or 8 bits")
    return SubTensor(name=part.name, offset=part.offset, size=part.size, dtype=dtype, shape=part.shape, bits=bits)


def check_layout(layout: Layout) -> None:
    """Check what a writer must never get wrong; raises `ManifestError`.

    The stride is page-aligned; every expert of a layer has an own place at a multiple of it inside the file;
    sub-tensors neither overlap nor leave the blob.
    """
    stride, count = layout.expert_stride, layout.experts_per_layer
    routed = [(i, layer) for i, layer in enumerate(layout.layers) if layer.parts]
    if stride % MIN_PAGE_BYTES or (routed and not stride):
        raise _bad("expertStride", str(stride), f"a multiple of {MIN_PAGE_BYTES}")
    for position, layer in routed:
        if sorted(layer.offsets) != [e * stride for e in range(count)]:
            wrong = next(
                (offset for offset in layer.offsets if offset % stride or offset >= count * stride), "shared by two"
            )
            raise _bad(f"layer {position} expert offset", str(wrong), f"each multiple of {stride} below {count} once")
        reached = 0
        for part in sorted(layer.parts, key=lambda part: part.offset):
            if part.offset < reached or part.offset + part.size > stride:
                span = f"{part.offset} to {part.offset + part.size}"
                raise _bad(f"layer {position} {part.name} bytes", span, f"an own span inside {stride} bytes")
            reached = part.offset + part.size


def _bad(what: str, got: str, expected: str) -> ManifestError:
    return ManifestError(what=f"layout.json {what}", got=got, expected=expected)
