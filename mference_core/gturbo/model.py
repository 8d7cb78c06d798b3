"""An installed directory, opened under one of two verify policies (gturbo-format 10, 11)."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

from attrs import field, frozen

from mference_core.errors import DigestMismatch, ManifestError, PartialInstall, UsageError
from mference_core.gturbo.digests import (
    DIGESTS_CAP_BYTES,
    DIGESTS_NAME,
    Digests,
    block_spans,
    decode_digests,
    hash_spans,
)
from mference_core.gturbo.index import IndexEntry, ResidentIndex, read_index
from mference_core.gturbo.layout import LAYOUT_CAP_BYTES, LayerLayout, Layout, decode_layout
from mference_core.gturbo.receipt import check_receipt
from mference_core.gturbo.verification import DAMAGED, THREADS, LayerFiles, LayerProof, Verification
from mference_core.jsondata import file_size, hash_file, read_capped
from mference_core.manifest import LAYOUT_NAME, MANIFEST_NAME, RECEIPT_NAME, WEIGHTS_NAME, Manifest
from mference_core.tensors import ExpertLayer, Extent, Span, Weight

FULL_SHA256, TRUSTED_RECEIPT = "full-sha256", "trusted-receipt"
POLICIES = (FULL_SHA256, TRUSTED_RECEIPT)
EXPERTS_DIR = "packed_experts"


@frozen(kw_only=True)
class GturboModel:
    """A verified install. Experts are verified when they are first needed: see `touch_layer`.

    With `proofs` each expert is verified when it is first read, with `files` the layer files are, whole and ahead of
    their use; with neither, sizes are all that is compared.
    """

    path: Path
    manifest: Manifest
    index: ResidentIndex
    layout: Layout
    verification: Verification = field(eq=False, repr=False)
    proofs: Mapping[int, LayerProof] = field(factory=dict, eq=False, repr=False)
    files: LayerFiles | None = field(default=None, eq=False, repr=False)

    def weights(self) -> dict[str, Weight]:
        """Return every resident tensor by name, spans absolute in model_weights.bin."""
        path = self.path / WEIGHTS_NAME
        return {entry.name: _weight(path, entry) for entry in self.index.entries}

    def expert_layers(self) -> dict[int, ExpertLayer]:
        """Return every routed layer by number, each with the proof its readers owe, if any."""
        routed = {i: layer for i, layer in enumerate(self.layout.layers) if layer.parts}
        return {i: _expert_layer(i, layer, self.layer_path(i), self.proofs.get(i)) for i, layer in routed.items()}

    def layer_path(self, layer: int) -> Path:
        """Return the file of a routed layer, under whichever of its two names the manifest lists."""
        return self.path / layer_name(self.manifest, layer)

    def touch_layer(self, layer: int) -> None:
        """Verify a layer's file, before its first expert is read, as far as the experts do not verify themselves.

        A file is hashed once, and the other layers' files after it without being waited for; sizes are compared at
        every call. Callable from any thread. Raises `DigestMismatch` or `ManifestError`, again on every call until the
        file is good.
        """
        if self.files is not None:
            self.files.touch(layer)
        else:
            check_file(self.path, layer_name(self.manifest, layer), self.manifest, hashed=False)


def layer_names(layer: int) -> tuple[str, str]:
    """Return the two names the manifest may list a layer's file under."""
    return f"{EXPERTS_DIR}/layer_{layer:02d}.bin", f"{EXPERTS_DIR}/layer_{layer}.bin"


def layer_name(manifest: Manifest, layer: int) -> str:
    """Return the name that the manifest lists a routed layer's file under; raises `ManifestError` if it lists none."""
    for name in layer_names(layer):
        if name in manifest.files:
            return name
    raise ManifestError(what=f"manifest files {layer_names(layer)[0]}", got="missing", expected="its size and sha256")


