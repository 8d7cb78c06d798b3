"""Lengths, joining timelines, biases, states, installs and kernels: each case fails when what it is about is broken."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest

from mference_acceptance.case import CaseFailed
from mference_acceptance.cases import installs, lengths
from mference_acceptance.cases.parity import compare, golden_bar
from mference_acceptance.context import Context, Golden
from mference_core import plugins
from mference_core.graph import Layer, LayerGraph, Step
from mference_core.install import local
from mference_core.plugins import LoadedFamily
from mference_core.router import Router
from mference_kernels import levels, native, quant

Broken = Callable[..., LoadedFamily]
Refused = Callable[[str, LoadedFamily], str]
Passed = Callable[[str, LoadedFamily], Mapping[str, Any]]
BIAS = mx.array([0.25, -0.5, 0.0, 0.1, 0.1, 1.0, -0.3, 0.25])


def with_layer(broken: Broken, change: Callable[[Layer], Layer]) -> LoadedFamily:
    """Break the second layer."""

    def graph(real: LayerGraph) -> LayerGraph:
        return attrs.evolve(real, layers=(real.layers[0], change(real.layers[1]), *real.layers[2:]))

    return broken(mference_layer_graph=graph)


def test_a_fault_at_one_length_alone_is_caught(
    broken: Broken, refused: Refused, figures: Passed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last chunk of eleven tokens is computed otherwise: no chunk size on the usual prompt ends in one."""
    monkeypatch.setattr(lengths, "LONGEST", 40)

    def change(layer: Layer) -> Layer:
        def combine(h: Any, shared: Any, routed: Any) -> Any:
            x = layer.combine(h, shared, routed)
            return x * (1.01 if x.shape[1] == 11 else 1)

        return attrs.evolve(layer, combine=combine)

    family = with_layer(broken, change)
    figures("chunk-sizes", family)
    assert "last logits of a prompt of 11 tokens in chunks of 16" in refused("prompt-lengths", family)


def test_a_state_that_is_wrong_after_a_ragged_end_is_caught(
    broken: Broken, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "LONGEST", 40)

    def change(layer: Layer) -> Layer:
        def attend(x: Any, states: Any, step: Step) -> Any:
            late = step.offsets[0] % 16 == 15 and step.lengths == (1,)
            moved = attrs.evolve(step, positions=step.positions + 1) if late else step
            return layer.attend(x, states, moved)

        return attrs.evolve(layer, attend=attend)

    assert "after the token that follows" in refused("prompt-lengths", with_layer(broken, change))


