"""The family against its goldens: at every chunk size, slot count and directory kind, batched and alone."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import pytest

from mference_acceptance.arrays import number
from mference_acceptance.cases.parity import compare, golden_bar
from mference_acceptance.context import KINDS, Context, Golden
from mference_acceptance.runs import Text, complete, greedy
from mference_core import plugins
from mference_core.engine import Engine
from mference_core.graph import LayerGraph
from mference_core.routed import routed_branch
from mference_core.session import Session
from mference_core.states import CompositeState, CompressedState
from mference_core.steps import make_step
from mference_deepseekv4.attention import Attention
from mference_deepseekv4.compressor import Indexer
from mference_deepseekv4.layout import ENTRY, POOL
from mference_deepseekv4.streams import LayerRows, Site, write

LENGTHS = (9, 121, 270)
EXPERTS, TOP_K, LAYERS = 8, 3, 5
ENTRY_LAYERS, INDEXED_LAYERS = (2, 3, 4), (2, 4)
RATES = {2: 4, 3: 128, 4: 4}
DECODED = 4
BAR = 5e-5
"""Relative to 1 + |golden|: what the goldens' reference differs from itself by is 4e-5. Measured 4.5e-5."""

ON_CPU = mx.default_device() == mx.Device(mx.cpu)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return Context(family=plugins.load("deepseekv4"), folder=tmp_path_factory.mktemp("gate"))


def close(got: mx.array, want: mx.array, bar: float = BAR) -> bool:
    return got.shape == want.shape and number((mx.abs(got - want) / (1 + mx.abs(want))).max()) < bar


def equal(got: mx.array, want: mx.array) -> bool:
    """Compare bit for bit on CPUs, within rounding elsewhere."""
    return bool(mx.array_equal(got, want)) if ON_CPU else close(got, want)


def entries_of(session: Session, layer: int, part: str = POOL) -> mx.array:
    state = cast("CompositeState", session.states[layer]).parts[part]
    return cast("CompressedState", state).entries.read(1)[1][ENTRY][0]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_agree_with_the_goldens_wherever_the_weights_come_from(context: Context, kind: str) -> None:
    """Layers, experts and their weights, logits, and 32 greedy tokens; decoding of 121 tokens crosses the 128th."""
    assert tuple(len(golden.ids) for golden in context.goldens) == LENGTHS
    assert golden_bar(context) == BAR
    with context.engine(kind) as engine:
        for golden in context.goldens:
            assert len(golden.decoded) == 32
            assert max(compare(engine, golden).values()) < BAR


@pytest.mark.parametrize("chunk", [270, 7, 1])
def test_entries_are_the_golden_ones(context: Context, chunk: int) -> None:
    """After the prompt, whatever the chunk: 67 of each 4 tokens, 2 of 128."""
    with context.engine("float", chunk=chunk) as engine:
        for golden in context.goldens[: 3 if chunk > 1 else 2]:
            session = engine.session()
            session.prefill(golden.ids)
            for layer in ENTRY_LAYERS:
                want = golden.arrays[f"compressed.{layer}"]
                assert want.shape[0] == len(golden.ids) // RATES[layer]
                assert entries_of(session, layer).shape == want.shape
                assert not want.size or close(entries_of(session, layer), want)


