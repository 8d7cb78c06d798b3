"""Digests of parts of an install's big files, made while the files are hashed whole: which bytes, and what came out."""

from collections.abc import Mapping, Sequence

from mference_core.gturbo.digests import BLOCK_BYTES, Digests, block_spans, encode_digests, expert_spans
from mference_core.gturbo.layout import LayerLayout
from mference_core.gturbo.model import EXPERTS_DIR
from mference_core.install.hashing import Hashed, Spans
from mference_core.install.outputs import Outputs
from mference_core.manifest import WEIGHTS_NAME


def part_spans(weights_bytes: int, layers: Mapping[str, LayerLayout]) -> dict[str, list[Spans]]:
    """Return the spans of every part: the blocks of the resident file, each expert of each layer file."""
    parts: dict[str, list[Spans]] = {
        name: [tuple(expert_spans(layer, expert)) for expert in range(len(layer.offsets))]
        for name, layer in layers.items()
    }
    parts[WEIGHTS_NAME] = [(span,) for span in block_spans(weights_bytes, BLOCK_BYTES)]
    return parts


def output_parts(outputs: Outputs) -> dict[str, list[Spans]]:
    """Return the spans of every part of an install that is planned."""
    layers = {f"{EXPERTS_DIR}/{layer.file}": layer for layer in outputs.layout.layers if layer.parts}
    return part_spans(outputs.index.file_size, layers)


def digests_bytes(parts: Mapping[str, Sequence[Spans]]) -> int:
    """Return the size of the digests.json of these parts, 0 for none."""
    if not parts:
        return 0
    none = "0" * 64
    found = {name: Hashed(sha256=none, parts=(none,) * len(spans)) for name, spans in parts.items()}
    return len(encode_digests(made_digests(found)))


def made_digests(found: Mapping[str, Hashed]) -> Digests:
    """Return what digests.json says of files that were hashed with their parts."""
    return Digests(
        files={name: hashed.sha256 for name, hashed in found.items()},
        experts={name: hashed.parts for name, hashed in found.items() if name != WEIGHTS_NAME},
        blocks=found[WEIGHTS_NAME].parts,
    )
