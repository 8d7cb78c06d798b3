"""A grammar followed token by token: which ids may come next, as a mask over the model's vocabulary.

The engine is `llguidance`: of the two well-kept ones it is the one without a deep-learning framework beneath it.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import llguidance
import mlx.core as mx
from attrs import define, field

from mference_core.errors import RequestError
from mference_core.tokens import Tokenizer

_vocabularies: "weakref.WeakKeyDictionary[Tokenizer, dict[Any, llguidance.LLTokenizer]]" = weakref.WeakKeyDictionary()


@define(eq=False)
class _Pieces:
    """A vocabulary as the engine wants it."""

    tokenizer: Tokenizer
    eos_token_id: int
    bos_token_id: None = None
    tokens: list[bytes] = field(init=False)
    special_token_ids: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tokens = [self.tokenizer.spelling(number) for number in range(self.tokenizer.size)]
        self.special_token_ids = sorted(self.tokenizer.control_ids)

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


def vocabulary(tokenizer: Tokenizer, vocab_size: int, stops: Iterable[int]) -> llguidance.LLTokenizer:
    """Return the engine's form of a vocabulary of `vocab_size` ids, made once for each set of stop ids."""
    made = _vocabularies.setdefault(tokenizer, {})
    key = (vocab_size, tuple(sorted(stops)))
    if key not in made:
        pieces = llguidance.TokenizerWrapper(_Pieces(tokenizer, key[1][0]))
        made[key] = llguidance.LLTokenizer(pieces, n_vocab=vocab_size, eos_token=list(key[1]))
    return made[key]


@define(eq=False)
class GrammarConstraint:
    """One answer's grammar; see `mference_core.scheduler.request.Constraint`."""

    matcher: llguidance.LLMatcher
    vocab_size: int

    @classmethod
    def of(
        cls, grammar: str, what: str, tokenizer: Tokenizer, vocab_size: int, stop_ids: Mapping[int, str]
    ) -> "GrammarConstraint":
        """Make the constraint of a grammar. Raises `RequestError`, naming `what`, for one that cannot be followed."""
        words = vocabulary(tokenizer, vocab_size, stop_ids)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(words, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0]
            raise RequestError(what=what, got=f"a schema that cannot be followed ({reason})", remedy="simplify it")
        return cls(matcher, vocab_size)

    def allowed(self) -> mx.array:
        """Return which ids may come next, (V,) bool."""
        mask: Any = memoryview(self.matcher.compute_bitmask()).cast("I")
        words = mx.array(mask)
        bits = (words[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1
        return bits.reshape(-1)[: self.vocab_size].astype(mx.bool_)

    def accept(self, token: int) -> None:
        """Take the chosen id. Raises `RequestError` if the grammar grew too large to follow."""
        if not self.matcher.consume_token(token):
            reason = self.matcher.get_error().splitlines()[0]
            raise RequestError(what="the schema", got=f"too large to follow ({reason})", remedy="simplify it")

    def finished(self) -> bool:
        """Say whether nothing but a stop id may follow."""
        return self.matcher.is_stopped()
