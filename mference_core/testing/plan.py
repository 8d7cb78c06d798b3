"""A checkpoint of any family and size as a plan: every tensor's form and shape, and its bytes on demand."""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from mference_core.arch import Arch
from mference_core.checkpoint import MLX, Checkpoint
from mference_core.errors import UsageError
from mference_core.gturbo.layout import LayerLayout, plan_parts
from mference_core.install.outputs import Outputs, plan_outputs
from mference_core.placement import InstallPlan
from mference_core.plugins import LoadedFamily
from mference_core.tensors import DTYPE_BYTES, ExpertLayer, Extent, Quant, Span, Weight
from mference_core.testing.filler import Filler
from mference_core.testing.forms import Form, Forms, read_forms
from mference_core.testing.writing import Piece

NOWHERE = Path("synthetic")
"""The file of tensors that are on no disk yet."""


@frozen(kw_only=True)
class Synthetic:
    """A checkpoint of a family that could be written: `outputs` says the files of its install, byte for byte."""

    family: LoadedFamily
    arch: Arch
    plan: InstallPlan
    forms: Forms
    checkpoint: Checkpoint
    outputs: Outputs

    @property
    def model_id(self) -> str:
        """What the checkpoint calls itself."""
        return f"synthetic/{self.family.family.name}"


def plan_synthetic(
    family: LoadedFamily, *, arch: Arch | None = None, layers: int | None = None, routed_bits: int | None = None
) -> Synthetic:
    """Plan a checkpoint of `arch`, by default the family's first pinned one, cut to its first `layers`.

    `routed_bits` is the width of experts' codes, by default the family's. Raises: UsageError, ManifestError.
    """
    whole = _pinned(family) if arch is None else arch
    arch = _cut(whole, layers)
    plan: InstallPlan = family.ask("mference_install_plan", arch=arch)
    forms = read_forms(family)
    checkpoint = Checkpoint(
        path=NOWHERE,
        kind=MLX,
        arch=arch,
        pinned=family.contract.is_pinned(arch),
        config=None,
        weights={name: _weight(name, shape, forms.of(name, shape, plan)) for name, shape in plan.residents.items()},
        experts={
            layer: _experts(layer, arch.num_experts, shapes, _expert_forms(forms, layer, whole, shapes, routed_bits))
            for layer, shapes in plan.experts.items()
        },
        tokenizer_dir=None,
        digest="",
        touch=lambda _: None,
        dropped={},
    )
    return Synthetic(
        family=family,
        arch=arch,
        plan=plan,
        forms=forms,
        checkpoint=checkpoint,
        outputs=plan_outputs(checkpoint, plan),
    )


def _pinned(family: LoadedFamily) -> Arch:
    if not family.contract.pinned:
        raise UsageError(what=f"family {family.family.name}", got="without a pinned arch", expected="an arch to write")
    return family.contract.pinned[0]


def _cut(arch: Arch, layers: int | None) -> Arch:
    """Return `arch` with its first `layers` only: every tuple with one entry per layer is cut with it."""
    if layers is None:
        return arch
    if not 1 <= layers <= arch.num_layers:
        raise UsageError(what="layers", got=str(layers), expected=f"1 to {arch.num_layers}")
    values = {a.name: getattr(arch, a.name) for a in attrs.fields(type(arch))}
    cut: dict[str, Any] = {
        name: v[:layers] for name, v in values.items() if isinstance(v, tuple) and len(v) == arch.num_layers
    }
    return attrs.evolve(arch, num_layers=layers, **cut)


def _span(size: int) -> Span:
    return Span(path=NOWHERE, offset=0, size=size)


def _weight(name: str, shape: tuple[int, ...], form: Form) -> Weight:
    if form.quant is None:
        data = _span(prod(shape) * DTYPE_BYTES[form.dtype])
        return Weight(name=name, dtype=form.dtype, shape=shape, data=data)
    groups = _span(2 * prod(shape) // form.quant.group_size)
    data = _span(prod(shape) * form.quant.bits // 8)
    return Weight(name=name, dtype="U32", shape=shape, data=data, quant=form.quant, scales=groups, biases=groups)


def _expert_forms(
    forms: Forms, layer: int, whole: Arch, shapes: Mapping[str, tuple[int, int]], bits: int | None
) -> dict[str, Quant]:
    last = layer == whole.num_layers - 1
    return {role: forms.expert(role, shape[1], bits, last=last) for role, shape in shapes.items()}


def _experts(layer: int, count: int, shapes: Mapping[str, tuple[int, int]], quants: Mapping[str, Quant]) -> ExpertLayer:
    places = plan_parts(shapes, quants)
    held = LayerLayout(file="", offsets=tuple(range(count)), parts=places).expert_parts
    size, names = sum(part.size for part in held), tuple(part.name for part in held)

    def extents(_: int) -> tuple[Extent, ...]:
        return (Extent(span=_span(size), parts=names),)

    return ExpertLayer(layer=layer, count=count, parts=held, extents=extents)


def weight_parts(made: Synthetic, filler: Filler, weight: Weight) -> dict[str, Callable[[], Iterator[Piece]]]:
    """Return what yields the bytes of a resident's `data`, `scales` and `biases`, in this order."""
    name, quant, columns = weight.name, weight.quant, weight.shape[-1]
    if quant is None:
        below = made.arch.num_experts
        return {"data": lambda: filler.plain(name, weight.dtype, weight.shape, weight.data.size, below)}
    assert weight.scales is not None
    size = weight.scales.size
    return {
        "data": lambda: filler.codes(name, weight.data.size),
        "scales": lambda: filler.companion(name, "scales", quant, columns, size),
        "biases": lambda: filler.companion(name, "biases", quant, columns, size),
    }


def part_pieces(filler: Filler, layer: ExpertLayer, expert: int, name: str) -> Iterator[Piece]:
    """Yield the bytes of one sub-tensor of one expert."""
    parts = {part.name: part for part in layer.parts}
    role, _, kind = name.partition("_")
    key, quant = f"{layer.layer} {role} {expert}", parts[role].quant
    assert quant is not None
    if not kind:
        return filler.codes(key, parts[name].size)
    return filler.companion(key, kind, quant, parts[role].shape[1] * 32 // quant.bits, parts[name].size)
