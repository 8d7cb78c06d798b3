"""States made of states: pooled entries with an open window, and several kinds of past side by side."""

from collections.abc import Mapping
from weakref import ref

import mlx.core as mx
from attrs import cmp_using, define, field, frozen

from mference_core.kv import Composite, Compressed, KVLayout, Layout, Linear, Recurrent, Ring
from mference_core.state import DTYPES, LayerState, RecurrentState, RowState, Snapshot, cannot_rewind
from mference_kernels import levels, native

ENTRIES, OPEN, CARRIED = "entries.", "open.", "carried."


class _Kept(dict[str, mx.array]):
    """What a call is about to replace, for the mark that may want it back."""


def _copy(array: mx.array) -> mx.array:
    """Return an array with memory of its own, which holds on to no larger one: rows are written in place."""
    return array * mx.array(1, array.dtype)


_ARRAYS = cmp_using(eq=lambda a, b: a is b)


@frozen(kw_only=True)
class Windows:
    """Windows that a call closes: of each name rows (windows, rate, width), and (rate, carried) of the window before.

    `first` is the number of the first window, which is that of its entry; `before` is zeros for window 0. Without a
    window there are no rows.
    """

    first: int
    rows: Mapping[str, mx.array] = field(eq=_ARRAYS)
    before: Mapping[str, mx.array] = field(eq=_ARRAYS)

    @property
    def count(self) -> int:
        """How many windows the call closes."""
        return int(next(iter(self.rows.values())).shape[0]) if self.rows else 0


@define(kw_only=True)
class CompressedState:
    """Entries, the rows of the open window, and what is carried of the last closed one; between calls a window has an entry.

    A call gives its rows to `take`, makes an entry of each window that comes back, and appends it to `entries`.
    """

    layout: Compressed
    context: int
    length: int = 0
    entries: RowState = field(init=False)
    open_rows: dict[str, mx.array] = field(init=False)
    carried: dict[str, mx.array] = field(init=False)
    _marked: "ref[_Kept] | None" = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.entries = RowState(layout=self.layout.entries, context=self.layout.entries_context(self.context))
        self._blank()

    def _blank(self) -> None:
        rate, dtype = self.layout.rate, DTYPES[self.layout.dtype]
        self.open_rows = {name: mx.zeros((rate - 1, width), dtype) for name, width in self.layout.open_rows.items()}
        self.carried = {name: mx.zeros((rate, width), dtype) for name, width in self.layout.carried.items()}

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays held, for evaluation."""
        return (*self.entries.arrays, *self.open_rows.values(), *self.carried.values())

    def take(self, *, first: int = 0, count: int | None = None, **rows: mx.array) -> Windows:
        """Take the rows of `count` tokens, each array of the layout, and return the windows that they close.

        Arrays are (..., width), flattened; the tokens' rows begin at `first`, and are all that follow unless `count` says.
        Raises: ValueError for other names or shapes; nothing is changed then.
        """
        rate, dtype = self.layout.rate, DTYPES[self.layout.dtype]
        counts = {row.size // max(1, row.shape[-1]) for row in rows.values()}
        count = max(counts, default=0) - first if count is None else count
        widths = {name: row.shape[-1] for name, row in rows.items()}
        if widths != dict(self.layout.open_rows) or len(counts) > 1 or not 0 <= first <= first + count <= max(counts):
            shapes = {name: row.shape for name, row in rows.items()}
            raise ValueError(f"[compressed] rows must be {dict(self.layout.open_rows)} wide but got {shapes}")
        held, closed = self.length % rate, (self.length % rate + count) // rate
        if closed:
            mine = {n: r.reshape(-1, r.shape[-1])[first : first + count].astype(dtype) for n, r in rows.items()}
            return self._close(mine, held, closed, count)
        for name, row in rows.items():
            if levels.cpu() and dtype == mx.float32:
                native.store(self.open_rows[name], held, row, first, count)
            else:
                flat = row.reshape(-1, row.shape[-1])
                self.open_rows[name][held : held + count] = flat[first : first + count].astype(dtype)
                mx.async_eval(self.open_rows[name])  # else it would be a chain of updates until the window closes
        window = self.length // rate
        self.length += count
        return Windows(first=window, rows={}, before={})

    def _close(self, rows: Mapping[str, mx.array], held: int, closed: int, count: int) -> Windows:
        self._keep()
        rate, first = self.layout.rate, self.length // self.layout.rate
        joined = {name: mx.concatenate([self.open_rows[name][:held], row]) for name, row in rows.items()}
        whole = {name: row[: closed * rate].reshape(closed, rate, -1) for name, row in joined.items()}
        windows = Windows(first=first, rows=whole, before=dict(self.carried))
        self.open_rows = {
            name: _copy(mx.pad(row[closed * rate :], [(0, (closed + 1) * rate - 1 - row.shape[0]), (0, 0)]))
            for name, row in joined.items()
        }
        self.carried = {name: _copy(whole[name][-1, :, :width]) for name, width in self.layout.carried.items()}
        self.length += count
        return windows

    def _keep(self) -> None:
        """Hand the arrays that are about to be replaced to the mark of this call, if there is one."""
        kept = self._marked() if self._marked is not None else None
        if kept is not None and not kept:
            kept.update(self._named(self.open_rows, self.carried))

    def _named(self, open_rows: Mapping[str, mx.array], carried: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {OPEN + name: a for name, a in open_rows.items()} | {CARRIED + name: a for name, a in carried.items()}

    def _adopt(self, arrays: Mapping[str, mx.array]) -> None:
        self.open_rows = {name: _copy(arrays[OPEN + name]) for name in self.layout.open_rows}
        self.carried = {name: _copy(arrays[CARRIED + name]) for name in self.layout.carried}

    def snapshot(self) -> Snapshot:
        """Copy entries, open rows and what is carried."""
        copies = {name: _copy(a) for name, a in self._named(self.open_rows, self.carried).items()}
        mx.eval(*copies.values())
        entries = {ENTRIES + name: array for name, array in self.entries.snapshot().arrays.items()}
        return Snapshot(length=self.length, written=self.length, arrays=entries | copies)

    def restore(self, snapshot: Snapshot) -> None:
        """Become what `snapshot` was taken of."""
        count = snapshot.length // self.layout.rate
        entries = _part(snapshot.arrays, ENTRIES)
        self.entries.restore(Snapshot(length=count, written=count, arrays=entries))
        self._adopt(snapshot.arrays)
        self.length = snapshot.length

    def mark(self) -> Snapshot:
        """Remember the length; arrays are kept only if the call that follows closes a window and so replaces them."""
        kept = _Kept()
        self._marked = ref(kept)
        return Snapshot(length=self.length, written=self.length, arrays=kept)

    def undo(self, mark: Snapshot) -> None:
        """Forget the entries and rows after `mark`."""
        if mark.arrays:
            self._adopt(mark.arrays)
        self.length = mark.length
        self.entries.truncate(mark.length // self.layout.rate)

    def _oldest(self) -> int:
        """Return the first token of the open window: what was before it is pooled already."""
        return self.length - self.length % self.layout.rate

    def can_truncate(self, length: int) -> bool:
        """Say whether no closed window would have to be opened again."""
        return length == 0 or self._oldest() <= length <= self.length

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; a closed window cannot be opened again, only everything be forgotten."""
        if not self.can_truncate(length):
            raise cannot_rewind("compressed", self.length, length, f"0, or {self._oldest()} to {self.length}")
        if length == 0:
            self.entries.truncate(0)
            self._blank()
        self.length = length


