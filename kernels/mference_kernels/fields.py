"""attrs fields that hold arrays."""

from typing import Any

import mlx.core as mx
from attrs import cmp_using, field


def _same(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b))


def array_field(**options: Any) -> Any:
    """Return a field whose arrays compare by value; takes the options of `attrs.field`."""
    return field(eq=cmp_using(eq=_same), **options)
