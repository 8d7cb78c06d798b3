"""Sampling: the written order, the vectors of the published scheme, ties, seeds, faults and batches."""

import math
from collections import Counter
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mference_core import sampling
from mference_core.errors import NumericError, RequestError
from mference_core.prng import draw_state, gumbel, splitmix64, uniform
from mference_core.sampling import (
    Sampler,
    SamplingOptions,
    greedy,
    log_probs,
    nucleus,
    pick,
    sample_rows,
)

ROW_FACTOR = 0xD2B74407B1CE6E93


def one(logits: list[float], prompt: tuple[int, ...] = (), **options: Any) -> int:
    sampler = Sampler(options=SamplingOptions(**options), vocab_size=len(logits), prompt=prompt)
    return sampler.sample(mx.array(logits))


def probability_logits(*probabilities: float) -> mx.array:
    return mx.array([math.log(p) for p in probabilities])


@pytest.mark.parametrize(
    ("seed", "index", "state", "u"),
    [
        (0, 0, 0xE220A8397B1DCDAF, 0.9634089470),
        (0, 1, 0x910A2DEC89025CC1, 0.4722015262),
        (42, 0, 0xBDD732262FEB6E95, 0.6268104911),
        (42, 1, 0xBA69EC90EB4FEF88, 0.5656945705),
        (20260721, 0, 0xFF633C8235960366, 0.8028709888),
        (20260722, 0, 0x822F0D842717EEE0, 0.5847094059),
    ],
)
def test_generator_vectors(seed: int, index: int, state: int, u: float) -> None:
    assert splitmix64(seed + index) == state
    assert uniform(state) == pytest.approx(u, abs=5e-11)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (0, [-0.066887, 2.979225, 0.215524, 3.795402]),
        (1, [4.080718, 2.742884, 2.959665, 0.926193]),
    ],
)
def test_gumbel_vectors(index: int, expected: list[float]) -> None:
    state = splitmix64(42 + index) ^ (index * ROW_FACTOR)
    assert cast("list[float]", gumbel(state, 4).tolist()) == pytest.approx(expected, abs=1e-6)


def test_gumbel_of_every_row_is_finite() -> None:
    """The 24-bit u never rounds to 0 or 1, at the real vocabulary size."""
    for state in range(16):
        values = gumbel(splitmix64(state), 262144)
        assert mx.isfinite(values).all().item()
        assert cast("float", values.max().item()) < 17.4


def test_neighbouring_seeds_are_not_one_stream_shifted() -> None:
    streams = [[draw_state(seed, index) for index in range(50)] for seed in (7, 8, 9)]
    assert len({state for stream in streams for state in stream}) == 150


def test_temperature_zero_takes_the_lowest_index_on_ties() -> None:
    for extra in ({"top_p": 0.9}, {"top_k": 1}, {"top_k": None, "top_p": None}, {"seed": 9}):
        assert one([1, 1, 0], temperature=0, **extra) == 0
    assert one([0, 3, 3, 3], temperature=0) == 1
    assert greedy(mx.array([[0.0, -0.0], [-2.0, -1.0]])).tolist() == [0, 1]


def test_a_greedy_row_is_the_same_beside_a_sampled_row() -> None:
    rows = mx.array([[1.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    cold = Sampler(options=SamplingOptions(temperature=0), vocab_size=3)
    warm = Sampler(options=SamplingOptions(temperature=1, seed=3), vocab_size=3)
    alone = Sampler(options=SamplingOptions(temperature=1, seed=3), vocab_size=3)
    for _ in range(20):
        assert sample_rows([cold, warm], rows) == [0, alone.sample(rows[1])]


def test_truncation_example_in_float32() -> None:
    """Of 0.5, 0.3, 0.15, 0.05 with top-k 3 and top-p 0.8 two survive; weights p squared at temperature 0.5."""
    values = cast("list[float]", mx.softmax(probability_logits(0.5, 0.3, 0.15, 0.05)).tolist())
    assert nucleus([0.5, 0.30000001192092896, 0.15000000596046448], 0.8) == 2
    border = values[0] ** 2 / (values[0] ** 2 + values[1] ** 2)
    assert border == pytest.approx(0.25 / 0.34, abs=1e-6)
    assert pick(values[:2], 0.5, border - 1e-9) == 0
    assert pick(values[:2], 0.5, border + 1e-9) == 1


def test_pick_survives_temperatures_that_underflow() -> None:
    assert pick([1e-3, 9e-4], 1e-6, 0.999) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 64, "top_p": 0.95},
        {"top_k": None, "top_p": 0.95},
        {"top_k": 3, "top_p": None},
        {"top_k": None, "top_p": None},
    ],
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    """2,000 draws agree with the truncated, tempered distribution within five standard deviations."""
    given_p = [0.4, 0.3, 0.2, 0.06, 0.04]
    temperature = 0.7
    kept = 4 if options["top_p"] else options["top_k"] or 5
    weights = [p ** (1 / temperature) for p in given_p[:kept]]
    sampler = Sampler(options=SamplingOptions(temperature=temperature, seed=5, **options), vocab_size=5)
    logits = probability_logits(*given_p)
    counts = Counter(sampler.sample(logits) for _ in range(2000))
    assert set(counts) == set(range(kept))
    for token, weight in enumerate(weights):
        expected = weight / sum(weights)
        assert counts[token] / 2000 == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / 2000))


