"""`pytest --mference-family=NAME`: the gate's cases, one test each, for a family author's own runs and CI.

Nothing but pytest is imported until the option is given. The tests prove a family here and now; only `mference accept`
writes a record.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mference_acceptance.case import Case
    from mference_acceptance.context import Context

OPTION = "--mference-family"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option; it may be repeated."""
    group = parser.getgroup("mference", "acceptance cases of model families")
    group.addoption(OPTION, action="append", default=[], metavar="NAME", help="Run the gate's cases against a family.")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the cases of each family asked for, before selections such as -k are made."""
    for name in dict.fromkeys(config.getoption(OPTION)):
        items.extend(FamilyCases.make(session, name).collect())


class FamilyCases(pytest.Collector):
    """One family's cases; they share a context, as in the gate."""

    context: Context

    @classmethod
    def make(cls, session: pytest.Session, name: str) -> FamilyCases:
        """Load a family; one that cannot be loaded is an error of usage, said in one line."""
        from pathlib import Path  # noqa: PLC0415

        from mference_acceptance.context import Context  # noqa: PLC0415
        from mference_core import plugins  # noqa: PLC0415
        from mference_core.errors import MferenceError  # noqa: PLC0415

        try:
            family = plugins.load(name)
        except MferenceError as error:
            raise pytest.UsageError(f"{OPTION}: {error}") from error
        made: FamilyCases = cls.from_parent(session, name=name, nodeid=f"mference:{name}")
        folder = TemporaryDirectory(prefix="mference-gate-")
        session.config.add_cleanup(folder.cleanup)
        made.context = Context(family=family, folder=Path(folder.name))
        return made

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one test per case."""
        from mference_acceptance.cases import CASES  # noqa: PLC0415

        for case in CASES:
            item: CaseItem = CaseItem.from_parent(self, name=case.name)
            item.case, item.context = case, self.context
            yield item


class CaseItem(pytest.Item):
    """One case against one family; its figures are properties of the test's report."""

    case: Case
    context: Context

    def runtest(self) -> None:
        """Run the case."""
        self.user_properties.extend(self.case.run(self.context).items())

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show a verdict as what must hold and the reason, anything else with its traceback."""
        from mference_acceptance.case import CaseFailed  # noqa: PLC0415

        if isinstance(excinfo.value, CaseFailed):
            return f"must hold: {self.case.holds}\nreason: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Name the family and the case in reports."""
        parent = self.parent.name if self.parent is not None else ""
        return f"mference:{parent}", None, f"{parent} {self.name}"
