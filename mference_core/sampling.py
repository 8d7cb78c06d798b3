"""From logits to a token: one written order of operations, one generator per request, no surprises on ties.

The order is penalties and bias, softmax in float32, then one of three: temperature 0 takes the best logit; without
truncation the Gumbel-max form draws from the whole vocabulary; else the candidates, by probability down and index
up, are cut by top-k and top-p and drawn from. Rows of a batch never see each other.
"""

import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import attrs
import mlx.core as mx
from attrs import define, field, frozen

from mference_core.errors import NumericError, RequestError
from mference_core.prng import draw_state, gumbel, uniform

MAX_TOP_K = 256
BLOCK = 256
"""Logits that are passed over together when the largest are looked for."""

MAX_BIAS = 100.0
MAX_LOGPROBS = 20


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _must(expected: str, holds: Any) -> Any:
    def check(_options: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if not holds(value):
            raise RequestError(what=attribute.name, got=repr(value), expected=expected)

    return check


def _bias(value: Any) -> dict[int, float]:
    """Read a `logit_bias` mapping; JSON makes its keys strings."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(what="logit_bias", got=repr(value), expected="an object of token id to number")
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        text = str(key)
        if isinstance(key, bool) or not (text.isascii() and text.isdigit() and len(text) < 10):
            raise RequestError(what="a key of logit_bias", got=repr(key), expected="a token id")
        if not _number(bias) or abs(bias) > MAX_BIAS:
            raise RequestError(what=f"logit_bias of token {text}", got=repr(bias), expected="a number from -100 to 100")
        pairs[int(text)] = float(bias)
    return pairs


@frozen(kw_only=True)
class SamplingOptions:
    """How one request picks its tokens. Raises `RequestError` for a value that cannot be meant.

    `temperature` 0 is greedy whatever else is set. `top_k` and `top_p` None truncate nothing. The repetition penalty
    covers prompt and answer (1 is off); presence and frequency penalties cover the answer (0 is off). `logit_bias`
    adds to the logits of token ids. Without `seed` every request draws differently.
    """

    temperature: float = field(
        default=0.2, validator=_must("a finite number of at least 0", lambda v: _number(v) and v >= 0)
    )
    top_k: int | None = field(
        default=64,
        validator=_must(
            f"an integer from 1 to {MAX_TOP_K}, or none",
            lambda v: v is None or (type(v) is int and 1 <= v <= MAX_TOP_K),
        ),
    )
    top_p: float | None = field(
        default=0.95,
        validator=_must("a number above 0 and up to 1, or none", lambda v: v is None or (_number(v) and 0 < v <= 1)),
    )
    repetition_penalty: float = field(
        default=1.0, validator=_must("a finite number above 0", lambda v: _number(v) and v > 0)
    )
    presence_penalty: float = field(
        default=0.0, validator=_must("a number from -2 to 2", lambda v: _number(v) and abs(v) <= 2)
    )
    frequency_penalty: float = field(
        default=0.0, validator=_must("a number from -2 to 2", lambda v: _number(v) and abs(v) <= 2)
    )
    logit_bias: Mapping[int, float] = field(factory=dict, converter=_bias)
    seed: int | None = field(
        default=None,
        validator=_must("an unsigned 64-bit integer", lambda v: v is None or (type(v) is int and 0 <= v < 1 << 64)),
    )

    @property
    def plain_greedy(self) -> bool:
        """Say whether the token is the best raw logit, so that nothing but `greedy` is needed."""
        return self.temperature == 0 and not self.penalised and not self.logit_bias

    @property
    def penalised(self) -> bool:
        """Say whether the logits depend on the history."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)


@frozen(kw_only=True)
class LogProbs:
    """The log-probability of a token, and the likeliest `(id, log-probability)` pairs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def greedy(logits: mx.array) -> mx.array:
    """Return the index of the largest logit, the lowest on ties, without evaluating anything.

    Shapes: (..., V) -> (...) uint32. Written as two reductions: an argmax leaves ties to the backend.
    """
    size = logits.shape[-1]
    best = logits.max(axis=-1, keepdims=True)
    return mx.where(logits == best, mx.arange(size, dtype=mx.uint32), mx.array(size, mx.uint32)).min(axis=-1)


def _ranked(values: mx.array, count: int) -> mx.array:
    """Return the keys of the `count` largest float32 `values`, unordered: value in sortable bits, then index reversed.

    All keys differ, so which ones are kept is the same everywhere. Shapes: (..., V) -> (..., count) uint64.
    Each of them lies in one of the `count` blocks whose largest keys are largest, so a large vocabulary is only searched
    there.
    """
    size = values.shape[-1]
    blocks = -(-size // BLOCK)
    if blocks < 2 * count:
        return _largest(values, mx.arange(size), size, count)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, blocks * BLOCK - size)]
    cut = mx.pad(values, padding, constant_values=-math.inf).reshape(*values.shape[:-1], blocks, BLOCK)
    best = _largest(cut.max(axis=-1), mx.arange(blocks), blocks, count)
    chosen = (blocks - 1 - (best & 0xFFFFFFFF)).astype(mx.int32)
    found = mx.take_along_axis(cut, chosen[..., None], axis=-2).flatten(-2)
    ids = (chosen[..., None] * BLOCK + mx.arange(BLOCK)).flatten(-2)
    return _largest(found, ids, blocks * BLOCK, count) - (blocks * BLOCK - size)


def _largest(values: mx.array, ids: mx.array, size: int, count: int) -> mx.array:
    """Return the keys of the `count` largest values, `ids` below `size` being their indices."""
    bits = (values + 0.0).view(mx.uint32)  # adding zero makes -0 and 0 one value
    sortable = mx.where(values < 0, ~bits, bits | 0x80000000).astype(mx.uint64)
    return mx.topk((sortable << 32) | (size - 1 - ids).astype(mx.uint64), count)


def _unpack(keys: mx.array, size: int) -> list[int]:
    """Return the indices behind `_ranked` keys (count,), best first."""
    ordered: list[int] = sorted(cast("list[int]", keys.tolist()), reverse=True)
    return [size - 1 - (key & 0xFFFFFFFF) for key in ordered]


def _values(keys: Sequence[int]) -> tuple[float, ...]:
    """Return the values behind `_ranked` keys, none of them negative, to the bit."""
    return struct.unpack(f"{len(keys)}f", struct.pack(f"{len(keys)}I", *((key >> 32) & 0x7FFFFFFF for key in keys)))


def nucleus(probabilities: Sequence[float], top_p: float) -> int | None:
    """Return how many of the descending `probabilities` top-p keeps, or None if their sum stays below `top_p`."""
    return next((n for n, total in enumerate(accumulate(probabilities), start=1) if total >= top_p), None)


def pick(probabilities: Sequence[float], temperature: float, u: float) -> int:
    """Return the position in descending `probabilities` that `u` in [0, 1) hits, weights being p ** (1/T)."""
    best = probabilities[0] or 1.0  # relative weights cannot all underflow at low temperatures
    sums = list(accumulate((p / best) ** (1 / temperature) for p in probabilities))
    return next((n for n, total in enumerate(sums) if total >= u * sums[-1]), 0)


def _faults(logits: mx.array) -> mx.array:
    """Return whether a row has a NaN, a plus infinity, and nothing but minus infinities: (..., V) -> (..., 3) bool."""
    found = [mx.isnan(logits).any(axis=-1), (logits == math.inf).any(axis=-1), (logits == -math.inf).all(axis=-1)]
    return mx.stack(found, axis=-1)


@define(kw_only=True, eq=False)
class Sampler:
    """The token choice of one request: its options, generator state and history.

    `prompt` holds the ids before the answer. Raises `RequestError` if a biased id is outside the vocabulary.
    """

    options: SamplingOptions
    vocab_size: int
    prompt: Iterable[int] = ()
    seed: int = field(init=False)
    count: int = field(init=False, default=0)
    _seen: dict[int, None] = field(init=False)
    _generated: Counter[int] = field(init=False, factory=Counter)

    def __attrs_post_init__(self) -> None:
        """Start the history and settle the seed."""
        self._seen = dict.fromkeys(t for t in self.prompt if 0 <= t < self.vocab_size)
        given = self.options.seed
        self.seed = int.from_bytes(os.urandom(8), "little") if given is None else given
        worst = max(self.options.logit_bias, default=0)
        if worst >= self.vocab_size:
            raise RequestError(
                what="a key of logit_bias", got=str(worst), expected=f"a token id below {self.vocab_size}"
            )

    def sample(self, logits: mx.array) -> int:
        """Choose the next token and remember it.

        Shapes: logits (V,) any float; minus infinity excludes a token. Raises `NumericError`, and chooses nothing,
        if a logit is NaN or plus infinity or every token is excluded.
        """
        token = sample_rows([self], logits[None])[0]
        if isinstance(token, NumericError):
            raise token
        return token

    def accept(self, token: int) -> None:
        """Record a token chosen elsewhere (a lazily evaluated greedy step) as if `sample` had returned it."""
        self._seen[token] = None
        self._generated[token] += 1
        self.count += 1

    def _shape(self, logits: mx.array) -> mx.array:
        """Apply penalties and bias; the caller's array stays as it is."""
        o = self.options
        if o.repetition_penalty != 1 and self._seen:
            ids = mx.array(list(self._seen), dtype=mx.int32)
            old = logits[ids]
            new = mx.where(old > 0, old / o.repetition_penalty, old * o.repetition_penalty)
            logits = mx.put_along_axis(logits, ids, new, axis=0)
        shifts = dict(o.logit_bias)
        if o.presence_penalty or o.frequency_penalty:
            for token, times in self._generated.items():
                shifts[token] = shifts.get(token, 0.0) - o.presence_penalty - o.frequency_penalty * times
        if shifts:
            ids = mx.array(list(shifts), dtype=mx.int32)
            logits = logits.at[ids].add(mx.array(list(shifts.values()), dtype=mx.float32))
        return logits

    def refuse(self, kind: str) -> NumericError:
        """Return the error of logits that no token can be made of: they are NaN, infinite or empty."""
        return NumericError(
            what=f"logits of step {self.count}",
            got=kind,
            expected="finite numbers",
            remedy="no token was made of them; the weights or a kernel of this model are broken",
        )

    @property
    def _ranks(self) -> int:
        """How many candidates to look at first; 0 where the token is the best of something."""
        o = self.options
        if o.temperature == 0 or (o.top_k is None and (o.top_p is None or o.top_p == 1)):
            return 0
        return min(o.top_k or MAX_TOP_K, self.vocab_size)

    def _best(self, x: mx.array) -> mx.array:
        """Return the best of the shaped logits (V,), or the one that noise makes the best, unevaluated."""
        o = self.options
        if o.temperature == 0:
            return greedy(x)
        noise = gumbel(draw_state(self.seed, self.count), self.vocab_size)
        return greedy((x - x.max()) / o.temperature + noise)

    def _draw(self, keys: list[int], probabilities: mx.array) -> int:
        """Draw from the candidates behind `keys`; `probabilities` (V,) is looked at again where they are too few."""
        o = self.options
        keys.sort(reverse=True)
        keys = keys[: o.top_k or len(keys)]
        values = _values(keys)
        kept = nucleus(values, o.top_p) if o.top_p is not None and o.top_p < 1 else len(keys)
        if kept is None and o.top_k is None and len(keys) < self.vocab_size:
            # A nucleus wider than the first guess: look at eight times as many.
            more = _ranked(probabilities, min(len(keys) * 8, self.vocab_size))
            return self._draw(cast("list[int]", more.tolist()), probabilities)
        at = pick(values[:kept], o.temperature, uniform(draw_state(self.seed, self.count)))
        return self.vocab_size - 1 - (keys[at] & 0xFFFFFFFF)


def sample_rows(samplers: Sequence[Sampler], logits: mx.array | Sequence[mx.array]) -> list[int | NumericError]:
    """Choose one token per row with one evaluation; each row comes out as if it were alone.

    Shapes: logits (B, V), or B of (V,). A row that cannot be sampled gives its error as the value and leaves its sampler
    as it was.
    """
    if not samplers:
        return []
    raw = (logits if isinstance(logits, mx.array) else mx.stack(list(logits))).astype(mx.float32)
    if raw.shape != (len(samplers), samplers[0].vocab_size):
        expected = (len(samplers), samplers[0].vocab_size)
        raise ValueError(f"[sample] logits must be {expected} but got {raw.shape}")
    shaped = [sampler._shape(raw[at]) for at, sampler in enumerate(samplers)]  # noqa: SLF001
    drawn = [at for at, sampler in enumerate(samplers) if sampler._ranks]  # noqa: SLF001
    chosen = {at: sampler._best(shaped[at]) for at, sampler in enumerate(samplers) if at not in drawn}  # noqa: SLF001
    faults, keys, probabilities = _faults(raw), mx.zeros((0,)), mx.zeros((0,))
    if drawn:
        probabilities = mx.softmax(mx.stack([shaped[at] for at in drawn]), axis=-1, precise=True)
        keys = _ranked(probabilities, max(samplers[at]._ranks for at in drawn))  # noqa: SLF001
    mx.eval(faults, keys, *chosen.values())
    flags, candidates = cast("list[list[bool]]", faults.tolist()), cast("list[list[int]]", keys.tolist())
    made: list[int | NumericError] = []
    for at, sampler in enumerate(samplers):
        kind = next((kind for kind, found in zip(("NaN", "infinite", "empty"), flags[at], strict=True) if found), None)
        if kind is not None:
            made.append(sampler.refuse(kind))
            continue
        place = drawn.index(at) if at in drawn else None
        token = (
            cast("int", chosen[at].item()) if place is None else sampler._draw(candidates[place], probabilities[place])  # noqa: SLF001
        )
        sampler.accept(token)
        made.append(token)
    return made


def best_rows(samplers: Sequence[Sampler], best: mx.array, tokens: mx.array) -> list[int | NumericError]:
    """Return the tokens of greedy rows, `best` (B,) being their logits and `tokens` (B,) what `greedy` gives.

    As `sample_rows` does for options that are plainly greedy, at a fraction of the work. A NaN among the logits makes the
    best one NaN.
    """
    mx.eval(best, tokens)
    made: list[int | NumericError] = []
    values, ids = cast("list[float]", best.tolist()), cast("list[int]", tokens.tolist())
    for sampler, value, token in zip(samplers, values, ids, strict=True):
        if math.isfinite(value):
            sampler.accept(token)
            made.append(token)
        else:
            made.append(sampler.refuse("NaN" if math.isnan(value) else "infinite" if value > 0 else "empty"))
    return made


def log_probs(logits: mx.array, token: int, top: int = 0) -> LogProbs:
    """Return the log-probabilities of the model itself, before penalties, temperature and truncation.

    Shapes: logits (V,). `top` pairs from 0 to 20, ties by lower id. Raises `RequestError` if `top` is outside.
    """
    if not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(what="top_logprobs", got=str(top), expected=f"an integer from 0 to {MAX_LOGPROBS}")
    x = logits.astype(mx.float32)
    ids = _unpack(_ranked(x, min(top, x.size)), x.size) if top else []
    own, *others = cast("list[float]", (x - mx.logsumexp(x))[mx.array([token, *ids], dtype=mx.uint32)].tolist())
    return LogProbs(token=token, logprob=own, top=tuple(zip(ids, others, strict=True)))