def check_file(directory: Path, name: str, manifest: Manifest, hashed: bool) -> None:  # noqa: FBT001 (one meaning)
    """Compare one listed file's size, and its digest if `hashed`, with the manifest; raises `DigestMismatch`."""
    entry, path = manifest.files[name], directory / name
    if not path.exists():
        raise ManifestError(what=str(path), got="missing", expected="the file the manifest lists", remedy=_AGAIN)
    size = file_size(path)
    if size != entry.size:
        raise DigestMismatch(what=f"{path} size", got=f"{size} bytes", expected=f"{entry.size}", remedy=_AGAIN)
    if hashed and (digest := hash_file(path)) != entry.sha256:
        raise DigestMismatch(what=f"{path} sha256", got=digest, expected=entry.sha256, remedy=_AGAIN)


_AGAIN = DAMAGED


def open_gturbo(path: Path, manifest: Manifest, policy: str = FULL_SHA256) -> GturboModel:
    """Open an install whose manifest was read from `path`.

    Both policies hash everything but the layer files, whose sizes alone are compared here. Raises `ManifestError`,
    `DigestMismatch`, or `UsageError` for an unknown policy.
    """
    if policy not in POLICIES:
        raise UsageError(what="--verify", got=repr(policy), expected=" or ".join(POLICIES))
    if policy == TRUSTED_RECEIPT:
        check_receipt(path, manifest)
    for odd in unlisted(path, manifest):
        raise ManifestError(what=str(odd), got="not in the manifest", expected="listed files only", remedy="remove it")
    for name in sorted(manifest.files):
        check_file(path, name, manifest, hashed=False)
    index, layout = read_structure(path, manifest)
    # Last, as it is what takes time: a directory that is wrong in size or shape is refused at once.
    verification, layers = Verification(policy), layer_files(manifest, layout)
    start = perf_counter()
    for name in sorted(manifest.files.keys() - layers.keys() - {WEIGHTS_NAME}):
        check_file(path, name, manifest, hashed=True)
    digests = read_digests(path, manifest, layout)
    _check_weights(path, manifest, digests)
    size = sum(entry.size for name, entry in manifest.files.items() if name not in layers)
    verification.count(size, perf_counter() - start)
    verification.count_wait(perf_counter() - start)
    proofs, files = dict[int, LayerProof](), None
    if policy == FULL_SHA256 and digests is not None:
        proofs = {i: LayerProof(verification, path / name, digests.experts[name]) for name, i in layers.items()}
    elif policy == FULL_SHA256:

        def check(layer: int) -> None:
            name, start = layer_name(manifest, layer), perf_counter()
            check_file(path, name, manifest, True)  # noqa: FBT003
            verification.count(manifest.files[name].size, perf_counter() - start)

        size = sum(manifest.files[name].size for name in layers)
        files = LayerFiles(tuple(layers.values()), check, verification, size)
    return GturboModel(
        path=path, manifest=manifest, index=index, layout=layout, verification=verification, proofs=proofs, files=files
    )


def read_structure(path: Path, manifest: Manifest) -> tuple[ResidentIndex, Layout]:
    """Read index and layout and hold them against the manifest's dimensions; raises `ManifestError`."""
    index = read_index(path / WEIGHTS_NAME)
    layout = decode_layout(read_capped(path / LAYOUT_NAME, LAYOUT_CAP_BYTES, "layout"))
    _check_dimensions(manifest, layout)
    return index, layout


def layer_files(manifest: Manifest, layout: Layout) -> dict[str, int]:
    """Return the routed layers by the names of their files."""
    return {layer_name(manifest, i): i for i, layer in enumerate(layout.layers) if layer.parts}


def read_digests(path: Path, manifest: Manifest, layout: Layout) -> Digests | None:
    """Return the digests of parts that an install has, None if it lists none.

    The file itself must have been verified already. Raises `ManifestError`.
    """
    if DIGESTS_NAME not in manifest.files:
        return None
    experts = {name: len(layout.layers[i].offsets) for name, i in layer_files(manifest, layout).items()}
    return decode_digests(read_capped(path / DIGESTS_NAME, DIGESTS_CAP_BYTES, "digests"), manifest.files, experts)