def test_every_length_is_tried(sound: LoadedFamily, figures: Passed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, and again those around the multiples of other chunks."""
    assert lengths.LONGEST == 320
    monkeypatch.setattr(lengths, "LONGEST", 70)
    found = figures("prompt-lengths", sound)
    assert found["longest"] == 70
    assert found["prompts"] == 70 + 4 + 9 + 3  # chunks of 16, 1, 7 and 64
    assert found["least_expert_lead"] > 1e-4


def test_a_prompt_that_disturbs_those_who_decode_is_caught(broken: Broken, refused: Refused) -> None:
    def change(layer: Layer) -> Layer:
        def attend(x: Any, states: Any, step: Step) -> Any:
            mixed = 1 in step.lengths and max(step.lengths) == 13
            moved = attrs.evolve(step, positions=step.positions + 1) if mixed else step
            return layer.attend(x, states, moved)

        return attrs.evolve(layer, attend=attend)

    assert "beside each other" in refused("joining-timelines", with_layer(broken, change))


def biased(real: Router, *, added: bool, stated: Any) -> Router:
    def choose(layer: int, scores: mx.array, step: Step | None) -> Any:
        return real.choose(layer, scores + BIAS if added else scores, step)

    return attrs.evolve(real, choose=choose, bias=stated)


def test_a_bias_is_part_of_the_order(broken: Broken, figures: Passed) -> None:
    family = broken(mference_router=lambda real: biased(real, added=True, stated=lambda _: BIAS))
    plain = figures("router-ties", broken(mference_router=lambda real: biased(real, added=False, stated=None)))
    none = figures("router-ties", broken(mference_router=lambda real: biased(real, added=False, stated=lambda _: None)))
    tied = "rows_tied_at_the_last_place"
    assert plain[tied] == none[tied]
    assert figures("router-ties", family)[tied] > plain[tied] // 2


@pytest.mark.parametrize(
    ("added", "stated", "reason"),
    [
        (True, None, "chooses"),
        (False, lambda _: BIAS, "chooses"),
        (True, lambda _: -BIAS, "chooses"),
        (True, lambda _: BIAS[:3], "bias is"),
        (True, lambda _: BIAS.astype(mx.bfloat16), "bias is"),
    ],
)
def test_a_bias_that_is_not_what_is_said_is_caught(
    broken: Broken, refused: Refused, added: Any, stated: Any, reason: str
) -> None:
    family = broken(mference_router=lambda real: biased(real, added=added, stated=stated))
    assert reason in refused("router-ties", family)


def spoilt(golden: Golden, key: str, value: mx.array) -> Golden:
    return attrs.evolve(golden, arrays={**golden.arrays, key: value})


def test_states_of_goldens_are_held(tmp_path: Path) -> None:
    """By name, or by shape where the name is another program's; one that fits no array is refused."""
    context = Context(family=plugins.load("qwen36"), folder=tmp_path)
    golden, bar = context.goldens[0], golden_bar(context)
    with context.engine() as engine:
        session = engine.session()
        session.prefill(golden.ids)
        conv = session.states[0].snapshot().arrays["conv"]
        assert compare(engine, spoilt(golden, "state.0.conv", conv), bar)["states"] < 1e-5
        for key, value, reason in (
            ("state.0.conv", conv * 1.01, "state.0.conv is off by"),
            ("state.1.recurrent", golden.arrays["state.1.recurrent"] * 1.01, "state.1.recurrent is off by"),
            ("state.1.recurrent", mx.zeros((2, 2)), "is none of the layer's arrays: s [4, 32, 32], conv"),
            ("state.0.s", mx.zeros((2, 2)), "state.0.s has shape [4, 32, 32], expected [2, 2]"),
            ("state.9.s", conv, "a layer the model does not have"),
        ):
            with pytest.raises(CaseFailed) as caught:
                compare(engine, spoilt(golden, key, value), bar)
            assert reason in str(caught.value)


def test_an_install_of_other_bytes_is_caught(
    sound: LoadedFamily, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digests are those of what was written, so only the source gives it away."""
    real = local._read_all

    def read(handle: int, into: memoryview, offset: int, path: Path) -> None:
        real(handle, into, offset, path)
        into[-1] ^= path.suffix == ".safetensors"

    monkeypatch.setattr(local, "_read_all", read)
    assert "byte for byte" in refused("install-round-trip", sound)


def flip(path: Path) -> None:
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes() + b" ")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(flip, "differs from the first in manifest.json"), (lambda path: (path / "x").write_bytes(b""), "other files")],
)
def test_an_install_that_comes_out_otherwise_each_time_is_caught(
    sound: LoadedFamily, refused: Refused, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], object], reason: str
) -> None:
    def again(source: Path, output: Path, *rest: Any) -> None:
        local.install_local(source, output, *rest)
        spoil(output)

    monkeypatch.setattr(installs, "install_local", again)
    assert reason in refused("install-round-trip", sound)


def test_a_native_variant_with_wrong_bits_is_caught(
    sound: LoadedFamily, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "variants", lambda: ("avx2",))
    monkeypatch.setattr(levels, "self_check", lambda variant: f"the native '{variant}' kernels gave wrong bits")
    assert "'avx2' kernels gave wrong bits" in refused("kernel-bars", sound)


@pytest.mark.parametrize(("name", "what"), [("linear", "product of 1 rows"), ("rows", "rows of")])
def test_a_product_beyond_rounding_is_caught(
    sound: LoadedFamily, refused: Refused, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    real = getattr(quant, name)
    monkeypatch.setattr(quant, name, lambda x, w: real(x, w) * 1.00001)
    assert what in refused("kernel-bars", sound)


def test_the_level_that_ran_is_said(sound: LoadedFamily, figures: Passed, monkeypatch: pytest.MonkeyPatch) -> None:
    before = levels.level()
    found = figures("kernel-bars", sound)
    assert found["level"] == (f"native {before.variant}" if before.variant else "mlx operations")
    assert found["matrices"] > 40
    monkeypatch.setattr(levels, "level", lambda: levels.Level(variant=None, reason="off"))
    monkeypatch.setattr(native, "variants", tuple)
    found = figures("kernel-bars", sound)
    assert (found["level"], found["checked"]) == ("mlx operations", "no native variant")
