"""Digests of whole files, taken while the rest still downloads: of outputs, and of the source they came from."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from threading import Lock

from attrs import define, field

from mference_core.errors import DigestMismatch, MferenceError
from mference_core.install.answers import RemoteFile
from mference_core.install.files import METADATA_DIR, OutputFiles
from mference_core.install.http import HubClient
from mference_core.install.ranges import RangePlan, RangeRequest
from mference_core.install.saved import replace_file
from mference_core.jsondata import parse_object, read_capped

MARKS_NAME, MARKS_CAP_BYTES = "checked.json", 1 << 20


@define(kw_only=True)
class Checks:
    """Background digests of one download.

    An output is hashed once every range that fills it is done; a source file once every range of it is: its bytes
    are read back from where they were put, what no output holds is read from the hub. So bytes that were changed at
    the source, on the way or on this disk are all found. `heads` are the first bytes of each source file, known already.
    """

    client: HubClient
    outputs: OutputFiles
    plan: RangePlan
    fingerprint: str
    files: Mapping[str, RemoteFile]
    heads: Mapping[str, bytes]
    checked: dict[str, str] = field(factory=dict, init=False)
    _missing: dict[str, set[str]] = field(factory=dict, init=False)
    _hashes: dict[str, Future[str]] = field(factory=dict, init=False)
    _sources: dict[str, Future[str | None]] = field(factory=dict, init=False)
    _pool: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="mference-hash"))
    _lock: Lock = field(factory=Lock, init=False)

    def begin(self, done: set[str]) -> None:
        """Start from the ranges that are done already, and from the source files an earlier session has checked."""
        self.checked = self._read_marks()
        for request in self.plan.ranges:
            for name in self._subjects(request):
                self._missing.setdefault(name, set()).add(request.ident)
        held = {
            shard: value for shard, value in self.checked.items() if self._missing.get(_source(shard), set()) <= done
        }
        if held != self.checked:
            self.checked = held
            self._write_marks()
        for shard in held:
            self._missing.pop(_source(shard), None)
        for name in self.plan.outputs.keys() - self._missing.keys():
            self._missing[name] = set()
        for request in self.plan.ranges:
            if request.ident in done:
                self.done(request)
        for name in sorted(name for name, left in self._missing.items() if not left):
            self._start(name)

    def close(self) -> None:
        """End what is under way."""
        self.outputs.stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def _subjects(self, request: RangeRequest) -> set[str]:
        names = {copy.dest_path for copy in request.copies}
        return names | {_source(request.shard)} if self.files[request.shard].digest else names

    def done(self, request: RangeRequest) -> None:
        """Take note that a range is durable; start the digests that waited for it."""
        with self._lock:
            for name in self._subjects(request):
                left = self._missing.get(name)
                if left and request.ident in left:
                    left.discard(request.ident)
                    if not left:
                        self._start(name)

    def _start(self, name: str) -> None:
        if name.startswith("source:"):
            shard = name.removeprefix("source:")
            if shard not in self._sources:
                self._sources[shard] = self._pool.submit(self._check_source, shard)
        elif name not in self._hashes:
            self._hashes[name] = self._pool.submit(self.outputs.hash, name)

    # --- answers

    def wrong_sources(self) -> dict[str, str]:
        """Wait for the source files under way; return those unlike the hub's digest, with the one found."""
        found = {shard: future.result() for shard, future in sorted(self._sources.items())}
        return {shard: digest for shard, digest in found.items() if digest is not None}

    def again(self, requests: list[RangeRequest]) -> None:
        """Forget what was found of these ranges: they will be fetched again."""
        for request in requests:
            for name in self._subjects(request):
                self._missing.setdefault(name, set()).add(request.ident)
                self._hashes.pop(name, None)
                self._sources.pop(name.removeprefix("source:"), None)

    def output_hashes(self) -> Iterator[tuple[str, str]]:
        """Yield the name and SHA-256 of each output as it is known."""
        for name in self.plan.outputs:
            yield name, self._hashes[name].result()

    # --- the source

    def _check_source(self, shard: str) -> str | None:
        """Return None if a source file is what the hub says, else its digest."""
        stated = self.files[shard].digest
        assert stated is not None
        found = ""
        for keep in (True, False):
            # The second time without the kept bytes between copies: if those alone were bad, no range needs to be.
            digest = stated.start()
            for data in self._source_bytes(shard, keep=keep):
                digest.update(data)
            if (found := digest.hexdigest()) == stated.value:
                with self._lock:
                    self.checked[shard] = found
                    self._write_marks()
                return None
        return str(found)

    def _source_bytes(self, shard: str, *, keep: bool) -> Iterator[bytes | memoryview]:
        """Yield a source file from its first byte to its last."""
        file, head = self.files[shard], self.heads[shard]
        assert file.size is not None
        yield head
        at = len(head)
        for request in self._by_shard()[shard]:
            yield from self.client.read_range(file, at, request.offset - at)
            for piece in request.pieces:
                if piece.path is not None:
                    yield from self.outputs.read(piece.path, piece.offset, piece.size)
                    continue
                kept = self.outputs.read_gap(request, piece) if keep else None
                yield from kept or self.client.read_range(file, request.offset + piece.start, piece.size)
            at = request.offset + request.size
        yield from self.client.read_range(file, at, file.size - at)

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


def _source(shard: str) -> str:
    return f"source:{shard}"


def corrupt(repo: str, file: RemoteFile, found: str) -> DigestMismatch:
    """Return the error of a source file that twice was not what its hub says."""
    assert file.digest is not None
    return DigestMismatch(
        what=f"{repo} {file.name} {file.digest.kind} digest",
        got=found,
        expected=f"{file.digest.value}, as the hub states",
        remedy="the source or the way to it changes bytes: nothing of this file was kept",
    )