def test_ties_at_the_cut_keep_the_lower_indices() -> None:
    sampler = Sampler(options=SamplingOptions(temperature=1, top_k=3, top_p=None, seed=1), vocab_size=40)
    seen = {sampler.sample(mx.zeros(40)) for _ in range(200)}
    assert seen == {0, 1, 2}


def test_a_wide_nucleus_without_top_k_reaches_past_the_first_candidates() -> None:
    """On 3,000 equal tokens top-p 0.5 keeps about the first 1,500, far more than one block of candidates."""
    sampler = Sampler(options=SamplingOptions(temperature=1, top_k=None, top_p=0.5, seed=1), vocab_size=3000)
    seen = [sampler.sample(mx.zeros(3000)) for _ in range(200)]
    assert 1300 < max(seen) <= 1500


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    assert one([3.0, 2.0, -1.0], prompt=(0, 0), temperature=0, repetition_penalty=2) == 1
    assert one([-1.0, -1.5, -5.0], prompt=(0,), temperature=0, repetition_penalty=2) == 1
    assert one([3.0, 2.0, -1.0], prompt=(0,), temperature=0, repetition_penalty=1.2) == 0


def test_penalties_count_what_was_generated() -> None:
    """Presence and frequency penalties look at the answer only, the repetition penalty at the prompt too."""
    sampler = Sampler(options=SamplingOptions(temperature=0, frequency_penalty=0.75), vocab_size=2, prompt=(0, 0, 0, 0))
    assert [sampler.sample(mx.array([2.0, 1.0])) for _ in range(4)] == [0, 0, 1, 0]
    sampler = Sampler(options=SamplingOptions(temperature=0, presence_penalty=1.5), vocab_size=2)
    assert [sampler.sample(mx.array([2.0, 1.0])) for _ in range(3)] == [0, 1, 0]


def test_the_callers_logits_stay_as_they_are() -> None:
    logits = mx.array([3.0, 2.0, -1.0])
    options = SamplingOptions(temperature=0, repetition_penalty=2, logit_bias={"2": 50})
    assert Sampler(options=options, vocab_size=3, prompt=(0, 1)).sample(logits) == 2
    assert logits.tolist() == [3.0, 2.0, -1.0]


@pytest.mark.parametrize(
    "bias",
    [{"x": 1}, {"-1": 1}, {"1.0": 1}, {True: 1}, {"5": 1000}, {"5": "1"}, {"5": math.nan}, {"99999999999": 1}, [1]],
)
def test_bad_bias_is_refused(bias: Any) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingOptions(logit_bias=bias)


def test_bias_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="a key of logit_bias is 5; expected a token id below 5"):
        Sampler(options=SamplingOptions(logit_bias={"5": -100}), vocab_size=5)
    assert one([5.0, 4.0], temperature=0, logit_bias={"0": -100}) == 1


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", (-1, math.nan, math.inf, "1", True)),
        ("top_k", (0, 257, -1, 1.5, True)),
        ("top_p", (0, 1.01, -0.1, math.nan)),
        ("repetition_penalty", (0, -1, math.inf)),
        ("presence_penalty", (2.5, math.nan)),
        ("frequency_penalty", (-2.5, "x")),
        ("seed", (-1, 1 << 64, 1.0, True)),
    ],
)
def test_bad_options_are_refused(name: str, bad: tuple[Any, ...]) -> None:
    for value in bad:
        with pytest.raises(RequestError, match=f"^{name} is .*; expected "):
            SamplingOptions(**{name: value})


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ([math.nan] * 5, "NaN"),
        ([0, 1, math.nan, 2, 3], "NaN"),
        ([0, math.inf, 1, 1, 1], "infinite"),
        ([-math.inf] * 5, "empty"),
    ],
)
def test_rows_that_are_not_finite_give_no_token(
    temperature: float, top_k: int | None, row: list[float], kind: str
) -> None:
    sampler = Sampler(options=SamplingOptions(temperature=temperature, top_k=top_k, top_p=None), vocab_size=5)
    sampler.sample(mx.zeros(5))
    with pytest.raises(NumericError, match=f"logits of step 1 is {kind}"):
        sampler.sample(mx.array(row))
    assert sampler.count == 1


