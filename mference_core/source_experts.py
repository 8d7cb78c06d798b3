"""The experts of one layer of a plain directory, whether it stacks them or stores each alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from mference_core.errors import ManifestError
from mference_core.placement import ROLES, Routed
from mference_core.tensors import DTYPE_BYTES, FLOATS, ExpertLayer, ExpertPart, Extent, Span, Weight


@frozen(kw_only=True)
class _Stored:
    """Tensors of the same roles: one that stacks all experts, or one per expert by its number."""

    roles: tuple[str, ...]
    stack: Weight | None = None
    each: Mapping[int, Weight] = field(factory=dict)

    @property
    def count(self) -> int:
        return len(self.each) if self.stack is None else self.stack.shape[0]

    @property
    def sample(self) -> Weight:
        return self.stack or self.each[0]


@define
class FoundExperts:
    """What was found of one layer's experts so far; `where` names the layer in errors."""

    where: str
    _each: dict[tuple[str, ...], dict[int | None, Weight]] = field(factory=dict)
    _taken: set[tuple[str, int | None]] = field(factory=set)

    def add(self, weight: Weight, place: Routed) -> str | None:
        """Take a tensor; return the role that another one has taken already, if any."""
        for role in place.roles:
            if (role, place.expert) in self._taken:
                return role
            self._taken.add((role, place.expert))
        self._each.setdefault(place.roles, {})[place.expert] = weight
        return None

    def layer(self, number: int, shapes: Mapping[str, tuple[int, int]] | None) -> ExpertLayer:
        """Return the complete layer; raises `ManifestError` for what is amiss.

        `shapes` are those of one expert, None for a layer that must have none.
        """
        if shapes is None:
            raise self._bad("", "there", "none in this layer")
        stored = [self._stored(roles, weights) for roles, weights in self._each.items()]
        role_of = {role: tensors for tensors in stored for role in tensors.roles}
        for role in ROLES:
            if role not in role_of:
                raise self._bad(role, "missing", "gate, up and down")
        if len({role for role, _ in self._taken}) != sum(len(tensors.roles) for tensors in stored):
            raise self._bad("", "stored in two ways", "each role alone, or always the same ones together")
        for tensors in stored:
            self._check_shapes(tensors, shapes)
        counts = sorted({tensors.count for tensors in stored})
        if len(counts) != 1 or not counts[0]:
            raise self._bad("", f"{counts} in number", "one count for gate, up and down")
        parts = tuple(part for role in ROLES for part in _parts(role, role_of[role].sample, shapes[role]))
        rows = [row for tensors in stored for row in _rows(tensors)]

        def extents(expert: int) -> tuple[Extent, ...]:
            return tuple(Extent(span=_span(spans, expert, counts[0]), parts=names) for spans, names in rows)

        return ExpertLayer(layer=number, count=counts[0], parts=parts, extents=extents)

    def _stored(self, roles: tuple[str, ...], weights: Mapping[int | None, Weight]) -> _Stored:
        stack = weights.get(None)
        each = {expert: weight for expert, weight in weights.items() if expert is not None}
        if stack is not None and each:
            raise self._bad(roles[0], "stacked and stored one by one", "one of the two")
        if stack is None:
            self._check_alike(roles[0], each)
        return _Stored(roles=roles, stack=stack, each=each)

    def _check_alike(self, role: str, each: Mapping[int, Weight]) -> None:
        missing = next((expert for expert in range(max(each)) if expert not in each), None)
        if missing is not None:
            raise self._bad(f"{role} {missing}", "missing", f"experts 0 to {max(each)}")
        first = each[0]
        for weight in each.values():
            if _form(weight) != _form(first):
                got = f"unlike {first.name} in dtype, shape or quantisation"
                raise self._bad(weight.name, got, "experts of one form")

    def _check_shapes(self, tensors: _Stored, shapes: Mapping[str, tuple[int, int]]) -> None:
        weight = tensors.sample
        rows, columns = sum(shapes[role][0] for role in tensors.roles), shapes[tensors.roles[0]][1]
        if tensors.stack is None:
            good, expected = weight.shape == (rows, columns), f"[{rows}, {columns}]"
        else:
            good = len(weight.shape) == 3 and weight.shape[1:] == (rows, columns)
            expected = f"[experts, {rows}, {columns}]"
        if not good:
            raise self._bad(weight.name, f"of shape {list(weight.shape)}", expected)
        if weight.quant is None and weight.dtype not in FLOATS:
            raise self._bad(weight.name, weight.dtype, " or ".join(FLOATS))

    def _bad(self, what: str, got: str, expected: str) -> ManifestError:
        return ManifestError(what=f"{self.where} {what}".rstrip(), got=got, expected=expected)


def _form(weight: Weight) -> tuple[Any, ...]:
    return weight.dtype, weight.shape, weight.quant, weight.companions


def _rows(tensors: _Stored) -> list[tuple[Sequence[Span], tuple[str, ...]]]:
    """Return the spans of each stored tensor, one of all experts or one per expert, and the parts it holds."""
    weights = [tensors.stack] if tensors.stack is not None else [tensors.each[e] for e in range(tensors.count)]
    columns = {
        "": [weight.data for weight in weights],
        "_scales": [weight.scales for weight in weights if weight.scales is not None],
        "_biases": [weight.biases for weight in weights if weight.biases is not None],
    }
    return [(spans, tuple(role + suffix for role in tensors.roles)) for suffix, spans in columns.items() if spans]


def _span(spans: Sequence[Span], expert: int, count: int) -> Span:
    if len(spans) == count > 1:
        return spans[expert]
    size = spans[0].size // count
    return Span(path=spans[0].path, offset=spans[0].offset + expert * size, size=size)


def _parts(role: str, weight: Weight, shape: tuple[int, int]) -> list[ExpertPart]:
    rows, columns = shape
    if weight.quant is None:
        size = rows * columns * DTYPE_BYTES[weight.dtype]
        return [ExpertPart(name=role, dtype=weight.dtype, shape=shape, size=size)]
    words, groups = (rows, columns * weight.quant.bits // 32), (rows, columns // weight.quant.group_size)
    codes = ExpertPart(name=role, dtype="U32", shape=words, size=4 * words[0] * words[1], quant=weight.quant)
    size = DTYPE_BYTES[weight.companions] * groups[0] * groups[1]
    return [
        codes,
        *(
            ExpertPart(name=role + suffix, dtype=weight.companions, shape=groups, size=size)
            for suffix in ("_scales", "_biases")
        ),
    ]
