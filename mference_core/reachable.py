"""Finding the arrays that an object holds, however deep: in fields, containers, closures and bound arguments."""

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import attrs
import mlx.core as mx


def arrays_of(root: object) -> Iterator[mx.array]:
    """Yield every array that `root` can reach through plain objects, each object once.

    An array that is not computed yet can only be computed on the thread it was written on: who hands an object to another
    thread computes these first.
    """
    seen, waiting = set[int](), [root]
    kept: list[Any] = []  # so that no id is given anew meanwhile
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | type | None):
            continue
        seen.add(id(value))
        kept.append(value)
        if isinstance(value, mx.array):
            yield value
        else:
            waiting += _parts(value)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _full(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    held = list(getattr(value, "__dict__", {}).values())
    if attrs.has(type(value)):
        held += [getattr(value, each.name, None) for each in attrs.fields(type(value))]
    return held


def _full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
