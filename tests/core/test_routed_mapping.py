"""A mapping in place of slots: the plan that chooses it, and a model's output that does not change by it."""

from pathlib import Path

import mlx.core as mx
import pytest

from mference_core import plugins
from mference_core.checkpoint import open_checkpoint, peek
from mference_core.engine import Engine, LoadOptions
from mference_core.errors import UsageError
from mference_core.experts.mapped_files import MappedFiles
from mference_core.experts.mapping import MappedExperts
from mference_core.experts.plan import MemoryPlan, Requested, plan_memory
from mference_core.experts.reader import ExpertReader
from mference_core.experts.residents import ResidentExperts
from mference_core.routed import LayerExperts
from mference_core.testing.toys import toy_arch, toy_contract, toy_plan, write_toy
from mference_kernels import cpu, levels
from mference_kernels.activations import geglu, geglu_ops
from mference_kernels.experts import gated_experts

TOKENS = [7, 3, 200, 41, 5, 9, 77, 13, 1]


def planned(budget_bytes: int | None, requested: Requested = "auto", *, mappable: bool = True) -> MemoryPlan:
    return plan_memory(
        budget_bytes=budget_bytes,
        resident_bytes=700,
        state_bytes=200,
        scratch_bytes=100,
        expert_bytes_per_layer={2: 100, 3: 150},
        experts=16,
        requested=requested,
        mappable=mappable,
    )


@pytest.mark.parametrize(
    ("budget_bytes", "requested", "mappable", "held"),
    [
        (5000, "auto", True, "mapped"),
        (4999, "auto", True, 15),
        (5000, "auto", False, "resident"),
        (5000, "resident", True, "resident"),
        (None, "mapped", True, "mapped"),
        (5000, 16, True, 16),
    ],
)
def test_what_fits_memory_is_mapped_where_it_can_be(
    budget_bytes: int | None, requested: Requested, held: int | str, *, mappable: bool
) -> None:
    plan = planned(budget_bytes, requested, mappable=mappable)
    assert plan.experts_held == held
    assert (plan.mapped, plan.resident) == (held == "mapped", held == "resident")
    assert plan.expert_bytes == 250 * plan.slots_per_layer


def test_the_plan_says_so() -> None:
    assert str(planned(5000)).startswith("all experts mapped: 4.9KiB of 4.9KiB (")


def test_a_mapping_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--expert-slots is 'mapped'; expected 'resident' or a number here; mapping"):
        planned(5000, "mapped", mappable=False)
    with pytest.raises(UsageError, match=r"^memory budget is 4.8KiB; expected at least 4.9KiB for all experts"):
        planned(4999, "mapped")


def test_output_from_a_mapping_is_that_from_slots(gemma4_reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, prefill in chunks and decode, from a directory of stacked tensors."""
    monkeypatch.setattr("mference_core.engine.reads_addresses", lambda: True)
    family, found = plugins.load("gemma4"), list[mx.array]()
    requests: tuple[Requested, ...] = ("mapped", 3, "resident")
    for slots in requests:
        options = LoadOptions(context=64, chunk=4, slots=slots)
        with Engine.load(family, gemma4_reference / "mlx", options) as engine:
            assert engine.memory.experts_held == slots
            session = engine.session()
            logits = [session.prefill(TOKENS), session.decode(17), session.decode(4)]
            found.append(mx.stack(logits))
            mx.eval(found[-1])
            assert slots == "resident" or engine.stats.hits + engine.stats.misses > 0
    assert mx.array_equal(found[0], found[1])
    assert mx.array_equal(found[0], found[2])


def test_a_float_checkpoint_is_not_mapped(gemma4_reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mference_core.engine.reads_addresses", lambda: True)
    with Engine.load(plugins.load("gemma4"), gemma4_reference, LoadOptions(context=32)) as engine:
        assert engine.memory.experts_held == "resident"


@pytest.mark.skipif(levels.cpu() is None, reason="needs the native kernels")
def test_native_kernels_read_the_mapping_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as from arrays, and nothing is copied on the way."""
    monkeypatch.setattr(MappedExperts, "copied", lambda *_: pytest.fail("copied"))
    arch = toy_arch(hidden_size=128, num_experts=6)
    write_toy(tmp_path / "toy", arch)
    layer = open_checkpoint(peek(tmp_path / "toy"), toy_contract(), toy_plan).experts[1]
    x = mx.random.normal((5, 128), key=mx.random.key(1))
    slots = mx.array([[0, 5], [3, 1], [2, 2], [4, 0], [5, 3]], dtype=mx.int32)
    files = MappedFiles()
    with ExpertReader() as reader:
        resident = LayerExperts(source=ResidentExperts(layer, reader), product_dtype=mx.float32)
        place = LayerExperts(source=MappedExperts(layer, files), product_dtype=mx.float32)
        expected = cpu.gated_experts_cpu(x, slots, resident.weights(), geglu_ops)
        found = gated_experts(x, slots, place.weights(), geglu)
        assert mx.array_equal(found.view(mx.uint32), expected.view(mx.uint32))
    files.close()


def test_an_activation_that_kernels_lack_works_from_copies(tmp_path: Path) -> None:
    def odd(gate: mx.array, up: mx.array) -> mx.array:
        return gate * 0.5 + up

    layer = open_checkpoint(peek(write_toy(tmp_path / "toy", toy_arch())), toy_contract(), toy_plan).experts[1]
    x, slots = mx.ones((2, 64)), mx.array([[3, 0], [1, 3]], dtype=mx.int32)
    files = MappedFiles()
    with ExpertReader() as reader:
        resident = LayerExperts(source=ResidentExperts(layer, reader), product_dtype=mx.float32)
        place = LayerExperts(source=MappedExperts(layer, files), product_dtype=mx.float32)
        expected, found = (gated_experts(x, slots, held.weights(), odd) for held in (resident, place))
        assert mx.array_equal(found.view(mx.uint32), expected.view(mx.uint32))
    files.close()
