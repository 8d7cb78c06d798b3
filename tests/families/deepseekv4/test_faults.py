"""Faults that other implementations have, put in on purpose: the goldens must notice each of them."""

from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import pytest

from mference_acceptance.case import CaseFailed
from mference_acceptance.cases.parity import compare
from mference_acceptance.context import Context
from mference_acceptance.runs import complete
from mference_core import plugins
from mference_core.states import CompressedState, Windows
from mference_deepseekv4 import attention, compressor, model, routing, streams
from mference_kernels import norms, pooling, rope, sparse
from mference_kernels import streams as stream_kernels
from mference_kernels.activations import ClampedSwiglu
from mference_kernels.experts import gated_experts, gated_linear

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return Context(family=plugins.load("deepseekv4"), folder=tmp_path_factory.mktemp("gate"))


def forget_carried(patch: pytest.MonkeyPatch) -> None:
    """Lose the previous window's half between calls: what every public port does."""
    take = CompressedState.take

    def forgetful(self: CompressedState, **rows: Any) -> Windows:
        windows = take(self, **rows)
        return attrs.evolve(windows, before={name: mx.zeros_like(row) for name, row in windows.before.items()})

    patch.setattr(CompressedState, "take", forgetful)


def forget_open_rows(patch: pytest.MonkeyPatch) -> None:
    """Start every call with an empty open window."""
    take = CompressedState.take

    def forgetful(self: CompressedState, **rows: Any) -> Windows:
        self.open_rows = {name: mx.zeros_like(row) for name, row in self.open_rows.items()}
        return take(self, **rows)

    patch.setattr(CompressedState, "take", forgetful)


def shared_without_clamp(patch: pytest.MonkeyPatch) -> None:
    def unclamped(x: mx.array, gate: Any, up: Any, down: Any, activation: Any) -> mx.array:
        del activation
        return gated_linear(x, gate, up, down, ClampedSwiglu(1e9))

    patch.setattr(model, "gated_linear", unclamped)


def experts_without_clamp(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model, "gated_experts", lambda t, s, held, _: gated_experts(t, s, held, ClampedSwiglu(1e9)))


def no_sinks(patch: pytest.MonkeyPatch) -> None:
    plain = sparse.sparse_attentions
    patch.setattr(
        attention, "sparse_attentions", lambda q, seen, s, **where: plain(q, seen, mx.full(s.shape, -1e9), **where)
    )


