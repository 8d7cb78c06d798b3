"""Digests of whole files, taken while the rest still downloads: of outputs, and of the source they came from."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import groupby
from threading import RLock
from typing import Any

from attrs import define, field

from mference_core.errors import DigestMismatch, MferenceError
from mference_core.install.answers import RemoteFile
from mference_core.install.files import METADATA_DIR, OutputFiles
from mference_core.install.hashing import THREADS_BESIDE, Hashed, Spans
from mference_core.install.http import HubClient
from mference_core.install.ranges import RangePlan, RangeRequest
from mference_core.install.saved import replace_file
from mference_core.jsondata import parse_object, read_capped

_TELL_SECONDS = 0.5
MARKS_NAME, MARKS_CAP_BYTES = "checked.json", 1 << 20


@define(kw_only=True)
class _SourceFile:
    """A source file being hashed from its first byte: as far as its ranges are done, in order."""

    requests: list[RangeRequest]
    done: set[str] = field(factory=set)
    found: "Future[str | None]" = field(factory=Future)
    digest: Any = None
    next: int = 0
    at: int = 0
    running: bool = False

    @property
    def ready(self) -> bool:
        """Whether the next range is there, or all of them are."""
        return self.next == len(self.requests) or self.requests[self.next].ident in self.done


@define(kw_only=True)
class Checks:
    """Background digests of one download.

    An output is hashed once every range that fills it is done. A source file is hashed along with its ranges: its
    bytes are read back from where they were put, what no output holds is read from the hub. So bytes that were changed
    at the source, on the way or on this disk are all found. `heads` are the first bytes of each source file, `parts`
    the spans of outputs that get digests of their own.
    """

    client: HubClient
    outputs: OutputFiles
    plan: RangePlan
    fingerprint: str
    files: Mapping[str, RemoteFile]
    heads: Mapping[str, bytes]
    parts: Mapping[str, Sequence[Spans]] = field(factory=dict)
    checked: dict[str, str] = field(factory=dict, init=False)
    _missing: dict[str, set[str]] = field(factory=dict, init=False)
    _hashes: dict[str, Future[Hashed]] = field(factory=dict, init=False)
    _sources: dict[str, _SourceFile] = field(factory=dict, init=False)
    _pool: ThreadPoolExecutor = field(
        factory=lambda: ThreadPoolExecutor(THREADS_BESIDE, thread_name_prefix="mference-hash")
    )
    _lock: RLock = field(factory=RLock, init=False)

    def begin(self, done: set[str]) -> None:
        """Start from the ranges that are done already, and from the source files an earlier session has checked."""
        self._missing = {name: set() for name in self.plan.outputs}
        for request in self.plan.ranges:
            for copy in request.copies:
                self._missing[copy.dest_path].add(request.ident)
        marks = self._read_marks()
        whole = {shard for shard, requests in self._by_shard().items() if {r.ident for r in requests} <= done}
        self.checked = {shard: value for shard, value in marks.items() if shard in whole}
        if self.checked != marks:
            self._write_marks()
        for shard, requests in self._by_shard().items():
            if self.files[shard].digest is not None and shard not in self.checked:
                self._sources[shard] = _SourceFile(requests=requests)
        for name in [name for name, left in self._missing.items() if not left]:
            self._hash(name)
        for request in self.plan.ranges:
            if request.ident in done:
                self.done(request)

    def close(self) -> None:
        """End what is under way."""
        self.outputs.stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def done(self, request: RangeRequest) -> None:
        """Take note that a range is durable; start the digests that waited for it."""
        with self._lock:
            for name in {copy.dest_path for copy in request.copies}:
                self._missing[name].discard(request.ident)
                if not self._missing[name] and name not in self._hashes:
                    self._hash(name)
            source = self._sources.get(request.shard)
            if source is not None:
                source.done.add(request.ident)
                if source.ready and not source.running:
                    source.running = True
                    self._pool.submit(self._advance, request.shard, source)

    def _hash(self, name: str) -> None:
        self._hashes[name] = self._pool.submit(self.outputs.hash, name, self.parts.get(name, ()))

    # --- answers

    def wrong_sources(self, tell: Callable[[int, int], None]) -> dict[str, str]:
        """Wait for all source files; return those unlike the hub's digest, with the one found.

        `tell` is called now and then with bytes hashed and bytes in all.
        """
        total = sum(self.files[shard].size or 0 for shard in self._sources)
        running = {source.found for source in self._sources.values()}
        while running:
            tell(sum(source.at for source in self._sources.values()), total)
            running = wait(running, _TELL_SECONDS, FIRST_EXCEPTION).not_done
            if any(source.found.done() and source.found.exception() for source in self._sources.values()):
                break
        found = {shard: source.found.result() for shard, source in sorted(self._sources.items())}
        return {shard: digest for shard, digest in found.items() if digest is not None}

    def again(self, requests: list[RangeRequest]) -> None:
        """Forget what was found of these ranges, all those of some source files: they will be fetched again."""
        with self._lock:
            for request in requests:
                for copy in request.copies:
                    self._missing[copy.dest_path].add(request.ident)
                    self._hashes.pop(copy.dest_path, None)
            for shard in {request.shard for request in requests}:
                self._sources[shard] = _SourceFile(requests=self._by_shard()[shard])

    def output_hashes(self) -> Iterator[tuple[str, Hashed]]:
        """Yield the name and digests of each output as they are known."""
        for name in self.plan.outputs:
            yield name, self._hashes[name].result()

    # --- the source

    def _advance(self, shard: str, source: _SourceFile) -> None:
        """Hash a source file as far as it is there; after its last byte, say what was found."""
        try:
            if source.digest is None:
                stated = self.files[shard].digest
                assert stated is not None
                source.digest, source.at = stated.start(), len(self.heads[shard])
                source.digest.update(self.heads[shard])
            while source.next < len(source.requests):
                with self._lock:
                    if not source.ready:
                        source.running = False
                        return
                request = source.requests[source.next]
                for data in self._bytes_up_to(request, source.at, keep=True):
                    source.digest.update(data)
                source.next, source.at = source.next + 1, request.offset + request.size
            for data in self._rest(shard, source.at):
                source.digest.update(data)
            source.found.set_result(self._verdict(shard, source))
        except BaseException as error:  # noqa: BLE001  raised by whoever asks for what was found
            source.found.set_exception(error)

    def _verdict(self, shard: str, source: _SourceFile) -> str | None:
        stated = self.files[shard].digest
        assert stated is not None
        if source.digest.hexdigest() != stated.value:
            # Once more without the kept bytes between copies: if those alone were bad, no range needs to be fetched.
            source.digest, at = stated.start(), len(self.heads[shard])
            source.digest.update(self.heads[shard])
            for request in source.requests:
                for data in self._bytes_up_to(request, at, keep=False):
                    source.digest.update(data)
                at = request.offset + request.size
            for data in self._rest(shard, at):
                source.digest.update(data)
        found = str(source.digest.hexdigest())
        if found != stated.value:
            return found
        with self._lock:
            self.checked[shard] = found
            self._write_marks()
        return None

    def _bytes_up_to(self, request: RangeRequest, at: int, *, keep: bool) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a source file from `at` to the end of a range."""
        file = self.files[request.shard]
        yield from self.client.read_range(file, at, request.offset - at)
        for piece in request.pieces:
            if piece.path is not None:
                yield from self.outputs.read(piece.path, piece.offset, piece.size)
                continue
            kept = self.outputs.read_gap(request, piece) if keep else None
            yield from kept or self.client.read_range(file, request.offset + piece.start, piece.size)

    def _rest(self, shard: str, at: int) -> Iterator[bytes]:
        file = self.files[shard]
        return self.client.read_range(file, at, (file.size or 0) - at)

    def _by_shard(self) -> dict[str, list[RangeRequest]]:
        return {shard: list(found) for shard, found in groupby(self.plan.ranges, key=lambda request: request.shard)}

    # --- what earlier sessions have checked

    def _read_marks(self) -> dict[str, str]:
        path = self.outputs.root / METADATA_DIR / MARKS_NAME
        try:
            values = parse_object(read_capped(path, MARKS_CAP_BYTES, "checked files"), MARKS_NAME)
        except MferenceError:
            return {}
        stated = {name: file.digest.value for name, file in self.files.items() if file.digest is not None}
        marks = values.get("files")
        if values.get("planFingerprint") != self.fingerprint or not isinstance(marks, dict):
            return {}
        return {name: value for name, value in stated.items() if marks.get(name) == value}

    def _write_marks(self) -> None:
        values = {"files": self.checked, "planFingerprint": self.fingerprint}
        replace_file(self.outputs.root / METADATA_DIR / MARKS_NAME, json.dumps(values, sort_keys=True).encode())


def corrupt(repo: str, file: RemoteFile, found: str) -> DigestMismatch:
    """Return the error of a source file that twice was not what its hub says."""
    assert file.digest is not None
    return DigestMismatch(
        what=f"{repo} {file.name} {file.digest.kind} digest",
        got=found,
        expected=f"{file.digest.value}, as the hub states",
        remedy="the source or the way to it changes bytes: nothing of this file was kept",
    )
