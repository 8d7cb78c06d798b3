"""The family against its goldens, at every chunk size, slot count, directory kind and dtype."""

from pathlib import Path

import mlx.core as mx
import pytest

from mference_acceptance.arrays import number
from mference_acceptance.cases.half import half_precision_layers
from mference_acceptance.cases.parity import compare
from mference_acceptance.context import KINDS, Context
from mference_acceptance.runs import Trace, complete, greedy
from mference_core import plugins
from mference_core.kv import Linear, Ring

LENGTHS = (6, 21, 70)
EXPERTS, TOP_K, WINDOW = 8, 3, 16
DECODED = 3
BAR = 3e-5
"""Measured 2e-5 relative to 1 + |golden|; 5e-5 is what two correct programs may differ by."""

ON_CPU = mx.default_device() == mx.Device(mx.cpu)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return Context(family=plugins.load("gemma4"), folder=tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def whole(context: Context) -> mx.array:
    """Logits (1 + decoded, V) of the longest prompt taken in one chunk, all experts resident."""
    with context.engine("mlx") as engine:
        return complete(engine.session(), context.longest.ids, DECODED).logits


def equal(got: mx.array, want: mx.array) -> bool:
    """Compare bit for bit on CPUs, within rounding elsewhere."""
    return bool(mx.array_equal(got, want) if ON_CPU else mx.allclose(got, want, rtol=5e-5, atol=5e-5))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_agree_with_the_goldens_wherever_the_weights_come_from(context: Context, kind: str) -> None:
    assert tuple(len(golden.ids) for golden in context.goldens) == LENGTHS
    with context.engine(kind) as engine:
        assert [len(golden.decoded) for golden in context.goldens] == [32, 32, 32]
        for golden in context.goldens:
            assert max(compare(engine, golden).values()) < (BAR if ON_CPU else 5e-5)


def test_streamed_in_small_chunks_the_goldens_still_hold(context: Context) -> None:
    with context.engine("gturbo", slots=TOP_K, chunk=5) as engine:
        for golden in context.goldens:
            compare(engine, golden)
        assert 0 < engine.stats.hit_rate < 1


@pytest.mark.parametrize("first", range(1, 72, 12))
def test_every_chunk_size_gives_the_same_logits(context: Context, whole: mx.array, first: int) -> None:
    """Chunks of 1 to past the prompt of 70 tokens: more than four windows, so every ring wraps."""
    for chunk in range(first, min(first + 12, 72)):
        with context.engine("mlx", chunk=chunk) as engine:
            assert engine.chunk == chunk
            assert equal(complete(engine.session(), context.longest.ids, DECODED).logits, whole), chunk


@pytest.mark.parametrize("kind", ["mlx", "gturbo"])
def test_every_slot_count_gives_the_same_bits(context: Context, whole: mx.array, kind: str) -> None:
    for slots in (*range(TOP_K, EXPERTS + 1), "resident"):
        with context.engine(kind, slots=slots, chunk=33) as engine:
            text = complete(engine.session(), context.longest.ids, DECODED)
            held = {experts.source.slots for experts in engine.experts if experts is not None}
        assert held == {EXPERTS if slots == "resident" else slots}
        assert equal(text.logits, whole), slots


def test_float_and_quantised_directories_are_the_same_function(context: Context, whole: mx.array) -> None:
    with context.engine("float") as engine:
        text = complete(engine.session(), context.longest.ids, DECODED)
    assert bool(mx.allclose(text.logits, whole, rtol=2e-5, atol=2e-5))


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1])
def test_prompts_around_the_window_equal_token_by_token(context: Context, length: int) -> None:
    ids = context.longest.ids[:length]
    with context.engine("float", chunk=length) as engine:
        together = engine.session().prefill(ids)
        alone = engine.session()
        for token in ids:
            last = alone.decode(token)
        assert equal(together, last)


def test_decode_after_seven_hundred_tokens_equals_one_prefill(context: Context) -> None:
    """Long after the rings have wrapped and the append-only rows have grown twice."""
    ids = (context.longest.ids * 11)[:720]
    with context.engine("float", chunk=64, context=800) as engine:
        split, whole = engine.session(), engine.session()
        split.prefill(ids[:700])
        for token in ids[700:-1]:
            split.decode(token)
        assert equal(split.decode(ids[-1]), whole.prefill(ids))
        assert split.nbytes == engine.layout.bytes_at(720)


def test_half_precision_holds_layer_by_layer(context: Context) -> None:
    figures = half_precision_layers(context)
    assert 0.001 < figures["worst"] < figures["bar"]


def test_bfloat16_keeps_most_routing_choices(context: Context) -> None:
    """Half precision may flip a choice, and then everything after it differs; that must stay rare."""
    golden, agree, total = context.longest, 0, 0
    with context.engine("mlx", dtype="bfloat16") as engine:
        trace = Trace()
        engine.session().prefill(golden.ids, observe=trace)
        for layer in range(len(engine.graph.layers)):
            want = golden.arrays[f"router.{layer}.experts"]
            same = (mx.sort(trace.ids(layer), axis=-1) == want).all(axis=-1)
            agree, total = agree + int(number(same.sum())), total + len(golden.ids)
    assert agree / total > 0.85


def test_the_layout_is_what_the_family_page_says(context: Context) -> None:
    """Rings of window plus chunk on sliding layers, append-only rows on full ones, keys and values both kept."""
    with context.engine("float", chunk=20, context=1000) as engine:
        sliding, full = engine.layout.layers[:2]
        assert isinstance(sliding, Ring)
        assert (sliding.window, sliding.capacity_rows(0, 1000)) == (WINDOW, WINDOW + 20)
        assert isinstance(full, Linear)
        assert dict(sliding.rows) == {"k": (2, 32), "v": (2, 32)}
        assert dict(full.rows) == {"k": (1, 64), "v": (1, 64)}
    pinned = context.family.contract.pinned[0]
    layout = context.family.ask("mference_kv_layout", arch=pinned, context=4096, chunk=128, dtype="bfloat16")
    assert layout.bytes_at(4096) == 25 * 1152 * 8192 + 5 * 4096 * 4096
    assert layout.bytes_per_token == 20_480


def test_greedy_text_is_the_golden_one(context: Context) -> None:
    golden = context.goldens[1]
    with context.engine("gturbo", slots=4) as engine:
        session = engine.session()
        text = greedy(session, session.prefill(golden.ids), len(golden.decoded))
    assert text.tokens == golden.decoded


def test_the_reference_lies_in_the_package(gemma4_reference: Path, context: Context) -> None:
    assert context.reference == gemma4_reference
