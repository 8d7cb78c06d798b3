"""Which kernels run on the CPU: one switch, read from the environment at first use.

`MFERENCE_CPU_KERNELS` is `off` (mlx operations, the definitions), a variant's name, which must then work, or `auto`
(the default): the best proven variant whose first products here equal the contract bit for bit, else mlx operations.
`MFERENCE_CPU_THREADS` is the number of threads; every core this process may use without it. No result depends on it.
"""

import os
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import mlx.core as mx
from attrs import frozen

from mference_kernels import contract, native

SWITCH, THREADS = "MFERENCE_CPU_KERNELS", "MFERENCE_CPU_THREADS"
VARIANTS = ("portable", "avx2", "avx512", "amx", "neon")
UNPROVEN = ("amx",)
"""Equal to the contract on emulated tiles, but not yet run on a machine that has them: only when forced."""

SLOWDOWN = "CPU products run in mlx operations, about 40 times slower"


@frozen(kw_only=True)
class Level:
    """What was chosen: `variant` is None for mlx operations, and `reason` then says why."""

    variant: str | None
    reason: str = ""


@cache
def level() -> Level:
    """Return the level of this process, choosing it at the first call.

    Raises `ValueError` for a switch that cannot be meant, `native.Unavailable` for a variant that cannot be had.
    """
    wanted = os.environ.get(SWITCH) or "auto"
    if wanted == "off":
        return Level(variant=None, reason=f"{SWITCH} is off")
    if wanted != "auto" and wanted not in VARIANTS:
        raise ValueError(f"[levels] {SWITCH} must be off, auto or one of {', '.join(VARIANTS)} but got {wanted!r}")
    if wanted != "auto":
        native.choose(wanted)
    _set_threads(native.variants())
    if wanted != "auto":
        if (problem := self_check(wanted)) is not None:
            raise native.Unavailable(problem)
        return Level(variant=wanted)
    return _best()


def _set_threads(variants: Sequence[str]) -> None:
    count = os.environ.get(THREADS)
    if count is not None:
        if not count.isdecimal() or int(count) < 1:
            raise ValueError(f"[levels] {THREADS} must be a positive number but got {count!r}")
        if variants:
            native.set_threads(int(count))


def _best() -> Level:
    try:
        native.library()
    except native.Unavailable as why:
        return Level(variant=None, reason=f"{why}; {SLOWDOWN}")
    problems = []
    for variant in native.variants():
        if variant in UNPROVEN:
            continue
        problem = self_check(variant)
        if problem is None:
            return Level(variant=variant)
        problems.append(problem)
    return Level(variant=None, reason=f"{'; '.join(problems)}; {SLOWDOWN}")


def cpu() -> ModuleType | None:
    """Return the module of fast paths where they may run now: on the CPU device, with a proven variant; else None."""
    if mx.default_device() != mx.Device(mx.cpu) or level().variant is None:
        return None
    from mference_kernels import cpu as paths  # noqa: PLC0415 - it imports the modules that ask here

    return paths


def self_check(variant: str) -> str | None:
    """Compare small products of `variant`, which stays chosen, with the contract; return what is wrong, or None."""
    from mference_kernels import cpu as paths  # noqa: PLC0415
    from mference_kernels.quant import Quantized  # noqa: PLC0415

    native.choose(variant)
    key = mx.random.key(1)
    for bits, group_size, rows in ((4, 64, 1), (4, 32, 17), (8, 64, 3), (2, 64, 17)):
        out, groups = 3, 19 if rows == 1 else 3
        keys = mx.random.split(key, 4)
        words = mx.random.randint(-(2**31), 2**31 - 1, (out, groups * group_size * bits // 32), key=keys[0])
        scales = mx.random.normal((out, groups), key=keys[1]).astype(mx.bfloat16)
        biases = mx.random.normal((out, groups), key=keys[2]).astype(mx.bfloat16)
        x = mx.random.normal((rows, groups * group_size), key=keys[3])
        w = Quantized(codes=words.view(mx.uint32), scales=scales, biases=biases, bits=bits, group_size=group_size)
        got: Any = paths.linear_cpu(x, w).tolist()
        lists = [array.tolist() for array in (w.codes, w.scales, w.biases)]
        if got != contract.products(lists, x.tolist(), bits, group_size):
            return f"the native '{variant}' kernels gave wrong bits for {bits}-bit codes in groups of {group_size}"
    return None
