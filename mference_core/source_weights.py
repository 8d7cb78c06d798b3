"""Tensors of a Hugging Face or MLX directory under their canonical names, quantised triples joined."""

from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

from mference_core.errors import ManifestError
from mference_core.jsondata import member, typed
from mference_core.placement import IDENTITY, Dropped, InstallPlan, Resident, Routed, Transform
from mference_core.safetensors_index import Source, SourceTensor
from mference_core.source_experts import FoundExperts
from mference_core.tensors import FLOATS, UNSUPPORTED, ExpertLayer, Quant, Weight

BITS = (2, 4, 8)
GROUP_SIZES = (32, 64, 128)
# An override may leave the base group only at this width, for these groups (gturbo-format 13).
_OVERRIDE_BITS, _OVERRIDE_GROUPS = 2, (32, 64)
_COMPANIONS = (".scales", ".biases")


@frozen(kw_only=True)
class QuantTable:
    """The `quantization` object of a config.json: a base and per-tensor overrides (None: kept in float)."""

    base: Quant
    overrides: Mapping[str, Quant | None] = field(factory=dict)

    def of(self, name: str) -> Quant | None:
        """Return what the table says of a tensor, given without `.weight`."""
        return self.overrides.get(name, self.base)

    @property
    def honored(self) -> int:
        """Count of override objects: the manifest's `bitWidthOverridesHonored`."""
        return sum(quant is not None for quant in self.overrides.values())


def read_quant_table(config: Mapping[str, Any]) -> QuantTable | None:
    """Return the quantisation table of a config.json, or None for a float checkpoint.

    Raises `ManifestError` on a mode, width or group this program does not read.
    """
    values = config.get("quantization", config.get("quantization_config"))
    if values is None:
        return None
    where = "config.json quantization"
    typed(values, dict, where)
    if "quantization" not in config and "quant_method" in values:
        raise ManifestError(
            what=f"{where} quant_method", got=repr(values["quant_method"]), expected="none", remedy=UNSUPPORTED
        )
    base = _quant(values, where)
    overrides = dict[str, Quant | None]()
    for name, value in values.items():
        if isinstance(value, dict):
            quant = _quant({"mode": values.get("mode", "affine"), **value}, f"{where} {name}")
            if quant.group_size != base.group_size and not (
                quant.bits == _OVERRIDE_BITS and quant.group_size in _OVERRIDE_GROUPS
            ):
                what, got = f"{where} {name} group_size", str(quant.group_size)
                raise ManifestError(what=what, got=got, expected=f"{base.group_size}, or 32 or 64 at 2 bits")
            overrides[name] = quant
        elif isinstance(value, bool):
            overrides[name] = base if value else None
    return QuantTable(base=base, overrides=overrides)


def _quant(values: Mapping[str, Any], where: str) -> Quant:
    mode = values.get("mode", "affine")
    if mode != "affine":
        raise ManifestError(what=f"{where} mode", got=repr(mode), expected="'affine'", remedy=UNSUPPORTED)
    bits, group = member(values, "bits", int, where), member(values, "group_size", int, where)
    if bits not in BITS:
        raise ManifestError(what=f"{where} bits", got=str(bits), expected="2, 4 or 8", remedy=UNSUPPORTED)
    if group not in GROUP_SIZES:
        raise ManifestError(what=f"{where} group_size", got=str(group), expected="32, 64 or 128", remedy=UNSUPPORTED)
    return Quant(bits=bits, group_size=group)


@frozen(kw_only=True)
class SourceWeights:
    """A directory's tensors in place: residents by canonical name, experts by layer, names left out with reasons."""

    residents: Mapping[str, Weight]
    experts: Mapping[int, ExpertLayer]
    dropped: Mapping[str, str]


