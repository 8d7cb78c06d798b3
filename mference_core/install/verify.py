"""Verifying a finished install: every byte against the manifest; a receipt, or digests of parts, written if asked."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic

from attrs import evolve, frozen

from mference_core.checkpoint import check_directory
from mference_core.errors import DigestMismatch, InstallError, ManifestError, MferenceError
from mference_core.gturbo.digests import (
    DIGESTS_NAME,
    Digests,
    block_spans,
    encode_digests,
    expert_spans,
    hash_spans,
)
from mference_core.gturbo.layout import LAYOUT_CAP_BYTES, Layout, decode_layout
from mference_core.gturbo.model import layer_files, read_digests, read_structure, unlisted
from mference_core.gturbo.receipt import (
    RECEIPT_CAP_BYTES,
    TOOL_VERIFY,
    Receipt,
    check_receipt,
    decode_receipt,
    encode_receipt,
    make_receipt,
)
from mference_core.install.finish import write_small
from mference_core.install.hashing import Hashed, Spans, hash_files
from mference_core.install.parts import made_digests, part_spans
from mference_core.install.repair_state import Origin, origin_of, read_state
from mference_core.install.report import VERIFYING, InstallProgress, Progress
from mference_core.install.transaction import install_errors, locked, sync_directory, undisturbed
from mference_core.jsondata import read_capped, standard_path
from mference_core.manifest import (
    LAYOUT_NAME,
    MANIFEST_NAME,
    RECEIPT_NAME,
    WEIGHTS_NAME,
    FileEntry,
    Manifest,
    encode_manifest,
    read_manifest,
)

REPAIR, REMOVE = "repair it with 'mference repair'", "remove it"


@frozen(kw_only=True)
class Damage:
    """A file of an install, or bytes `[offset, offset + size)` of it, unlike what the manifest says.

    `part` names those bytes: an expert, a block; empty for a whole file.
    """

    path: Path
    file: str
    got: str
    expected: str
    what: str = "sha256"
    part: str = ""
    offset: int = 0
    size: int = 0
    remedy: str = REPAIR

    def __str__(self) -> str:
        """Return the line a user reads."""
        where = f" {self.part} (bytes {self.offset} to {self.offset + self.size})" if self.part else ""
        subject = f"{self.path}{where}" + (f" {self.what}" if self.what else "")
        return str(DigestMismatch(what=subject, got=self.got, expected=self.expected, remedy=self.remedy))


@frozen(kw_only=True)
class VerifyReport:
    """What a verification found, and wrote: files and bytes hashed, damage, whether receipt and digests were written.

    `stale_receipt` says that a receipt vouches for files that are damaged.
    """

    path: Path
    files: int
    size_bytes: int
    seconds: float
    damages: tuple[Damage, ...] = ()
    receipt: bool = False
    digests: bool = False
    stale_receipt: bool = False


def read_installed(directory: Path) -> tuple[Path, Manifest]:
    """Return the standardised path and the manifest of an install; raises `ManifestError`, `PartialInstall`."""
    path = Path(standard_path(directory))
    check_directory(path)
    if not (path / MANIFEST_NAME).exists():
        model = (path / "config.json").exists()
        remedy = "install it with 'mference install --source' to have digests" if model else "see 'mference install'"
        raise ManifestError(what=str(path), got="no install", expected="one, with a manifest", remedy=remedy)
    return path, read_manifest(path / MANIFEST_NAME)


def verify_install(
    directory: Path, *, write_receipt: bool = False, expert_digests: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Hash every file of an install, several at a time, and say what is not as the manifest has it.

    With `write_receipt` a good install gets the receipt that `trusted-receipt` loads ask for, a damaged one loses it,
    and what it said of the source is kept for a repair.
    With `expert_digests` a good install gets digests.json, which its manifest then lists; a receipt that held before
    is written again. Otherwise nothing is written, and no right to write is needed.

    Raises `ManifestError` for no install, or one that was badly written; `InstallLocked` while another process writes,
    `InstallError` where what was asked for cannot be written. An interrupt leaves everything as it was.
    """
    started = monotonic()
    path, manifest = read_installed(directory)
    writing = write_receipt or expert_digests
    with _held(path, writing=writing):
        if writing:
            sweep(path, manifest)
        before, state = known_receipt(path, manifest), read_state(path.resolve(), manifest.digest)
        adding = expert_digests and DIGESTS_NAME not in manifest.files
        layout = _layout_if_good(path) if adding else None
        damages, made = find_damage(path, manifest, progress, layout)
        report = VerifyReport(
            path=path,
            files=len(manifest.files),
            size_bytes=sum(entry.size for entry in manifest.files.values()),
            seconds=monotonic() - started,
            damages=damages,
        )
        if damages:
            if write_receipt:
                with install_errors(path):
                    if before is not None:  # a repair wants to know where the install came from
                        state.origin, state.receipt = state.origin or origin_of(before), True
                        state.write()
                    remove_receipt(path)
            return evolve(report, stale_receipt=before is not None and not write_receipt)
        read_structure(path, manifest)
        valid = before is not None and _holds(path, manifest)
        with install_errors(path):
            if made is not None:
                manifest = add_digests(path, manifest, made)
            if write_receipt or (made is not None and valid):
                put_receipt(path, manifest, origin_of(before) or state.origin)
                state.forget()
    return evolve(report, receipt=write_receipt, digests=made is not None, seconds=monotonic() - started)


