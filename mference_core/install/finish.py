"""The last steps that every install takes: what the manifest says, written when everything else is durable."""

import os
from collections.abc import Mapping
from pathlib import Path

from mference_core.arch import encode_arch
from mference_core.checkpoint import Checkpoint
from mference_core.gturbo.receipt import encode_receipt, make_receipt
from mference_core.install.outputs import Outputs
from mference_core.install.transaction import Target, sync_directory
from mference_core.manifest import (
    LAYOUT_NAME,
    MANIFEST_NAME,
    RECEIPT_NAME,
    UNKNOWN_MODEL_ID,
    WEIGHTS_NAME,
    FileEntry,
    Manifest,
    encode_manifest,
    read_manifest,
)
from mference_core.source_weights import read_quant_table

CONFIG_NAME = "config.json"
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def draft_manifest(checkpoint: Checkpoint, outputs: Outputs, known_ids: Mapping[str, str]) -> Manifest:
    """Return the manifest without real file entries, so that what it may not say is refused before any byte."""
    table = read_quant_table(checkpoint.config or {})
    snapshot = checkpoint.source_sha256 or ""
    pending = FileEntry(size=0, sha256="0" * 64)
    return Manifest(
        arch=encode_arch(checkpoint.arch),
        files={WEIGHTS_NAME: pending, LAYOUT_NAME: pending},
        experts_per_layer=outputs.layout.experts_per_layer,
        num_layers=len(outputs.layout.layers),
        expert_stride=outputs.layout.expert_stride,
        quant=outputs.quant,
        model_id=known_ids.get(snapshot, UNKNOWN_MODEL_ID),
        source_snapshot_hash=f"sha256:{snapshot}",
        bit_width_overrides_honored=table.honored if table else 0,
    )


def write_manifest(target: Target, manifest: Manifest, repo: str | None = None, commit: str | None = None) -> int:
    """Write manifest and receipt and make all of it durable; return their bytes.

    `repo` and `commit` are the source that the receipt names, if it was downloaded.
    """
    data = encode_manifest(manifest)
    made = make_receipt(read_manifest(data), target.shown, source_repo_id=repo, source_revision=commit)
    receipt = encode_receipt(made)
    folders = [target.partial, *(item for item in target.partial.iterdir() if item.is_dir())]
    for folder in folders[1:]:
        sync_directory(folder)
    pending = target.partial / (MANIFEST_NAME + ".tmp")
    write_small(pending, data)
    pending.rename(target.partial / MANIFEST_NAME)
    write_small(target.partial / RECEIPT_NAME, receipt)
    sync_directory(target.partial)
    return len(data) + len(receipt)


def write_small(path: Path, data: bytes) -> None:
    """Write a file that must not be there yet, durable when this returns; raises `OSError`."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        write_all(handle, memoryview(data))
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: memoryview) -> None:
    """Write all of `data` at a file's position; raises `OSError`."""
    done = 0
    while done < len(data):
        done += os.write(handle, data[done:])
