"""What an install was made from, opened again: which of its bytes came from where, and how to have them once more."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import evolve, frozen

from mference_core.checkpoint import CONFIG_CAP_BYTES, Checkpoint, open_checkpoint, peek
from mference_core.errors import InstallError, MferenceError
from mference_core.gturbo.layout import Layout
from mference_core.gturbo.model import EXPERTS_DIR, layer_name
from mference_core.install.finish import CONFIG_NAME
from mference_core.install.http import HubClient
from mference_core.install.metadata import TOKENIZER_CAP_BYTES, read_metadata
from mference_core.install.outputs import Outputs, check_quantised, plan_outputs, plan_requests
from mference_core.install.planning import Reader
from mference_core.install.ranges import Copy
from mference_core.install.repair_state import Origin
from mference_core.jsondata import read_capped
from mference_core.manifest import WEIGHTS_NAME, Manifest

FETCH_BYTES = 8 << 20
SAMPLED_FILES, SAMPLE_BYTES = 8, 256
TOKENIZER_PREFIX = "tokenizer/"


@frozen(kw_only=True)
class Fetch:
    """`size` contiguous bytes of a source file, and where they go: (offset in the output, offset in these, bytes)."""

    shard: str
    offset: int
    size: int
    places: tuple[tuple[int, int, int], ...]


@frozen(kw_only=True)
class Original:
    """The source of an install. `copies` are by name of output file; `read(shard, offset, size)` and `small(name)`.

    `workers` says how many reads at a time it is good for; both calls may be made from any thread, and `stop` ends
    those under way. `origin` is None for a source of this machine.
    """

    name: str
    origin: Origin | None = None
    outputs: Outputs
    copies: Mapping[str, tuple[Copy, ...]]
    read: Callable[[str, int, int], bytes]
    small: Callable[[str], bytes]
    snapshot: str | None
    workers: int = 1
    stop: Callable[[], None] = lambda: None


def hub_original(client: HubClient, commit: str, reader: Reader) -> Original:
    """Open a repository at a commit; raises `SourceError` and, for content, `ManifestError`."""
    remote = read_metadata(client, commit)
    check_quantised(remote.seen)
    checkpoint = open_checkpoint(remote.seen, reader.contract, reader.plan_for, source=remote.source)

    def small(name: str) -> bytes:
        if name == CONFIG_NAME:
            return remote.seen.config_data
        if name not in remote.tokenizer:
            raise InstallError(what=f"{client.repo} {name}", got="missing", expected="what the install has")
        return client.read_small(remote.tokenizer[name], TOKENIZER_CAP_BYTES[name])

    def read(shard: str, offset: int, size: int) -> bytes:
        return b"".join(client.read_range(remote.files[shard], offset, size))

    made = _original(f"{client.repo} at {remote.commit}", checkpoint, reader, read, small)
    origin = Origin(repo=client.repo, commit=remote.commit)
    return evolve(made, origin=origin, workers=client.connections, stop=client.stop)


def folder_original(source: Path, reader: Reader) -> Original:
    """Open a model directory of this machine; raises `ManifestError`."""
    found = peek(source)
    check_quantised(found)
    checkpoint = open_checkpoint(found, reader.contract, reader.plan_for)

    def small(name: str) -> bytes:
        return read_capped(source / name, TOKENIZER_CAP_BYTES.get(name, CONFIG_CAP_BYTES), "source file")

    def read(shard: str, offset: int, size: int) -> bytes:
        with (source / shard).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    return _original(str(source), checkpoint, reader, read, small)


def _original(
    name: str,
    checkpoint: Checkpoint,
    reader: Reader,
    read: Callable[[str, int, int], bytes],
    small: Callable[[str], bytes],
) -> Original:
    outputs = plan_outputs(checkpoint, reader.plan_for(checkpoint.arch))
    copies = dict[str, list[Copy]]()
    for request in plan_requests(checkpoint, outputs).ranges:
        for copy in request.copies:
            copies.setdefault(copy.dest_path, []).append(copy)

    def exactly(shard: str, offset: int, size: int) -> bytes:
        data = read(shard, offset, size)
        if len(data) != size:
            raise InstallError(what=f"{name} {shard}", got=f"cut short at {offset + len(data)} bytes")
        return data

    return Original(
        name=name,
        outputs=outputs,
        copies={path: tuple(sorted(of, key=lambda copy: copy.dest_offset)) for path, of in copies.items()},
        read=exactly,
        small=small,
        snapshot=checkpoint.source_sha256,
    )


def check_made(original: Original, path: Path, manifest: Manifest) -> dict[str, str]:
    """Refuse a source that the install at `path` was not made from; return its output names by the manifest's.

    Raises `InstallError`.
    """
    snapshot = f"sha256:{original.snapshot}"
    if manifest.source_snapshot_hash not in (None, "sha256:", snapshot):
        raise _other(original, path, f"with index {snapshot}", str(manifest.source_snapshot_hash))
    layout, names = original.outputs.layout, {WEIGHTS_NAME: WEIGHTS_NAME}
    sizes = {WEIGHTS_NAME: original.outputs.index.file_size}
    for number, layer in enumerate(layout.layers):
        if layer.parts:
            try:
                name = layer_name(manifest, number)
            except MferenceError as error:
                raise _other(original, path, f"with experts in layer {number}", "none there") from error
            names[name] = f"{EXPERTS_DIR}/{layer.file}"
            sizes[name] = layout.expert_stride * layout.experts_per_layer
    for name, size in sizes.items():
        if manifest.files[name].size != size:
            raise _other(original, path, f"of {size} bytes in {name}", f"{manifest.files[name].size}")
    return names


def check_layout_made(original: Original, path: Path, layout: Layout) -> None:
    """Refuse a source whose experts would lie elsewhere than the install's layout has them; raises `InstallError`."""
    ours = [(layer.offsets, layer.parts) for layer in original.outputs.layout.layers]
    if ours != [(layer.offsets, layer.parts) for layer in layout.layers]:
        raise _other(original, path, "laid out in another way", "the layout of the install")