def place_tensors(source: Source, table: QuantTable | None, plan: InstallPlan) -> SourceWeights:
    """Give every tensor of a source its place, or raise `ManifestError` naming the first that has none."""
    residents, dropped = dict[str, Weight](), dict[str, str]()
    routed = dict[int, FoundExperts]()
    for name, tensor in source.tensors.items():
        if _base_of(name, source) is not None:
            continue
        place = plan.place(name)
        match place:
            case None:
                raise _bad(tensor, "unknown to the family", "a name of the checkpoint")
            case Dropped():
                dropped[name] = place.reason
            case Resident():
                if place.name in residents:
                    raise _bad(tensor, "a second tensor for " + place.name, "one tensor per place")
                weight = _weight(place.name, tensor, source, table)
                residents[place.name] = _transformed(weight, place.transform, tensor, plan)
            case Routed():
                weight = _weight(name, tensor, source, table)
                where = f"{source.directory} layer {place.layer} experts"
                twice = routed.setdefault(place.layer, FoundExperts(where)).add(weight, place)
                if twice is not None:
                    raise _bad(tensor, f"a second tensor for layer {place.layer} {twice}", "one tensor per place")
    experts = {layer: found.layer(layer, plan.experts.get(layer)) for layer, found in sorted(routed.items())}
    return SourceWeights(residents=residents, experts=experts, dropped=dropped)


def _base_of(name: str, source: Source) -> str | None:
    """Return the `.weight` a companion belongs to, if `name` is one."""
    stem, dot, kind = name.rpartition(".")
    weight = stem + ".weight"
    return weight if dot + kind in _COMPANIONS and weight in source.tensors else None


def _weight(name: str, tensor: SourceTensor, source: Source, table: QuantTable | None) -> Weight:
    """Join a tensor with its companions; `name` is the one the weight gets."""
    stem = tensor.name.removesuffix(".weight")
    companions = [source.tensors[stem + kind] for kind in _COMPANIONS if stem + kind in source.tensors]
    if tensor.dtype != "U32" or stem == tensor.name:
        if companions and stem != tensor.name:
            raise _bad(companions[0], f"beside a {tensor.dtype} weight", "packed U32 codes")
        if tensor.dtype == "U32":
            raise _bad(tensor, "U32 without the suffix .weight", "a quantised .weight or a plain dtype")
        return Weight(name=name, dtype=tensor.dtype, shape=tensor.shape, data=tensor.span)
    quant = table.of(stem) if table else None
    if quant is None:
        raise _bad(tensor, "U32", "a float tensor, as config.json quantization says")
    if len(companions) != len(_COMPANIONS):
        missing = next(kind for kind in _COMPANIONS if stem + kind not in source.tensors)
        raise _bad(tensor, f"without {missing}", "both .scales and .biases")
    if len(tensor.shape) < 2:
        raise _bad(tensor, f"of shape {list(tensor.shape)}", "rows of packed codes")
    shape = (*tensor.shape[:-1], tensor.shape[-1] * 32 // quant.bits)
    groups = (*shape[:-1], shape[-1] // quant.group_size)
    kind = _companion_dtype(companions)
    for companion in companions:
        if companion.shape != groups or shape[-1] % quant.group_size:
            expected = f"{list(groups)} for {list(shape)} at {quant.bits} bits in groups of {quant.group_size}"
            raise _bad(companion, f"of shape {list(companion.shape)}", expected)
    scales, biases = (companion.span for companion in companions)
    return Weight(
        name=name,
        dtype="U32",
        shape=shape,
        data=tensor.span,
        quant=quant,
        scales=scales,
        biases=biases,
        companions=kind,
    )


def _transformed(weight: Weight, transform: Transform, tensor: SourceTensor, plan: InstallPlan) -> Weight:
    """Return a resident as the rest of the program sees it, whatever way this source states it."""
    if transform == IDENTITY:
        return weight
    if weight.dtype not in FLOATS:
        raise _bad(tensor, weight.dtype, " or ".join(FLOATS))
    shape = weight.shape
    if transform.stored is not None:
        if shape != transform.stored:
            raise _bad(tensor, f"of shape {list(shape)}", f"{list(transform.stored)}")
        shape = plan.residents.get(weight.name, shape)
    return evolve(weight, shape=tuple(shape), add=transform.add)


def _companion_dtype(companions: list[SourceTensor]) -> str:
    first = companions[0]
    for companion in companions:
        if companion.dtype not in FLOATS:
            raise _bad(companion, companion.dtype, " or ".join(FLOATS))
        if companion.dtype != first.dtype:
            raise _bad(companion, companion.dtype, f"{first.dtype}, as {first.name}")
    return first.dtype


def _bad(tensor: SourceTensor, got: str, expected: str) -> ManifestError:
    return ManifestError(what=f"{tensor.span.path} tensor {tensor.name}", got=got, expected=expected)