@contextmanager
def _held(path: Path, *, writing: bool) -> Iterator[None]:
    real = path.resolve()
    if writing and not os.access(real, os.W_OK):
        raise InstallError(what=str(path), got="read-only", expected="a directory to write a receipt or digests in")
    holding: AbstractContextManager[object] = locked(real) if writing else undisturbed(real)
    with holding:
        yield


# --- finding


def find_damage(
    path: Path, manifest: Manifest, progress: Progress | None, layout: Layout | None = None
) -> tuple[tuple[Damage, ...], Digests | None]:
    """Return what of an install is damaged, parts of files where they have digests.

    With a `layout`, the digests of parts are made in the same reading; they mean something if nothing is damaged.
    """
    kinds = {name: _kind(path, name, entry) for name, entry in sorted(manifest.files.items())}
    damages = [damage for damage in kinds.values() if damage is not None]
    sizes = {name: manifest.files[name].size for name, damage in kinds.items() if damage is None}
    total = sum(sizes.values())

    def told(file: str, done: int) -> None:
        if progress is not None:
            progress(InstallProgress(stage=VERIFYING, file=file, done_bytes=done, total_bytes=total))

    told("", 0)
    parts = all_parts(manifest, layout) if layout is not None else {}
    found = hash_files(path, sizes, told, parts)
    wrong = (_wrong(path, name, hashed, manifest.files[name]) for name, hashed in found.items())
    damages += [damage for damage in wrong if damage is not None]
    damages = _located(path, manifest, damages)
    for odd in unlisted(path, manifest):
        name = odd.relative_to(path).as_posix()
        damages.append(
            Damage(path=odd, file=name, got="not in the manifest", expected="listed files only", what="", remedy=REMOVE)
        )
    if layout is None or damages:
        return tuple(damages), None
    return (), made_digests({name: found[name] for name in parts})


def _kind(path: Path, name: str, entry: FileEntry) -> Damage | None:
    """Return what is wrong with a file before it is read."""
    file = path / name
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        return _damage(path, name, "missing", "the file the manifest lists", what="")
    except OSError as error:
        return _damage(path, name, f"unreadable ({error.strerror})", "its bytes", what="")
    if not file.is_file():
        return _damage(path, name, "not a regular file", "the file the manifest lists", what="")
    if size != entry.size:
        return _damage(path, name, f"{size} bytes", f"{entry.size}", what="size")
    return None


def _wrong(path: Path, name: str, hashed: Hashed, entry: FileEntry) -> Damage | None:
    """Return what is wrong with a file that was read."""
    if hashed.error:
        return _damage(path, name, f"unreadable ({hashed.error})", "its bytes", what="")
    if hashed.size != entry.size:
        return _damage(path, name, f"{hashed.size} bytes", f"{entry.size}", what="size")
    return None if hashed.sha256 == entry.sha256 else _damage(path, name, hashed.sha256, entry.sha256)


def _damage(path: Path, name: str, got: str, expected: str, what: str = "sha256") -> Damage:
    return Damage(path=path / name, file=name, got=got, expected=expected, what=what)


def all_parts(manifest: Manifest, layout: Layout) -> dict[str, list[Spans]]:
    """Return the spans of every part of every file that digests.json speaks of."""
    layers = {name: layout.layers[number] for name, number in layer_files(manifest, layout).items()}
    return part_spans(manifest.files[WEIGHTS_NAME].size, layers)


