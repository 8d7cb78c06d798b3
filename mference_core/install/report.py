"""What an install tells while it works, and when it is done."""

from collections.abc import Callable
from pathlib import Path

from attrs import frozen

VERIFYING, REPAIRING = "verifying", "repairing"
METADATA, RESUMING, RESERVING, COPYING, CHECKING, HASHING, FINISHING = (
    "metadata",
    "resuming",
    "reserving",
    "copying",
    "checking",
    "hashing",
    "finishing",
)


@frozen(kw_only=True)
class InstallProgress:
    """How far a stage of an install is: bytes done, of how many, and the file at hand.

    `reused_bytes` of those done were there before: a download that goes on counts them, its rate does not.
    """

    file: str
    done_bytes: int
    total_bytes: int
    stage: str = COPYING
    reused_bytes: int = 0


@frozen(kw_only=True)
class InstallReport:
    """What an install wrote: bytes over all files, names of source tensors left out with the reason.

    For a download: the commit it came from, bytes received and bytes reused from an earlier session, requests that
    had to be made again, and the source files held against the hub's digests.
    """

    path: Path
    model_id: str
    files: int
    size_bytes: int
    resident_tensors: int
    routed_layers: int
    dropped: dict[str, str]
    seconds: float
    commit: str | None = None
    downloaded_bytes: int = 0
    reused_bytes: int = 0
    repeated_requests: int = 0
    checked_files: int = 0


Progress = Callable[[InstallProgress], None]
