"""Each case fails when what it is about is broken; the whole family passes (see test_record)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest

from mference_acceptance.cases import CASES, contract
from mference_acceptance.context import Context
from mference_acceptance.gate import run_case
from mference_core import checkpoint, engine, kv, state
from mference_core.arch import Arch, ManifestContract
from mference_core.experts.plan import MemoryPlan, plan_memory
from mference_core.graph import Attended, Layer, Routing, Step
from mference_core.gturbo import model as gturbo_model
from mference_core.kv import Linear, Ring
from mference_core.plugins import LoadedFamily
from mference_core.records import CaseResult
from mference_core.router import Router
from mference_core.state import LayerState, RowState, Snapshot

BY_NAME = {case.name: case for case in CASES}

Change = Callable[[Layer], Layer]


class Hooks:
    """A family's hooks, some of which are replaced."""

    def __init__(self, real: Any, replaced: Mapping[str, Callable[..., Any]]) -> None:
        self._real, self._replaced = real, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._real, name)


def broken(family: LoadedFamily, **hooks: Callable[..., Any]) -> LoadedFamily:
    return attrs.evolve(family, hooks=Hooks(family.hooks, hooks))


def with_layers(family: LoadedFamily, change: Change, only: int | None = None) -> LoadedFamily:
    """Break the layers of a family, or one of them."""

    def graph(**arguments: Any) -> Any:
        real = family.hooks.mference_layer_graph(**arguments)
        layers = [change(layer) if only in (None, i) else layer for i, layer in enumerate(real.layers)]
        return attrs.evolve(real, layers=tuple(layers))

    return broken(family, mference_layer_graph=graph)


def with_router(family: LoadedFamily, choose: Callable[[Router, int, mx.array, Step | None], Routing]) -> LoadedFamily:
    def router(**arguments: Any) -> Router:
        real: Router = family.hooks.mference_router(**arguments)
        return attrs.evolve(real, choose=lambda layer, scores, step: choose(real, layer, scores, step))

    return broken(family, mference_router=router)


def with_layout(family: LoadedFamily, change: Callable[[Linear | Ring], Linear | Ring]) -> LoadedFamily:
    def layout(**arguments: Any) -> Any:
        real = family.hooks.mference_kv_layout(**arguments)
        return attrs.evolve(real, layers=tuple(change(layer) for layer in real.layers))

    return broken(family, mference_kv_layout=layout)


def judge(name: str, family: LoadedFamily, folder: Path) -> CaseResult:
    return run_case(BY_NAME[name], Context(family=family, folder=folder))


def refused(name: str, family: LoadedFamily, folder: Path) -> str:
    """Return why a case fails, in one line."""
    result = judge(name, family, folder)
    assert not result.passed, f"{name} did not notice"
    reason = str(result.figures["reason"])
    assert reason
    assert "\n" not in reason
    return reason


def moved(step: Step, positions: mx.array) -> Step:
    return attrs.evolve(step, positions=positions)


def attending(change: Callable[[Step], Step]) -> Change:
    """Give `attend` another step."""

    def changed(layer: Layer) -> Layer:
        def attend(x: Any, states: Sequence[LayerState], step: Step) -> Attended:
            return layer.attend(x, states, change(step))

        return attrs.evolve(layer, attend=attend)

    return changed


def combining(change: Callable[[mx.array], mx.array]) -> Change:
    """Change what `combine` returns."""

    def changed(layer: Layer) -> Layer:
        return attrs.evolve(layer, combine=lambda h, shared, routed: change(layer.combine(h, shared, routed)))

    return changed


def choose_higher_ids(real: Router, layer: int, scores: mx.array, step: Step | None) -> Routing:
    flipped = real.choose(layer, scores[..., ::-1], step)
    return Routing(ids=real.experts - 1 - flipped.ids, weights=flipped.weights)


def choose_ascending(real: Router, layer: int, scores: mx.array, step: Step | None) -> Routing:
    best = real.choose(layer, scores, step)
    order = mx.argsort(best.ids, axis=-1)
    return Routing(
        ids=mx.take_along_axis(best.ids, order, axis=-1), weights=mx.take_along_axis(best.weights, order, axis=-1)
    )


