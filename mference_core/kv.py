"""How layers keep their past: layouts as values, with exact sizes in rows and bytes. No arrays are made here."""

from collections.abc import Mapping
from fractions import Fraction
from math import prod
from typing import Any

from attrs import evolve, field, frozen

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _row_bytes(rows: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    return sum(prod(shape) for shape in rows.values()) * DTYPE_BYTES[dtype]


@frozen(kw_only=True)
class Linear:
    """Append-only rows that grow in blocks of `block_rows` up to the context.

    `rows` maps a name to the (heads, dim) of one token's row.
    """

    rows: Mapping[str, tuple[int, int]]
    dtype: str
    block_rows: int = 256

    def capacity_rows(self, tokens: int, context: int) -> int:
        """Rows allocated when `tokens` are held of a `context`."""
        blocks = -(-tokens // self.block_rows) * self.block_rows
        return min(blocks, context) if tokens <= context else blocks

    def bytes_at(self, tokens: int, context: int) -> int:
        """Bytes allocated when `tokens` are held."""
        return self.capacity_rows(tokens, context) * _row_bytes(self.rows, self.dtype)


@frozen(kw_only=True)
class Ring:
    """The last `window` tokens, plus `slack_rows` so that a chunk of that many tokens can be written before it is read.

    The row of a position is position mod capacity; the whole ring is allocated at once.
    """

    rows: Mapping[str, tuple[int, int]]
    dtype: str
    window: int
    slack_rows: int

    def capacity_rows(self, tokens: int, context: int) -> int:  # noqa: ARG002  same question for every layout
        """Rows allocated, whatever is held."""
        return min(context, self.window + self.slack_rows)

    def bytes_at(self, tokens: int, context: int) -> int:
        """Bytes allocated, whatever is held."""
        return self.capacity_rows(tokens, context) * _row_bytes(self.rows, self.dtype)


@frozen(kw_only=True)
class Recurrent:
    """Arrays of fixed shape that every token rewrites; they cannot be rewound, only restored.

    All are of `dtype` but those that `dtypes` names.
    """

    arrays: Mapping[str, tuple[int, ...]]
    dtype: str = "float32"
    dtypes: Mapping[str, str] = field(factory=dict)

    def dtype_of(self, name: str) -> str:
        """Return the dtype of an array."""
        return self.dtypes.get(name, self.dtype)

    def bytes_at(self, tokens: int, context: int) -> int:  # noqa: ARG002
        """Bytes allocated, whatever is held."""
        return sum(_row_bytes({name: shape}, self.dtype_of(name)) for name, shape in self.arrays.items())


@frozen(kw_only=True)
class Compressed:
    """One entry per window of `rate` tokens, append-only, beside the rows of the window that is still open.

    `open_rows` maps a name to the features of one token's row, which is kept until its window closes. `carried` says
    what the next window needs of the last closed one: the first so many features of each of its rows. Both have `dtype`.
    """

    entries: Linear
    rate: int = field()
    open_rows: Mapping[str, int]
    carried: Mapping[str, int] = field(factory=dict)
    dtype: str = "float32"

    @rate.validator
    def _pools(self, _: object, value: int) -> None:
        if value < 2:
            raise ValueError(f"[compressed] rate must be at least 2 but got {value}")

    @carried.validator
    def _part_of_a_row(self, _: object, value: Mapping[str, int]) -> None:
        if any(width > self.open_rows.get(name, 0) for name, width in value.items()):
            raise ValueError(f"[compressed] carried must be a part of {dict(self.open_rows)} but got {dict(value)}")

    def entries_context(self, context: int) -> int:
        """Entries that timelines of `context` tokens can have."""
        return -(-context // self.rate)

    def bytes_at(self, tokens: int, context: int) -> int:
        """Bytes allocated when `tokens` are held."""
        open_values = (self.rate - 1) * sum(self.open_rows.values()) + self.rate * sum(self.carried.values())
        pooled = self.entries.bytes_at(tokens // self.rate, self.entries_context(context))
        return pooled + open_values * DTYPE_BYTES[self.dtype]


@frozen(kw_only=True)
class Composite:
    """Several layouts that take the same tokens, by name."""

    parts: Mapping[str, "Linear | Ring | Recurrent | Compressed"]

    def bytes_at(self, tokens: int, context: int) -> int:
        """Bytes allocated when `tokens` are held."""
        return sum(part.bytes_at(tokens, context) for part in self.parts.values())


Layout = Linear | Ring | Recurrent | Compressed | Composite


def growth_bytes(layout: Layout) -> Fraction:
    """Return the bytes each further token costs, block rounding aside."""
    if isinstance(layout, Composite):
        return sum(map(growth_bytes, layout.parts.values()), Fraction(0))
    if isinstance(layout, Compressed):
        return growth_bytes(layout.entries) / layout.rate
    return Fraction(_row_bytes(layout.rows, layout.dtype) if isinstance(layout, Linear) else 0)


def stored_as(layout: "KVLayout", dtype: str) -> "KVLayout":
    """Return the layout with rows of attention, in `Linear` and `Ring` layouts, and entries stored as `dtype`.

    Other states stay: what they hold enters the next token's arithmetic as it was computed, so rounding it would make
    results depend on where a chunk ends. Rows are always read from where they are stored.
    """
    return evolve(layout, layers=tuple(_stored_as(one, dtype) for one in layout.layers))


def _stored_as(layout: Any, dtype: str) -> Any:
    if isinstance(layout, Composite):
        return evolve(layout, parts={name: _stored_as(part, dtype) for name, part in layout.parts.items()})
    if isinstance(layout, Compressed):
        return evolve(layout, entries=_stored_as(layout.entries, dtype))
    return evolve(layout, dtype=dtype) if isinstance(layout, Linear | Ring) else layout


@frozen(kw_only=True)
class KVLayout:
    """One layout per layer, in layer order, for timelines of at most `context` tokens."""

    layers: tuple[Layout, ...]
    context: int

    def bytes_at(self, tokens: int) -> int:
        """Bytes one timeline has allocated when it holds `tokens`."""
        return sum(layout.bytes_at(tokens, self.context) for layout in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes each further token costs, block rounding aside, rounded down."""
        return int(sum(map(growth_bytes, self.layers)))

    @property
    def fixed_bytes(self) -> int:
        """Bytes an empty timeline costs."""
        return self.bytes_at(0)