@pytest.mark.parametrize("chunk", [270, 33, 1])
def test_the_indexer_picks_the_golden_entries(context: Context, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever more entries are visible than are picked; before that it is not asked."""
    seen: list[tuple[int, mx.array]] = []
    pick = Indexer.pick

    def watched(self: Indexer, *args: Any) -> mx.array:
        seen.append((args[4], pick(self, *args)))
        return seen[-1][1]

    monkeypatch.setattr(Indexer, "pick", watched)
    with context.engine("float", chunk=chunk) as engine:
        for golden in context.goldens[: 3 if chunk > 1 else 2]:
            seen.clear()
            engine.session().prefill(golden.ids)
            asked = [start for start in range(0, len(golden.ids), chunk) if min(start + chunk, len(golden.ids)) >= 36]
            for at, layer in enumerate(INDEXED_LAYERS):
                want = cast("list[list[int]]", golden.arrays[f"indexer.{layer}.topk"].tolist())
                mine = seen[at :: len(INDEXED_LAYERS)]
                assert [start for start, _ in mine] == asked
                for start, picks in mine:
                    rows = cast("list[list[int]]", picks.tolist())
                    assert [[e for e in row if e >= 0] for row in rows] == [
                        [e for e in row if e >= 0] for row in want[start : start + len(rows)]
                    ]


def golden_input(graph: LayerGraph, golden: Golden, layer: int) -> mx.array:
    if layer:
        return golden.arrays[f"layer.{layer - 1}"][None]
    return cast("mx.array", graph.embed(mx.array([golden.ids], dtype=mx.int32)))


@pytest.mark.parametrize("golden_index", range(3))
def test_mixers_and_blocks_are_the_golden_ones(
    context: Context, golden_index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's mixer and feed-forward block on its own, given the golden input: `attn.i` and `mlp.i`."""
    golden = context.goldens[golden_index]
    mixed: list[mx.array] = []
    call = Attention.__call__

    def watched(self: Attention, *args: Any) -> mx.array:
        mixed.append(call(self, *args))
        return mixed[-1]

    monkeypatch.setattr(Attention, "__call__", watched)
    with context.engine("float") as engine:
        step = make_step([0], mx.array([golden.ids], dtype=mx.int32))
        states = engine.session().states
        for index, layer in enumerate(engine.graph.layers):
            attended = layer.attend(golden_input(engine.graph, golden, index), [states[index]], step)
            assert close(mixed[-1][0], golden.arrays[f"attn.{index}"])
            held = engine.experts[index]
            assert held is not None
            assert layer.route is not None
            assert attended.rows is not None
            routed = routed_branch(layer, held, attended.rows, layer.route(attended.h, step), step)
            assert close((routed + layer.shared(attended.h))[0], golden.arrays[f"mlp.{index}"])


def test_streams_start_as_copies_and_pass_through_a_site(context: Context) -> None:
    """What a site writes is read back by weights that are neither the identity nor equal for all streams."""
    golden = context.goldens[0]
    with context.engine("float") as engine:
        x = golden_input(engine.graph, golden, 0)
        assert x.shape == (1, 9, 4, 64)
        assert all(mx.array_equal(x[0, :, stream], golden.arrays["embeddings"]) for stream in range(4))
        weights = {name: engine.weights.array(f"model.layers.1.attn_hc.{name}") for name in ("fn", "base", "scale")}
        assert [a.dtype for a in weights.values()] == [mx.float32] * 3
        attended = engine.graph.layers[0].attend(x, [engine.session().states[0]], make_step([0], mx.zeros((1, 9))))
        h = cast("LayerRows", attended.h)
        assert isinstance(h, LayerRows)
        columns, rows = h.mix.sum(axis=-2), h.mix.sum(axis=-1)
        assert number(mx.abs(columns - 1).max()) < 1e-5
        assert number(mx.abs(rows - 1).max()) < 1e-2
        nothing = write(h, mx.zeros_like(h.rows))
        assert close(nothing.sum(axis=2), h.streams.sum(axis=2), 1e-4)
    assert Site.__name__ == "Site"


def in_pieces(engine: Engine, ids: Sequence[int], size: int) -> Text:
    session, logits = engine.session(), mx.zeros(0)
    for start in range(0, len(ids), size):
        logits = session.prefill(ids[start : start + size])
    return greedy(session, logits, DECODED)


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (70, (*range(1, 18), 31, 35, 36, 37, 63, 64, 65, 69, 71)),
        (270, (3, 16, 17, 32, 36, 64, 127, 128, 129, 255, 256, 269)),
    ],
)
def test_every_chunk_size_gives_the_same_bits(context: Context, length: int, sizes: Sequence[int]) -> None:
    """Chunks of 1 to past the prompt: across windows of 4 and 128 tokens, the ring's edge and the indexer's limit."""
    ids = context.longest.ids[:length]
    with context.engine("mlx") as engine:
        want = complete(engine.session(), ids, DECODED)
        for size in sizes:
            text = in_pieces(engine, ids, size)
            assert equal(text.logits, want.logits), size
            assert text.tokens == want.tokens


@pytest.mark.parametrize("kind", ["mlx", "gturbo"])
def test_every_slot_count_gives_the_same_bits(context: Context, kind: str) -> None:
    ids = context.longest.ids[:130]
    with context.engine("mlx", chunk=33) as engine:
        want = complete(engine.session(), ids, DECODED).logits
    for slots in (*range(TOP_K, EXPERTS + 1), "resident"):
        with context.engine(kind, slots=slots, chunk=33) as engine:
            assert equal(complete(engine.session(), ids, DECODED).logits, want), slots


def test_timelines_of_different_lengths_go_together(context: Context) -> None:
    """Some before their first entry, some past the indexer's limit, one that closes a window of 128 in this call."""
    prompts = [context.longest.ids[:n] for n in (1, 3, 4, 30, 127, 128, 200)]
    more = [context.longest.ids[-n:] for n in (1, 5, 2, 7, 1, 3, 4)]
    with context.engine("mlx") as engine:
        alone = []
        for prompt, tail in zip(prompts, more, strict=True):
            session = engine.session()
            session.prefill(prompt)
            alone.append(session.prefill(tail))
        sessions = [engine.session() for _ in prompts]
        engine.forward(sessions, prompts, want_logits=False)
        together = engine.forward(sessions, more)
    assert together is not None
    assert equal(together, mx.stack(alone))


def replay(engine: Engine, ids: Sequence[int], cut: int) -> mx.array:
    """Prefill up to a cut, then token by token; return the logits after each of the latter."""
    session = engine.session()
    session.prefill(ids[:cut])
    return mx.stack([session.decode(token) for token in ids[cut:]])


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 6, 7, 8, 126, 127, 128, 129, 130, 131])
def test_decoding_goes_on_from_a_prefill_that_ended_anywhere(context: Context, cut: int) -> None:
    """The open window, and what is carried of the one before, reach the next call: their loss is a known fault."""
    ids = context.longest.ids[: cut + 10]
    with context.engine("mlx", chunk=len(ids)) as engine:
        whole = replay(engine, ids, 1)
        assert equal(replay(engine, ids, cut), whole[cut - 1 :])


def test_a_long_prompt_is_the_same_however_it_is_cut(context: Context) -> None:
    """300 entries of 4 tokens where 8 are picked, 9 of 128, a window passed 70 times: bit for bit, to the last token."""
    ids = [(7919 * n * n + 31 * n) % 256 for n in range(1203)]
    with context.engine("mlx", chunk=len(ids), context=1300) as engine:
        whole = engine.session()
        want = greedy(whole, whole.prefill(ids), DECODED)
        for sizes in ((97,), (512, 1), (640,)):
            session, done, logits = engine.session(), 0, mx.zeros(0)
            while done < len(ids):
                size = sizes[0] if done < 1100 else sizes[-1]
                logits = session.prefill(ids[done : done + size])
                done += size
            text = greedy(session, logits, DECODED)
            assert equal(text.logits, want.logits), sizes
            assert text.tokens == want.tokens
            for layer in ENTRY_LAYERS:
                assert entries_of(session, layer).shape[0] == (len(ids) + DECODED) // RATES[layer]
                assert equal(entries_of(session, layer), entries_of(whole, layer))
