"""How a memory budget becomes expert slots, and what is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mference_core.errors import UsageError
from mference_core.experts.plan import (
    AUTO_SHARE,
    MemoryPlan,
    Requested,
    available_memory,
    format_bytes,
    parse_bytes,
    parse_slots,
    plan_memory,
    slot_rungs,
)

LAYERS = {2: 100, 3: 100, 5: 50}
FIXED = 1_000


def planned(budget_bytes: int | None, requested: Requested = "auto", available_bytes: int | None = None) -> MemoryPlan:
    return plan_memory(
        budget_bytes=budget_bytes,
        resident_bytes=700,
        state_bytes=200,
        scratch_bytes=100,
        expert_bytes_per_layer=LAYERS,
        experts=16,
        requested=requested,
        available_bytes=available_bytes,
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GiB", 6 * 1024**3),
        ("6GB", 6 * 10**9),
        ("900MiB", 900 * 1024**2),
        (" 1.5 tb ", 15 * 10**11),
        ("0.5kib", 512),
        ("12B", 12),
        ("12", 12),
        (12, 12),
    ],
)
def test_sizes_are_read_exactly(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "6Gi", "6G", "-6GiB", "6GiB of it", "1e9", "inf", "nan", "6,5GB", "٦GB", "0", "0.1B", -1, 0, True],
)
def test_anything_else_is_refused_in_one_line(text: str | int) -> None:
    with pytest.raises(UsageError, match="memory size") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 2**50))
def test_a_need_is_written_as_a_size_that_covers_it(size: int) -> None:
    """Whoever types the budget an error asks for must not be refused again."""
    assert size <= parse_bytes(format_bytes(size)) <= size * 1.1 + 1
    assert parse_bytes(format_bytes(size, up=False)) <= size


@pytest.mark.parametrize(("text", "value"), [("16", 16), (8, 8), ("resident", "resident"), ("Auto", "auto")])
def test_slot_values(text: str | int, value: Requested) -> None:
    assert parse_slots(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "all", "²", True])
def test_other_slot_values_are_refused(text: str | int) -> None:
    with pytest.raises(UsageError, match="--expert-slots"):
        parse_slots(text)


@pytest.mark.parametrize(
    ("budget_bytes", "slots", "resident"),
    [
        (FIXED + 4 * 250, 4, False),
        (FIXED + 5 * 250 - 1, 4, False),
        (FIXED + 5 * 250, 5, False),
        (FIXED + 16 * 250 - 1, 15, False),
        (FIXED + 16 * 250, 16, True),
        (10**12, 16, True),
    ],
)
def test_a_budget_takes_the_most_slots_that_fit(budget_bytes: int, slots: int, *, resident: bool) -> None:
    plan = planned(budget_bytes)
    assert (plan.slots_per_layer, plan.resident) == (slots, resident)
    assert plan.total_bytes == FIXED + slots * 250
    assert plan.expert_bytes == slots * 250


@given(st.integers(0, 8_000))
def test_a_plan_never_exceeds_its_budget_and_wastes_less_than_a_slot(budget_bytes: int) -> None:
    try:
        plan = planned(budget_bytes)
    except UsageError:
        assert budget_bytes < FIXED + 250
    else:
        assert plan.total_bytes <= budget_bytes
        assert plan.slots_per_layer == 16 or plan.total_bytes + 250 > budget_bytes


def test_too_small_a_budget_names_both_numbers_and_the_least_that_works() -> None:
    with pytest.raises(UsageError) as caught:
        planned(1249)
    line = str(caught.value)
    assert "1.2KiB" in line
    assert "expected at least 1.3KiB for 1 expert slots per layer" in line
    assert "--memory 1.3KiB" in line
    assert planned(parse_bytes("1.3KiB")).slots_per_layer == 1


def test_a_budget_too_small_for_the_slots_asked_for_names_the_least_that_works() -> None:
    for requested in (12, "resident"):
        with pytest.raises(UsageError, match=r"the least is 1\.3KiB"):
            planned(2500, requested)


def test_a_number_of_slots_is_exact_and_capped_at_the_experts() -> None:
    assert planned(None, 5).slots_per_layer == 5
    assert planned(10**9, 5).slots_per_layer == 5
    assert planned(None, 99).slots_per_layer == 16
    assert planned(None, "resident").slots_per_layer == 16
    assert planned(None, "resident").resident


def test_one_slot_is_enough_and_none_is_refused() -> None:
    assert planned(None, 1).slots_per_layer == 1
    with pytest.raises(UsageError, match="--expert-slots is 0; expected at least 1"):
        planned(None, 0)


def test_without_a_budget_auto_stays_within_its_share_of_the_memory_available() -> None:
    available = 4_000
    plan = planned(None, "auto", available)
    assert plan.budget_bytes == available * AUTO_SHARE
    assert plan.slots_per_layer == (2_800 - FIXED) // 250
    with pytest.raises(UsageError, match=r"70% of the memory available is 1\.1KiB"):
        planned(None, "auto", 1_750)


def test_a_model_without_experts_only_has_to_fit() -> None:
    def dense(budget_bytes: int) -> MemoryPlan:
        return plan_memory(
            budget_bytes=budget_bytes,
            resident_bytes=700,
            state_bytes=0,
            scratch_bytes=0,
            expert_bytes_per_layer={},
            experts=0,
        )

    assert dense(700) == MemoryPlan(
        slots_per_layer=0,
        resident=True,
        resident_bytes=700,
        state_bytes=0,
        scratch_bytes=0,
        expert_bytes=0,
        budget_bytes=700,
    )
    assert str(dense(700)).startswith("no experts: 700B of 700B (weights 700B")
    with pytest.raises(UsageError, match="699B; expected at least 700B"):
        dense(699)


def test_a_plan_reads_as_one_line() -> None:
    assert str(planned(2_500)) == (
        "6 expert slots per layer: 2.5KiB of 2.5KiB (weights 700B, state 200B, scratch 100B, experts 1.5KiB)"
    )
    assert str(planned(None, "resident")).startswith("all experts resident: 4.9KiB (")


def test_rungs_list_what_the_model_can_run_with() -> None:
    rungs = slot_rungs(fixed_bytes=FIXED, expert_bytes_per_layer=LAYERS, experts=96, top_k=10)
    assert rungs == (
        (16, FIXED + 16 * 250),
        (24, FIXED + 24 * 250),
        (32, FIXED + 32 * 250),
        (64, FIXED + 64 * 250),
        ("resident", FIXED + 96 * 250),
    )
    assert slot_rungs(fixed_bytes=7, expert_bytes_per_layer={}, experts=0, top_k=0) == (("resident", 7),)


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write the kernel files of a machine with 8 MB available."""
    for name, text in {"proc/meminfo": "MemAvailable:    8000 kB\n", "proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_available_memory_of_a_machine_without_groups(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, "0::/\n", {})) == 8000 * 1024


def test_available_memory_honours_every_group_above_the_process(tmp_path: Path) -> None:
    """A limit of the parent binds as much as the group's own; pages the kernel gives up first are not used up."""
    at = "sys/fs/cgroup"
    files = {
        f"{at}/a/b/memory.max": "max\n",
        f"{at}/a/b/memory.current": "900\n",
        f"{at}/a/memory.max": "5000\n",
        f"{at}/a/memory.current": "3000\n",
        f"{at}/a/memory.stat": "anon 2500\ninactive_file 400\n",
    }
    assert available_memory(machine(tmp_path, "0::/a/b\n", files)) == 5000 - 3000 + 400


def test_available_memory_honours_version_1_groups(tmp_path: Path) -> None:
    at = "sys/fs/cgroup/memory"
    files = {
        f"{at}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{at}/memory.usage_in_bytes": "4000\n",
        f"{at}/x/memory.limit_in_bytes": "6000\n",
        f"{at}/x/memory.usage_in_bytes": "4000\n",
        f"{at}/x/memory.stat": "inactive_file 1\ntotal_inactive_file 10\n",
    }
    assert available_memory(machine(tmp_path, "9:cpu:/y\n4:memory:/x\n0::/\n", files)) == 2010


def test_available_memory_of_this_machine_is_plausible() -> None:
    assert 2**20 < available_memory() < 2**50


def test_available_memory_where_the_kernel_says_nothing(tmp_path: Path) -> None:
    """What macOS looks like: no `proc`, so the machine's memory."""
    assert available_memory(tmp_path) > 2**28
