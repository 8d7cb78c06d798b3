"""Where each tensor of a source checkpoint belongs: a family's install plan, as values."""

from collections.abc import Callable, Mapping

from attrs import frozen

ROLES = ("gate", "up", "down")


@frozen(kw_only=True)
class Resident:
    """A tensor that stays in memory, under the name it has in an install.

    `order` is (group, layer, rank): the sort key of gturbo-format section 4, before the name.
    """

    name: str
    order: tuple[int, int, int]


@frozen(kw_only=True)
class Routed:
    """A stack of one layer's experts, axis 0 the expert; `roles` are stacked along the output axis in that order."""

    layer: int
    roles: tuple[str, ...]


@frozen(kw_only=True)
class Dropped:
    """A tensor this program has no use for, and why."""

    reason: str


Place = Resident | Routed | Dropped


@frozen(kw_only=True)
class InstallPlan:
    """How a family's source checkpoints map to an install.

    `place(name)` gets a tensor name, companions (`.scales`, `.biases`) already stripped and `.weight` kept,
    and returns its place, or None for a name the family does not know (the source is then refused).
    `residents` lists every resident name of a complete checkpoint with its logical (unpacked) shape, and
    `experts` each routed layer's shapes of gate, up and down of one expert, [out, in].
    `quant_slots` maps the manifest's quant slots (embedding, attention, router, sharedExpert) to the resident
    name whose bit width they state.
    """

    place: Callable[[str], Place | None]
    residents: Mapping[str, tuple[int, ...]]
    experts: Mapping[int, Mapping[str, tuple[int, int]]]
    quant_slots: Mapping[str, str]
