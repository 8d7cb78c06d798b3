"""The family against its goldens, at every chunk size, slot count, directory kind and dtype."""

import mlx.core as mx
import pytest

from mference_acceptance.arrays import number
from mference_acceptance.cases.half import half_precision_layers
from mference_acceptance.cases.parity import compare, golden_bar
from mference_acceptance.context import KINDS, Context
from mference_acceptance.runs import complete, greedy
from mference_core import plugins
from mference_core.kv import Linear, Recurrent
from mference_core.routed import routed_branch
from mference_core.state import RecurrentState
from mference_core.steps import make_step
from mference_kernels.gated_delta import CPU_CHUNK_TOKENS
from mference_kernels.levels import level

LENGTHS = (3, 64, 150)
EXPERTS, TOP_K = 8, 3
DELTA_LAYERS, FULL_LAYER = (0, 1, 2), 3
DECODED = 3
CLOSE = 5e-5
"""Two ways to take one prompt, relative to 1 + |logit|; measured 2.3e-5."""

ON_CPU = mx.default_device() == mx.Device(mx.cpu)
GOLDEN_BAR = 1.7e-4 if ON_CPU else 3e-4
"""Relative to 1 + |golden|: what the reference, taken in pieces, differs from itself by. Measured 1.1e-4 on CPUs."""


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return Context(family=plugins.load("qwen36"), folder=tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def whole(context: Context) -> mx.array:
    """Logits (1 + decoded, V) of the longest prompt taken in one chunk, all experts resident."""
    with context.engine("mlx") as engine:
        return complete(engine.session(), context.longest.ids, DECODED).logits


def close(got: mx.array, want: mx.array, bar: float = CLOSE) -> bool:
    return number((mx.abs(got - want) / (1 + mx.abs(want))).max()) < bar


def equal(got: mx.array, want: mx.array) -> bool:
    """Compare bit for bit on CPUs, within rounding elsewhere."""
    return bool(mx.array_equal(got, want)) if ON_CPU else close(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_agree_with_the_goldens_wherever_the_weights_come_from(context: Context, kind: str) -> None:
    assert tuple(len(golden.ids) for golden in context.goldens) == LENGTHS
    assert 1.7e-4 < golden_bar(context) < 3e-4
    with context.engine(kind) as engine:
        assert [len(golden.decoded) for golden in context.goldens] == [32, 32, 32]
        for golden in context.goldens:
            assert max(compare(engine, golden, GOLDEN_BAR).values()) < GOLDEN_BAR


@pytest.mark.parametrize("chunk", [150, 13, 1])
def test_recurrent_states_are_the_golden_ones(context: Context, chunk: int) -> None:
    """After the prompt, whatever the chunk; a state is [value heads, key dim, value dim]."""
    with context.engine("mlx", chunk=chunk) as engine:
        for golden in context.goldens:
            session = engine.session()
            session.prefill(golden.ids)
            for layer in DELTA_LAYERS:
                state, want = session.states[layer], golden.arrays[f"state.{layer}.recurrent"]
                assert isinstance(state, RecurrentState)
                assert state.values["s"].shape == want.shape
                error = mx.abs(state.values["s"] - want) / (1 + mx.abs(want))
                assert number(error.max()) < (1e-5 if ON_CPU else 1e-4)


def test_mixers_and_blocks_are_the_golden_ones(context: Context) -> None:
    """Each layer's mixer and feed-forward block on its own, given the golden input: `attn.i` and `mlp.i`."""
    golden = context.longest
    with context.engine("float") as engine:
        step = make_step([0], mx.array([golden.ids], dtype=mx.int32))
        states = engine.session().states
        for index, layer in enumerate(engine.graph.layers):
            x = golden.arrays["embeddings" if index == 0 else f"layer.{index - 1}"][None]
            attended = layer.attend(x, [states[index]], step)
            assert close((attended.h[0] - x)[0], golden.arrays[f"attn.{index}"], GOLDEN_BAR)
            assert layer.route is not None
            held = engine.experts[index]
            assert held is not None
            assert attended.rows is not None
            routed = routed_branch(layer, held, attended.rows, layer.route(attended.h, step), step)
            out = layer.combine(attended.h, layer.shared(attended.h), routed)
            assert close((out - attended.h[0])[0], golden.arrays[f"mlp.{index}"], GOLDEN_BAR)


def test_streamed_in_small_chunks_the_goldens_still_hold(context: Context) -> None:
    with context.engine("gturbo", slots=TOP_K, chunk=5) as engine:
        for golden in context.goldens:
            compare(engine, golden, GOLDEN_BAR)
        assert 0 < engine.stats.hit_rate < 1


SHARED_TOKENS = 64
"""Tokens the native delta networks prepare together."""

EDGES = {edge + step for edge in (CPU_CHUNK_TOKENS, SHARED_TOKENS, 2 * SHARED_TOKENS) for step in (-1, 0, 1)}


def test_every_chunk_size_gives_the_same_bits(context: Context) -> None:
    """From one token to past the prompt, among them sizes around what a delta network takes together."""
    ids, exact = context.longest.ids, ON_CPU and level().variant is not None
    with context.engine("mlx") as engine:
        want = complete(engine.session(), ids, DECODED)
    for chunk in sorted({1, 2, 3, 4, 5, 7, 50, 75, 149, 150, 151, *EDGES}):
        with context.engine("mlx", chunk=chunk) as engine:
            text = complete(engine.session(), ids, DECODED)
        assert equal(text.logits, want.logits) if exact else close(text.logits, want.logits), chunk
        assert text.tokens == want.tokens


@pytest.mark.parametrize("kind", ["mlx", "gturbo"])
def test_every_slot_count_gives_the_same_bits(context: Context, kind: str) -> None:
    with context.engine("mlx", chunk=33) as engine:
        want = complete(engine.session(), context.longest.ids, DECODED).logits
    for slots in (*range(TOP_K, EXPERTS + 1), "resident"):
        with context.engine(kind, slots=slots, chunk=33) as engine:
            text = complete(engine.session(), context.longest.ids, DECODED)
            held = {experts.source.slots for experts in engine.experts if experts is not None}
        assert held == {EXPERTS if slots == "resident" else slots}
        assert equal(text.logits, want), slots


def test_float_and_quantised_directories_are_the_same_function(context: Context, whole: mx.array) -> None:
    """Norms stored less one and norms stored whole, taps on the last axis and on the middle one."""
    with context.engine("float") as engine:
        text = complete(engine.session(), context.longest.ids, DECODED)
        plain = engine.weights.array("language_model.model.norm.weight")
    with context.engine("mlx") as engine:
        stored = engine.weights.array("language_model.model.norm.weight")
    assert close(text.logits, whole)
    assert bool(mx.allclose(plain, stored.astype(mx.float32), rtol=0, atol=1e-6))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 127, 128, 129])
