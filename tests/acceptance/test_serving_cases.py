"""Serving together and from what was kept: each case fails when what it is about is broken, and no other notices."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx
import pytest

from mference_core.engine import Engine
from mference_core.graph import Layer, LayerGraph
from mference_core.plugins import LoadedFamily
from mference_core.prefix import pieces
from mference_core.prefix.pieces import Piece

Broken = Callable[..., LoadedFamily]
Refused = Callable[[str, LoadedFamily], str]
Passed = Callable[[str, LoadedFamily], Mapping[str, Any]]


def test_a_batch_that_changes_its_rows_is_caught(broken: Broken, refused: Refused) -> None:
    """Several timelines together come out otherwise than one."""

    def change(layer: Layer) -> Layer:
        def combine(h: Any, shared: Any, routed: Any) -> Any:
            x = layer.combine(h, shared, routed)
            return x * (1.5 if x.shape[0] > 1 and x.shape[1] == 1 else 1)

        return attrs.evolve(layer, combine=combine)

    def graph(real: LayerGraph) -> LayerGraph:
        return attrs.evolve(real, layers=(real.layers[0], change(real.layers[1]), *real.layers[2:]))

    assert "alone [" in refused("concurrent-requests", broken(mference_layer_graph=graph))


def test_answers_that_are_mixed_up_are_caught(
    sound: LoadedFamily, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows get each other's logits."""
    take = Engine.forward

    def forward(self: Engine, sessions: Any, tokens: Any, **more: Any) -> Any:
        logits = take(self, sessions, tokens, **more)
        return logits[::-1] if logits is not None and all(len(part) == 1 for part in tokens) else logits

    monkeypatch.setattr(Engine, "forward", forward)
    assert "answers [" in refused("concurrent-requests", sound)


def test_requests_that_are_not_served_together_are_caught(
    sound: LoadedFamily, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mference_acceptance.cases.serving.SchedulerOptions", lambda **_: _one_at_a_time())
    assert "none were made together" in refused("concurrent-requests", sound)


def _one_at_a_time() -> Any:
    from mference_core.scheduler.scheduler import SchedulerOptions  # noqa: PLC0415

    return SchedulerOptions(max_active=1)


@pytest.mark.parametrize("kind", ["rows", "ring"])
def test_kept_rows_that_changed_are_caught(
    sound: LoadedFamily, refused: Refused, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One value of what was kept is another."""
    copy = pieces.copy_rows

    def changed(session: Any, layers: Any, first: int, last: int) -> Piece:
        piece = copy(session, layers, first, last)
        linear = 1 in layers
        if first == 64 and linear == (kind == "rows"):
            name = next(iter(piece.arrays))
            array = piece.arrays[name]
            other = mx.concatenate([array[:, :-1], array[:, -1:] + 0.5], axis=1)
            return Piece(arrays={**piece.arrays, name: other})
        return piece

    monkeypatch.setattr("mference_core.prefix.cache.copy_rows", changed)
    assert "tokens from memory, is not equal bit for bit" in refused("prefix-reuse", sound)


def test_a_ring_put_back_at_the_wrong_place_is_caught(
    sound: LoadedFamily, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has wrapped, and is put back as if it had not."""
    right = pieces.ring_snapshot

    def wrong(state: Any, length: int, start: int, rows: Any) -> Any:
        snapshot = right(state, length, start, rows)
        turned = {name: mx.roll(array, 1, axis=1) for name, array in snapshot.arrays.items()}
        return attrs.evolve(snapshot, arrays=turned) if length > state.capacity_rows else snapshot

    monkeypatch.setattr(pieces, "ring_snapshot", wrong)
    assert "is not equal bit for bit" in refused("prefix-reuse", sound)


def test_a_cache_that_reuses_nothing_is_caught(
    sound: LoadedFamily, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mference_core.prefix.cache.PrefixCache.restore", lambda *_: 0)
    assert "the same prompt reuses 0 tokens" in refused("prefix-reuse", sound)


def test_the_sound_family_passes(sound: LoadedFamily, figures: Passed) -> None:
    assert figures("concurrent-requests", sound)["requests"] >= 6
    assert figures("prefix-reuse", sound)["worst"] == 0 or mx.default_device() != mx.Device(mx.cpu)
