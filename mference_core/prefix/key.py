"""What kept pieces belong to: a model, its family, and everything the bits of a state depend on."""

import json
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from mference_core.checkpoint import GTURBO, Checkpoint
from mference_core.engine import Engine
from mference_core.records import family_digest
from mference_core.tensors import Span
from mference_kernels import levels

STATE_FORMAT = 1
"""Version of how states are laid out in arrays and pieces in files."""


def cache_key(engine: Engine) -> str:
    """Return the digest that pieces of this engine's timelines are filed under.

    The digest of a plain directory does not cover its values, so its files' sizes and times stand for them.
    """
    entry = engine.family.entry
    facts = {
        "model": engine.checkpoint.digest,
        "files": [] if engine.checkpoint.kind == GTURBO else sorted(_files(engine.checkpoint)),
        "family": [entry.name, entry.version, family_digest(entry.folder)],
        "state_format": STATE_FORMAT,
        "dtype": [engine.dtype, str(engine.weights.product_dtype)],
        "layout": [repr(layer) for layer in engine.layout.layers],
        "unit": engine.cuts.unit_tokens,
        "backend": [str(mx.default_device()), version("mlx"), levels.cpu() is not None],
    }
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _files(checkpoint: Checkpoint) -> Iterator[tuple[str, int, int]]:
    for path in {span.path for span in _spans(checkpoint)}:
        status = Path(path).stat()
        yield path.name, status.st_size, status.st_mtime_ns


def _spans(checkpoint: Checkpoint) -> Iterator[Span]:
    for weight in checkpoint.weights.values():
        yield from (span for span in (weight.data, weight.scales, weight.biases) if span is not None)
    for layer in checkpoint.experts.values():
        for expert in range(layer.count):
            yield from (extent.span for extent in layer.extents(expert))
