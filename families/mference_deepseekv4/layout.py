"""How each kind of layer keeps its past, and the names under which it is found again.

Every layer keeps a window of rows, each both key and value. Layers with entries keep those too, and the rows of the
window of tokens that is still open: its pooling is a softmax, so they stay float32. Where windows overlap (rate 4) half
of each row of the last closed one is carried into the next call; an indexer has entries of its own.
"""

from mference_core import Composite, Compressed, KVLayout, Linear, Ring
from mference_deepseekv4.arch import CSA, SLIDING, DeepseekV4Arch

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
