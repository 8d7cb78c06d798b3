"""States: their sizes at the published shape, how far they go back, and that sessions survive what fails."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import pytest

from mference_acceptance.context import Context
from mference_acceptance.runs import complete
from mference_core import plugins
from mference_core.engine import Engine
from mference_core.errors import CannotRewind
from mference_core.kv import Composite, Compressed, Ring
from mference_core.states import CompositeState, CompressedState, new_states
from mference_deepseekv4 import attention
from mference_deepseekv4.arch import CSA, HCA, PINNED, SLIDING
from mference_deepseekv4.layout import INDEX, POOL, WINDOW, kv_layout
from mference_kernels import rope

ON_CPU = mx.default_device() == mx.Device(mx.cpu)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return Context(family=plugins.load("deepseekv4"), folder=tmp_path_factory.mktemp("gate"))


def equal(got: mx.array, want: mx.array) -> bool:
    return bool(mx.array_equal(got, want)) if ON_CPU else bool(mx.allclose(got, want, rtol=5e-5, atol=5e-5))


def test_the_published_shape_grows_by_6880_bytes_a_token() -> None:
    """21 layers with entries and index keys of each 4 tokens, 20 with entries of each 128, two-byte rows."""
    layout = kv_layout(PINNED, 4096, 128, "float16")
    assert layout.bytes_per_token == 21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128 == 6880
    kinds = [PINNED.kind(layer) for layer in range(PINNED.num_layers)]
    assert [kinds.count(kind) for kind in (SLIDING, CSA, HCA)] == [2, 21, 20]
    ring = min(4096, 128 + 128) * 512 * 2
    csa = (3 * 2 * 1024 + 4 * 2 * 512 + 3 * 2 * 256 + 4 * 2 * 128) * 4
    hca = 127 * 2 * 512 * 4
    assert layout.fixed_bytes == 43 * ring + 21 * csa + 20 * hca
    assert layout.bytes_at(4096) - layout.fixed_bytes == 4096 * 6880


def test_each_kind_of_layer_keeps_what_it_needs() -> None:
    layout = kv_layout(PINNED, 1 << 20, 512, "bfloat16")
    sliding, csa, hca = layout.layers[0], layout.layers[2], layout.layers[3]
    assert isinstance(sliding, Ring)
    assert (sliding.window, sliding.slack_rows) == (128, 512)
    assert isinstance(csa, Composite)
    assert isinstance(hca, Composite)
    assert (set(csa.parts), set(hca.parts)) == ({WINDOW, POOL, INDEX}, {WINDOW, POOL})
    pool, index, heavy = (cast("Compressed", part) for part in (csa.parts[POOL], csa.parts[INDEX], hca.parts[POOL]))
    assert [(p.rate, set(p.open_rows.values()), set(p.carried.values())) for p in (pool, index, heavy)] == [
        (4, {1024}, {512}),
        (4, {256}, {128}),
        (128, {512}, set()),
    ]
    assert {p.dtype for p in (pool, index, heavy)} == {"float32"}, "gates go through a softmax"


def test_what_is_allocated_at_the_published_shape_is_what_is_declared() -> None:
    layout = kv_layout(PINNED, 300, 64, "bfloat16")
    states = new_states(layout)
    assert sum(state.nbytes for state in states) == layout.fixed_bytes
    part = cast("CompressedState", cast("CompositeState", states[2]).parts[POOL])
    windows = part.take(values=mx.zeros((9, 1024)), gates=mx.zeros((9, 1024)))
    part.entries.append(e=mx.zeros((1, windows.count, 512)))
    assert (windows.count, part.length, part.entries.length) == (2, 9, 2)
    assert part.nbytes == part.layout.bytes_at(9, 300)


def continued(engine: Engine, *parts: Sequence[int]) -> mx.array:
    session = engine.session()
    for part in parts[:-1]:
        session.prefill(part)
    return complete(session, parts[-1], 3).logits


@pytest.mark.parametrize("length", [5, 34, 127, 128, 130, 262])
def test_it_goes_back_within_the_open_windows_and_no_further(context: Context, length: int) -> None:
    """A window of 4 that has closed cannot be opened again; a snapshot takes any timeline back."""
    ids = context.longest.ids
    other = [(token + 1) % 256 for token in ids[:6]]
    with context.engine("mlx") as engine:
        session = engine.session()
        session.prefill(ids[: length - 3])
        saved, kept = session.snapshots(), list(session.tokens)
        for token in ids[length - 3 : length]:
            session.decode(token)
        for cut in range(1, length):
            possible = cut >= length // 4 * 4
            assert all(state.can_truncate(cut) for state in session.states) == possible
        with pytest.raises(CannotRewind, match="unable to rewind so far"):
            session.rewind(length // 4 * 4 - 1)
        if length % 4:
            session.rewind(length // 4 * 4)
            want = continued(engine, ids[: length // 4 * 4], other)
            assert equal(complete(session, other, 3).logits, want)
        session.restore(saved, kept)
        assert equal(complete(session, other, 3).logits, continued(engine, ids[: length - 3], other))


@pytest.mark.parametrize("at", [0, 3, 5, 8, 12])
def test_a_call_that_fails_half_way_leaves_no_trace(context: Context, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever layer fails, before or after its windows closed: the next call goes on as if there had been none."""
    ids = context.longest.ids
    with context.engine("mlx") as engine:
        want = continued(engine, ids[:126], ids[126:140])
        session = engine.session()
        session.prefill(ids[:126])
        calls, plain = 0, rope.turned_heads

        def failing(*args: Any, **options: Any) -> mx.array:
            nonlocal calls
            calls += 1
            if calls > at:
                raise KeyboardInterrupt
            return plain(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(attention, "turned_heads", failing)
            with pytest.raises(KeyboardInterrupt):
                session.prefill([9] * 7)
        assert session.length == 126
        assert equal(complete(session, ids[126:140], 3).logits, want)


@pytest.mark.parametrize("lengths", [(2, 3), (120, 9)])
def test_forks_share_nothing(context: Context, lengths: tuple[int, int]) -> None:
    first, second = lengths
    ids = context.longest.ids
    with context.engine("mlx") as engine:
        trunk = engine.session()
        trunk.prefill(ids[:first])
        fork = trunk.fork()
        fork.prefill([7] * second)
        assert equal(
            complete(trunk, ids[first : first + second], 3).logits,
            continued(engine, ids[:first], ids[first : first + second]),
        )
        assert equal(complete(fork, [8], 3).logits, continued(engine, ids[:first], [7] * second, [8]))
