"""Running the cases against one family, and writing the record of a pass."""

import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from mference_acceptance.case import Case, CaseFailed
from mference_acceptance.cases import CASES
from mference_acceptance.context import Context
from mference_core import plugins, records
from mference_core.errors import MferenceError, NotAccepted, PluginError
from mference_core.hookspecs import CONTRACT_VERSION
from mference_core.plugins import LoadedFamily
from mference_core.records import AcceptanceRecord, CaseResult, Environment

Report = Callable[[CaseResult], None]


def run_gate(name: str, version: int, report: Report | None, records_dir: Path | None) -> AcceptanceRecord:
    """Judge an installed family and write its record; see `mference_acceptance.accept`."""
    folder = records_dir or records.user_dir()
    check_writable(folder)
    entry = plugins.find(name)
    digest = records.family_digest(entry.folder)
    family = plugins.load(name)
    results = judge(family, CASES, report)
    failed = [result for result in results if not result.passed]
    if failed:
        raise NotAccepted(
            what=f"family {name} of distribution {entry.distribution}",
            got=f"refused by the gate in {len(failed)} of {len(results)} cases: {', '.join(r.name for r in failed)}",
            remedy=f"first reason: {failed[0].figures['reason']}",
        )
    if records.family_digest(entry.folder) != digest:
        raise NotAccepted(what=f"family {name}", got="changed while the gate ran", remedy="run it again")
    record = AcceptanceRecord(
        family=name,
        digest=digest,
        contract=CONTRACT_VERSION,
        gate=version,
        environment=Environment.here(),
        spellings=family.family.spellings,
        model_types=family.family.model_types,
        cases=results,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_record(record, folder)
    return record


def judge(family: LoadedFamily, cases: Sequence[Case], report: Report | None = None) -> tuple[CaseResult, ...]:
    """Run cases against a loaded family; whatever a case raises is its failure, never the caller's."""
    results = []
    with tempfile.TemporaryDirectory(prefix="mference-gate-") as folder:
        context = Context(family=family, folder=Path(folder))
        for case in cases:
            results.append(run_case(case, context))
            if report is not None:
                report(results[-1])
    return tuple(results)


def run_case(case: Case, context: Context) -> CaseResult:
    """Run one case; figures always hold its `seconds`, and the `reason` of a failure."""
    started = perf_counter()
    try:
        figures = case.run(context)
    except CaseFailed as failure:
        passed, figures = False, {"reason": _line(str(failure))}
    except Exception as error:  # noqa: BLE001  a family's own exception is a verdict on it
        name = "" if isinstance(error, MferenceError) else f"{type(error).__name__}: "
        passed, figures = False, {"reason": _line(f"stopped by {name}{error}")}
    else:
        passed = True
    return CaseResult(name=case.name, passed=passed, figures={**figures, "seconds": round(perf_counter() - started, 2)})


def _line(text: str) -> str:
    return " ".join(text.split())


def check_writable(folder: Path) -> None:
    """Raise `PluginError` unless records can be written to `folder`, which is made when missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error


def write_record(record: AcceptanceRecord, folder: Path) -> Path:
    """Write a record so that readers see all of it or none; returns its path."""
    path = folder / record.file_name
    try:
        handle, pending = tempfile.mkstemp(dir=folder, prefix=".record-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(record.encode())
                file.flush()
                os.fsync(file.fileno())
            Path(pending).chmod(0o644)
            Path(pending).replace(path)
        except BaseException:
            Path(pending).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritable(folder, error) from error
    return path


def _unwritable(folder: Path, error: OSError) -> PluginError:
    return PluginError(
        what=f"folder of acceptance records {folder}",
        got=f"not writable ({error.strerror})",
        expected="a folder of your own",
        remedy="set MFERENCE_DATA_DIR to one",
    )
