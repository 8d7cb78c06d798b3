"""Keys and values kept in half precision: other numbers than in float32, and every promise of exactness all the same."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions

ON_CPU = mx.default_device() == mx.Device(mx.cpu)
PROMPT = [(7 * i + 3) % 90 for i in range(40)]
NEW = [4, 8, 15, 16, 23]


def logits(model: Path, **options: Any) -> list[Any]:
    """Return those of the prompt and of each token after it."""
    load = LoadOptions(**{"dtype": "float32", "context": 64, "slots": "resident", "chunk": 16, **options})
    with Engine.load(plugins.load("gemma4"), model, load) as engine:
        session = engine.session()
        found = [session.prefill(PROMPT)] + [session.decode(token) for token in NEW]
        assert session.nbytes == engine.layout.bytes_at(session.length)
        return [mx.array(one) for one in found]


def same(got: list[Any], want: list[Any]) -> bool:
    close = mx.array_equal if ON_CPU else lambda a, b: mx.allclose(a, b, rtol=5e-5, atol=5e-5)
    return all(bool(close(a, b)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("kv_dtype", "bar"), [("bfloat16", 0.05), ("float16", 0.005)])
def test_half_precision_is_close_and_exact_in_itself(gemma4_reference: Path, kv_dtype: str, bar: float) -> None:
    model = gemma4_reference / "mlx"
    want, exact = logits(model, kv_dtype=kv_dtype), logits(model)
    worst = max(mx.abs(a - b).max().item() / mx.abs(b).max().item() for a, b in zip(want, exact, strict=True))
    assert 0 < worst < bar
    for options in ({"slots": 1}, {"slots": 4}, {"chunk": 7}, {"chunk": 40}, {"slots": "mapped"}):
        if options.get("slots") != "mapped" or ON_CPU:
            assert same(logits(model, kv_dtype=kv_dtype, **options), want), options


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_timelines_together_are_those_alone(gemma4_reference: Path, kv_dtype: str) -> None:
    load = LoadOptions(dtype="float32", kv_dtype=kv_dtype, context=64, slots="resident", chunk=16)
    with Engine.load(plugins.load("gemma4"), gemma4_reference / "mlx", load) as engine:
        prompts = [PROMPT[:5], PROMPT[3:19], PROMPT[20:]]
        alone, together = [], [engine.session() for _ in prompts]
        for prompt, session in zip(prompts, together, strict=True):
            one = engine.session()
            one.prefill(prompt)
            alone.append(one.decode(9))
            session.prefill(prompt)
        got = engine.forward(together, [[9]] * len(prompts))
        assert got is not None
        assert same([got[i] for i in range(len(prompts))], alone)
        twin = together[2].fork()
        assert same([twin.decode(1)], [together[2].decode(1)])


def test_rows_of_attention_take_half_the_bytes(gemma4_reference: Path) -> None:
    load = LoadOptions(dtype="float32", context=64, slots="resident", chunk=16)
    sizes = {}
    for name in ("auto", "float32", "bfloat16", "float16"):
        options = LoadOptions(
            **{**{f: getattr(load, f) for f in ("dtype", "context", "slots", "chunk")}, "kv_dtype": name}
        )
        with Engine.load(plugins.load("gemma4"), gemma4_reference / "mlx", options) as engine:
            sizes[name] = engine.memory.state_bytes
    assert sizes["auto"] == sizes["float32"] == 2 * sizes["bfloat16"] == 2 * sizes["float16"]
