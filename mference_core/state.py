"""States: what layouts describe, as arrays, with the three verbs everything else is built on.

`snapshot` keeps a copy, `restore` brings it back, `truncate(n)` forgets all but the first n tokens or refuses. `mark`
and `undo` are for one call: they take a state back to where the call found it, at no cost unless it fails.
"""

from collections.abc import Mapping
from typing import Protocol

import mlx.core as mx
from attrs import cmp_using, define, field, frozen

from mference_core.errors import CannotRewind
from mference_core.kv import Linear, Recurrent, Ring
from mference_kernels.native_program import Timeline

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@frozen(kw_only=True)
class Snapshot:
    """A copy of one state: its arrays, the tokens it held, and how many it had ever written.

    `parts` are the marks of a composite's parts; a copy has their arrays in `arrays`.
    """

    length: int
    written: int
    arrays: Mapping[str, mx.array] = field(eq=cmp_using(eq=lambda a, b: a is b))
    parts: Mapping[str, "Snapshot"] = field(factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the copied arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class LayerState(Protocol):
    """One layer's past on one timeline."""

    @property
    def length(self) -> int:
        """Tokens held."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays held, for evaluation."""

    def snapshot(self) -> Snapshot:
        """Copy what is held."""

    def restore(self, snapshot: Snapshot) -> None:
        """Become what `snapshot` was taken of."""

    def mark(self) -> Snapshot:
        """Remember this moment without copying, for `undo` of the one call that follows."""

    def undo(self, mark: Snapshot) -> None:
        """Go back to `mark`, whatever part of the call was done; raises `CannotRewind` if the call was too long."""

    def can_truncate(self, length: int) -> bool:
        """Say whether `truncate(length)` would succeed."""

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; raises `CannotRewind`, unchanged, where that is impossible."""


def cannot_rewind(kind: str, have: int, want: int, oldest: str) -> CannotRewind:
    """Return the error of a state of `have` tokens that cannot keep `want` of them; `oldest` says what it can keep."""
    return CannotRewind(
        what=f"{kind} state of {have} tokens cut to {want}", expected=oldest, remedy="restore a snapshot or start again"
    )


@define(kw_only=True)
class RowState:
    """Rows of `Linear` and `Ring` layouts, stored (heads, capacity, dim); the row of a position is position mod capacity."""

    layout: Linear | Ring
    context: int
    length: int = 0
    written: int = 0
    _rows: dict[str, mx.array] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._allocate(self.layout.capacity_rows(0, self.context))

    def _allocate(self, capacity: int) -> None:
        for name, (heads, dim) in self.layout.rows.items():
            old = self._rows.get(name)
            extra = capacity - (0 if old is None else old.shape[1])
            blank = mx.zeros((heads, extra, dim), DTYPES[self.layout.dtype])
            self._rows[name] = blank if old is None else mx.concatenate([old, blank], axis=1)

    @property
    def capacity_rows(self) -> int:
        """Rows allocated."""
        return int(next(iter(self._rows.values())).shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for array in self._rows.values())

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays held, for evaluation."""
        return tuple(self._rows.values())

    def append(self, **rows: mx.array) -> None:
        """Add L tokens; each array is (heads, L, dim) and is cast to the layout's dtype.

        Raises ValueError if a ring would overwrite keys that these tokens still see.
        """
        count = next(iter(rows.values())).shape[1]
        self._make_room(count)
        for name, value in rows.items():
            self._write(name, value.astype(DTYPES[self.layout.dtype]))
        self._count(count)

    def extend(self, count: int, keys: str = "k", values: str = "v") -> Timeline:
        """Add `count` tokens whose rows the caller writes, in place and at once: native programs do. Errors as `append`.

        Nothing else holds the arrays: what `snapshot` and `restore` take and give are copies.
        """
        self._make_room(count)
        place = Timeline(self._rows[keys], self._rows[values], self.length, count)
        self._count(count)
        return place

    def _make_room(self, count: int) -> None:
        need = self.length + count
        if isinstance(self.layout, Linear):
            if need > self.capacity_rows:
                self._allocate(self.layout.capacity_rows(need, self.context))
        elif need > self.capacity_rows and count > self.capacity_rows - self.layout.window + 1:
            room = self.capacity_rows - self.layout.window + 1
            raise ValueError(f"[ring] a chunk must have at most {room} tokens but got {count}")

    def _count(self, tokens: int) -> None:
        self.length += tokens
        self.written = max(self.written, self.length)

    def _write(self, name: str, value: mx.array) -> None:
        array, capacity = self._rows[name], self.capacity_rows
        start = self.length % capacity if capacity else 0
        head = min(value.shape[1], capacity - start)
        array[:, start : start + head] = value[:, :head]
        if head < value.shape[1]:
            array[:, : value.shape[1] - head] = value[:, head:]
        self._rows[name] = array

    def read(self, queries: int) -> tuple[int, dict[str, mx.array]]:
        """Return what the last `queries` tokens can see: the first position, and arrays (heads, S, dim) in position order."""
        first = 0
        if isinstance(self.layout, Ring):
            first = max(0, self.length - queries - self.layout.window + 1)
        return first, {name: self._slice(array, first, self.length) for name, array in self._rows.items()}

    def visible(self, queries: int) -> tuple[int, dict[str, mx.array], bool]:
        """Return what `read` does without a copy, for attention: a ring that wraps comes whole, and the last value is true.

        The row of a position is then position mod rows.
        """
        first = 0
        if isinstance(self.layout, Ring):
            first = max(0, self.length - queries - self.layout.window + 1)
        capacity = self.capacity_rows
        if first < self.length and first % capacity > (self.length - 1) % capacity:
            return first, dict(self._rows), True
        return first, {name: self._slice(array, first, self.length) for name, array in self._rows.items()}, False

    def _slice(self, array: mx.array, first: int, last: int) -> mx.array:
        capacity = self.capacity_rows
        if first == last:
            return array[:, :0]
        a, b = first % capacity, (last - 1) % capacity + 1
        return array[:, a:b] if a < b else mx.concatenate([array[:, a:], array[:, :b]], axis=1)

    @property
    def oldest_row(self) -> int:
        """First position whose row is still held."""
        return max(0, self.written - self.capacity_rows)

    def copy_rows(self, first: int, last: int) -> dict[str, mx.array]:
        """Copy the rows of positions `first` to `last`, each array (heads, last - first, dim), to be computed at once."""
        return {name: mx.array(self._slice(array, first, last)) for name, array in self._rows.items()}

    def snapshot(self) -> Snapshot:
        """Copy the rows that can still be read."""
        kept = self.capacity_rows if isinstance(self.layout, Ring) else self.length
        copies = {name: mx.array(array[:, :kept]) for name, array in self._rows.items()}
        mx.eval(*copies.values())
        return Snapshot(length=self.length, written=self.written, arrays=copies)

    def restore(self, snapshot: Snapshot) -> None:
        """Become what `snapshot` was taken of."""
        self._rows, self.length, self.written = {}, snapshot.length, snapshot.written
        self._allocate(self.layout.capacity_rows(snapshot.length, self.context))
        for name, saved in snapshot.arrays.items():
            own = mx.array(saved)  # an update of all rows would become the array itself, and rows are written in place
            self._rows[name][:, : saved.shape[1]] = own

    def mark(self) -> Snapshot:
        """Remember the length: rows before it are not written again."""
        return Snapshot(length=self.length, written=self.written, arrays={})

    def undo(self, mark: Snapshot) -> None:
        """Forget the rows after `mark`."""
        self.truncate(mark.length)

    def _oldest_end(self) -> int:
        """Return the shortest non-zero length whose window is still whole."""
        if isinstance(self.layout, Linear) or self.written <= self.capacity_rows:
            return 0
        return self.written - self.capacity_rows + self.layout.window - 1

    def can_truncate(self, length: int) -> bool:
        """Say whether `length` tokens can be kept; a ring cannot when rows of their window have been overwritten."""
        return length == 0 or self._oldest_end() <= length <= self.length

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if not self.can_truncate(length):
            raise cannot_rewind("row", self.length, length, f"0, or {self._oldest_end()} to {self.length}")
        self.length = length
        if length == 0:
            self.written = 0


@define(kw_only=True)
class RecurrentState:
    """Fixed arrays of a `Recurrent` layout; `advance` replaces them."""

    layout: Recurrent
    length: int = 0
    values: dict[str, mx.array] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.values = self._blank()

    def _blank(self) -> dict[str, mx.array]:
        return {name: mx.zeros(shape, self._dtype(name)) for name, shape in self.layout.arrays.items()}

    def _dtype(self, name: str) -> mx.Dtype:
        return DTYPES[self.layout.dtype_of(name)]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for array in self.values.values())

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays held, for evaluation."""
        return tuple(self.values.values())

    def advance(self, tokens: int, **values: mx.array) -> None:
        """Take the arrays after `tokens` more tokens; shapes as declared, cast to the layout's dtypes."""
        for name, value in values.items():
            if value.shape != self.layout.arrays[name]:
                raise ValueError(f"[recurrent] {name} must be {self.layout.arrays[name]} but got {value.shape}")
        self.values = self.values | {name: value.astype(self._dtype(name)) for name, value in values.items()}
        self.length += tokens

    def snapshot(self) -> Snapshot:
        """Copy the arrays."""
        copies = {name: mx.array(array) for name, array in self.values.items()}
        mx.eval(*copies.values())
        return Snapshot(length=self.length, written=self.length, arrays=copies)

    def restore(self, snapshot: Snapshot) -> None:
        """Become what `snapshot` was taken of."""
        self.values, self.length = dict(snapshot.arrays), snapshot.length

    def mark(self) -> Snapshot:
        """Keep the arrays themselves: `advance` replaces them and never writes to them."""
        return Snapshot(length=self.length, written=self.length, arrays=dict(self.values))

    def undo(self, mark: Snapshot) -> None:
        """Take the arrays of `mark` again."""
        self.restore(mark)

    def can_truncate(self, length: int) -> bool:
        """Say whether `length` is all tokens or none."""
        return length in (0, self.length)

    def truncate(self, length: int) -> None:
        """Keep all tokens or none; anything between is refused."""
        if not self.can_truncate(length):
            raise cannot_rewind("recurrent", self.length, length, f"0 or {self.length}")
        if length == 0:
            self.values, self.length = self._blank(), 0
