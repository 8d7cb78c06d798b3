"""How layers keep their past: layouts as values, with exact sizes in rows and bytes. No arrays are made here."""

from collections.abc import Mapping
from math import prod

from attrs import field, frozen

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
    """One pooled entry per `rate` tokens, append-only, beside a tail of fixed shape for tokens not yet pooled."""

    entries: Linear
    tail: Recurrent
    rate: int = field()

    def bytes_at(self, tokens: int, context: int) -> int:
        """Bytes allocated when `tokens` are held."""
        return self.entries.bytes_at(tokens // self.rate, -(-context // self.rate)) + self.tail.bytes_at(0, 0)


Layout = Linear | Ring | Recurrent | Compressed


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
        """Bytes each further token costs, block rounding aside."""
        total = 0
        for layout in self.layers:
            if isinstance(layout, Linear):
                total += _row_bytes(layout.rows, layout.dtype)
            elif isinstance(layout, Compressed):
                total += _row_bytes(layout.entries.rows, layout.entries.dtype) // layout.rate
        return total

    @property
    def fixed_bytes(self) -> int:
        """Bytes an empty timeline costs."""
        return self.bytes_at(0)
