"""Arrays as plain numbers, typed."""

from typing import Any, cast

import mlx.core as mx


def number(x: mx.array) -> float:
    """Return the value of an array of one element."""
    return float(cast("float", x.item()))


def listed(x: mx.array) -> list[Any]:
    """Return an array's values as nested lists."""
    return cast("list[Any]", x.tolist())


def best_token(logits: mx.array) -> int:
    """Return the lowest index of the largest of logits (V,)."""
    return int(number(mx.argmax(logits)))
