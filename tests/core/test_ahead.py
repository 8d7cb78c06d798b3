"""Looking ahead: what is guessed, what is read for it, and that no result depends on it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from mference_core import plugins
from mference_core.ahead import LOOKAHEAD, READS, LookAhead, looks_ahead
from mference_core.engine import Engine, LoadOptions
from mference_core.errors import UsageError
from mference_core.experts.stats import ExpertStats, Guesses
from mference_core.graph import LayerGraph, Routing
from mference_core.steps import make_step

BYTES = 100
PROMPT = [(7 * n) % 251 for n in range(40)]


def test_a_guess_is_settled_by_the_next_request_only() -> None:
    guesses = Guesses(expert_bytes=BYTES)
    guesses.settle([1, 2])
    assert guesses.stats == ExpertStats()
    guesses.note([3, 1, 4], [4, 1])
    guesses.settle([1, 5])
    guesses.settle([4])
    assert guesses.stats == ExpertStats(predicted=3, confirmed=1, ahead_bytes=2 * BYTES, wasted_bytes=BYTES)
    guesses.note([7], [])
    guesses.settle([7])
    assert guesses.stats == ExpertStats(predicted=4, confirmed=2, ahead_bytes=2 * BYTES, wasted_bytes=BYTES)


class Source:
    """Takes guesses down."""

    def __init__(self, *, full: bool = False) -> None:
        self.full, self.asked = full, list[tuple[tuple[int, ...], int, bool]]()

    def look_ahead(self, experts: tuple[int, ...], most: int, *, certain: bool) -> None:
        self.asked.append((experts, most, certain))


def looking(
    ids: list[list[list[int]]], *, tokens: int = 1, ahead: int = READS, **held: Any
) -> tuple[LookAhead, Source]:
    """Return what layer 0 sees of a layer 1 that chooses `ids` (B, 1, k)."""
    source = Source(full=held.pop("full", False))
    second = SimpleNamespace(source=source, ahead=ahead, certain=held.pop("certain", False))

    def route(h: mx.array, asked: Any) -> Routing:
        assert h is rows
        assert asked is step
        return Routing(ids=mx.array(ids, dtype=mx.int32), weights=mx.zeros(1))

    rows = mx.zeros((len(ids), tokens, 4))
    graph = cast("LayerGraph", SimpleNamespace(layers=[None, SimpleNamespace(route=held.pop("route", route))]))
    step = make_step([0] * len(ids), mx.zeros((len(ids), tokens), dtype=mx.int32))
    experts = cast("Any", [None, held.pop("next", second)])
    return LookAhead(graph, experts, 0, rows, step), source


def test_the_next_layers_router_is_asked_about_these_rows() -> None:
    ahead, source = looking([[[4, 2, 9]]])
    ahead.begin()
    ahead.begin()
    assert source.asked == [((4, 2, 9), READS, False)], "once"


def test_timelines_are_merged_by_rank() -> None:
    """The best guess of each comes before anyone's second best; an expert is named once."""
    ahead, source = looking([[[4, 2]], [[9, 4]], [[2, 7]]], ahead=5, certain=True)
    ahead.begin()
    assert source.asked == [((4, 9, 2, 7), 5, True)]


@pytest.mark.parametrize(
    "changes",
    [{"full": True}, {"tokens": 2}, {"ahead": 0}, {"next": None}],
    ids=["in memory", "prefill", "off", "dense"],
)
def test_there_is_nothing_to_guess(changes: dict[str, Any]) -> None:
    def route(*_: Any) -> Routing:
        raise AssertionError

    ahead, source = looking([[[1]]], route=route, **changes)
    assert ahead.predict() is None
    ahead.begin()
    assert source.asked == []


@pytest.fixture(scope="module", params=["qwen36", "deepseekv4"])
def family(request: pytest.FixtureRequest) -> Any:
    return plugins.load(request.param)


def run(family: Any, **options: Any) -> tuple[mx.array, ExpertStats]:
    path = cast("Path", family.family.reference) / "mlx"
    with Engine.load(family, path, LoadOptions(dtype="float32", context=200, chunk=16, **options)) as engine:
        session = engine.session()
        logits = [session.prefill(PROMPT)]
        before = engine.stats
        assert before.predicted == 0, "prefill does not guess"
        logits += [session.decode(token) for token in PROMPT[:30]]
        mx.eval(logits)
        return mx.stack(logits), engine.stats


def test_no_slot_count_and_no_guess_changes_a_bit(family: Any) -> None:
    want, _ = run(family, slots="resident")
    for slots in (3, 4, 6, 7):
        off, quiet = run(family, slots=slots, lookahead="off")
        on, stats = run(family, slots=slots, lookahead="on")
        assert bool(mx.array_equal(off, want))
        assert bool(mx.array_equal(on, want))
        assert (quiet.predicted, quiet.ahead_bytes) == (0, 0)
        assert stats.predicted > 0
        assert 0 < stats.confirmed <= stats.predicted
        assert 0 <= stats.wasted_bytes <= stats.ahead_bytes <= stats.bytes_read


def test_layers_that_choose_by_token_id_are_known_beforehand() -> None:
    """Every guess about them comes true, so no byte read for one is wasted, and they are read whole."""
    family = plugins.load("deepseekv4")
    path = cast("Path", family.family.reference) / "mlx"
    with Engine.load(family, path, LoadOptions(dtype="float32", context=200, slots=3, lookahead="on")) as engine:
        session = engine.session()
        session.prefill(PROMPT)
        for token in PROMPT:
            mx.eval(session.decode(token))
        known = engine.experts[1]
        guessed = engine.experts[2]
        assert known is not None
        assert guessed is not None
        assert (known.certain, guessed.certain) == (True, False)
        stats = known.source.stats
        assert stats.confirmed == stats.predicted == 3 * len(PROMPT)
        assert stats.wasted_bytes == 0 < stats.ahead_bytes
        assert guessed.source.stats.confirmed < guessed.source.stats.predicted


def test_a_switch_that_cannot_be_meant_is_refused() -> None:
    family = plugins.load("qwen36")
    path = cast("Path", family.family.reference) / "mlx"
    with pytest.raises(UsageError, match="--lookahead is 'maybe'; expected off, on or auto"):
        Engine.load(family, path, LoadOptions(lookahead="maybe"))


def test_auto_does_not_look_ahead_on_processors() -> None:
    """There reads take the cores that compute: it was measured not to pay."""
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("this is no CPU")
    assert [looks_ahead(value) for value in LOOKAHEAD] == [False, True, False]