def choose_twice(real: Router, layer: int, scores: mx.array, step: Step | None) -> Routing:
    best = real.choose(layer, scores, step)
    return Routing(ids=mx.concatenate([best.ids[..., :1], best.ids[..., :-1]], axis=-1), weights=best.weights)


@pytest.mark.parametrize("choose", [choose_higher_ids, choose_ascending, choose_twice])
def test_a_router_with_another_order_is_caught(sound: LoadedFamily, tmp_path: Path, choose: Any) -> None:
    assert "chooses" in refused("router-ties", with_router(sound, choose), tmp_path)


def choose_weights_off(real: Router, layer: int, scores: mx.array, step: Step | None) -> Routing:
    best = real.choose(layer, scores, step)
    return attrs.evolve(best, weights=best.weights * 1.0001)


def choose_second_best(real: Router, layer: int, scores: mx.array, step: Step | None) -> Routing:
    best = mx.where(scores == scores.max(axis=-1, keepdims=True), -100.0, scores)
    return real.choose(layer, best, step)


@pytest.mark.parametrize(
    ("choose", "reason"), [(choose_weights_off, "router weights"), (choose_second_best, "is sent to experts")]
)
def test_parity_holds_the_routing(sound: LoadedFamily, tmp_path: Path, choose: Any, reason: str) -> None:
    assert reason in refused("parity-float", with_router(sound, choose), tmp_path)


@pytest.mark.parametrize("case", ["parity-float", "parity-quantised", "parity-install"])
def test_parity_misses_no_layer_scalar(sound: LoadedFamily, tmp_path: Path, case: str) -> None:
    assert "layer 2 is off by" in refused(case, with_layers(sound, combining(lambda x: x * 1.001), only=2), tmp_path)


def test_parity_holds_rotary_positions(sound: LoadedFamily, tmp_path: Path) -> None:
    family = with_layers(sound, attending(lambda step: moved(step, step.positions * 2)), only=1)
    assert "layer 1" in refused("parity-float", family, tmp_path)


@pytest.mark.parametrize(
    ("part", "reason"), [("embed", "embeddings"), ("final_norm", "final norm"), ("project", "logits")]
)
def test_parity_holds_embeddings_and_head(sound: LoadedFamily, tmp_path: Path, part: str, reason: str) -> None:
    def graph(**arguments: Any) -> Any:
        real = sound.hooks.mference_layer_graph(**arguments)
        return attrs.evolve(real, **{part: lambda x: 1.001 * getattr(real, part)(x)})

    assert reason in refused("parity-float", broken(sound, mference_layer_graph=graph), tmp_path)


