"""Repack a quantised model directory on this machine into an install, in memory bounded by one tile."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from pathlib import Path
from time import monotonic

from attrs import define, evolve, field

from mference_core.arch import Arch, ManifestContract
from mference_core.buffers import read_buffer
from mference_core.checkpoint import GTURBO, Checkpoint, open_checkpoint, peek
from mference_core.errors import InstallError
from mference_core.gturbo.digests import DIGESTS_NAME, encode_digests
from mference_core.gturbo.model import EXPERTS_DIR
from mference_core.install.finish import CONFIG_NAME, TOKENIZER_NAMES, draft_manifest, write_all, write_manifest
from mference_core.install.hashing import Hashed, PartHashes, Spans
from mference_core.install.outputs import Outputs, check_quantised, expert_spans, plan_outputs
from mference_core.install.parts import digests_bytes, made_digests, output_parts
from mference_core.install.report import InstallProgress, InstallReport, Progress
from mference_core.install.transaction import (
    abandon,
    check_disk,
    check_swap,
    disk_bytes_needed,
    install_errors,
    locked,
    prepare,
    promote,
)
from mference_core.jsondata import standard_path
from mference_core.manifest import LAYOUT_NAME, WEIGHTS_NAME, FileEntry
from mference_core.placement import InstallPlan
from mference_core.tensors import Span

TILE_BYTES = 512 << 10


def install_local(
    source: Path,
    output: Path,
    contract: ManifestContract,
    plan_for: Callable[[Arch], InstallPlan],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    known_ids: Mapping[str, str] | None = None,
    expert_digests: bool = False,
) -> InstallReport:
    """Install the MLX-quantised directory `source` as `output`; values are moved, never changed.

    `known_ids` maps the SHA-256 of a published index file to the manifest's `modelID`. With `expert_digests` the
    install has digests.json, made in the same reading.

    The output appears complete or not at all: any failure, and Ctrl-C, removes what was written. Raises
    `ManifestError` for a bad source, `InstallError` (`InstallLocked`) for a bad output or a full disk.
    """
    started = monotonic()
    _check_apart(source, output)
    checkpoint, plan = _open_source(source, contract, plan_for)
    outputs = plan_outputs(checkpoint, plan)
    manifest = draft_manifest(checkpoint, outputs, known_ids or {})
    tokenizer = _tokenizer_files(checkpoint.path)
    parts = output_parts(outputs) if expert_digests else {}
    with locked(output) as target, install_errors(target.shown):
        side_bytes = sum(path.stat().st_size for path in tokenizer) + digests_bytes(parts)
        check_disk(target, outputs.total_bytes + side_bytes)
        prepare(target, overwrite=overwrite)
        try:
            if target.final.exists():
                check_swap(target)
            writer = _Staging(root=target.partial, total_bytes=outputs.total_bytes + side_bytes, progress=progress)
            _write_model(writer, checkpoint, outputs, parts)
            for path in tokenizer:
                writer.write(f"tokenizer/{path.name}", [Span(path=path, offset=0, size=path.stat().st_size)])
            manifest = evolve(manifest, files=dict(writer.files))
            written = write_manifest(target, manifest)
            promote(target, overwrite=overwrite)
        except BaseException:
            abandon(target)
            raise
    return InstallReport(
        path=target.shown,
        model_id=manifest.model_id,
        files=len(writer.files) + 2,
        size_bytes=written + sum(entry.size for entry in writer.files.values()),
        resident_tensors=len(outputs.weights),
        routed_layers=len(checkpoint.experts),
        dropped=dict(checkpoint.dropped),
        seconds=monotonic() - started,
    )


def local_bytes(
    checkpoint: Checkpoint, plan_for: Callable[[Arch], InstallPlan], *, expert_digests: bool = False
) -> tuple[int, int]:
    """Return the bytes of a local install but for its metadata, and the free bytes it asks for; raises as it does."""
    outputs = plan_outputs(checkpoint, plan_for(checkpoint.arch))
    size = outputs.total_bytes + sum(path.stat().st_size for path in _tokenizer_files(checkpoint.path))
    size += digests_bytes(output_parts(outputs) if expert_digests else {})
    return size, disk_bytes_needed(size)


def _tokenizer_files(source: Path) -> list[Path]:
    return [path for name in (CONFIG_NAME, *TOKENIZER_NAMES) if (path := source / name).is_file()]


def _check_apart(source: Path, output: Path) -> None:
    inner, outer = Path(standard_path(output)).resolve(), Path(standard_path(source)).resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise InstallError(what=f"output {output}", got=f"not apart from the source {source}", expected="another path")


def _open_source(
    source: Path, contract: ManifestContract, plan_for: Callable[[Arch], InstallPlan]
) -> tuple[Checkpoint, InstallPlan]:
    found = peek(source)
    if found.kind == GTURBO:
        raise InstallError(what=str(source), got="an install already", expected="a quantised model directory")
    check_quantised(found)
    checkpoint = open_checkpoint(found, contract, plan_for)
    return checkpoint, plan_for(checkpoint.arch)


def _write_model(
    writer: "_Staging", checkpoint: Checkpoint, outputs: Outputs, parts: Mapping[str, Sequence[Spans]]
) -> None:
    residents = (span for w in outputs.weights for span in (w.data, w.scales, w.biases) if span is not None)
    found = {WEIGHTS_NAME: writer.write(WEIGHTS_NAME, [outputs.index_image, *residents], parts.get(WEIGHTS_NAME, ()))}
    stride = outputs.layout.expert_stride
    for number, layer in sorted(checkpoint.experts.items()):
        name, padding = f"{EXPERTS_DIR}/{outputs.layout.layers[number].file}", bytes(stride - layer.expert_bytes)
        pieces: Iterator[Span | bytes] = chain.from_iterable(
            (*expert_spans(layer, e), padding) for e in range(layer.count)
        )
        found[name] = writer.write(name, pieces, parts.get(name, ()))
    writer.write(LAYOUT_NAME, [outputs.layout_image])
    if parts:
        writer.write(DIGESTS_NAME, [encode_digests(made_digests(found))])


@define
class _Staging:
    """The staging directory: every file goes through one buffer of a tile, which is hashed as it is written."""

    root: Path
    total_bytes: int
    progress: Progress | None
    files: dict[str, FileEntry] = field(factory=dict)
    done_bytes: int = 0
    _tile: memoryview = field(factory=lambda: read_buffer(TILE_BYTES))

    def write(self, name: str, pieces: Iterable[Span | bytes], parts: Sequence[Spans] = ()) -> Hashed:
        """Write one file from source spans and literal bytes; record, and return, its size and digests."""
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        digest, inner, size = sha256(), PartHashes(parts), 0
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            for tile in self._tiles(pieces):
                digest.update(tile)
                if parts:
                    inner.feed(size, tile)
                write_all(handle, tile)
                size += len(tile)
                self.done_bytes += len(tile)
                if self.progress is not None:
                    event = InstallProgress(file=name, done_bytes=self.done_bytes, total_bytes=self.total_bytes)
                    self.progress(event)
            os.fsync(handle)
        finally:
            os.close(handle)
        self.files[name] = FileEntry(size=size, sha256=digest.hexdigest())
        return Hashed(size=size, sha256=digest.hexdigest(), parts=inner.digests())

    def _tiles(self, pieces: Iterable[Span | bytes]) -> Iterator[memoryview]:
        """Gather pieces into full tiles; each tile is valid until the next is asked for."""
        view, filled = self._tile, 0
        with _sources() as handle_of:
            for piece in pieces:
                size, done = piece.size if isinstance(piece, Span) else len(piece), 0
                while done < size:
                    count = min(size - done, TILE_BYTES - filled)
                    into = view[filled : filled + count]
                    if isinstance(piece, Span):
                        _read_all(handle_of(piece.path), into, piece.offset + done, piece.path)
                    else:
                        into[:] = piece[done : done + count]
                    done, filled = done + count, filled + count
                    if filled == TILE_BYTES:
                        yield view
                        filled = 0
        if filled:
            yield view[:filled]


@contextmanager
def _sources() -> Iterator[Callable[[Path], int]]:
    """Open each source file once while the block runs."""
    handles = dict[Path, int]()

    def handle_of(path: Path) -> int:
        if path not in handles:
            handles[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return handles[path]

    try:
        yield handle_of
    finally:
        for handle in handles.values():
            os.close(handle)


def _read_all(handle: int, into: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(handle, [into[done:]], offset + done)
        if count == 0:
            raise InstallError(
                what=str(path), got=f"cut short at {offset + done} bytes", expected="an unchanged source"
            )
        done += count
