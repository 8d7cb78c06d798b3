"""Repairing an install in place: what is damaged is fetched again from where it came from, and nothing else."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from time import monotonic

from attrs import define, evolve, field, frozen

from mference_core.errors import DigestMismatch, InstallError, SourceError
from mference_core.gturbo.digests import DIGESTS_NAME, Digests, encode_digests
from mference_core.gturbo.layout import LAYOUT_CAP_BYTES, Layout, decode_layout
from mference_core.gturbo.model import read_digests, read_structure
from mference_core.install.big_file import BigFile
from mference_core.install.hashing import hash_files
from mference_core.install.original import TOKENIZER_PREFIX, Original, check_bytes, check_layout_made, check_made, gaps
from mference_core.install.parts import made_digests
from mference_core.install.repair_state import Origin, RepairState, origin_of, read_state, state_path
from mference_core.install.report import REPAIRING, InstallProgress, Progress
from mference_core.install.transaction import Target, check_disk, install_errors, locked
from mference_core.install.verify import (
    REMOVE,
    Damage,
    all_parts,
    bad_parts,
    find_damage,
    known_receipt,
    put_file,
    put_receipt,
    read_installed,
    remove_receipt,
    sweep,
)
from mference_core.install.writable import check_files, check_folders, check_writable
from mference_core.jsondata import hash_file, read_capped
from mference_core.manifest import LAYOUT_NAME, WEIGHTS_NAME, Manifest


@frozen(kw_only=True)
class RepairReport:
    """What a repair did: the files it found damaged and made good, bytes fetched from the source and bytes changed.

    `receipt` says that one was written, `left` names files that no repair can do anything about.
    """

    path: Path
    repaired: tuple[str, ...]
    fetched_bytes: int
    changed_bytes: int
    seconds: float
    receipt: bool = False
    left: tuple[Damage, ...] = ()


Opening = Callable[["Recorded"], AbstractContextManager[Original]]
"""Opens the source of an install, given what is recorded of it."""


@frozen(kw_only=True)
class Recorded:
    """What an install and its receipt say of the source: `origin` of a download, digest of the source's index."""

    path: Path
    manifest: Manifest
    origin: Origin | None
    snapshot: str | None


def repair_install(
    directory: Path, opening: Opening, *, write_receipt: bool = False, progress: Progress | None = None
) -> RepairReport:
    """Make an install good again; the source is opened, by `opening`, only if something is damaged.

    Everything is verified first. Parts that have digests are fetched if they are damaged; of other files, reads are
    compared in order until the file is good. The receipt goes before the first byte is written, and comes back at the
    end if there was one, or if asked: a repair that stops in the middle leaves an install that fails verification,
    never one that passes, and the next one goes on from there.

    Raises `ManifestError` for no install or one without a readable manifest, `InstallLocked`, `SourceError`,
    `InstallError` for a source that is another one, a full disk or what may not be written, `DigestMismatch` for a
    source that gives other bytes.
    """
    started = monotonic()
    path, manifest = read_installed(directory)
    check_writable(path)
    with locked(path.resolve()) as target, install_errors(path):
        check_folders(path, manifest)
        check_files(target.final.parent, [state_path(target.final).name])
        sweep(path, manifest)
        state = read_state(target.final, manifest.digest)
        before = known_receipt(path, manifest)
        damages, _ = find_damage(path, manifest, progress)
        left = tuple(damage for damage in damages if damage.remedy == REMOVE)
        bad = sorted({damage.file for damage in damages} - {damage.file for damage in left})
        work = _Repair(path=path, manifest=manifest, state=state, progress=progress)
        if bad:
            check_files(path, bad)
            origin = state.origin or origin_of(before)
            state.receipt |= before is not None
            recorded = Recorded(path=path, manifest=manifest, origin=origin, snapshot=manifest.source_snapshot_hash)
            work.do(bad, target, recorded, opening)
        writing = (write_receipt or state.receipt) and not left
        if not left:
            read_structure(path, manifest)
            if writing:
                put_receipt(path, manifest, origin_of(before) or work.origin or state.origin)
            state.forget()
    return RepairReport(
        path=path,
        repaired=tuple(bad),
        fetched_bytes=work.fetched_bytes,
        changed_bytes=work.changed_bytes,
        seconds=monotonic() - started,
        receipt=writing,
        left=left,
    )


