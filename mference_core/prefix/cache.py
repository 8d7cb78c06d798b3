"""The prefix cache: what is computed of prompts and answers serves every later prompt that begins alike."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import mlx.core as mx
from attrs import define, field, frozen

from mference_core.engine import Engine
from mference_core.prefix.disk import DiskPieces, Name, Raw
from mference_core.prefix.pieces import (
    POINT,
    RING,
    ROWS,
    Parts,
    Piece,
    copy_point,
    copy_rows,
    join,
    oldest_ring_row,
)
from mference_core.prefix.tree import Stretch, Tree
from mference_core.session import Session

STRETCH_TOKENS = 64
POINT_TOKENS = 1024


@frozen(kw_only=True)
class CacheFigures:
    """Bytes and stretches in memory, bytes on disk; timelines restored, and tokens of them."""

    nbytes: int = 0
    disk_bytes: int = 0
    stretches: int = 0
    restored: int = 0
    restored_tokens: int = 0


@define(kw_only=True, eq=False)
class PrefixCache:
    """Beginnings of timelines of one engine, at most `limit_bytes` of them; used by the engine's own thread.

    A timeline that was restored is, to the bit, one that was computed in the calls that `engine.cuts` makes. Layers
    that keep rows can be cut at any token. All others are kept as points, which lie where prompts may be cut: at the
    last such place of a prompt, and on the way there every `point_tokens`. What is on `disk` is brought into memory
    before it serves: `fetch`, then `adopt`.
    """

    engine: Engine
    limit_bytes: int
    disk: DiskPieces | None = None
    point_tokens: int = POINT_TOKENS
    changes: int = field(default=0, init=False)
    parts: Parts = field(init=False)
    tree: Tree = field(init=False)
    _restored: int = field(default=0, init=False)
    _restored_tokens: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.parts = Parts.of(self.engine.layout)
        unit = self.engine.cuts.unit_tokens
        root = Stretch(parent=None, start=0, tokens=(), name=b"")  # files are apart by key already
        self.tree = Tree(size_tokens=-(-STRETCH_TOKENS // unit) * unit, limit_bytes=self.limit_bytes, root=root)

    @property
    def anywhere(self) -> bool:
        """Say whether timelines can be cut at any token."""
        return not self.parts.point

    def figures(self) -> CacheFigures:
        """Return what is held and what it was good for; from any thread."""
        return CacheFigures(
            nbytes=self.tree.nbytes,
            disk_bytes=self.disk.nbytes if self.disk is not None else 0,
            stretches=self.tree.stretches,
            restored=self._restored,
            restored_tokens=self._restored_tokens,
        )

    def restore(self, session: Session, prompt: Sequence[int]) -> int:
        """Make `session` hold the longest beginning of `prompt` that is kept, if it is longer than what it holds.

        Returns the tokens the session holds of `prompt` then; always less than all.
        """
        held = session.length
        path, length = self._longest(prompt)
        if length <= held:
            return held
        path = [stretch for stretch in path if stretch.start < length]
        near = self._near(path, length)
        point = path[-1].pieces.get(POINT)
        session.restore(
            join(
                session,
                self.parts,
                length,
                rows=[stretch.pieces[ROWS] for stretch in path],
                ring=[stretch.pieces[RING] for stretch in near] if self.parts.ring else [],
                ring_start=near[0].start if near else 0,
                point=point,
            ),
            prompt[:length],
        )
        mx.eval([array for state in session.states for array in state.arrays])
        self.tree.use(path[-1:], (POINT,))
        self.tree.use(near, (RING,))
        self.tree.use(path, (ROWS,))
        self._restored += 1
        self._restored_tokens += length - held
        return length

    def keep(self, session: Session, whole: Sequence[int], *, wanted: bool = False) -> None:
        """Keep what `session` holds of a timeline that will have the tokens of `whole`, and what is not kept yet.

        `wanted` says that somebody waits for just this, so that a point is kept wherever it may be.

        What is complete is kept to its last token where nothing is carried. What a ring has lost already is not kept.
        """
        length = session.length
        path = self.tree.grow(session.tokens, partly=length >= len(whole) and self.anywhere)
        oldest = oldest_ring_row(session, self.parts)
        made: list[tuple[Stretch, str, Piece]] = []
        for stretch in path:
            end = min(stretch.end, length)
            if ROWS not in stretch.pieces:
                made.append((stretch, ROWS, copy_rows(session, self.parts.linear, stretch.start, end)))
            if self.parts.ring and RING not in stretch.pieces and stretch.start >= oldest and stretch.end <= length:
                made.append((stretch, RING, copy_rows(session, self.parts.ring, stretch.start, end)))
        if self._wants_point(path, length, whole, wanted=wanted):
            made.append((path[-1], POINT, copy_point(session, self.parts)))
        if made:
            mx.eval([array for _, _, piece in made for array in piece.arrays.values()])
            self.changes += 1
        for stretch, kind, piece in made:
            self.tree.put(stretch, kind, piece)
            if self.disk is not None and len(stretch.tokens) == self.tree.size_tokens:
                self.disk.write(stretch.name, kind, piece)
        self.tree.use(path, (ROWS,))
        self.tree.trim()

    def fetch(self, prompt: Sequence[int]) -> "Future[dict[Name, Raw]] | None":
        """Begin to read what makes more of a prompt restorable; None where the disk has nothing to add.

        `adopt` must follow when it is done, with the same prompt.
        """
        if self.disk is None:
            return None
        path = self.tree.grow(prompt, partly=False)
        known = next((at for at, stretch in enumerate(path) if not self._somewhere(stretch, ROWS)), len(path))
        path, here = path[:known], self._longest(prompt)[1]
        most = len(prompt) - 1 if self.anywhere else self.engine.cuts.last(len(prompt))
        while path and path[-1].end > here:
            wanted = self._pieces_of(path, path[-1].end)
            missing = [(stretch, kind) for stretch, kind in wanted if kind not in stretch.pieces]
            fits = sum(self.disk.size(stretch.name, kind) for stretch, kind in missing) < self.limit_bytes
            if path[-1].end <= most and fits and all(self._somewhere(*one) for one in missing):
                return self.disk.read([(stretch.name, kind) for stretch, kind in missing])
            path.pop()
        return None

    def adopt(self, prompt: Sequence[int], read: Mapping[Name, Raw]) -> None:
        """Take what was read of a prompt into memory."""
        path = list[Stretch]()
        for stretch in self.tree.grow(prompt, partly=False):
            for kind in (ROWS, RING, POINT):
                raw = read.get((stretch.name, kind))
                if raw is not None and kind not in stretch.pieces and (kind == ROWS or ROWS in stretch.pieces):
                    self.tree.put(stretch, kind, raw.piece())
            if ROWS not in stretch.pieces:
                break
            path.append(stretch)
        self.tree.use(path, (ROWS,))
        self.tree.trim()
        self.changes += 1

    def _somewhere(self, stretch: Stretch, kind: str) -> bool:
        return kind in stretch.pieces or (self.disk is not None and self.disk.has(stretch.name, kind))

    def _pieces_of(self, path: Sequence[Stretch], length: int) -> list[tuple[Stretch, str]]:
        """Return the pieces that a timeline of `length`, where `path` ends, is made of."""
        ring = [(stretch, RING) for stretch in self._near(path, length)] if self.parts.ring else []
        point = [(path[-1], POINT)] if self.parts.point else []
        return [*((stretch, ROWS) for stretch in path), *ring, *point]

    def end(self, start: int, prompt: Sequence[int], wanted: int | None = None) -> int:
        """Return where the call ends that takes `prompt` from token `start`, so that what it computes can be kept.

        As `engine.cuts` says, or earlier for the sake of a point: where another prompt went on otherwise, and at the last
        cut where experts need not be read again for it.
        """
        cuts, size, memory, total = self.engine.cuts, self.tree.size_tokens, self.engine.memory, len(prompt)
        end = cuts.end(start, total, wanted)
        if self.anywhere:
            even = end // size * size  # a ring may have lost the beginning of a stretch when its end is computed
            return even if start < even and end < total else end
        last = cuts.last(total) // size * size if memory.resident or memory.mapped else 0
        return min((cut for cut in (self._branch(prompt), last) if start < cut < end), default=end)

    def _branch(self, prompt: Sequence[int]) -> int:
        """Return the last stretch's end that `prompt` shares with others which go on otherwise; 0 if it has a point."""
        path, shared = self.tree.find(prompt)
        path = [stretch for stretch in path if stretch.end <= shared and len(stretch.tokens) == self.tree.size_tokens]
        fresh = path and path[-1].after and POINT not in path[-1].pieces
        return path[-1].end if fresh and path[-1].end <= self.engine.cuts.last(len(prompt)) else 0

    def _wants_point(self, path: Sequence[Stretch], length: int, prompt: Sequence[int], *, wanted: bool) -> bool:
        """Say whether to keep a point at `length` of `prompt`: where prompts part, at its last cut, or far from others."""
        if not self.parts.point or not path or path[-1].end != length or POINT in path[-1].pieces:
            return False
        if wanted:
            return True
        known = max((stretch.end for stretch in path if POINT in stretch.pieces), default=0)
        last = self.end(length, prompt) == len(prompt)
        return last or length - known >= self.point_tokens or self._branch(prompt) == length

    def close(self) -> None:
        """Forget what is in memory; what is on disk stays."""
        self.tree.clear()
        if self.disk is not None:
            self.disk.close()

    def _longest(self, prompt: Sequence[int]) -> tuple[list[Stretch], int]:
        """Return the stretches and the length of the longest beginning that can be restored and gone on from."""
        path, shared = self.tree.find(prompt)
        most = min(shared, len(prompt) - 1) if self.anywhere else min(shared, self.engine.cuts.last(len(prompt)))
        for stretch in reversed(path):
            length = min(stretch.end, most)
            if length <= stretch.start or not (self.anywhere or (length == stretch.end and POINT in stretch.pieces)):
                continue
            if not self.parts.ring or all(RING in one.pieces for one in self._near(path, length)):
                return path, length
        return [], 0

    def _near(self, path: Sequence[Stretch], length: int) -> list[Stretch]:
        """Return the stretches whose rows are seen through the windows of the next token after `length`."""
        first = max(0, min(length - 1, length - self.parts.window_rows + 1))
        return [stretch for stretch in path if stretch.start < length and stretch.end > first]
