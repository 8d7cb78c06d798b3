"""Which directory a command means, and which family reads it."""

from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from mference_core import plugins
from mference_core.checkpoint import Peek, peek
from mference_core.errors import ManifestError, UsageError
from mference_core.plugins import LoadedFamily
from mference_core.records import data_dir


@frozen(kw_only=True)
class Found:
    """A dispatched family and the model directory to load."""

    family: LoadedFamily
    path: Path


def installed_path(family: str) -> Path:
    """Return where a family's pinned checkpoint is installed."""
    return data_dir() / "models" / f"{family}.gturbo"


def others(found: Found) -> dict[str, Path]:
    """Return the models beside the one found, by name: all that are installed; beside an embedded demo the demos too."""
    installed = {path.name.removesuffix(".gturbo"): path for path in sorted((data_dir() / "models").glob("*.gturbo"))}
    demo = found.family.family.demo
    if demo is not None and found.path.resolve() == demo.resolve():
        families = [plugins.load(name).family for name in plugins.installed()]
        demos = {f"{one.name}-demo": one.demo for one in families if one.demo is not None and one.demo.is_dir()}
        installed = demos | installed
    return {name: path for name, path in installed.items() if path.resolve() != found.path.resolve()}


def check_reads(family: LoadedFamily, seen: Peek) -> None:
    """Raise `ManifestError` if the family does not read what the directory says it is."""
    install = seen.kind == "gturbo"
    who = family.family
    if not (seen.spelling in who.spellings if install else seen.model_type in who.model_types):
        said = f"arch.family '{seen.spelling}'" if install else f"model type '{seen.model_type}'"
        raise ManifestError(
            what=f"{seen.path}",
            got=f"a model with {said}",
            expected=f"one that family {who.name} reads",
            remedy="leave out --family to choose by what the directory says",
        )


def find_model(
    family: str | None,
    model: Path | None,
    notice: Callable[[str], None],
    load: Callable[[str, Callable[[str], None]], LoadedFamily] = plugins.dispatch,
) -> Found:
    """Return the family and directory of `--family` and `--model`.

    A family alone means its pinned checkpoint where that is installed, else its embedded demo; `notice` says which.
    Raises `UsageError` when neither is given; `FamilyNotFound`, `NotAccepted` and the errors of `peek`.
    """
    if model is not None:
        seen = peek(model)
        loaded = load(family or plugins.name_for(seen.spelling, seen.model_type, on_disk=seen.kind), notice)
        check_reads(loaded, seen)
        return Found(family=loaded, path=model)
    if family is None:
        raise UsageError(what="no model named", remedy="give --model DIR or --family NAME; see 'mference families'")
    loaded = load(family, notice)
    path = installed_path(family)
    if path.exists():
        notice(f"using the installed checkpoint {path}")
        return Found(family=loaded, path=path)
    demo = loaded.family.demo
    if demo is None or not demo.is_dir():
        raise UsageError(
            what=f"family {family}", got="without an installed checkpoint or a demo", remedy="give --model DIR"
        )
    notice(f"using the embedded demo checkpoint of {family}; '{path}' is not installed")
    return Found(family=loaded, path=demo)
