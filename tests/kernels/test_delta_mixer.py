"""Whole gated delta mixers: each rounding as written, timelines independent, the definition within rounding."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mference_kernels import cpu_delta, delta_contract, levels, native
from mference_kernels.delta_mixer import DeltaMixer, Mixed, delta_mixer, delta_mixer_ops

pytestmark = pytest.mark.usefixtures("restored")


def mixer_inputs(
    lengths: list[int], keys: int, share: int, dims: tuple[int, int], *, taps: int = 4, dtype: mx.Dtype = mx.float32
) -> Any:
    """Return the arguments of `delta_mixer`, the mixer last."""
    mx.random.seed(sum(lengths))
    key_dim, value_dim = dims
    B, L, values = len(lengths), max(lengths), keys * share
    channels = 2 * keys * key_dim + values * value_dim
    mixer = DeltaMixer(
        taps=mx.random.normal((taps, channels)) * 0.5,
        log_rate=mx.random.uniform(-3, 2, (values,)),
        dt_bias=mx.random.normal((values,)),
        norm=mx.random.normal((value_dim,)),
        key_heads=keys,
        key_dim=key_dim,
        unit_eps=1e-6,
        norm_eps=1e-6,
    )
    rows = [mx.random.normal((B, L, width)).astype(dtype) for width in (channels, values * value_dim, values, values)]
    tails = [mx.random.normal((taps - 1, channels)).astype(dtype) for _ in lengths]
    states = [mx.random.normal((values, key_dim, value_dim)) for _ in lengths]
    mx.eval(rows, tails, states)
    return [*rows, lengths, tails, states, mixer]


@given(
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    keys=st.integers(1, 2),
    share=st.integers(1, 2),
    dims=st.sampled_from([(3, 5), (17, 20)]),
    taps=st.integers(2, 5),
)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_mixer_rounds_as_written(
    lengths: list[int], keys: int, share: int, dims: tuple[int, int], taps: int
) -> None:
    arguments = mixer_inputs(lengths, keys, share, dims, taps=taps)
    for variant in native.variants():
        native.choose(variant)
        y, tails, states = cpu_delta.delta_mixer_cpu(*arguments)
        for b, length in enumerate(lengths):
            held = arguments[6][b].tolist()
            rows = [array[b, :length].tolist() for array in arguments[:4]]
            assert y[b, :length].tolist() == delta_contract.mixed(rows, arguments[5][b].tolist(), held, arguments[7]), (
                variant
            )
            assert states[b].tolist() == held, variant
            kept = mx.concatenate([arguments[5][b], arguments[0][b, :length]])[-(taps - 1) :]
            assert mx.array_equal(tails[b], kept), variant
            assert not mx.any(y[b, length:])


def equal(got: Mixed, want: Mixed) -> bool:
    return all(
        bool(mx.array_equal(one, two))
        for one, two in zip([got[0], *got[1], *got[2]], [want[0], *want[1], *want[2]], strict=True)
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_timelines_together_are_each_alone_in_any_cut(dtype: mx.Dtype) -> None:
    """Lengths around the tokens that are prepared together, at a published head size."""
    arguments = mixer_inputs([130, 1, 64, 65], 2, 2, (128, 128), dtype=dtype)
    y, tails, states = delta_mixer(*arguments)
    assert tails[0].dtype == dtype
    for variant in native.variants():
        native.choose(variant)
        native.set_threads(3 if variant == "portable" else 1)
        for b, length in enumerate(arguments[4]):
            tail, state, start, outputs = arguments[5][b], arguments[6][b], 0, []
            for end in sorted({1, min(2, length), length // 2 + 1, length}):
                cut = [array[b : b + 1, start:end] for array in arguments[:4]]
                if start < end:
                    out, (tail,), (state,) = delta_mixer(*cut, [end - start], [tail], [state], arguments[7])
                    outputs.append(out)
                start = end
            alone = mx.concatenate(outputs, axis=1), [tail], [state]
            assert equal(alone, (y[b : b + 1, :length], [tails[b]], [states[b]])), (variant, b)


def test_the_mixer_is_close_to_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = mixer_inputs([70, 3], 2, 2, (128, 128))
    got = delta_mixer(*arguments)
    monkeypatch.setattr(levels, "cpu", lambda: None)
    want = delta_mixer(*arguments)
    assert equal(want, delta_mixer_ops(*arguments))
    for one, two in zip([got[0], *got[2]], [want[0], *want[2]], strict=True):
        assert mx.abs(one - two).max() < 2e-5 * mx.abs(two).max()
    assert all(bool(mx.array_equal(one, two)) for one, two in zip(got[1], want[1], strict=True))


@pytest.mark.parametrize("run", [delta_mixer_ops, cpu_delta.delta_mixer_cpu])
def test_what_does_not_fit_a_mixer_is_refused(run: Any) -> None:
    qkv, z, a, b, lengths, tails, states, mixer = mixer_inputs([3, 2], 1, 2, (8, 8))
    with pytest.raises(ValueError, match=r"\[delta_mixer\] z must be \(2, 3, 16\) but got \(2, 3, 15\)"):
        run(qkv, z[..., 1:], a, b, lengths, tails, states, mixer)
    with pytest.raises(ValueError, match=r"lengths must be 2 numbers from 1 to 3 but got \[4, 2\]"):
        run(qkv, z, a, b, [4, 2], tails, states, mixer)
    with pytest.raises(ValueError, match=r"lengths must be 2 numbers from 1 to 3 but got \[0, 2\]"):
        run(qkv, z, a, b, [0, 2], tails, states, mixer)
    with pytest.raises(ValueError, match=r"\[delta_mixer\] states must be 2 of \(2, 8, 8\)"):
        run(qkv, z, a, b, lengths, tails, states[:1], mixer)
    with pytest.raises(ValueError, match=r"\[delta_mixer\] tails must be 2 of \(3, 32\)"):
        run(qkv, z, a, b, lengths, [tail[1:] for tail in tails], states, mixer)