def _check_weights(path: Path, manifest: Manifest, digests: Digests | None) -> None:
    """Hash the resident file: its blocks side by side where they have digests."""
    if digests is None:
        check_file(path, WEIGHTS_NAME, manifest, hashed=True)
        return
    file = path / WEIGHTS_NAME
    spans = list(block_spans(manifest.files[WEIGHTS_NAME].size, digests.block_bytes))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="mference-verify") as pool:
        try:
            found = pool.map(lambda span: hash_spans(file, [span]), spans)
            for (offset, _), digest, wanted in zip(spans, found, digests.blocks, strict=True):
                if digest != wanted:
                    what = f"{file} block at {offset} sha256"
                    raise DigestMismatch(what=what, got=digest, expected=wanted, remedy=_AGAIN)
        except (OSError, EOFError) as error:
            raise ManifestError(what=str(file), got=f"unreadable ({error})", remedy=_AGAIN) from error
        finally:
            pool.shutdown(cancel_futures=True)


def unlisted(path: Path, manifest: Manifest) -> Iterator[Path]:
    """Yield files nobody vouches for; names with a leading dot belong to file managers.

    Digests that the manifest does not list are no concern of anybody's: they are not read.
    """
    known = {*manifest.files, MANIFEST_NAME, RECEIPT_NAME, DIGESTS_NAME}
    for item in sorted(path.rglob("*")):
        name = item.relative_to(path)
        if item.is_dir() or any(part.startswith(".") for part in name.parts) or name.as_posix() in known:
            continue
        yield item


def _check_dimensions(manifest: Manifest, layout: Layout) -> None:
    pairs = {
        "expertStride": (layout.expert_stride, manifest.expert_stride),
        "expertsPerLayer": (layout.experts_per_layer, manifest.experts_per_layer),
        "numLayers": (len(layout.layers), manifest.num_layers),
    }
    for key, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ManifestError(what=f"layout.json {key}", got=str(ours), expected=f"the manifest's {theirs}")
    need = layout.expert_stride * layout.experts_per_layer
    for i, layer in enumerate(layout.layers):
        if not layer.parts:
            if any(name in manifest.files for name in layer_names(i)):
                raise ManifestError(what=f"layout.json layer {i} experts", got="empty", expected="those of its file")
            continue
        name = layer_name(manifest, i)
        if manifest.files[name].size != need:
            got = f"{manifest.files[name].size} bytes"
            raise ManifestError(what=f"manifest files {name} size", got=got, expected=f"{need}, experts x stride")


def _weight(path: Path, entry: IndexEntry) -> Weight:
    spans = [Span(path=path, offset=offset, size=size) for offset, size in entry.spans]
    data, scales, biases = spans if len(spans) == 3 else (spans[0], None, None)
    return Weight(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        data=data,
        quant=entry.quant,
        scales=scales,
        biases=biases,
    )


def _expert_layer(number: int, layer: LayerLayout, path: Path, proof: LayerProof | None) -> ExpertLayer:
    runs = list[tuple[int, int, tuple[str, ...]]]()  # (offset in the blob, size, names), contiguous
    for part in sorted(layer.parts, key=lambda part: part.offset):
        if runs and sum(runs[-1][:2]) == part.offset:
            offset, size, names = runs.pop()
            runs.append((offset, size + part.size, (*names, part.name)))
        else:
            runs.append((part.offset, part.size, (part.name,)))

    def extents(expert: int) -> tuple[Extent, ...]:
        start = layer.offsets[expert]
        return tuple(
            Extent(span=Span(path=path, offset=start + offset, size=size), parts=names) for offset, size, names in runs
        )

    return ExpertLayer(layer=number, count=len(layer.offsets), parts=layer.expert_parts, extents=extents, proof=proof)


def missing_manifest(path: Path) -> PartialInstall:
    """Return the error of a directory that holds install files but no manifest."""
    return PartialInstall(
        what=f"{path}", got="without manifest.json", expected="a finished install", remedy="run the install again"
    )
