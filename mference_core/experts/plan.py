"""One budget for everything a loaded model holds: how many expert slots fit, and refusing what cannot."""

import os
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Literal

from attrs import frozen

from mference_core.errors import UsageError

RUNGS = (8, 16, 24, 32, 64, 96, 128)
AUTO_SHARE = Fraction(70, 100)  # of the memory available; the rest is left to the page cache and to other programs
UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgt", start=1)
    for name, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}

Requested = int | Literal["resident", "mapped", "auto"]


def parse_bytes(text: str | int) -> int:
    """Return the bytes of `6GiB`, `6GB`, `900MiB`, `1.5TB` or a plain number; fractions of a byte are dropped.

    Raises: UsageError when it is not a positive size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(text).strip().lower(), re.ASCII)
    if not match or match[2] not in UNITS or isinstance(text, bool):
        raise UsageError(
            what="memory size", got=repr(text), expected="a number and a unit, such as 6GiB, 6GB or 900MiB"
        )
    size = int(Fraction(match[1]) * UNITS[match[2]])
    if size < 1:
        raise UsageError(what="memory size", got=repr(text), expected="at least 1 byte")
    return size


def format_bytes(size: int, *, up: bool = True) -> str:
    """Return a size as `parse_bytes` reads it, in tenths of its unit: needs are rounded `up`, limits down."""
    for unit, scale in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= scale:
            tenths = (size * 10 + (scale - 1 if up else 0)) // scale
            return f"{tenths // 10}.{tenths % 10}{unit}"
    return f"{size}B"


def parse_slots(text: str | int) -> Requested:
    """Return the value of `--expert-slots`: a positive number or one of three words; UsageError for anything else."""
    value = str(text).strip().lower()
    named: dict[str, Requested] = {"resident": "resident", "mapped": "mapped", "auto": "auto"}
    if value in named:
        return named[value]
    if not re.fullmatch(r"\d+", value, re.ASCII) or int(value) < 1 or isinstance(text, bool):
        raise UsageError(
            what="--expert-slots", got=repr(text), expected="a positive number, 'resident', 'mapped' or 'auto'"
        )
    return int(value)


@frozen(kw_only=True)
class MemoryPlan:
    """What is held in memory, in bytes; `slots_per_layer` is 0 without experts, and all of them when they fit.

    Then they are `resident` in arrays, or `mapped`: used in place from the files, `expert_bytes` being page cache.
    """

    slots_per_layer: int
    resident: bool
    resident_bytes: int
    state_bytes: int
    scratch_bytes: int
    expert_bytes: int
    budget_bytes: int | None
    mapped: bool = False

    @property
    def experts_held(self) -> int | str:
        """How experts are held: a number of slots per layer, `resident` or `mapped`."""
        if self.mapped:
            return "mapped"
        return "resident" if self.resident else self.slots_per_layer

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.resident_bytes + self.state_bytes + self.scratch_bytes + self.expert_bytes

    def __str__(self) -> str:
        held = self.experts_held
        slots = f"all experts {held}" if isinstance(held, str) else f"{held} expert slots per layer"
        slots = slots if self.slots_per_layer else "no experts"
        limit = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes is not None else ""
        return (
            f"{slots}: {format_bytes(self.total_bytes)}{limit} "
            f"(weights {format_bytes(self.resident_bytes)}, state {format_bytes(self.state_bytes)}, "
            f"scratch {format_bytes(self.scratch_bytes)}, experts {format_bytes(self.expert_bytes)})"
        )


def plan_memory(
    *,
    budget_bytes: int | None,
    resident_bytes: int,
    state_bytes: int,
    scratch_bytes: int,
    expert_bytes_per_layer: Mapping[int, int],
    experts: int,
    requested: Requested = "auto",
    available_bytes: int | None = None,
    mappable: bool = False,
) -> MemoryPlan:
    """Choose the expert slots per layer.

    `expert_bytes_per_layer` is the bytes of one expert of each routed layer, `experts` their number.
    `auto` takes the most that fits `budget_bytes`: if all fits, mapped where that is `mappable` (experts that native
    kernels can use in place from their files), else resident; without a budget that is `AUTO_SHARE` of
    `available_bytes` (what this process can still get, when None). A number is capped at `experts`.
    Fewer slots than a token has experts are enough: it then uses them in turn. Raises: UsageError when a number is below
    1, or when even the slots wanted, or one, do not fit.
    """
    fixed = resident_bytes + state_bytes + scratch_bytes
    per_slot = sum(expert_bytes_per_layer.values())
    if isinstance(requested, int) and requested < 1:
        raise UsageError(what="--expert-slots", got=str(requested), expected="at least 1")
    what = "memory budget"
    if requested == "auto" and budget_bytes is None:
        what = f"{float(AUTO_SHARE):.0%} of the memory available"
        available = available_memory() if available_bytes is None else available_bytes
        budget_bytes = int(available * AUTO_SHARE)
    if requested == "mapped" and not mappable:
        raise UsageError(
            what="--expert-slots",
            got="'mapped'",
            expected="'resident' or a number here",
            remedy="mapping needs the native CPU kernels and quantised experts",
        )
    if not per_slot:
        slots = 0
    elif requested == "auto":
        slots = max(1, min(experts, ((budget_bytes or 0) - fixed) // per_slot))
    else:
        slots = min(requested, experts) if isinstance(requested, int) else experts
    everything = not per_slot or requested == "resident" or (requested == "auto" and slots == experts)
    mapped = bool(per_slot) and mappable and (requested == "mapped" or (requested == "auto" and slots == experts))
    plan = MemoryPlan(
        slots_per_layer=slots,
        resident=everything and not mapped,
        resident_bytes=resident_bytes,
        state_bytes=state_bytes,
        scratch_bytes=scratch_bytes,
        expert_bytes=slots * per_slot,
        budget_bytes=budget_bytes,
        mapped=mapped,
    )
    if budget_bytes is not None and plan.total_bytes > budget_bytes:
        raise _too_small(what, plan, budget_bytes, fixed + per_slot)
    return plan


def _too_small(what: str, plan: MemoryPlan, budget_bytes: int, smallest_bytes: int) -> UsageError:
    """Say what does not fit, both numbers, and what would."""
    slots = "all experts" if plan.resident or plan.mapped else f"{plan.slots_per_layer} expert slots per layer"
    needs = f"{format_bytes(plan.total_bytes)} for {slots}" if plan.expert_bytes else format_bytes(plan.total_bytes)
    remedy = f"use --memory {format_bytes(plan.total_bytes)} or more"
    if plan.total_bytes > smallest_bytes:
        remedy += f", or fewer slots (the least is {format_bytes(smallest_bytes)})"
    elif plan.state_bytes:
        remedy += ", or a smaller --max-context"
    got = format_bytes(budget_bytes, up=False)
    return UsageError(what=what, got=got, expected=f"at least {needs}", remedy=remedy)


def slot_rungs(
    *, fixed_bytes: int, expert_bytes_per_layer: Mapping[int, int], experts: int, top_k: int
) -> tuple[tuple[int | Literal["resident"], int], ...]:
    """Return (slots per layer, total bytes) for the usual slot counts that the model can run with, then resident.

    `fixed_bytes` is everything but the experts.
    """
    per_slot = sum(expert_bytes_per_layer.values())
    rungs: list[int | Literal["resident"]] = [n for n in RUNGS if top_k <= n < experts and per_slot]
    rungs.append("resident")
    return tuple((n, fixed_bytes + per_slot * (experts if n == "resident" else n)) for n in rungs)


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes this process can still get: the least of the machine's and its control groups'.

    Where the kernel does not say what is available (macOS), the machine's memory. `root` holds `proc` and `sys`.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    free = int(meminfo[1]) * 1024 if meminfo else machine
    return max(0, min([free, *_group_limits(root)]))


def _group_limits(root: Path) -> Iterator[int]:
    """Yield what is left in each control group, version 1 or 2, that this process belongs to.

    File pages that the kernel gives up first do not count as used.
    """
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, limit_file, used_file, cache = (
            (mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else (mount, "memory.max", "memory.current", "inactive_file")
        )
        group = base / name.lstrip("/")
        while True:
            limit, used = _text(group / limit_file).strip(), _text(group / used_file).strip()
            if limit.isdigit() and used.isdigit():
                idle = re.search(rf"^{cache} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
                yield int(limit) - int(used) + (int(idle[1]) if idle else 0)
            if group == base:
                break
            group = group.parent


def _text(path: Path) -> str:
    """Return the text of a small kernel file, or nothing where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
