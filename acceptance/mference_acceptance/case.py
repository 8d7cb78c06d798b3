"""What a case is: a function that returns figures, or raises `CaseFailed` with the reason in one line."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from attrs import frozen

from mference_acceptance.arrays import number
from mference_acceptance.context import Context

Figures = dict[str, Any]
"""Name -> number or text, for people to read and for records to keep."""

LAYER_BAR = 5e-5
"""float32 rows and logits against goldens: |difference| / (1 + |golden|). Two correct programs differ by up to 4e-5."""

WIDEST_BAR = 3e-4
"""What takes the place of `LAYER_BAR` where the reference does not agree with itself so closely."""

ROUTER_WEIGHT_BAR = 1e-5
"""float32 router weights against goldens, absolute; in proportion wider where the golden bar is wider than `LAYER_BAR`."""

HALF_BAR, HALF_PRODUCT_BAR = 0.015, 0.05
"""One layer with bfloat16 rows, routing held equal: root mean square of the difference to its float32 golden, over
that of the golden; with products in float32, and in bfloat16. Measured 0.007 and, products rounded coarsely, 0.025."""

PRODUCT_BAR = 2e-6
"""float32 products beside their definition: root mean square of the difference over what that of the product would be
if its terms were of random sign, so that a product which nearly cancels out is not held to its small remainder."""


class CaseFailed(Exception):
    """A case does not hold, and why, in one line."""


@frozen(kw_only=True)
class Case:
    """One requirement: its name, what must hold, and the function that finds out."""

    name: str
    run: Callable[[Context], Figures]

    @property
    def holds(self) -> str:
        """First line of the function's docstring."""
        return (self.run.__doc__ or "").strip().splitlines()[0]


def case_of(run: Callable[[Context], Figures]) -> Case:
    """Make a case of a function, named after it."""
    return Case(name=run.__name__.replace("_", "-"), run=run)


def require(holds: bool, reason: str) -> None:  # noqa: FBT001  an assertion
    """Raise `CaseFailed` unless `holds`."""
    if not holds:
        raise CaseFailed(reason)


def relative_error(got: mx.array, want: mx.array) -> float:
    """Return the largest |got - want| / (1 + |want|); infinity when something is not finite or shapes differ."""
    if got.shape != want.shape or not bool(mx.isfinite(got).all()):
        return float("inf")
    want = want.astype(mx.float32)
    return number((mx.abs(got.astype(mx.float32) - want) / (1 + mx.abs(want))).max()) if got.size else 0.0


def within(got: mx.array, want: mx.array, bar: float, what: str) -> float:
    """Return the relative error, or raise `CaseFailed` when it passes `bar`."""
    if got.shape != want.shape:
        raise CaseFailed(f"{what} has shape {list(got.shape)}, expected {list(want.shape)}")
    error = relative_error(got, want)
    require(error <= bar, f"{what} is off by {error:.2g}, at most {bar:.2g} is allowed")
    return error


def same(got: mx.array, want: mx.array, what: str) -> None:
    """Raise `CaseFailed` unless two arrays are equal bit for bit."""
    if got.shape != want.shape:
        raise CaseFailed(f"{what} has shape {list(got.shape)}, expected {list(want.shape)}")
    if not bool(mx.array_equal(got, want)):
        raise CaseFailed(f"{what} is not equal bit for bit (off by {relative_error(got, want):.2g})")