def test_a_window_shorter_than_declared_is_caught(sound: LoadedFamily, tmp_path: Path) -> None:
    def shorter(layout: Linear | Ring) -> Linear | Ring:
        return attrs.evolve(layout, window=layout.window // 2) if isinstance(layout, Ring) else layout

    refused("parity-float", with_layout(sound, shorter), tmp_path)


def test_a_ring_without_room_for_a_chunk_is_caught(sound: LoadedFamily, tmp_path: Path) -> None:
    def tight(layout: Linear | Ring) -> Linear | Ring:
        return attrs.evolve(layout, slack_rows=1) if isinstance(layout, Ring) else layout

    assert "[ring]" in refused("chunk-sizes", with_layout(sound, tight), tmp_path)


def test_positions_that_start_again_with_each_chunk_are_caught(sound: LoadedFamily, tmp_path: Path) -> None:
    again = attending(lambda step: moved(step, step.positions - step.positions[:, :1]))
    refused("chunk-sizes", with_layers(sound, again), tmp_path)


def test_a_result_that_depends_on_the_slot_is_caught(sound: LoadedFamily, tmp_path: Path) -> None:
    def changed(layer: Layer) -> Layer:
        def experts(rows: mx.array, slots: mx.array, held: Any) -> mx.array:
            assert layer.experts is not None
            return layer.experts(rows, slots, held) + 1e-6 * slots[..., None]

        return attrs.evolve(layer, experts=experts)

    assert "bit for bit" in refused("slot-counts", with_layers(sound, changed, only=0), tmp_path)


def leak(layer: Layer) -> Layer:
    """Mix the timelines of a batch, a little."""

    def shared(h: mx.array) -> Any:
        return layer.shared(h) + (1e-3 * h.mean(axis=0, keepdims=True) if h.shape[0] > 1 else 0)

    return attrs.evolve(layer, shared=shared)


def keep_padding(step: Step) -> Step:
    return attrs.evolve(step, lengths=(step.ids.shape[1],) * len(step.lengths))


@pytest.mark.parametrize("change", [leak, attending(keep_padding)])
def test_timelines_that_touch_are_caught(sound: LoadedFamily, tmp_path: Path, change: Change) -> None:
    refused("ragged-batches", with_layers(sound, change), tmp_path)


def lie(self: RowState, length: int) -> bool:
    return 0 <= length <= self.length


def shrink_nothing(self: RowState, length: int) -> None:
    del self, length


def refuse_everything(self: RowState, length: int) -> bool:
    return length in (0, self.length) if isinstance(self.layout, Ring) else length <= self.length


@pytest.mark.parametrize(("verb", "fault"), [("can_truncate", lie), ("truncate", shrink_nothing)])
def test_a_cut_that_lies_is_caught(
    sound: LoadedFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, fault: Any
) -> None:
    monkeypatch.setattr(RowState, verb, fault)
    refused("rewinding", sound, tmp_path)


def test_a_state_that_refuses_honestly_passes(
    sound: LoadedFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowState, "can_truncate", refuse_everything)
    assert judge("rewinding", sound, tmp_path).passed


def test_a_snapshot_that_is_no_copy_is_caught(
    sound: LoadedFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shallow(self: RowState) -> Snapshot:
        rows = {name: self._rows[name] for name in self.layout.rows}
        return Snapshot(length=self.length, written=self.written, arrays=rows)

    def adopt(self: RowState, snapshot: Snapshot) -> None:
        self._rows, self.length, self.written = dict(snapshot.arrays), snapshot.length, snapshot.written

    monkeypatch.setattr(state.RowState, "snapshot", shallow)
    monkeypatch.setattr(state.RowState, "restore", adopt)
    assert "bit for bit" in refused("snapshots-and-forks", sound, tmp_path)


def test_bytes_that_are_not_declared_are_caught(
    sound: LoadedFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kv.Linear.bytes_at
    monkeypatch.setattr(kv.Linear, "bytes_at", lambda self, tokens, context: real(self, max(0, tokens - 1), context))
    assert "are declared" in refused("state-bytes", sound, tmp_path)


def test_coarse_half_precision_is_caught_where_float32_passes(sound: LoadedFamily, tmp_path: Path) -> None:
    def coarse(x: mx.array) -> mx.array:
        return mx.round(x * 4) / 4 if x.dtype == mx.bfloat16 else x

    family = with_layers(sound, combining(coarse), only=3)
    assert "layer 3 is off by" in refused("half-precision-layers", family, tmp_path)
    assert judge("parity-float", family, tmp_path).passed


def test_rows_of_another_dtype_are_caught(sound: LoadedFamily, tmp_path: Path) -> None:
    family = with_layers(sound, combining(lambda x: x.astype(mx.float32)), only=0)
    assert "float32" in refused("half-precision-layers", family, tmp_path)


class Careless(ManifestContract):
    """A contract with one fault, named by the attribute `fault`."""

    fault = ""

    def accept(self, values: Mapping[str, Any]) -> Arch:
        if self.fault == "raises" and not isinstance(values.get("numHeads"), int):
            raise KeyError("numHeads")
        if self.fault == "converts" and isinstance(values.get("hiddenSize"), str):
            values = {**values, "hiddenSize": int(values["hiddenSize"])}
        if self.fault == "clamps" and isinstance(values.get("slidingWindow"), int):
            values = {**values, "slidingWindow": max(1, values["slidingWindow"])}
        if self.fault == "ignores":
            values = {**values, "tieWordEmbeddings": True}
        return super().accept(values)

    def is_pinned(self, arch: Arch) -> bool:
        return self.fault == "pins" or super().is_pinned(arch)


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("raises", "arch-mutations"),
        ("converts", "arch-mutations"),
        ("clamps", "arch-mutations"),
        ("ignores", "arch-mutations"),
        ("pins", "pinned-archs"),
    ],
)
def test_a_careless_contract_is_caught(sound: LoadedFamily, tmp_path: Path, fault: str, case: str) -> None:
    kind = type("Faulty", (Careless,), {"fault": fault})
    fields = attrs.asdict(sound.contract, recurse=False)
    refused(case, attrs.evolve(sound, contract=kind(**fields)), tmp_path)


def test_a_config_reader_that_crashes_is_caught(sound: LoadedFamily, tmp_path: Path) -> None:
    def read(config: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(config.get("text_config"), dict):
            raise RuntimeError("no text_config")  # noqa: TRY004
        return sound.contract.from_config(config)

    family = attrs.evolve(sound, contract=attrs.evolve(sound.contract, from_config=read))
    assert "RuntimeError" in refused("config-mutations", family, tmp_path)


def fewer_layouts(family: LoadedFamily) -> LoadedFamily:
    def layout(**arguments: Any) -> Any:
        real = family.hooks.mference_kv_layout(**arguments)
        return attrs.evolve(real, layers=real.layers[1:])

    return broken(family, mference_kv_layout=layout)


def no_chat(family: LoadedFamily) -> LoadedFamily:
    return broken(family, mference_chat_format=lambda: None)


def greedy_plan(family: LoadedFamily) -> LoadedFamily:
    def plan(arch: Arch) -> Any:
        real = family.hooks.mference_install_plan(arch=arch)
        somewhere = next(iter(real.residents))
        return attrs.evolve(real, place=lambda name: real.place(name) or real.place(somewhere))

    return broken(family, mference_install_plan=plan)


@pytest.mark.parametrize("fault", [fewer_layouts, no_chat, greedy_plan])
def test_hooks_that_answer_wrongly_are_caught(
    sound: LoadedFamily, tmp_path: Path, fault: Callable[[LoadedFamily], LoadedFamily]
) -> None:
    refused("hooks-answer", fault(sound), tmp_path)


def test_a_load_that_does_not_count_tensors_is_caught(
    sound: LoadedFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_check_complete", lambda *_: None)
    assert "is accepted" in refused("missing-tensors", sound, tmp_path)


def test_an_unchecked_digest_is_caught(sound: LoadedFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gturbo_model, "check_file", lambda *_, **__: None)
    assert "changed is accepted" in refused("damaged-installs", sound, tmp_path)


def test_too_few_slots_served_anyway_are_caught(
    sound: LoadedFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generous(**arguments: Any) -> MemoryPlan:
        wanted = arguments["requested"]
        return plan_memory(**{**arguments, "requested": max(wanted, 1) if isinstance(wanted, int) else wanted})

    monkeypatch.setattr(engine, "plan_memory", generous)
    assert "is accepted" in refused("too-few-slots", sound, tmp_path)


def test_a_family_without_reference_fails_in_one_line(sound: LoadedFamily, tmp_path: Path) -> None:
    family = attrs.evolve(sound, family=attrs.evolve(sound.family, reference=None))
    assert "reference of family gemma4 is missing" in refused("parity-float", family, tmp_path)


def test_mutations_reach_every_field(sound: LoadedFamily, tmp_path: Path) -> None:
    arch = contract.reference_arch(Context(family=sound, folder=tmp_path))
    figures = judge("arch-mutations", sound, tmp_path).figures
    assert figures["refused"] + figures["accepted"] >= 10 * len(attrs.fields(type(arch)))


def test_cases_say_what_they_are() -> None:
    """Cases have names of their own, and docstrings that say what holds."""
    assert len(BY_NAME) == len(CASES)
    assert all(case.holds.endswith(".") for case in CASES)