def entries_a_token_late(patch: pytest.MonkeyPatch) -> None:
    """Show the entry of a window only to the query after its last token."""

    def late(q: mx.array, seen: list[sparse.Seen], s: mx.array, *, rate: int, **where: Any) -> mx.array:
        part, rows = seen[0], []
        for i in range(part.length):
            at = part.query_start + i
            closes = rate and (at + 1) % rate == 0
            fewer = mx.array([[*range((at + 1) // rate - 1), -1]], dtype=mx.int32) if closes else None
            places: dict[str, Any] = {"query_start": at, "key_start": part.key_start, "ring": part.ring, "rate": rate}
            rows.append(sparse.sparse_attention(q[0, i : i + 1], part.rows, part.entries, s, fewer, **places, **where))
        return mx.concatenate(rows)[None]

    patch.setattr(attention, "sparse_attentions", late)


Turned = Callable[..., mx.array]


def turn_otherwise(patch: pytest.MonkeyPatch, turn: Turned) -> None:
    """Let `turn` (x (B, L, heads, D), positions, frequencies, back) take the place of trailing rotary embedding."""

    def turned(x: mx.array, at: mx.array, f: mx.array, *, heads: int, **options: Any) -> mx.array:
        made = x.reshape(*at.shape, heads, -1)
        if options.get("eps") is not None:
            made = norms.rms_norm(made, options.get("weight"), options["eps"])
        made = turn(made, at, f, options.get("back", False))
        return made.reshape(*at.shape, -1) if options.get("flat") else made

    patch.setattr(attention, "turned_heads", turned)
    patch.setattr(compressor, "turned_heads", turned)


def output_not_turned_back(patch: pytest.MonkeyPatch) -> None:
    turn_otherwise(patch, lambda x, at, f, back: x if back else rope.trailing_rope(x, at, f))


def half_split_pairs(patch: pytest.MonkeyPatch) -> None:
    """Turn pairs (i, i + half) of the trailing features instead of neighbours."""

    def split(x: mx.array, at: mx.array, f: mx.array, back: bool) -> mx.array:  # noqa: FBT001
        still = x.shape[-1] - 2 * f.shape[0]
        turned = rope.rope_ops(x[..., still:].swapaxes(1, 2), -at if back else at, f).swapaxes(1, 2)
        return mx.concatenate([x[..., :still], turned], axis=-1)

    turn_otherwise(patch, split)


def scaled_magnitude(patch: pytest.MonkeyPatch) -> None:
    """Multiply turned features by the usual attention factor of scaled angles, 0.1 ln 16 + 1, instead of 1."""

    def loud(x: mx.array, at: mx.array, f: mx.array, back: bool) -> mx.array:  # noqa: FBT001
        still = x.shape[-1] - 2 * f.shape[0]
        turned = rope.trailing_rope(x, at, f, back=back)
        return mx.concatenate([turned[..., :still], turned[..., still:] * 1.277], axis=-1)

    turn_otherwise(patch, loud)


def nothing_otherwise(patch: pytest.MonkeyPatch) -> None:
    """Change nothing: what the faults above go through is no fault itself."""
    turn_otherwise(patch, lambda x, at, f, back: rope.trailing_rope(x, at, f, back=back))


def one_base_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        attention, "frequencies", lambda arch, _: rope.default_frequencies(arch.ca_rope_head_dim, arch.rope_theta)
    )


def unscaled_angles(patch: pytest.MonkeyPatch) -> None:
    """Leave out the interpolation of slow pairs, as for prompts below the original context."""
    patch.setattr(attention, "yarn_frequencies", lambda dims, theta, **_: rope.default_frequencies(dims, theta))


def mixing_not_transposed(patch: pytest.MonkeyPatch) -> None:
    plain = stream_kernels.write_streams
    patch.setattr(
        streams,
        "write_streams",
        lambda x, y, read, also: plain(x, y, attrs.evolve(read, mix=mx.contiguous(read.mix.swapaxes(-1, -2))), also),
    )


def one_balancing_step_less(patch: pytest.MonkeyPatch) -> None:
    plain = stream_kernels.read_streams
    patch.setattr(streams, "read_streams", lambda x, mixer: plain(x, attrs.evolve(mixer, iterations=1)))


def weights_with_bias(patch: pytest.MonkeyPatch) -> None:
    """Weigh experts by what they are chosen by."""

    class Biased:
        def __getattr__(self, name: str) -> Any:
            return getattr(mx, name)

        def take_along_axis(self, s: mx.array, ids: mx.array, axis: int) -> mx.array:
            return mx.take_along_axis(s, ids, axis=axis) + 0.3

    patch.setattr(routing, "mx", Biased())


def no_offsets(patch: pytest.MonkeyPatch) -> None:
    plain = pooling.pool_windows
    patch.setattr(compressor, "pool_windows", lambda v, g, o, b, n: plain(v, g, mx.zeros_like(o), b, n))


def offsets_not_for_the_window_before(patch: pytest.MonkeyPatch) -> None:
    """Pool the previous window's half by its gates alone."""
    plain = pooling.pool_windows

    def without(v: mx.array, g: mx.array, o: mx.array, b: Any, n: int) -> mx.array:
        if b is None:
            return plain(v, g, o, b, n)
        half = o.shape[-1] // 2
        return plain(v, g, mx.concatenate([mx.zeros_like(o[:, :half]), o[:, half:]], axis=-1), b, n)

    patch.setattr(compressor, "pool_windows", without)


def empty_window_before_the_first(patch: pytest.MonkeyPatch) -> None:
    """Give the zeros before window 0 a weight."""
    plain = pooling.pool_windows
    patch.setattr(compressor, "pool_windows", lambda v, g, o, b, n: plain(v, g, o, b, n + 1))


def newest_entries_instead_of_best(patch: pytest.MonkeyPatch) -> None:
    plain = sparse.pick_entries

    def newest(q: mx.array, w: mx.array, k: mx.array, **where: Any) -> mx.array:
        picks = plain(q, w, k, **where)
        seen = (mx.arange(q.shape[-3])[:, None] + where["query_start"] + 1) // where["rate"]
        last = seen - picks.shape[1] + mx.arange(picks.shape[1])[None]
        return mx.where(seen > picks.shape[1], last, picks).astype(mx.int32)

    patch.setattr(compressor, "pick_entries", newest)


def scores_without_relu(patch: pytest.MonkeyPatch) -> None:
    plain = sparse.pick_entries_ops

    def signed(q: mx.array, w: mx.array, k: mx.array, **where: Any) -> mx.array:
        flat = (q * w[..., None]).sum(axis=-2, keepdims=True).reshape(-1, 1, q.shape[-1])
        both = mx.concatenate([flat, -flat], axis=1)  # relu(x) - relu(-x) is x
        signs = mx.broadcast_to(mx.array([1.0, -1.0]), (flat.shape[0], 2))
        return plain(both, signs, k.reshape(-1, k.shape[-1]), **where)

    patch.setattr(compressor, "pick_entries", signed)


IN_ONE_CALL = (
    shared_without_clamp,
    experts_without_clamp,
    no_sinks,
    entries_a_token_late,
    output_not_turned_back,
    half_split_pairs,
    scaled_magnitude,
    one_base_for_all,
    unscaled_angles,
    mixing_not_transposed,
    one_balancing_step_less,
    weights_with_bias,
    no_offsets,
    offsets_not_for_the_window_before,
    empty_window_before_the_first,
    newest_entries_instead_of_best,
    scores_without_relu,
)


@pytest.mark.parametrize("fault", IN_ONE_CALL, ids=lambda fault: fault.__name__)
def test_a_fault_in_the_architecture_is_noticed(
    context: Context, fault: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    golden = context.goldens[1]
    with context.engine("float") as engine, pytest.raises(CaseFailed):
        compare(engine, golden)


def test_the_way_faults_are_put_in_is_no_fault(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_otherwise(monkeypatch)
    with context.engine("float") as engine:
        compare(engine, context.goldens[1])


@pytest.mark.parametrize("fault", [forget_carried, forget_open_rows], ids=lambda fault: fault.__name__)
def test_state_lost_between_calls_is_noticed(context: Context, fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """By decoding, and by a prompt in pieces whose borders lie inside and between windows; not by one whole call."""
    ids = context.goldens[1].ids
    with context.engine("float", chunk=len(ids)) as engine:
        want = complete(engine.session(), ids, 6).logits
    fault(monkeypatch)
    with context.engine("float", chunk=len(ids)) as engine:
        got = complete(engine.session(), ids, 6).logits
        assert bool(mx.array_equal(got[0], want[0]))
        assert float(mx.abs(got[1:] - want[1:]).max()) > 0.01
        for size in (6, 8) if fault is forget_carried else (6, 7):
            session, logits = engine.session(), mx.zeros(0)
            for start in range(0, len(ids), size):
                logits = session.prefill(ids[start : start + size])
            assert float(mx.abs(logits - want[0]).max()) > 0.01
