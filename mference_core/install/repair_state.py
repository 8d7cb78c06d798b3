"""A repair due or under way: from where it fetches, and how far it compared; kept beside the install until it is good."""

import json
from pathlib import Path

from attrs import define, field, frozen

from mference_core.errors import MferenceError
from mference_core.gturbo.receipt import Receipt
from mference_core.install.saved import replace_file
from mference_core.install.transaction import pending_path
from mference_core.jsondata import is_hex, member, parse_object, read_capped, size_member

SCHEMA, CAP_BYTES = 1, 4 << 20


@frozen(kw_only=True)
class Origin:
    """A repository and the commit that an install came from."""

    repo: str
    commit: str


def origin_of(receipt: Receipt | None) -> Origin | None:
    """Return the source that a receipt names, if it names one."""
    if receipt is None or not receipt.source_repo_id or not receipt.source_revision:
        return None
    return Origin(repo=receipt.source_repo_id, commit=receipt.source_revision)


@define(kw_only=True)
class Compared:
    """How far a file without digests of parts was compared: reads done, of those from byte `first` on first."""

    first: int = 0
    done: int = 0


@define(kw_only=True)
class RepairState:
    """What the file beside the install says; `manifest` is the digest of the manifest it was written under.

    `receipt` says that there was one, which comes back at the end.
    """

    path: Path
    manifest: str
    origin: Origin | None = None
    receipt: bool = False
    files: dict[str, Compared] = field(factory=dict)

    def write(self) -> None:
        """Make it durable; raises `OSError`."""
        values = {
            "files": {name: [held.first, held.done] for name, held in self.files.items()},
            "manifest": self.manifest,
            "receipt": self.receipt,
            "schema": SCHEMA,
        }
        if self.origin is not None:
            values |= {"commit": self.origin.commit, "repo": self.origin.repo}
        replace_file(self.path, json.dumps(values, sort_keys=True).encode())

    def forget(self) -> None:
        """Remove it, and what a kill left of one; raises `OSError`."""
        pending_path(self.path).unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def state_path(real: Path) -> Path:
    """Return where the state of a repair is kept; `real` is the install, links resolved."""
    return real.with_name(real.name + ".repair.json")


def read_state(real: Path, manifest: str) -> RepairState:
    """Return what an earlier session left, an empty state where it left nothing that means anything now."""
    path = state_path(real)
    try:
        values = parse_object(read_capped(path, CAP_BYTES, "repair state"), str(path))
        if size_member(values, "schema", str(path)) != SCHEMA or values.get("manifest") != manifest:
            return RepairState(path=path, manifest=manifest)
        origin = None
        if "repo" in values and is_hex(member(values, "commit", str, str(path)), 40):
            origin = Origin(repo=member(values, "repo", str, str(path)), commit=values["commit"])
        files = {
            name: Compared(first=pair[0], done=pair[1])
            for name, pair in member(values, "files", dict, str(path)).items()
            if isinstance(pair, list) and [type(value) for value in pair] == [int, int]
        }
    except MferenceError:
        return RepairState(path=path, manifest=manifest)
    receipt = values.get("receipt") is True
    return RepairState(path=path, manifest=manifest, origin=origin, receipt=receipt, files=files)
