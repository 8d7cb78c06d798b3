"""One download into a staging directory: begun or resumed, fetched, checked; its saved state never says too much."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import Self

from attrs import define, evolve, field

from mference_core.errors import InstallError
from mference_core.gturbo.digests import Digests
from mference_core.install.checks import Checks, corrupt
from mference_core.install.files import OutputFiles
from mference_core.install.hashing import Hashed
from mference_core.install.http import HubClient
from mference_core.install.parts import made_digests
from mference_core.install.planning import RemotePlan
from mference_core.install.ranges import RangeRequest, plan_fingerprint
from mference_core.install.report import CHECKING, COPYING, HASHING, RESERVING, RESUMING, InstallProgress
from mference_core.install.saved import DoneRange, Saved, write_saved
from mference_core.install.transaction import Target, abandon, check_disk, check_swap, prepare, remove_staging
from mference_core.install.transfer import Transfer
from mference_core.manifest import FileEntry

DISCARD = "remove it with 'mference discard' and start again"
Tell = Callable[[InstallProgress], None]


@define(kw_only=True)
class Download:
    """The payload files of one install, under the output's lock.

    A range is recorded once its bytes are durable and were read back; a source file that does not have the digest its
    hub states loses the records of all its ranges. `doubt` is given the names of such files first, and may raise.
    """

    client: HubClient
    target: Target
    plan: RemotePlan
    tell: Tell
    files: OutputFiles
    checks: Checks
    saved: Saved
    doubt: Callable[[Iterable[str]], None]
    reused_bytes: int = field(default=0, init=False)
    digests: Digests | None = field(default=None, init=False)
    _received_bytes: int = field(default=0, init=False)

    @classmethod
    def of(
        cls,
        client: HubClient,
        target: Target,
        plan: RemotePlan,
        tell: Tell,
        doubt: Callable[[Iterable[str]], None],
    ) -> Self:
        """Return the download of a plan, nothing of it done."""
        files = OutputFiles(root=target.partial, plan=plan.requests)
        remote, fingerprint = plan.remote, plan_fingerprint(plan.requests)
        return cls(
            client=client,
            target=target,
            plan=plan,
            tell=tell,
            doubt=doubt,
            files=files,
            checks=Checks(
                client=client,
                outputs=files,
                plan=plan.requests,
                fingerprint=fingerprint,
                files=remote.files,
                heads=remote.heads,
                parts=plan.parts,
            ),
            saved=Saved(
                repo=remote.repo,
                revision=remote.revision,
                commit=remote.commit,
                index_sha256=remote.source.snapshot_sha256,
                fingerprint=fingerprint,
                total_source_bytes=plan.requests.source_bytes,
                ranges={},
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.client.stop()
        self.checks.close()
        self.files.close()

    # --- starting

    def begin(self, *, overwrite: bool) -> None:
        """Make the staging directory, reserve the outputs, and save the state of a download with nothing done."""
        check_disk(self.target, self.plan.written_bytes)
        prepare(self.target, overwrite=overwrite)
        try:
            self._reserve()
        except BaseException:
            self.files.close()
            abandon(self.target)
            raise
        self.checks.begin(set())

    def _reserve(self) -> None:
        self._stage(RESERVING, total=self.plan.output_bytes)
        if self.target.final.exists():
            check_swap(self.target)
        self.files.reserve(self.plan.outputs.index_image)
        write_saved(self.target, self.saved)

    def resume(self, before: Saved) -> None:
        """Take over what an earlier session recorded, as far as the files still hold it."""
        self._check_same(before)
        requests = self._recorded(before)
        if not self.files.reopen(self.plan.outputs.index_image):
            self.files.close()
            remove_staging(self.target)
            check_disk(self.target, self.plan.written_bytes)
            self.target.partial.mkdir(mode=0o755)
            self._reserve()
            self.checks.begin(set())
            return
        good = self._still_good(before, requests)
        durable = sum(request.dest_size + request.gap_bytes for request in good)
        check_disk(self.target, self.plan.written_bytes, durable)
        if self.target.final.exists():
            check_swap(self.target)
        self.saved = evolve(self.saved, ranges={request.ident: before.ranges[request.ident] for request in good})
        self.reused_bytes = self.saved.done_source_bytes
        self.checks.begin(set(self.saved.ranges))
        if self.saved != before:
            write_saved(self.target, self.saved)

    def _check_same(self, before: Saved) -> None:
        """Refuse to mix two states of a source."""
        for name in ("commit", "index_sha256", "fingerprint", "total_source_bytes"):
            old, new = getattr(before, name), getattr(self.saved, name)
            if old != new:
                what = f"saved download of {self.target.shown}: {name.replace('_', ' ')}"
                raise InstallError(what=what, got=str(old), expected=f"{new} as the source is now", remedy=DISCARD)

    def _recorded(self, before: Saved) -> list[RangeRequest]:
        known = {request.ident: request for request in self.plan.requests.ranges}
        for ident, done in before.ranges.items():
            request = known.get(ident)
            if request is None or (request.size, request.dest_size) != (done.source_bytes, done.destination_bytes):
                what = f"{self.target.checkpoint} {ident}"
                raise InstallError(what=what, got="not a range of this source", expected="one", remedy=DISCARD)
        return [known[ident] for ident in sorted(before.ranges)]

    def _still_good(self, before: Saved, requests: list[RangeRequest]) -> list[RangeRequest]:
        """Return the recorded ranges whose bytes are in the files now, digested several at a time."""
        good, done = list[RangeRequest](), 0
        self._stage(RESUMING, total=before.done_source_bytes)
        with ThreadPoolExecutor(min(4, cpu_count() or 1), thread_name_prefix="mference-verify") as pool:
            try:
                for request, digest in zip(requests, pool.map(self.files.digest, requests), strict=True):
                    if digest == before.ranges[request.ident].digest:
                        good.append(request)
                    done += request.size
                    self._stage(RESUMING, done, before.done_source_bytes)
            except BaseException:
                self.files.stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
        return good

    # --- fetching

    def fetch(self) -> None:
        """Fetch every range that is missing, and again the source files that turned out wrong.

        Raises `SourceError`, `DigestMismatch` for a source file that is wrong twice, and `OSError`.
        """
        for last in (False, True):
            missing = [request for request in self.plan.requests.ranges if request.ident not in self.saved.ranges]
            self._received_bytes = self.saved.done_source_bytes - self.reused_bytes
            self._copying("")
            if missing:
                transfer = Transfer(
                    client=self.client,
                    files=self.plan.remote.files,
                    outputs=self.files,
                    settled=self._settled,
                    received=self._received,
                )
                transfer.run(missing)
            wrong = self.checks.wrong_sources(lambda done, total: self._stage(CHECKING, done, total))
            if not wrong:
                return
            self.doubt(wrong)
            self._drop(wrong)
            if last:
                shard, found = min(wrong.items())
                raise corrupt(self.client.repo, self.plan.remote.files[shard], found)

    def _received(self, shard: str, size: int) -> None:
        self._received_bytes += size
        self._copying(shard)

    def _settled(self, ranges: list[tuple[RangeRequest, str]]) -> None:
        done = {
            request.ident: DoneRange(
                ident=request.ident,
                source_bytes=request.size,
                destination_bytes=request.dest_size,
                digest=digest,
            )
            for request, digest in ranges
        }
        self.saved = evolve(self.saved, ranges={**self.saved.ranges, **done})
        write_saved(self.target, self.saved)
        for request, _ in ranges:
            self.checks.done(request)

    def _drop(self, shards: dict[str, str]) -> None:
        """Forget the ranges of source files that are wrong: what they wrote is not to be trusted."""
        requests = [request for request in self.plan.requests.ranges if request.shard in shards]
        idents = {request.ident for request in requests}
        kept = {ident: done for ident, done in self.saved.ranges.items() if ident not in idents}
        self.saved = evolve(self.saved, ranges=kept)
        write_saved(self.target, self.saved)
        self.reused_bytes = min(self.reused_bytes, self.saved.done_source_bytes)
        self.checks.again(requests)

    def hashes(self) -> dict[str, FileEntry]:
        """Return size and SHA-256 of every payload file; then `digests` are those of their parts, if asked for."""
        found, done, total = dict[str, Hashed](), 0, sum(self.plan.requests.outputs.values())
        self._stage(HASHING, total=total)
        for name, hashed in self.checks.output_hashes():
            found[name] = hashed
            done += hashed.size
            self._stage(HASHING, done, total, name)
        if self.plan.expert_digests:
            self.digests = made_digests(found)
        return {name: FileEntry(size=hashed.size, sha256=hashed.sha256) for name, hashed in found.items()}

    # --- telling

    def _copying(self, file: str) -> None:
        done = self.reused_bytes + self._received_bytes
        self.tell(
            InstallProgress(
                stage=COPYING,
                file=file,
                done_bytes=done,
                total_bytes=self.saved.total_source_bytes,
                reused_bytes=self.reused_bytes,
            )
        )

    def _stage(self, stage: str, done: int = 0, total: int = 0, file: str = "") -> None:
        self.tell(InstallProgress(stage=stage, file=file, done_bytes=done, total_bytes=total))
