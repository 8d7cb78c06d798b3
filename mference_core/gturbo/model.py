"""An installed directory, opened under one of two verify policies (gturbo-format 10, 11)."""

from pathlib import Path
from threading import Lock

from attrs import define, field, frozen

from mference_core.errors import DigestMismatch, ManifestError, PartialInstall, UsageError
from mference_core.gturbo.index import IndexEntry, ResidentIndex, read_index
from mference_core.gturbo.layout import LAYOUT_CAP_BYTES, LayerLayout, Layout, decode_layout
from mference_core.gturbo.receipt import check_receipt
from mference_core.jsondata import file_size, hash_file, read_capped
from mference_core.manifest import LAYOUT_NAME, MANIFEST_NAME, RECEIPT_NAME, WEIGHTS_NAME, Manifest
from mference_core.tensors import ExpertLayer, Extent, Span, Weight

FULL_SHA256, TRUSTED_RECEIPT = "full-sha256", "trusted-receipt"
POLICIES = (FULL_SHA256, TRUSTED_RECEIPT)
EXPERTS_DIR = "packed_experts"


@frozen(kw_only=True)
class GturboModel:
    """A verified install. Layer files are verified on first touch: see `touch_layer`."""

    path: Path
    manifest: Manifest
    index: ResidentIndex
    layout: Layout
    policy: str
    _touched: "_Touched" = field(init=False, eq=False, repr=False, factory=lambda: _Touched())  # noqa: PLW0108

    def weights(self) -> dict[str, Weight]:
        """Return every resident tensor by name, spans absolute in model_weights.bin."""
        path = self.path / WEIGHTS_NAME
        return {entry.name: _weight(path, entry) for entry in self.index.entries}

    def expert_layers(self) -> dict[int, ExpertLayer]:
        """Return every routed layer by number."""
        routed = {i: layer for i, layer in enumerate(self.layout.layers) if layer.parts}
        return {i: _expert_layer(i, layer, self.layer_path(i)) for i, layer in routed.items()}

    def layer_path(self, layer: int) -> Path:
        """Return the file of a routed layer, under whichever of its two names the manifest lists."""
        for name in layer_names(layer):
            if name in self.manifest.files:
                return self.path / name
        raise ManifestError(
            what=f"manifest files {layer_names(layer)[0]}", got="missing", expected="its size and sha256"
        )

    def touch_layer(self, layer: int) -> None:
        """Verify a layer's file once, before its first expert is read; later calls cost a dictionary look-up.

        Under full-sha256 the whole file is hashed, under trusted-receipt its size is compared. Callable from any
        thread. Raises `DigestMismatch` or `ManifestError`, again on every call until the file is good.
        """
        with self._touched.lock_of(layer):
            if layer in self._touched.done:
                return
            path = self.layer_path(layer)
            check_file(self.path, path.relative_to(self.path).as_posix(), self.manifest, self.policy == FULL_SHA256)
            self._touched.done.add(layer)


@define
class _Touched:
    done: set[int] = field(factory=set)
    locks: dict[int, Lock] = field(factory=dict)
    guard: Lock = field(factory=Lock)

    def lock_of(self, layer: int) -> Lock:
        with self.guard:
            return self.locks.setdefault(layer, Lock())


def layer_names(layer: int) -> tuple[str, str]:
    """Return the two names the manifest may list a layer's file under."""
    return f"{EXPERTS_DIR}/layer_{layer:02d}.bin", f"{EXPERTS_DIR}/layer_{layer}.bin"


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


_AGAIN = "install it again"


def open_gturbo(path: Path, manifest: Manifest, policy: str = FULL_SHA256) -> GturboModel:
    """Open an install whose manifest was read from `path`.

    Both policies hash everything but the layer files, whose sizes alone are compared here. Raises `ManifestError`,
    `DigestMismatch`, or `UsageError` for an unknown policy.
    """
    if policy not in POLICIES:
        raise UsageError(what="--verify", got=repr(policy), expected=" or ".join(POLICIES))
    if policy == TRUSTED_RECEIPT:
        check_receipt(path, manifest)
    _check_tree(path, manifest)
    for name in sorted(manifest.files):
        check_file(path, name, manifest, hashed=False)
    index = read_index(path / WEIGHTS_NAME)
    layout = decode_layout(read_capped(path / LAYOUT_NAME, LAYOUT_CAP_BYTES, "layout"))
    model = GturboModel(path=path, manifest=manifest, index=index, layout=layout, policy=policy)
    _check_dimensions(model)
    # Last, as it is what takes time: a directory that is wrong in size or shape is refused at once.
    layers = {model.layer_path(i) for i, layer in enumerate(layout.layers) if layer.parts}
    for name in sorted(manifest.files):
        if path / name not in layers:
            check_file(path, name, manifest, hashed=True)
    return model


def _check_tree(path: Path, manifest: Manifest) -> None:
    """Refuse files nobody vouches for; names with a leading dot belong to file managers."""
    known = {*manifest.files, MANIFEST_NAME, RECEIPT_NAME}
    for item in sorted(path.rglob("*")):
        name = item.relative_to(path)
        if item.is_dir() or any(part.startswith(".") for part in name.parts) or name.as_posix() in known:
            continue
        raise ManifestError(what=str(item), got="not in the manifest", expected="listed files only", remedy="remove it")


def _check_dimensions(model: GturboModel) -> None:
    manifest, layout = model.manifest, model.layout
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
        name = model.layer_path(i).relative_to(model.path).as_posix()
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


def _expert_layer(number: int, layer: LayerLayout, path: Path) -> ExpertLayer:
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

    return ExpertLayer(layer=number, count=len(layer.offsets), parts=layer.expert_parts, extents=extents)


def missing_manifest(path: Path) -> PartialInstall:
    """Return the error of a directory that holds install files but no manifest."""
    return PartialInstall(
        what=f"{path}", got="without manifest.json", expected="a finished install", remedy="run the install again"
    )