def check_bytes(original: Original, path: Path, intact: Mapping[str, str]) -> None:
    """Refuse a source with other weights: one tuned further has the same shapes, and the same index file.

    A few bytes of files that are `intact`, of the output names they have, are compared. Raises `InstallError`.
    """
    names = sorted(intact, key=lambda name: name != WEIGHTS_NAME)
    for name in names[:: -(-len(names) // SAMPLED_FILES) or 1]:
        copies = sorted(original.copies[intact[name]], key=lambda copy: copy.size)
        for copy in (copies[-1], copies[len(copies) * 3 // 4]):
            start = copy.dest_offset + copy.size // 2
            for fetch in fetches([copy], start, min(start + SAMPLE_BYTES, copy.dest_offset + copy.size)):
                with (path / name).open("rb") as file:
                    file.seek(start)
                    if file.read(fetch.size) != original.read(fetch.shard, fetch.offset, fetch.size):
                        raise _other(
                            original, path, f"unlike {name} at byte {start}", "the bytes there, which are good"
                        )


def _other(original: Original, path: Path, got: str, expected: str) -> InstallError:
    remedy = "give the repository and revision, or the directory, that it was installed from"
    return InstallError(what=f"the source {original.name} of {path}", got=got, expected=expected, remedy=remedy)


def fetches(copies: Sequence[Copy], start: int, end: int) -> Iterator[Fetch]:
    """Yield the reads that fill `[start, end)` of an output, none of a byte more, in order of the source."""
    clipped = list[tuple[str, int, int, int]]()
    for copy in copies:
        first, last = max(start, copy.dest_offset), min(end, copy.dest_offset + copy.size)
        while first < last:
            size = min(FETCH_BYTES, last - first)
            clipped.append((copy.shard, copy.offset + first - copy.dest_offset, size, first))
            first += size
    group = list[tuple[str, int, int, int]]()
    for piece in sorted(clipped):
        held = sum(size for _, _, size, _ in group)
        if group and (group[0][0], group[0][1] + held) == piece[:2] and held + piece[2] <= FETCH_BYTES:
            group.append(piece)
            continue
        if group:
            yield _fetch(group)
        group = [piece]
    if group:
        yield _fetch(group)


def _fetch(group: Sequence[tuple[str, int, int, int]]) -> Fetch:
    shard, start, _, _ = group[0]
    places = tuple((into, offset - start, size) for _, offset, size, into in group)
    return Fetch(shard=shard, offset=start, size=sum(size for _, _, size in places), places=places)


def gaps(copies: Sequence[Copy], size: int) -> Iterator[tuple[int, int]]:
    """Yield offset and size of the bytes of an output that no source byte fills."""
    at = 0
    for copy in copies:
        if copy.dest_offset > at:
            yield at, copy.dest_offset - at
        at = copy.dest_offset + copy.size
    if at < size:
        yield at, size - at