def _part(arrays: Mapping[str, mx.array], prefix: str) -> dict[str, mx.array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


PartState = RowState | RecurrentState | CompressedState


@define(kw_only=True)
class CompositeState:
    """States that take the same tokens; each verb is that of all parts, or of none where one refuses."""

    layout: Composite
    context: int
    parts: dict[str, PartState] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.parts = {name: _part_state(part, self.context) for name, part in self.layout.parts.items()}

    @property
    def length(self) -> int:
        """Tokens held by every part."""
        return min(part.length for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays held, for evaluation."""
        return tuple(array for part in self.parts.values() for array in part.arrays)

    def snapshot(self) -> Snapshot:
        """Copy every part; arrays are named PART.ARRAY."""
        copies = {name: part.snapshot() for name, part in self.parts.items()}
        arrays = {f"{name}.{key}": array for name, copy in copies.items() for key, array in copy.arrays.items()}
        written = max(copy.written for copy in copies.values())
        return Snapshot(length=self.length, written=written, arrays=arrays)

    def restore(self, snapshot: Snapshot) -> None:
        """Become what `snapshot` was taken of."""
        for name, part in self.parts.items():
            arrays = _part(snapshot.arrays, f"{name}.")
            part.restore(Snapshot(length=snapshot.length, written=snapshot.written, arrays=arrays))

    def mark(self) -> Snapshot:
        """Remember this moment in every part."""
        marks = {name: part.mark() for name, part in self.parts.items()}
        return Snapshot(length=self.length, written=self.length, arrays={}, parts=marks)

    def undo(self, mark: Snapshot) -> None:
        """Take every part back, however far the call came in it."""
        for name, part in self.parts.items():
            part.undo(mark.parts[name])

    def can_truncate(self, length: int) -> bool:
        """Say whether every part can keep `length` tokens."""
        return all(part.can_truncate(length) for part in self.parts.values())

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens in every part, or refuse in all."""
        if not self.can_truncate(length):
            stuck = next(name for name, part in self.parts.items() if not part.can_truncate(length))
            raise cannot_rewind(stuck, self.length, length, "what every part can keep")
        for part in self.parts.values():
            part.truncate(length)


def _part_state(layout: Linear | Ring | Recurrent | Compressed, context: int) -> PartState:
    if isinstance(layout, Recurrent):
        return RecurrentState(layout=layout)
    if isinstance(layout, Compressed):
        return CompressedState(layout=layout, context=context)
    return RowState(layout=layout, context=context)


def new_state(layout: Layout, context: int) -> PartState | CompositeState:
    """Allocate an empty state of `layout` for timelines of at most `context` tokens."""
    if isinstance(layout, Composite):
        return CompositeState(layout=layout, context=context)
    return _part_state(layout, context)


def new_states(layout: KVLayout) -> tuple[LayerState, ...]:
    """Allocate the states of one timeline, a state per layer."""
    return tuple(new_state(layer, layout.context) for layer in layout.layers)
