"""Arrays an object holds are found wherever they are, so that another thread can use it."""

from collections.abc import Callable
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from attrs import frozen

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions
from mference_core.reachable import arrays_of

FAMILIES = [name for name in plugins.installed() if plugins.load(name).family.reference is not None]


@frozen
class Held:
    """A value with fields."""

    one: Any
    two: Any = None

    def method(self) -> None:
        """Do nothing."""


class Slotted:
    __slots__ = ("__dict__", "name")


def closure(array: mx.array) -> Callable[[], mx.array]:
    def inner(*, default: mx.array = array + 1) -> mx.array:
        return array + default

    return inner


def test_everything_is_found_once() -> None:
    a, b, c, d, e, f = (mx.arange(n) for n in range(1, 7))
    loop: list[Any] = [a, a]
    loop.append(loop)
    root = Held({"x": loop, "y": (b, {"z": [c]})}, SimpleNamespace(d=d, e=partial(print, e, sep=Held(f).method)))
    assert sorted(array.size for array in arrays_of(root)) == [1, 2, 3, 4, 5, 6]
    assert sorted(array.size for array in arrays_of(closure(a))) == [1, 1]
    assert list(arrays_of(["text", b"bytes", 1, None, int, Slotted(), len])) == []


@pytest.mark.parametrize("kind", ["mlx", "."])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_can_be_used_on_another_thread(name: str, kind: str) -> None:
    """Nothing that was made at the load waits to be computed, for short calls and long ones."""
    family = plugins.load(name)
    assert family.family.reference is not None
    failed: list[Exception] = []
    options = LoadOptions(dtype="float32", chunk=96, context=400)
    with Engine.load(family, family.family.reference / kind, options) as engine:

        def work() -> None:
            try:
                session = engine.session()
                mx.eval(session.prefill([(37 * i) % 250 for i in range(300)]), session.decode(3))
            except Exception as error:  # noqa: BLE001  told below
                failed.append(error)

        thread = Thread(target=work)
        thread.start()
        thread.join()
    assert failed == []
