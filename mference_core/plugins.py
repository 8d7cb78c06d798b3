"""Families as plugins: list them without importing, load one, dispatch one only when the gate has accepted it."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pluggy
from attrs import frozen

from mference_core import hookspecs, records
from mference_core.arch import ManifestContract
from mference_core.errors import ContractError, DuplicateFamily, FamilyNotFound, MferenceError, NotAccepted
from mference_core.family import Family

GROUP = "mference.families"


@frozen(kw_only=True)
class Entry:
    """An installed family, not imported: its name, distribution and version."""

    name: str
    distribution: str
    version: str
    point: EntryPoint

    @property
    def folder(self) -> Path:
        """Folder of the family's package."""
        return records.package_dir(self.point.module, self.distribution)


@frozen(kw_only=True)
class LoadedFamily:
    """A registered family: what it says of itself, and its hooks."""

    entry: Entry
    family: Family
    contract: ManifestContract
    hooks: Any

    def ask(self, hook: str, **arguments: Any) -> Any:
        """Call a hook; raises `ContractError` naming the distribution when it crashes, or must answer and does not."""
        answer = _call(self.entry, self.hooks, hook, **arguments)
        if answer is None and hook in hookspecs.REQUIRED:
            raise _broken(self.entry, f"hook {hook}", "no answer", "a value")
        return answer


@frozen(kw_only=True)
class Gate:
    """The installed gate: its version, a function that runs it and returns the record it wrote, and how it is shown.

    `line(result)` is a line of text; `page(name, results, record, refusal)` an HTML page, `record` None if refused.
    """

    version: int
    accept: Callable[..., records.AcceptanceRecord]
    line: Callable[[records.CaseResult], str]
    page: Callable[..., str]


def _broken(entry: Entry, what: str, got: str, expected: str) -> ContractError:
    return ContractError(
        what=f"family {entry.name} of distribution {entry.distribution}: {what}", got=got, expected=expected
    )


def _call(entry: Entry, hooks: Any, hook: str, **arguments: Any) -> Any:
    try:
        return getattr(hooks, hook)(**arguments)
    except MferenceError:
        raise
    except Exception as error:
        got = f"failing: {type(error).__name__}: {error}"
        raise _broken(entry, f"hook {hook}", got, "an answer, or an error of mference_core.errors") from error


def installed() -> dict[str, Entry]:
    """List installed families by name, none of them imported.

    Raises `DuplicateFamily` naming both distributions when two offer one name.
    """
    found: dict[str, Entry] = {}
    for point in entry_points(group=GROUP):
        dist = point.dist
        entry = Entry(
            name=point.name,
            distribution=dist.name if dist else "unknown",
            version=dist.version if dist else "unknown",
            point=point,
        )
        other = found.get(entry.name)
        if other is not None and (other.distribution, other.point.value) != (entry.distribution, point.value):
            raise DuplicateFamily(
                what=f"family '{entry.name}'",
                got=f"offered by distributions {other.distribution} and {entry.distribution}",
                expected="one",
                remedy="uninstall one of them",
            )
        found[entry.name] = entry
    return dict(sorted(found.items()))


def find(name: str) -> Entry:
    """Return the entry of a family name, or raise `FamilyNotFound` listing what is installed."""
    families = installed()
    if name not in families:
        raise FamilyNotFound(
            what=f"no family '{name}'",
            remedy=f"installed: {', '.join(families) or 'none'}; see 'mference families'",
        )
    return families[name]


def register(entry: Entry, plugin: object) -> LoadedFamily:
    """Register a plugin object and check it against the contract."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=entry.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        text = " ".join(str(error).split())
        raise _broken(entry, "contract check", f"refused: {text}", "the hooks of mference_core.hookspecs") from error
    known = {name for name in dir(hookspecs) if name.startswith("mference_")}
    for name in dir(plugin):
        if name.startswith("mference_") and name not in known and callable(getattr(plugin, name)):
            raise _broken(entry, f"hook {name}", "unknown", f"one of {', '.join(sorted(known))}")
    for name in hookspecs.REQUIRED:
        if not getattr(manager.hook, name).get_hookimpls():
            raise _broken(entry, f"hook {name}", "missing", "an implementation")
    family, contract = (_call(entry, manager.hook, hook) for hook in ("mference_family", "mference_manifest_contract"))
    if not isinstance(family, Family) or family.name != entry.name:
        raise _broken(entry, "mference_family", repr(getattr(family, "name", family)), f"the name '{entry.name}'")
    if not isinstance(contract, ManifestContract):
        raise _broken(entry, "mference_manifest_contract", repr(contract), "a ManifestContract")
    return LoadedFamily(entry=entry, family=family, contract=contract, hooks=manager.hook)


def load(name: str) -> LoadedFamily:
    """Import and register one family, accepted or not; the gate itself and bypasses use this."""
    entry = find(name)
    try:
        plugin = entry.point.load()
    except MferenceError:
        raise
    except Exception as error:
        raise _broken(entry, "import", f"failed: {type(error).__name__}: {error}", "a package that imports") from error
    return register(entry, plugin)


def gate() -> Gate | None:
    """Return the installed gate, or None."""
    for point in entry_points(group=records.GATE_GROUP):
        module = point.load()
        return Gate(version=module.GATE_VERSION, accept=module.accept, line=module.render_line, page=module.page)
    return None


def dispatch(name: str, notice: Callable[[str], None] = lambda _: None) -> LoadedFamily:
    """Load a family that the gate has accepted for these files, here.

    An in-tree family as shipped that has no record for this environment is put through the gate on the spot, and
    `notice` gets one line saying so. Anything else raises `NotAccepted` naming the command that earns a record.
    """
    entry, judge = find(name), gate()
    remedy = f"run 'mference accept {name}'"
    if judge is None:
        raise NotAccepted(what="acceptance gate", got="not installed", remedy="reinstall mference")
    digest, here = records.family_digest(entry.folder), records.Environment.here()
    mine = [record for record in records.known_records() if record.family == name]
    if any(records.fits(record, digest, judge.version, here) for record in mine):
        return load(name)
    shipped = [record for record in records.read_records(records.shipped_dir()) if record.family == name]
    if any(record.digest == digest for record in shipped):
        notice(
            f"family {name} has no acceptance record for {here.backend} {here.processor} mlx {here.mlx} yet: "
            "running the gate once"
        )
        judge.accept(name)
        return load(name)
    state = "changed since it was accepted" if mine else "never accepted"
    raise NotAccepted(what=f"family {name} of distribution {entry.distribution}", got=state, remedy=remedy)


def name_for(spelling: str | None, model_type: str | None = None, *, on_disk: str) -> str:
    """Return the family that reads a model, by acceptance records alone, so that nothing unproven is imported.

    `on_disk` is the kind of directory: an install ("gturbo") goes by `arch.family`, others by config.json's model type.
    Raises `FamilyNotFound` naming families that are installed but not accepted, which might read it.
    """
    known = records.known_records()
    install = on_disk == "gturbo"
    for record in known:
        if spelling in record.spellings if install else model_type in record.model_types:
            return record.family
    wanted = f"arch.family '{spelling}'" if install else f"model type '{model_type}'"
    unproven = [name for name in installed() if name not in {record.family for record in known}]
    hint = "see 'mference families'"
    if unproven:
        hint = f"not accepted yet: {', '.join(unproven)} (run 'mference accept NAME')"
    raise FamilyNotFound(what=f"no accepted family reads {wanted}", remedy=hint)