def test_a_bad_row_does_not_stop_its_neighbours() -> None:
    samplers = [Sampler(options=SamplingOptions(temperature=0), vocab_size=2) for _ in range(2)]
    good, bad = sample_rows(samplers, mx.array([[0.0, 1.0], [math.nan, 1.0]]))
    assert good == 1
    assert isinstance(bad, NumericError)
    assert [s.count for s in samplers] == [1, 0]


def test_excluded_tokens_are_never_drawn() -> None:
    logits = mx.array([0.0, -math.inf, 0.0])
    for top_k in (None, 3):
        sampler = Sampler(options=SamplingOptions(temperature=5, top_k=top_k, top_p=None, seed=2), vocab_size=3)
        assert {sampler.sample(logits) for _ in range(100)} == {0, 2}


def test_a_seed_repeats_and_its_absence_does_not() -> None:
    def stream(seed: int | None) -> list[int]:
        sampler = Sampler(options=SamplingOptions(temperature=2, top_k=None, top_p=None, seed=seed), vocab_size=50)
        return [sampler.sample(mx.zeros(50)) for _ in range(30)]

    assert stream(1) == stream(1)
    assert stream(1) != stream(2)
    assert stream(None) != stream(None)


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0, 0.3, 1, 2]),
    top_k=st.sampled_from([None, 1, 5, 64]),
    top_p=st.sampled_from([None, 0.3, 0.9, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 5),
)


@settings(max_examples=30, deadline=None)
@given(options=st.lists(OPTIONS, min_size=1, max_size=4), data=st.data())
def test_rows_of_a_batch_come_out_as_if_alone(options: list[SamplingOptions], data: st.DataObject) -> None:
    rows = mx.array([[float(data.draw(st.integers(-3, 3))) for _ in range(12)] for _ in options])
    together = [Sampler(options=o, vocab_size=12, prompt=(1, 2)) for o in options]
    alone = [Sampler(options=o, vocab_size=12, prompt=(1, 2)) for o in options]
    for _ in range(4):
        assert sample_rows(together, rows) == [s.sample(row) for s, row in zip(alone, rows, strict=True)]


def test_log_probs_are_of_the_raw_distribution_in_order() -> None:
    result = log_probs(probability_logits(0.1, 0.4, 0.1, 0.4), token=2, top=4)
    assert result.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token for token, _ in result.top] == [1, 3, 0, 2]
    assert all(a >= b for (_, a), (_, b) in pairwise(result.top))
    assert log_probs(mx.array([-5.0, -1.0, 0.0, 2.0]), token=0, top=20).top[0][0] == 3
    assert log_probs(mx.zeros(3), token=0).top == ()
    with pytest.raises(RequestError, match="top_logprobs is 21"):
        log_probs(mx.zeros(30), token=0, top=21)


@pytest.mark.parametrize("kind", ["normal", "coarse", "equal", "mostly excluded", "zeros of both signs"])
def test_of_a_large_vocabulary_the_same_are_largest(kind: str) -> None:
    """Searched in blocks, alone and in rows: value down, then index up, whatever is equal or excluded."""
    size, count = 2 * sampling.BLOCK * 20 + 77, 20
    x = mx.random.normal((2, size), key=mx.random.key(3))
    if kind == "coarse":
        x = mx.round(x)
    elif kind == "equal":
        x = mx.zeros_like(x)
    elif kind == "mostly excluded":
        x = mx.where(mx.arange(size) % 997 == 5, x, -mx.inf)
    elif kind == "zeros of both signs":
        x = mx.where(mx.arange(size) % 3 == 0, -0.0, 0.0) * mx.ones_like(x)
    keys = sampling._ranked(x, count)
    for row in range(2):
        values: Any = x[row].tolist()
        wanted = sorted(range(size), key=lambda at: (-values[at], at))[:count]
        assert sampling._unpack(keys[row], size) == wanted
        assert sampling._unpack(sampling._ranked(x[row], count), size) == wanted
