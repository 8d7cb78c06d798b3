"""The architecture block of a checkpoint: typed, constrained field by field, compared with what a family pins."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import attrs
from attrs import field, frozen

from mference_core.errors import ArchMismatch

T = TypeVar("T")
Check = Callable[[Any, "attrs.Attribute[Any]", Any], None]

MASK_KINDS = {0: "sliding window", 1: "full", 2: "recurrent", 3: "compressed sparse", 4: "heavily compressed"}


def key_of(attribute: "attrs.Attribute[Any]") -> str:
    """Return the JSON key of a field: its `key` metadata, else its name in camel case."""
    head, *tail = attribute.name.split("_")
    return str(attribute.metadata.get("key", head + "".join(word.capitalize() for word in tail)))


def must(expected: str, holds: Callable[[Any, Any], bool]) -> Check:
    """Make a field validator: `holds(arch, value)` or an `ArchMismatch` that says `expected`."""

    def check(arch: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not holds(arch, value):
            raise ArchMismatch(what=f"manifest arch.{key_of(attribute)}", got=repr(value), expected=expected)

    return check


def positive(_arch: object, value: Any) -> bool:
    """Hold for numbers above zero."""
    return bool(value > 0)


def count(key: str | None = None, **extra: Any) -> Any:
    """Declare a positive integer field."""
    return field(validator=must("a positive integer", positive), metadata={"key": key} if key else {}, **extra)


@frozen(kw_only=True)
class Arch:
    """The 21 keys every manifest carries (gturbo-format 7.1); families subclass it to add keys and constraints.

    Sizes count elements, `sliding_window` counts tokens, `full_attention_layer_mask` holds one of
    `MASK_KINDS` per layer. Raises `ArchMismatch` naming the first field that cannot be meant.
    """

    hidden_size: int = count()
    ffn_intermediate: int = count()
    moe_intermediate_size: int = field(validator=must("an integer of at least 0", lambda _, v: v >= 0))
    num_heads: int = count()
    num_kv_heads: int = field(
        validator=must("a positive divisor of numHeads", lambda a, v: v > 0 and a.num_heads % v == 0),
        metadata={"key": "numKVHeads"},
    )
    num_full_kv_heads: int = field(
        validator=must("a positive divisor of numHeads", lambda a, v: v > 0 and a.num_heads % v == 0),
        metadata={"key": "numFullKVHeads"},
    )
    head_dim: int = count()
    full_head_dim: int = count()
    vocab_size: int = count()
    sliding_window: int = field(validator=must("an integer of at least 0", lambda _, v: v >= 0))
    final_logit_softcap: float = field(validator=must("a number of at least 0", lambda _, v: v >= 0))
    rope_theta: float = field(validator=must("a number of at least 0", lambda _, v: v >= 0))
    full_rope_theta: float = field(validator=must("a number of at least 0", lambda _, v: v >= 0))
    partial_rotary_factor: float = field(validator=must("a number from 0 to 1", lambda _, v: 0 <= v <= 1))
    num_layers: int = count()
    num_experts: int = field(validator=must("an integer of at least 0", lambda _, v: v >= 0))
    top_k_experts: int = field(
        validator=must("an integer from 0 to numExperts", lambda a, v: 0 <= v <= a.num_experts),
    )
    tie_word_embeddings: bool
    attention_k_eq_v: bool = field(metadata={"key": "attentionKEqV"})
    hidden_activation: str
    full_attention_layer_mask: tuple[int, ...] = field(
        validator=[
            must("one entry per layer", lambda a, v: len(v) == a.num_layers),
            must(f"entries from 0 to {max(MASK_KINDS)}", lambda _, v: all(m in MASK_KINDS for m in v)),
        ],
    )


def _typed(family: str, attribute: "attrs.Attribute[Any]", value: Any) -> Any:
    """Return `value` as the field's type; JSON may write 30 for 30.0, never true for 1."""
    kind, ok = attribute.type, False
    if kind is bool:
        ok = isinstance(value, bool)
    elif kind is int:
        ok = isinstance(value, int) and not isinstance(value, bool)
    elif kind is float:
        ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
        value = float(value) if ok else value
    elif kind is str:
        ok = isinstance(value, str)
    elif kind == tuple[int, ...]:
        ok = isinstance(value, list | tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        value = tuple(value) if ok else value
    if not ok:
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        raise ArchMismatch(what=f"manifest arch.{key_of(attribute)}", got=repr(value), expected=f"{name} for {family}")
    return value


def decode_arch(kind: type[T], family: str, values: Mapping[str, Any]) -> T:
    """Build an arch of class `kind` from JSON `values`; unknown keys are ignored, as the format says.

    Raises `ArchMismatch` on a missing key without default, a wrong type or a violated constraint.
    """
    fields = {}
    for attribute in attrs.fields(cast("Any", kind)):
        key = key_of(attribute)
        if key in values:
            fields[attribute.name] = _typed(family, attribute, values[key])
        elif attribute.default is attrs.NOTHING:
            raise ArchMismatch(what=f"manifest arch.{key}", got="missing", expected=f"a value for {family}")
    return kind(**fields)


def encode_arch(arch: Arch) -> dict[str, Any]:
    """Return the JSON object of `arch`, key by key; fields marked `on_disk=False` are left out."""
    pairs = ((a, getattr(arch, a.name)) for a in attrs.fields(type(arch)) if a.metadata.get("on_disk", True))
    return {key_of(a): list(value) if isinstance(value, tuple) else value for a, value in pairs}


@frozen(kw_only=True)
class ManifestContract:
    """What a family accepts as `arch`: its class, its pinned values, and how a config.json becomes one."""

    family: str
    arch: type[Arch]
    pinned: tuple[Arch, ...]
    from_config: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    def accept(self, values: Mapping[str, Any]) -> Arch:
        """Return the typed arch of JSON `values`, or raise `ArchMismatch` naming the field."""
        return decode_arch(self.arch, self.family, values)

    def is_pinned(self, arch: Arch) -> bool:
        """Say whether `arch` is one of the family's published checkpoints, value for value."""
        return arch in self.pinned
