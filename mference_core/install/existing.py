"""Ranges of files that are there: what their digests are now, and some of them fetched again, in place."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mference_core.install.answers import RemoteFile
from mference_core.install.files import OutputFiles
from mference_core.install.http import HubClient
from mference_core.install.ranges import RangePlan, RangeRequest
from mference_core.install.transfer import Transfer


def range_digests(
    root: Path, plan: RangePlan, requests: Sequence[RangeRequest] | None = None
) -> Iterator[tuple[RangeRequest, str]]:
    """Yield ranges of a plan, all if none are named, with the digest of their bytes in the files below `root`.

    The digests are those that a download records. Raises `OSError`, and `InstallError` for a file cut short.
    """
    files = OutputFiles(root=root, plan=plan, keep_gaps=False)
    try:
        files.open(writing=False)
        for request in plan.ranges if requests is None else requests:
            yield request, files.digest(request)
    finally:
        files.close()


def fetch_ranges(
    client: HubClient,
    sources: Mapping[str, RemoteFile],
    plan: RangePlan,
    root: Path,
    requests: Sequence[RangeRequest],
    received: Callable[[str, int], None] = lambda _, __: None,
) -> dict[str, str]:
    """Fetch ranges of a plan into the files below `root`, which are there at full size; other bytes are not touched.

    Durable when this returns the digest of each range's bytes as they were read back, by identifier. The caller holds
    the lock of the output, and holds the result against what it knows. Raises as `Transfer.run` does.
    """
    found = dict[str, str]()

    def settled(done: list[tuple[RangeRequest, str]]) -> None:
        found.update((request.ident, digest) for request, digest in done)

    files = OutputFiles(root=root, plan=plan, keep_gaps=False)
    try:
        files.open(writing=True)
        Transfer(client=client, files=sources, outputs=files, settled=settled, received=received).run(requests)
    finally:
        files.close()
    return found
