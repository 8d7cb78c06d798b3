"""How each kind of layer keeps its past, and the names under which it is found again.

Every layer keeps a window of rows, each both key and value. Layers with entries keep those too, and the rows of the
window of tokens that is still open: its pooling is a softmax, so they stay float32. Where windows overlap (rate 4) half
of each row of the last closed one is carried into the next call; an indexer has entries of its own.
"""

import mlx.core as mx

from mference_core import Composite, Compressed, KVLayout, Linear, Ring, RowState
from mference_deepseekv4.arch import CSA, SLIDING, DeepseekV4Arch
from mference_kernels.sparse import in_place, store_rows

WINDOW, POOL, INDEX = "window", "pool", "index"
ROW, ENTRY, VALUES, GATES = "kv", "e", "values", "gates"


def _pooled(arch: DeepseekV4Arch, layer: int, dims: int, dtype: str) -> Compressed:
    series = 2 if arch.kind(layer) == CSA else 1
    return Compressed(
        entries=Linear(rows={ENTRY: (1, dims)}, dtype=dtype),
        rate=arch.rate(layer),
        open_rows=dict.fromkeys((VALUES, GATES), series * dims),
        carried=dict.fromkeys((VALUES, GATES), dims) if series == 2 else {},
    )


def kv_layout(arch: DeepseekV4Arch, context: int, chunk: int, dtype: str) -> KVLayout:
    """Return a ring for each layer, with entries beside it, and entries of the indexer, where the layer has them."""
    ring = Ring(rows={ROW: (1, arch.head_dim)}, dtype=dtype, window=arch.sliding_window, slack_rows=chunk)
    layers: list[Ring | Composite] = []
    for layer in range(arch.num_layers):
        if arch.kind(layer) == SLIDING:
            layers.append(ring)
            continue
        parts: dict[str, Ring | Compressed] = {WINDOW: ring, POOL: _pooled(arch, layer, arch.head_dim, dtype)}
        if arch.kind(layer) == CSA:
            parts[INDEX] = _pooled(arch, layer, arch.ca_index_head_dim, dtype)
        layers.append(Composite(parts=parts))
    return KVLayout(layers=tuple(layers), context=context)


def _in_place(state: RowState) -> bool:
    return in_place() and state.layout.dtype in ("float32", "bfloat16")


def append(state: RowState, name: str, rows: mx.array, *, first: int, count: int) -> None:
    """Add rows `first` and on of `rows` (..., D), flattened, to a state, where it lies if that is possible."""
    if _in_place(state):
        store_rows(state.extend(count, name, name), rows, first)
    else:
        state.append(**{name: rows.reshape(1, -1, rows.shape[-1])[:, first : first + count]})


def held(state: RowState, queries: int) -> tuple[int, mx.array, bool]:
    """Return what the last `queries` tokens see: the first position, rows, and whether these are a ring.

    In place they are the whole memory, (1, capacity, D), in which the row of a position is position mod capacity.
    """
    if _in_place(state):
        first = max(0, state.length - queries - state.layout.window + 1) if isinstance(state.layout, Ring) else 0
        return first, state.arrays[0], True
    first, rows, ring = state.visible(queries)
    return first, next(iter(rows.values()))[0], ring
