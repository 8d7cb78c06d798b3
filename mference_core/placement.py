"""Where each tensor of a source checkpoint belongs: a family's install plan, as values."""

from collections.abc import Callable, Mapping

from attrs import frozen

ROLES = ("gate", "up", "down")


@frozen(kw_only=True)
class Transform:
    """How a source's plain tensor becomes the resident one; quantised tensors are never changed.

    `stored` is its shape in the source, where the resident's has other axes: same values in the same order. `add` is
    added to every value when it is read, in float32, for sources that hold a weight less a constant.
    """

    stored: tuple[int, ...] | None = None
    add: float = 0.0


IDENTITY = Transform()


@frozen(kw_only=True)
class Resident:
    """A tensor that stays in memory, under the name it has in an install.

    `order` is (group, layer, rank): the sort key of gturbo-format section 4, before the name. `transform` says how
    the source states it, where that is not how an install does.
    """

    name: str
    order: tuple[int, int, int]
    transform: Transform = IDENTITY


@frozen(kw_only=True)
class Routed:
    """A stack of one layer's experts, axis 0 the expert, or that of one `expert` alone, without the axis.

    `roles` are stacked along the output axis in that order.
    """

    layer: int
    roles: tuple[str, ...]
    expert: int | None = None


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
    name whose bit width they state. A slot whose tensor is not quantised states the width that the format's first
    writer stated all the same, unless it is one of `plain_slots`: then it says so. `integers` names the residents that
    hold integers; all others hold numbers.
    """

    place: Callable[[str], Place | None]
    residents: Mapping[str, tuple[int, ...]]
    experts: Mapping[int, Mapping[str, tuple[int, int]]]
    quant_slots: Mapping[str, str]
    plain_slots: frozenset[str] = frozenset()
    integers: frozenset[str] = frozenset()
