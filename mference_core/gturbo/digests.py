"""packed_experts/digests.json: digests of parts of the big files, so that a part can be verified, or fetched, alone.

The manifest lists this file like any other, so what it says is held by the manifest's digest. It is a file of this
program's own: other readers see one more listed file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from attrs import frozen

from mference_core.buffers import read_buffer
from mference_core.errors import ManifestError
from mference_core.gturbo.layout import LayerLayout
from mference_core.jsondata import is_hex, member, parse_object, read_in_order, size_member, typed
from mference_core.manifest import WEIGHTS_NAME, FileEntry

DIGESTS_NAME = "packed_experts/digests.json"
DIGESTS_CAP_BYTES = 16 << 20
BLOCK_BYTES = 4 << 20
SCHEMA = 1


@frozen(kw_only=True)
class Digests:
    """SHA-256 of each expert per layer file, and of each block of model_weights.bin.

    An expert's digest is of its sub-tensors in the order they lie in, without what is between or after them.
    `files` are the digests of the whole files, as the manifest has them.
    """

    files: Mapping[str, str]
    experts: Mapping[str, tuple[str, ...]]
    blocks: tuple[str, ...]
    block_bytes: int = BLOCK_BYTES


def expert_spans(layer: LayerLayout, expert: int) -> Iterator[tuple[int, int]]:
    """Yield offset and size in the layer file of the bytes that an expert's digest covers, in its order."""
    for part in sorted(layer.parts, key=lambda part: part.offset):
        yield layer.offsets[expert] + part.offset, part.size


def block_spans(size: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield offset and size of each block of a file."""
    for offset in range(0, size, block_bytes):
        yield offset, min(block_bytes, size - offset)


def encode_digests(digests: Digests) -> bytes:
    """Return digests.json."""
    files: dict[str, Any] = {
        name: {"experts": list(found), "sha256": digests.files[name]} for name, found in digests.experts.items()
    }
    files[WEIGHTS_NAME] = {"blocks": list(digests.blocks), "sha256": digests.files[WEIGHTS_NAME]}
    values = {"blockBytes": digests.block_bytes, "files": files, "schema": SCHEMA}
    return (json.dumps(values, indent=0, sort_keys=True) + "\n").encode()


def decode_digests(data: bytes, listed: Mapping[str, FileEntry], experts: Mapping[str, int]) -> Digests:
    """Return the digests in `data`, which must be of the files `listed` in the manifest.

    `experts` is how many there are in each layer file. Raises `ManifestError` for anything missing or foreign.
    """
    values = parse_object(data, DIGESTS_NAME)
    if (schema := member(values, "schema", int, DIGESTS_NAME)) != SCHEMA:
        raise ManifestError(what=f"{DIGESTS_NAME} schema", got=str(schema), expected=str(SCHEMA))
    block_bytes = size_member(values, "blockBytes", DIGESTS_NAME)
    if not block_bytes:
        raise ManifestError(what=f"{DIGESTS_NAME} blockBytes", got="0", expected="above 0")
    files = member(values, "files", dict, DIGESTS_NAME)
    wanted = {**dict.fromkeys(experts, "experts"), WEIGHTS_NAME: "blocks"}
    for name in sorted(files.keys() ^ wanted.keys()):
        got, expected = ("there", "no such file") if name in files else ("missing", "the digests of its parts")
        raise ManifestError(what=f"{DIGESTS_NAME} {name}", got=got, expected=expected)
    counts = {**experts, WEIGHTS_NAME: -(-listed[WEIGHTS_NAME].size // block_bytes)}
    found = {
        name: _decode_file(files[name], key, counts[name], f"{DIGESTS_NAME} {name}") for name, key in wanted.items()
    }
    for name, (whole, _) in found.items():
        if whole != listed[name].sha256:
            expected = f"the manifest's {listed[name].sha256}"
            raise ManifestError(what=f"{DIGESTS_NAME} {name} sha256", got=whole, expected=expected)
    return Digests(
        files={name: whole for name, (whole, _) in found.items()},
        experts={name: found[name][1] for name in experts},
        blocks=found[WEIGHTS_NAME][1],
        block_bytes=block_bytes,
    )


def _decode_file(value: Any, key: str, count: int, where: str) -> tuple[str, tuple[str, ...]]:
    values = typed(value, dict, where)
    whole, parts = member(values, "sha256", str, where), member(values, key, list, where)
    if len(parts) != count:
        raise ManifestError(what=f"{where} {key}", got=f"{len(parts)} in number", expected=str(count))
    for digest in (whole, *parts):
        if not is_hex(typed(digest, str, f"{where} {key}"), 64):
            raise ManifestError(what=f"{where} {key}", got=repr(digest)[:80], expected="64 lower-case hex")
    return whole, tuple(parts)


def hash_spans(path: Path, spans: Sequence[tuple[int, int]]) -> str:
    """Return the SHA-256 of some bytes of a file, one span after the other; raises `OSError`, or `EOFError`."""
    digest, buffer = sha256(), read_buffer(1 << 20)
    with path.open("rb", buffering=0) as file:
        read_in_order(file.fileno())
        for offset, size in spans:
            file.seek(offset)
            left = size
            while left:
                count = file.readinto(buffer[:left])
                if not count:
                    raise EOFError
                digest.update(buffer[:count])
                left -= count
    return digest.hexdigest()
