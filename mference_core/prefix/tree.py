"""Stretches of tokens as a tree, with what is kept of each: found by the tokens themselves, forgotten by last use."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

from attrs import define, field

from mference_core.prefix.pieces import ROWS, Piece

STRETCH_BYTES = 4096
"""What a stretch takes beside its arrays: mostly its tokens."""


@define(kw_only=True, eq=False)
class Stretch:
    """Tokens from position `start` on, after those of `parent`; `name` depends on them and on all before them.

    Only a stretch of full size has others after it.
    """

    parent: "Stretch | None" = field(repr=False)
    start: int
    tokens: tuple[int, ...] = field(repr=False)
    name: bytes
    pieces: dict[str, Piece] = field(factory=dict, repr=False)
    after: dict[tuple[int, ...], "Stretch"] = field(factory=dict, repr=False)

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.start + len(self.tokens)


def bytes_of(kind: str, piece: Piece) -> int:
    """Return what keeping a piece costs; its rows stand for the stretch itself."""
    return piece.nbytes + (STRETCH_BYTES if kind == ROWS else 0)


def name_of(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the name of a stretch after the one named `parent`."""
    return sha256(parent + b"".join(token.to_bytes(4, "little") for token in tokens)).digest()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


@define(kw_only=True, eq=False)
class Tree:
    """All stretches below `root`, whose pieces have at most `limit_bytes` together.

    What was not used for longest is forgotten first, with a stretch's rows all that follows them.
    """

    size_tokens: int
    limit_bytes: int
    root: Stretch
    nbytes: int = field(default=0, init=False)
    stretches: int = field(default=0, init=False)
    _order: OrderedDict[tuple[Stretch, str], None] = field(factory=OrderedDict, init=False, repr=False)

    def find(self, tokens: Sequence[int]) -> tuple[list[Stretch], int]:
        """Return the stretches that `tokens` begin with, and how many tokens they share; the last may share a part."""
        path, at = list[Stretch](), self.root
        while (after := at.after.get(tuple(tokens[at.end : at.end + self.size_tokens]))) is not None:
            path.append(after)
            at = after
            if len(at.tokens) < self.size_tokens:
                return path, at.end
        rest = tokens[at.end : at.end + self.size_tokens]
        shared, best = max(((common(one.tokens, rest), one) for one in at.after.values()), key=_first, default=(0, at))
        return ([*path, best], at.end + shared) if shared else (path, at.end)

    def grow(self, tokens: Sequence[int], *, partly: bool) -> list[Stretch]:
        """Return the stretches of `tokens`, new ones where there are none.

        Only if `partly` the last may be short, or longer than the tokens are. A new one is in the tree once it has rows.
        """
        path, at = list[Stretch](), self.root
        for start in range(0, len(tokens), self.size_tokens):
            part = tuple(tokens[start : start + self.size_tokens])
            if len(part) < self.size_tokens and not partly:
                break
            old = at.after.get(part)
            if len(part) < self.size_tokens and old is None:
                old = next((one for one in at.after.values() if one.tokens[: len(part)] == part), None)
            at = old or Stretch(parent=at, start=start, tokens=part, name=name_of(at.name, part))
            path.append(at)
        return path

    def put(self, stretch: Stretch, kind: str, piece: Piece) -> None:
        """Keep a piece of a stretch whose parent has rows, as the one used last."""
        parent = stretch.parent
        assert parent is not None
        if kind == ROWS and parent.after.get(stretch.tokens) is not stretch:
            for other in [
                one for one in parent.after.values() if common(one.tokens, stretch.tokens) == len(one.tokens)
            ]:
                self._forget(other, ROWS)  # a shorter beginning of this one
            parent.after[stretch.tokens] = stretch
            self.stretches += 1
        old = stretch.pieces.get(kind)
        self.nbytes += bytes_of(kind, piece) - (bytes_of(kind, old) if old is not None else 0)
        stretch.pieces[kind] = piece
        self._order[stretch, kind] = None
        self._order.move_to_end((stretch, kind))

    def use(self, path: Sequence[Stretch], kinds: Sequence[str]) -> None:
        """Count a use of some pieces; the first stretches are forgotten last."""
        for stretch in reversed(path):
            for kind in kinds:
                if kind in stretch.pieces:
                    self._order.move_to_end((stretch, kind))

    def trim(self) -> None:
        """Forget what is too much."""
        while self.nbytes > self.limit_bytes and self._order:
            self._forget(*next(iter(self._order)))

    def clear(self) -> None:
        """Forget everything."""
        self._order.clear()
        self.root.after.clear()
        self.nbytes = self.stretches = 0

    def _forget(self, stretch: Stretch, kind: str) -> None:
        if kind != ROWS:
            self._drop(stretch, kind)
            return
        assert stretch.parent is not None
        stretch.parent.after.pop(stretch.tokens, None)
        waiting = [stretch]
        while waiting:
            gone = waiting.pop()
            self.stretches -= 1
            waiting += gone.after.values()
            for each in list(gone.pieces):
                self._drop(gone, each)

    def _drop(self, stretch: Stretch, kind: str) -> None:
        self.nbytes -= bytes_of(kind, stretch.pieces.pop(kind))
        self._order.pop((stretch, kind), None)


def _first(pair: tuple[int, Stretch]) -> int:
    return pair[0]
