"""Timelines in pieces: rows of stretches of tokens, states at single points, and timelines made of them again.

What a layer keeps a row a token of is copied by stretches, each of which serves every timeline that begins alike. All
other states cannot be taken apart: a copy of them, a point, serves timelines of exactly its length.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import mlx.core as mx
from attrs import field, frozen

from mference_core.kv import KVLayout, Linear, Ring
from mference_core.session import Session
from mference_core.state import DTYPES, RowState, Snapshot

ROWS, RING, POINT = "rows", "ring", "point"
"""Kinds of pieces: rows of `Linear` layers, rows of `Ring` layers, and the other states at the end of a stretch."""


@frozen(kw_only=True)
class Piece:
    """Arrays by `layer.name`, and for a point what each layer had written."""

    arrays: Mapping[str, mx.array] = field(eq=False, repr=False)
    written: Mapping[int, int] = field(factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


@frozen(kw_only=True)
class Parts:
    """Which layers of a model are kept in which kind of piece; `window_rows` is the widest ring's."""

    linear: tuple[int, ...]
    ring: tuple[int, ...]
    point: tuple[int, ...]
    window_rows: int

    @classmethod
    def of(cls, layout: KVLayout) -> "Parts":
        """Return the parts of a model's timelines."""
        kinds = [next((kind for kind in (Linear, Ring) if isinstance(layer, kind)), None) for layer in layout.layers]
        return cls(
            linear=tuple(i for i, kind in enumerate(kinds) if kind is Linear),
            ring=tuple(i for i, kind in enumerate(kinds) if kind is Ring),
            point=tuple(i for i, kind in enumerate(kinds) if kind is None),
            window_rows=max((layer.window for layer in layout.layers if isinstance(layer, Ring)), default=0),
        )


def oldest_ring_row(session: Session, parts: Parts) -> int:
    """Return the first position that every ring still holds the row of."""
    return max((_rows_of(session, layer).oldest_row for layer in parts.ring), default=0)


def copy_rows(session: Session, layers: Sequence[int], first: int, last: int) -> Piece:
    """Copy the rows of positions `first` to `last` of some layers; to be computed before the session goes on."""
    return Piece(
        arrays={
            f"{layer}.{name}": array
            for layer in layers
            for name, array in _rows_of(session, layer).copy_rows(first, last).items()
        }
    )


def copy_point(session: Session, parts: Parts) -> Piece:
    """Copy what can only be kept whole."""
    taken = {layer: session.states[layer].snapshot() for layer in parts.point}
    return Piece(
        arrays={f"{layer}.{name}": array for layer, one in taken.items() for name, array in one.arrays.items()},
        written={layer: one.written for layer, one in taken.items()},
    )


def join(
    session: Session,
    parts: Parts,
    length: int,
    rows: Sequence[Piece],
    ring: Sequence[Piece],
    ring_start: int,
    point: Piece | None,
) -> list[Snapshot]:
    """Return snapshots of a timeline of `length` tokens, sharing no array with the pieces.

    `rows` are the pieces of all its stretches, `ring` those from position `ring_start` on, enough for every window; the
    last may be longer than the timeline. `point` was taken at its end.
    """
    made = dict[int, Snapshot]()
    for layer in parts.linear:
        joined = {name: array[:, :length] for name, array in _joined(rows, layer).items()}
        made[layer] = Snapshot(length=length, written=length, arrays=joined)
    for layer in parts.ring:
        state = _rows_of(session, layer)
        joined = {name: array[:, : length - ring_start] for name, array in _joined(ring, layer).items()}
        made[layer] = ring_snapshot(state, length, ring_start, joined)
    for layer in parts.point:
        assert point is not None
        prefix = f"{layer}."
        arrays = {
            name.removeprefix(prefix): mx.array(array)
            for name, array in point.arrays.items()
            if name.startswith(prefix)
        }
        made[layer] = Snapshot(length=length, written=point.written[layer], arrays=arrays)
    return [made[layer] for layer in range(len(made))]


def ring_snapshot(state: RowState, length: int, start: int, rows: Mapping[str, mx.array]) -> Snapshot:
    """Return the snapshot of a ring of `length` tokens that holds the rows of positions from `start` on, and no other.

    Shapes: rows (heads, length - start, dim), at least the window's.
    """
    capacity = state.layout.capacity_rows(length, state.context)
    first = max(start, length - capacity)
    arrays = {}
    for name, array in rows.items():
        heads, _, dim = array.shape
        held = array[:, first - start :]
        lost = mx.zeros((heads, min(length, capacity) - (length - first), dim), DTYPES[state.layout.dtype])
        whole = mx.concatenate([lost, held], axis=1)
        turn = capacity - length % capacity
        if length > capacity and turn < capacity:
            whole = mx.concatenate([whole[:, turn:], whole[:, :turn]], axis=1)
        arrays[name] = whole
    return Snapshot(length=length, written=first + capacity if first else length, arrays=arrays)


def _rows_of(session: Session, layer: int) -> RowState:
    return cast("RowState", session.states[layer])


def _joined(pieces: Sequence[Piece], layer: int) -> dict[str, mx.array]:
    prefix = f"{layer}."
    names = [name for name in pieces[0].arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): mx.concatenate([p.arrays[name] for p in pieces], axis=1) for name in names}