def _located(path: Path, manifest: Manifest, damages: Sequence[Damage]) -> list[Damage]:
    """Replace the damage of whole files by that of their parts, where intact digests tell them apart."""
    bad = {damage.file for damage in damages}
    if DIGESTS_NAME not in manifest.files or bad & {DIGESTS_NAME, LAYOUT_NAME}:
        return list(damages)
    layout = _layout(path)
    digests = read_digests(path, manifest, layout)
    assert digests is not None
    placed = list[Damage]()
    for damage in damages:
        if damage.what != "sha256" or damage.file not in digests.files:
            placed.append(damage)
            continue
        found = list(bad_parts(path, damage.file, manifest, layout, digests))
        placed += found or [damage]
    return placed


def bad_parts(path: Path, name: str, manifest: Manifest, layout: Layout, digests: Digests) -> Iterator[Damage]:
    """Yield the parts of a file that are not as digests.json has them; a file that is too short lacks its last ones."""
    layer = layer_files(manifest, layout).get(name)
    if layer is None:
        pieces: list[Spans] = [(span,) for span in block_spans(manifest.files[name].size, digests.block_bytes)]
        wanted, label = digests.blocks, "block"
    else:
        pieces = [tuple(expert_spans(layout.layers[layer], e)) for e in range(layout.experts_per_layer)]
        wanted, label = digests.experts[name], "expert"
    for number, (spans, digest) in enumerate(zip(pieces, wanted, strict=True)):
        try:
            found = hash_spans(path / name, spans)
        except EOFError:
            found = "cut short"
        except OSError as error:
            found = f"unreadable ({error.strerror})"
        if found != digest:
            first, last = spans[0][0], sum(spans[-1])
            damage = _damage(path, name, found, digest)
            yield evolve(damage, part=f"{label} {number}", offset=first, size=last - first)


def _layout(path: Path) -> Layout:
    return decode_layout(read_capped(path / LAYOUT_NAME, LAYOUT_CAP_BYTES, "layout"))


def _layout_if_good(path: Path) -> Layout | None:
    """Return the layout; None for one that is damaged, as will be found."""
    try:
        return _layout(path)
    except MferenceError:
        return None


# --- writing


def known_receipt(path: Path, manifest: Manifest) -> Receipt | None:
    """Return the receipt of an install if it is of these files, wherever they were then; None for any other."""
    try:
        receipt = decode_receipt(read_capped(path / RECEIPT_NAME, RECEIPT_CAP_BYTES, "receipt"))
    except MferenceError:
        return None
    return receipt if receipt.manifest_sha256 == manifest.digest else None


def _holds(path: Path, manifest: Manifest) -> bool:
    try:
        check_receipt(path, manifest)
    except MferenceError:
        return False
    return True


def put_receipt(path: Path, manifest: Manifest, origin: Origin | None) -> None:
    """Write the receipt of an install that was verified; it names the source, if that is known."""
    receipt = make_receipt(
        manifest,
        path,
        source_repo_id=origin.repo if origin else None,
        source_revision=origin.commit if origin else None,
        tool_version=TOOL_VERIFY,
    )
    put_file(path / RECEIPT_NAME, encode_receipt(receipt))


def remove_receipt(path: Path) -> None:
    """Remove the receipt, durable when this returns."""
    (path / RECEIPT_NAME).unlink(missing_ok=True)
    sync_directory(path)


def add_digests(path: Path, manifest: Manifest, digests: Digests) -> Manifest:
    """Write digests.json, then the manifest that lists it; an install killed in between is as good as before."""
    data = encode_digests(digests)
    entry = FileEntry(size=len(data), sha256=sha256(data).hexdigest())
    listed = encode_manifest(evolve(manifest, files={**manifest.files, DIGESTS_NAME: entry}))
    read_manifest(listed)
    remove_receipt(path)
    put_file(path / DIGESTS_NAME, data)
    put_file(path / MANIFEST_NAME, listed)
    return read_manifest(listed)


def sweep(path: Path, manifest: Manifest) -> None:
    """Remove what a kill left of files that were being replaced."""
    for name in (*manifest.files, MANIFEST_NAME, RECEIPT_NAME):
        with suppress(NotADirectoryError):  # a file in place of a folder: that is damage
            _pending(path / name).unlink(missing_ok=True)


def _pending(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def put_file(path: Path, data: bytes) -> None:
    """Replace a file of an install in one step, durable when this returns; what a kill leaves is no file of it."""
    pending = _pending(path)
    pending.unlink(missing_ok=True)
    write_small(pending, data)
    pending.rename(path)
    sync_directory(path.parent)