@define(kw_only=True)
class _Repair:
    path: Path
    manifest: Manifest
    state: RepairState
    progress: Progress | None
    origin: Origin | None = None
    fetched_bytes: int = 0
    changed_bytes: int = 0
    _total: int = 0
    _done: int = 0
    _names: dict[str, str] = field(factory=dict)
    _lock: Lock = field(factory=Lock)

    def do(self, bad: Sequence[str], target: Target, recorded: Recorded, opening: Opening) -> None:
        """Make the files in `bad` good, small ones first: the layout says where the parts of the others lie."""
        if bad == [DIGESTS_NAME]:
            self._begin(target, self.manifest.files[DIGESTS_NAME].size, recorded.origin)
        else:
            with opening(recorded) as opened:
                original = evolve(opened, read=partial(self._read, opened))
                self._check(original, bad)
                self.origin = original.origin
                growth = sum(self._growth(original, name) for name in bad)
                # What was recorded is not given up for a source that has not made the install good yet.
                self._begin(target, growth, recorded.origin or original.origin)
                with ThreadPoolExecutor(original.workers, thread_name_prefix="mference-repair") as pool:
                    try:
                        self._from(original, bad, pool)
                    except DigestMismatch:
                        self.state.origin = recorded.origin
                        self.state.write()
                        raise
                    finally:
                        original.stop()  # reads that are still under way are of no use
                        pool.shutdown(cancel_futures=True)
        if DIGESTS_NAME in bad:
            self._put(DIGESTS_NAME, self._digests())

    def _check(self, original: Original, bad: Sequence[str]) -> None:
        """Refuse a source that the install was not made from, before anything is touched."""
        self._names = check_made(original, self.path, self.manifest)
        for name in bad:
            if name not in (*self._names, LAYOUT_NAME, DIGESTS_NAME) and not name.startswith(TOKENIZER_PREFIX):
                remedy = "install it again with --overwrite"
                raise InstallError(what=str(self.path / name), got="damaged, and of no source", remedy=remedy)
        if LAYOUT_NAME not in bad:
            check_layout_made(original, self.path, self._layout())
        by_parts = DIGESTS_NAME in self.manifest.files and DIGESTS_NAME not in bad
        if not by_parts and any(name in self._names for name in bad):
            check_bytes(original, self.path, {name: made for name, made in self._names.items() if name not in bad})

    def _from(self, original: Original, bad: Sequence[str], pool: ThreadPoolExecutor) -> None:
        for name in bad:
            if name not in self._names and name != DIGESTS_NAME:
                self._put(name, self._small(original, name))
        layout = self._layout()
        digests = None if DIGESTS_NAME in bad else read_digests(self.path, self.manifest, layout)
        self._big_files([name for name in bad if name in self._names], original, layout, digests, pool)

    def _layout(self) -> Layout:
        return decode_layout(read_capped(self.path / LAYOUT_NAME, LAYOUT_CAP_BYTES, "layout"))

    def _read(self, original: Original, shard: str, offset: int, size: int) -> bytes:
        try:
            data = original.read(shard, offset, size)
        except OSError as error:
            raise SourceError(
                what=f"{shard} of {original.name}",
                got=f"unreadable ({error.strerror})",
                expected="the file it was installed from",
                remedy="bring it back and run the same command: what was repaired is kept",
            ) from error
        with self._lock:
            self.fetched_bytes += len(data)
        return data

    def _begin(self, target: Target, growth: int, origin: Origin | None) -> None:
        """Say what is under way, then take the receipt away, before anything is written."""
        if growth:
            check_disk(target, growth, reserve_bytes=0)
        self.state.origin = origin
        self.state.write()
        remove_receipt(self.path)

    def _growth(self, original: Original, name: str) -> int:
        """Return the bytes that a file will take beyond those it has; small ones are written anew beside the old."""
        size = self.manifest.files[name].size
        if name not in self._names:
            return size
        holes = sum(count for _, count in gaps(original.copies[self._names[name]], size))
        return max(0, size - holes - _allocated(self.path / name))

    # --- small files

    def _small(self, original: Original, name: str) -> bytes:
        if name == LAYOUT_NAME:
            return original.outputs.layout_image
        data = original.small(name.removeprefix(TOKENIZER_PREFIX))
        self.fetched_bytes += len(data)
        return data

    def _put(self, name: str, data: bytes) -> None:
        """Replace a file in one step, if the bytes are what the manifest says."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        wanted = self.manifest.files[name]
        if len(data) != wanted.size or (found := sha256(data).hexdigest()) != wanted.sha256:
            raise self._not_made(name, f"{len(data)} bytes" if len(data) != wanted.size else found)
        put_file(self.path / name, data)
        self.changed_bytes += len(data)

    def _not_made(self, name: str, got: str) -> DigestMismatch:
        wanted, made = self.manifest.files[name], name == DIGESTS_NAME
        return DigestMismatch(
            what=f"{self.path / name} {'made again' if made else 'from the source'}",
            got=got,
            expected=f"{wanted.size} bytes of sha256 {wanted.sha256}",
            remedy="install it again" if made else "the source gives other bytes: install it again",
        )

    def _digests(self) -> bytes:
        """Return digests.json made anew, from files that are good."""
        _, layout = read_structure(self.path, self.manifest)
        parts = all_parts(self.manifest, layout)
        sizes = {name: self.manifest.files[name].size for name in parts}
        self._total, self._done = sum(sizes.values()), 0
        return encode_digests(made_digests(hash_files(self.path, sizes, self._told, parts)))

    # --- big files

    def _big_files(
        self,
        names: Sequence[str],
        original: Original,
        layout: Layout,
        digests: Digests | None,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._total = sum(self.manifest.files[name].size for name in names)
        for name in names:
            copies = original.copies.get(self._names[name], ())
            start = self._done
            file = BigFile(
                path=self.path / name,
                size=self.manifest.files[name].size,
                wanted=self.manifest.files[name].sha256,
                copies=copies,
                image=original.outputs.index_image if name == WEIGHTS_NAME else b"",
                read=original.read,
                pool=pool,
                workers=original.workers,
                told=partial(self._told_of, name, start),
            )
            try:
                with file:
                    if digests is not None:
                        good = file.fill(bad_parts(self.path, name, self.manifest, layout, digests))
                    else:
                        good = file.compare(self.state.files, name, self.state.write)
            finally:
                self.changed_bytes += file.changed_bytes
            if not good:
                raise self._not_made(name, hash_file(self.path / name))
            self._done = start + self.manifest.files[name].size
            self._told(name, self._done)

    def _told_of(self, file: str, start: int, done: int) -> None:
        self._told(file, start + done)

    def _told(self, file: str, done: int) -> None:
        if self.progress is not None:
            self.progress(InstallProgress(stage=REPAIRING, file=file, done_bytes=done, total_bytes=self._total))


def _allocated(path: Path) -> int:
    try:
        held = path.stat()
    except OSError:
        return 0
    return min(held.st_size, held.st_blocks * 512)