def test_prompts_of_any_length_equal_token_by_token(context: Context, length: int) -> None:
    """Below and above the convolution's taps, and across the delta rule's chunks (bug report B15)."""
    ids = (context.longest.ids * 2)[:length]
    with context.engine("float", chunk=length) as engine:
        together, alone = engine.session(), engine.session()
        logits = together.prefill(ids)
        for token in ids:
            last = alone.decode(token)
        assert close(logits, last)
        assert number(mx.argmax(logits)) == number(mx.argmax(last))
        if ON_CPU and level().variant is not None:
            assert equal(logits, last)


def test_decode_after_seven_hundred_tokens_equals_one_prefill(context: Context) -> None:
    """Long after the append-only rows have grown twice."""
    ids = (context.longest.ids * 6)[:720]
    with context.engine("float", chunk=64, context=800) as engine:
        split, whole = engine.session(), engine.session()
        split.prefill(ids[:700])
        for token in ids[700:-1]:
            split.decode(token)
        assert close(split.decode(ids[-1]), whole.prefill(ids))
        assert split.nbytes == engine.layout.bytes_at(720)


def test_half_precision_holds_layer_by_layer(context: Context) -> None:
    figures = half_precision_layers(context)
    assert 0.001 < figures["worst"] < figures["bar"]


def test_the_state_stays_in_float32_whatever_the_rows_are(context: Context) -> None:
    with context.engine("mlx", dtype="bfloat16") as engine:
        session = engine.session()
        session.prefill(context.longest.ids)
        for layer in DELTA_LAYERS:
            state = session.states[layer]
            assert isinstance(state, RecurrentState)
            assert [state.values[name].dtype for name in ("s", "conv")] == [mx.float32, mx.bfloat16]
            assert number(mx.abs(state.values["s"] - context.longest.arrays[f"state.{layer}.recurrent"]).max()) < 0.2


def test_the_layout_is_what_the_family_page_says(context: Context) -> None:
    """Append-only rows on the full layer, a float32 state and three convolution rows on the others."""
    with context.engine("float", context=1000) as engine:
        delta, full = engine.layout.layers[0], engine.layout.layers[FULL_LAYER]
        assert isinstance(delta, Recurrent)
        assert dict(delta.arrays) == {"s": (4, 32, 32), "conv": (3, 256)}
        assert isinstance(full, Linear)
        assert dict(full.rows) == {"k": (2, 32), "v": (2, 32)}
    pinned = context.family.contract.pinned[0]
    layout = context.family.ask("mference_kv_layout", arch=pinned, context=4096, chunk=128, dtype="bfloat16")
    states = 30 * (2_097_152 + 49_152)
    assert layout.bytes_at(0) == layout.fixed_bytes == states
    assert layout.bytes_at(4096) == states + 83_886_080
    assert layout.bytes_per_token == 10 * 2048


def test_greedy_text_is_the_golden_one(context: Context) -> None:
    golden = context.goldens[1]
    with context.engine("gturbo", slots=4) as engine:
        session = engine.session()
        text = greedy(session, session.prefill(golden.ids), len(golden.decoded))
    assert text.tokens == golden.decoded
