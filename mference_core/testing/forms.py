"""How a family's quantised checkpoint stores each tensor, learnt from its tiny reference checkpoint."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from mference_core.checkpoint import open_checkpoint, peek
from mference_core.errors import UsageError
from mference_core.manifest import SLOT_DEFAULT_BITS
from mference_core.placement import ROLES, InstallPlan, Routed
from mference_core.plugins import LoadedFamily
from mference_core.safetensors_index import read_source
from mference_core.tensors import ExpertLayer, Quant

BASE_GROUP = 64


@frozen(kw_only=True)
class Form:
    """What is stored for a tensor: its dtype, and its quantisation or None."""

    dtype: str
    quant: Quant | None = None


@frozen(kw_only=True)
class Forms:
    """Forms of residents by name without its layer number, of experts by role; `stacks` names a role's tensor likewise.

    `last_experts` are the forms of the last layer's experts, where checkpoints like to differ, and `experts` those of
    the others. `config` is the reference's config.json. All empty for a family without a reference checkpoint.
    """

    residents: Mapping[str, Form]
    experts: Mapping[str, Quant]
    last_experts: Mapping[str, Quant]
    stacks: Mapping[str, str]
    config: Mapping[str, Any] | None

    def of(self, name: str, shape: tuple[int, ...], plan: InstallPlan) -> Form:
        """Return a resident's form; by default matrices of whole groups have 4 bits, those of a slot the slot's."""
        known = self.residents.get(pattern(name))
        if known is not None and (known.quant is None or shape[-1] % known.quant.group_size == 0):
            return known
        if len(shape) < 2 or shape[-1] % BASE_GROUP or not name.endswith(".weight"):
            return Form(dtype="BF16")
        slots = {pattern(tensor): slot for slot, tensor in plan.quant_slots.items()}
        slot = slots.get(pattern(name), "attention")
        bits = 4 if slot == "sharedExpert" else SLOT_DEFAULT_BITS[slot]
        return Form(dtype="U32", quant=Quant(bits=bits, group_size=BASE_GROUP))

    def expert(self, role: str, columns: int, bits: int | None, *, last: bool) -> Quant:
        """Return the quantisation of a role's experts, at `bits` where given, in the `last` layer or in another."""
        known = (self.last_experts if last else self.experts).get(
            role, Quant(bits=SLOT_DEFAULT_BITS["routedExpert"], group_size=BASE_GROUP)
        )
        group = known.group_size if columns % known.group_size == 0 else BASE_GROUP
        return Quant(bits=bits or known.bits, group_size=group)

    def stack(self, role: str, layer: int, plan: InstallPlan) -> str:
        """Return the name of the tensor that stacks a layer's experts. Raises: UsageError."""
        name = self.stacks.get(role, "").replace("#", str(layer), 1)
        if plan.place(name) != Routed(layer=layer, roles=(role,)):
            raise UsageError(
                what=f"name of the stacked {role} experts",
                got="unknown",
                expected="one in the family's reference/mlx checkpoint",
                remedy="write an install instead",
            )
        return name


def pattern(name: str) -> str:
    """Return a tensor's name with the first number among its parts, the layer's, as '#'."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name, count=1)


def read_forms(family: LoadedFamily) -> Forms:
    """Learn from a family's reference checkpoint."""
    reference = family.family.reference
    if reference is None or not (reference / "mlx").is_dir():
        return Forms(residents={}, experts={}, last_experts={}, stacks={}, config=None)
    return _learn(family, reference / "mlx")


def _learn(family: LoadedFamily, path: Path) -> Forms:
    checkpoint = open_checkpoint(
        peek(path), family.contract, lambda arch: family.ask("mference_install_plan", arch=arch)
    )
    plan: InstallPlan = family.ask("mference_install_plan", arch=checkpoint.arch)
    places = {name: plan.place(name) for name in read_source(path).tensors}
    routed = {name: place for name, place in places.items() if isinstance(place, Routed) and len(place.roles) == 1}
    layers = [layer for _, layer in sorted(checkpoint.experts.items())]
    return Forms(
        residents={
            pattern(name): Form(dtype=weight.dtype, quant=weight.quant) for name, weight in checkpoint.weights.items()
        },
        experts=_quants(layers[:-1] or layers),
        last_experts=_quants(layers[-1:]),
        stacks={place.roles[0]: pattern(name) for name, place in routed.items()},
        config=checkpoint.config,
    )


def _quants(layers: Iterable[ExpertLayer]) -> dict[str, Quant]:
    """Return how layers quantise each role, the last of them where they differ."""
    parts = [part for layer in layers for part in layer.parts if part.name in ROLES]
    return {part.name: part.quant for part in parts if part.quant is not None}
