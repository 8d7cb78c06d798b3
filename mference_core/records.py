"""Acceptance records: what the gate proved, for which files, on what; and whether one fits here and now.

This module reads and compares records. Only the gate writes them.
"""

import hashlib
import importlib.util
import json
import os
import platform
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import attrs
import platformdirs
from attrs import field, frozen

from mference_core.errors import ContractError, PluginError
from mference_core.hookspecs import CONTRACT_VERSION

GATE_GROUP = "mference.acceptance"
IGNORED = {"__pycache__"}


@frozen(kw_only=True)
class Environment:
    """Where a proof holds: mlx version, backend (cpu, cuda, metal), processor or GPU architecture."""

    mlx: str
    backend: str
    processor: str

    @classmethod
    def here(cls) -> "Environment":
        """Read this process's environment; imports mlx."""
        import mlx.core as mx  # noqa: PLC0415  listing families must not pay for it

        if mx.default_device() == mx.cpu:
            return cls(mlx=version("mlx"), backend="cpu", processor=platform.machine())
        backend = "metal" if mx.metal.is_available() else "cuda"
        return cls(mlx=version("mlx"), backend=backend, processor=str(mx.device_info().get("architecture", "unknown")))


@frozen(kw_only=True)
class CaseResult:
    """One case's name, verdict and figures (name -> number or text)."""

    name: str
    passed: bool
    figures: dict[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class AcceptanceRecord:
    """A passed gate, bound to the family's files, the contract, the gate and the environment."""

    family: str
    digest: str
    contract: int
    gate: int
    environment: Environment
    spellings: tuple[str | None, ...]
    model_types: tuple[str, ...]
    cases: tuple[CaseResult, ...]
    written: str

    @property
    def file_name(self) -> str:
        """Name of the record's file: one per family and environment."""
        here = self.environment
        return f"{self.family}-{here.backend}-{here.processor}-mlx{here.mlx}.json"

    def encode(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(attrs.asdict(self), indent=1, sort_keys=True) + "\n"


def decode_record(text: str, source: str) -> AcceptanceRecord:
    """Read a record; raises `ContractError` naming `source` when it is not one."""
    try:
        raw = json.loads(text)
        return AcceptanceRecord(
            **{
                **raw,
                "environment": Environment(**raw["environment"]),
                "spellings": tuple(raw["spellings"]),
                "model_types": tuple(raw["model_types"]),
                "cases": tuple(CaseResult(**case) for case in raw["cases"]),
            }
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ContractError(
            what=f"acceptance record {source}", got="unreadable", remedy="delete it and run 'mference accept' again"
        ) from error


def package_dir(module: str, distribution: str) -> Path:
    """Return the folder of an entry point's package without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise PluginError(
            what=f"package {module} of distribution {distribution}", got="missing", remedy="reinstall the distribution"
        )
    return Path(spec.origin).parent


def family_digest(folder: Path) -> str:
    """Return the SHA-256 over every file of a family's package, by relative path; caches are left out."""
    total = hashlib.sha256()
    files = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    for path in sorted(files):
        relative = path.relative_to(folder)
        if IGNORED.intersection(relative.parts) or path.suffix == ".pyc":
            continue
        with path.open("rb") as handle:
            total.update(f"{relative.as_posix()}\0{hashlib.file_digest(handle, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def shipped_dir() -> Path | None:
    """Return the folder of records shipped with the gate, or None where no gate is installed."""
    for entry in entry_points(group=GATE_GROUP):
        return package_dir(entry.module, entry.dist.name if entry.dist else "unknown") / "records"
    return None


def data_dir() -> Path:
    """Return the user's data directory; `MFERENCE_DATA_DIR` moves it."""
    override = os.environ.get("MFERENCE_DATA_DIR")
    return Path(override) if override else Path(platformdirs.user_data_dir("mference"))


def user_dir() -> Path:
    """Return the folder of this user's own records."""
    return data_dir() / "acceptance"


def read_records(folder: Path | None) -> list[AcceptanceRecord]:
    """Read every record of a folder; a missing folder holds none."""
    if folder is None or not folder.is_dir():
        return []
    return [decode_record(path.read_text("utf-8"), str(path)) for path in sorted(folder.glob("*.json"))]


def known_records() -> list[AcceptanceRecord]:
    """Return the shipped records and the user's."""
    return read_records(shipped_dir()) + read_records(user_dir())


def fits(record: AcceptanceRecord, digest: str, gate: int, here: Environment) -> bool:
    """Say whether a record proves these files, on this contract, gate and environment."""
    bound = (record.digest, record.contract, record.gate, record.environment)
    return bound == (digest, CONTRACT_VERSION, gate, here) and all(case.passed for case in record.cases)
