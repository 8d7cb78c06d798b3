"""Native programs, layer parts on their own and all layers in one call, give the bits of single calls of kernels."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest

from mference_core import plugins
from mference_core.chained import ChainedStep
from mference_core.engine import Engine, LoadOptions
from mference_core.graph import NativeLayer
from mference_core.steps import advance
from mference_kernels import levels
from mference_kernels.program import Program

pytestmark = pytest.mark.skipif(levels.cpu() is None, reason="needs the native kernels")

PROMPT = [5, 9, 2, 77, 31, 8, 64, 3, 3, 12]
NEW = [7, 1, 90, 14, 5, 5, 61]


def answers(engine: Engine) -> Iterator[Any]:
    """Yield logits of a prompt in chunks, of tokens after it, and of three timelines together."""
    session = engine.session()
    yield session.prefill(PROMPT).tolist()
    for token in NEW:
        yield session.decode(token).tolist()
    sessions = [engine.session() for _ in range(3)]
    for length, member in enumerate(sessions, start=2):
        member.prefill(PROMPT[:length])
    for token in NEW:
        logits = engine.forward(sessions, [[token], [token + 1], [token + 2]])
        assert logits is not None
        yield logits.tolist()
    ragged = engine.forward(sessions, [[1, 2, 3], [4], [5, 6]])
    assert ragged is not None
    yield ragged.tolist()


@pytest.mark.parametrize("slots", [3, 5, "resident", "mapped"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_whole_layers_parts_and_single_calls_agree(
    gemma4_reference: Path, monkeypatch: pytest.MonkeyPatch, slots: Any, dtype: str
) -> None:
    options = LoadOptions(dtype=dtype, slots=slots, context=64, chunk=4)
    found, served, ran = [], [], []
    run = ChainedStep._note

    def note(self: ChainedStep, first: int, done: int) -> None:
        ran.append(done - first)
        run(self, first, done)

    monkeypatch.setattr(ChainedStep, "_note", note)
    for way in ("whole", "parts", "calls"):
        with Engine.load(plugins.load("gemma4"), gemma4_reference / "mlx", options) as engine:
            if way != "whole":
                engine.decode_step = advance
            if way == "calls":
                monkeypatch.setattr(Program, "runs", lambda *_: False)
            found.append(list(answers(engine)))
            served.append(attrs.evolve(engine.stats, stall_seconds=0))
        if way == "whole":
            whole = sum(ran)
            ran.clear()
    assert found[0] == found[1] == found[2]
    assert served[0] == served[1] == served[2]
    assert not ran
    assert (whole > 0) == (dtype == "auto")


def test_layers_say_what_they_need(gemma4_reference: Path) -> None:
    with Engine.load(plugins.load("gemma4"), gemma4_reference / "mlx", LoadOptions(slots=3)) as engine:
        assert isinstance(engine.decode_step, ChainedStep)
        assert all(isinstance(layer.native, NativeLayer) for layer in engine.graph.layers)
    assert mx.default_device() == mx.Device(mx.cpu)
