"""An install before its first byte: what will be downloaded, written and needed."""

from collections.abc import Callable, Mapping, Sequence

from attrs import field, frozen

from mference_core.arch import Arch, ManifestContract
from mference_core.checkpoint import Checkpoint, open_checkpoint
from mference_core.install.finish import draft_manifest
from mference_core.install.hashing import Spans
from mference_core.install.metadata import RemoteSource
from mference_core.install.outputs import Outputs, check_quantised, plan_outputs, plan_requests
from mference_core.install.parts import digests_bytes, output_parts
from mference_core.install.ranges import RangePlan
from mference_core.install.transaction import CHUNK_BYTES, disk_bytes_needed
from mference_core.manifest import Manifest
from mference_core.placement import InstallPlan

PlanFor = Callable[[Arch], InstallPlan]


@frozen(kw_only=True)
class Reader:
    """The family that reads a source; `known_ids` maps digests of published index files to model ids."""

    contract: ManifestContract
    plan_for: PlanFor
    known_ids: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class RemotePlan:
    """An install before its first byte: what is downloaded and what is written, all sizes in bytes.

    `download_bytes` are those of the ranges; `check_bytes` more are read only to hold the source's files against the
    hub's digests.
    """

    remote: RemoteSource
    checkpoint: Checkpoint
    outputs: Outputs
    requests: RangePlan
    manifest: Manifest
    expert_digests: bool = False

    @property
    def parts(self) -> Mapping[str, Sequence[Spans]]:
        """The spans of payload files that get digests of their own."""
        return output_parts(self.outputs) if self.expert_digests else {}

    @property
    def download_bytes(self) -> int:
        """Bytes of all ranges."""
        return self.requests.source_bytes

    @property
    def check_bytes(self) -> int:
        """Bytes of files with a stated digest that no range and no header brings."""
        checked = {r.shard for r in self.requests.ranges if self.remote.files[r.shard].digest}
        whole = sum(self.remote.files[name].size or 0 for name in checked)
        ranges = sum(request.size for request in self.requests.ranges if request.shard in checked)
        heads = sum(len(self.remote.heads[name]) for name in checked)
        return whole - ranges - heads

    @property
    def side_bytes(self) -> int:
        """Bytes of the tokenizer files, and of digests.json if there is to be one."""
        tokenizer = sum(file.size or 0 for file in self.remote.tokenizer.values())
        return len(self.remote.seen.config_data) + tokenizer + digests_bytes(self.parts)

    @property
    def output_bytes(self) -> int:
        """Bytes of the install but for manifest and receipt."""
        return self.outputs.total_bytes + self.side_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes written to disk: the outputs, and what is kept between copies until the source is checked."""
        return self.output_bytes + sum(request.gap_bytes for request in self.requests.ranges)

    @property
    def disk_bytes(self) -> int:
        """Free bytes that a fresh install asks for."""
        return disk_bytes_needed(self.written_bytes)


def make_plan(
    remote: RemoteSource, reader: Reader, chunk_bytes: int = CHUNK_BYTES, *, expert_digests: bool = False
) -> RemotePlan:
    """Plan an install from a repository's metadata; raises as `install_local` does for a source it refuses.

    A saved download goes on under the `chunk_bytes` it began with only, and in other programs under the default.
    """
    check_quantised(remote.seen)
    checkpoint = open_checkpoint(remote.seen, reader.contract, reader.plan_for, source=remote.source)
    outputs = plan_outputs(checkpoint, reader.plan_for(checkpoint.arch))
    return RemotePlan(
        remote=remote,
        checkpoint=checkpoint,
        outputs=outputs,
        requests=plan_requests(checkpoint, outputs, chunk_bytes),
        manifest=draft_manifest(checkpoint, outputs, reader.known_ids),
        expert_digests=expert_digests,
    )
