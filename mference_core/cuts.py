"""Where a prompt is cut into calls, so that however it is cut its timeline holds the same bits.

Layers of rows, a row a token, do not care. Layers that carry something from token to token take a call's tokens in
blocks, which begin where the call does: their calls begin at multiples of one unit, and none is too short for a block.
"""

from attrs import frozen

from mference_core.kv import KVLayout, Linear, Ring

UNIT_TOKENS = 64
TAIL_TOKENS = 16


@frozen(kw_only=True)
class Cuts:
    """Calls of at most `chunk_tokens` that begin at multiples of `unit_tokens`; a cut leaves at least `tail_tokens`."""

    chunk_tokens: int
    unit_tokens: int = 1
    tail_tokens: int = 1

    @classmethod
    def of(cls, layout: KVLayout, chunk_tokens: int) -> "Cuts":
        """Return the cuts of a model's timelines. Chunks too small to choose from are the unit themselves."""
        if all(isinstance(layer, Linear | Ring) for layer in layout.layers):
            return cls(chunk_tokens=chunk_tokens)
        if chunk_tokens < UNIT_TOKENS + TAIL_TOKENS:
            return cls(chunk_tokens=chunk_tokens, unit_tokens=chunk_tokens)
        return cls(chunk_tokens=chunk_tokens, unit_tokens=UNIT_TOKENS, tail_tokens=TAIL_TOKENS)

    def end(self, start: int, total: int, wanted: int | None = None) -> int:
        """Return where the call ends that begins at token `start` of `total`.

        It has about `wanted` tokens, or as many as it may. Where a timeline begins off the unit, later calls are on it.
        """
        size = min(self.chunk_tokens, max(self.unit_tokens, wanted or self.chunk_tokens))
        if total - start <= size:
            return total
        end = min(self.floor(start + size), self.last(total))
        return end if end > start else min(total, start + self.chunk_tokens)

    def floor(self, length: int) -> int:
        """Return the last place a call may begin at, up to `length`."""
        return length // self.unit_tokens * self.unit_tokens

    def last(self, total: int) -> int:
        """Return the last place where a prompt of `total` tokens may be cut; 0 where it may not."""
        return self.floor(max(0, total - self.tail_tokens))
