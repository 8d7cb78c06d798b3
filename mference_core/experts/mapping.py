"""Experts used where they lie in a mapped file: no slots, no copies; the page cache is the memory.

For hosts where the files fit memory. Kernels that take addresses read the pages themselves; others get copies. Plain
faults read a cold file at a quarter of the speed of `pread`, so what is routed is asked for whole, before it is touched.
"""

import ctypes
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import mlx.core as mx

from mference_core.errors import StreamError
from mference_core.experts.mapped_files import MappedFile, MappedFiles
from mference_core.experts.pool import Lease
from mference_core.experts.slab import Slab
from mference_core.experts.stats import ExpertStats, Guesses
from mference_core.experts.table import SlotPlan
from mference_core.gturbo.layout import PART_NAMES
from mference_core.tensors import ExpertLayer

# A request for more is cut in tiles, so that one tile is used while the next is being read.
EXPERTS_AT_A_TIME = 32
# What was in memory so short a time ago still is, as nearly always as not to be worth asking nine times an expert.
RECHECK_SECONDS = 30.0

Place = tuple[MappedFile, int, int]
"""A span of a mapped file: offset and size in bytes."""


class MappedExperts:
    """The experts of one layer in a mapping; an expert's slot is its own number. To be used from one thread at a time.

    `before_first_read(layer)` is called once, before a byte of the layer is read. Uses hit when the expert's pages are
    in memory and, where the layer has a proof, verified: that is done once, on other threads, from when an expert is
    first asked for. Raises: StreamError when a file is missing, too short or unreadable, and after `files` was closed;
    DigestMismatch for an expert's bytes.
    """

    def __init__(
        self, layer: ExpertLayer, files: MappedFiles, *, before_first_read: Callable[[int], None] | None = None
    ) -> None:
        self.layer = layer
        self.experts = layer.count
        self.slots = min(EXPERTS_AT_A_TIME, layer.count)
        self.nbytes = 0
        self.full = False
        self.slot_map = mx.arange(layer.count, dtype=mx.int32)
        self._files = files
        self._before_first_read = before_first_read
        self._stats = ExpertStats()
        self._guesses = Guesses(expert_bytes=layer.expert_bytes)
        self._proving: dict[int, Future[None]] = {}
        self._seen = [-RECHECK_SECONDS] * layer.count
        self.slots_in_memory = (ctypes.c_int32 * layer.count)(*[-1] * layer.count)
        self._spans = [self._spans_of(expert) for expert in range(layer.count)]
        self.table = _table(map(self._parts_of, range(layer.count)))

    @property
    def stats(self) -> ExpertStats:
        """Figures since the load; bytes are those that were not in memory when they were asked for."""
        return self._stats + self._guesses.stats

    def acquire(self, experts: Sequence[int], avoiding: Collection[int] = frozenset()) -> Lease:
        """Begin reading those of distinct `experts` that are not in memory; `wait` returns when all of them are."""
        del avoiding  # nothing is ever refilled
        self._guesses.settle(experts)
        missing = self._ask(experts)
        self._stats += ExpertStats(
            hits=len(experts) - len(missing), misses=len(missing), bytes_read=sum(missing.values())
        )
        pairs = tuple((expert, expert) for expert in experts)
        plan = SlotPlan(
            slots=tuple(experts),
            hits=tuple(pair for pair in pairs if pair[0] not in missing),
            misses=tuple(pair for pair in pairs if pair[0] in missing),
        )
        return Lease(plan, (lambda: self._wait(missing)) if missing else None)

    def at_hand(self, experts: Sequence[int]) -> Lease | None:
        """Use distinct `experts` if all are in memory; else begin reading those that are not, and return None."""
        return None if self._ask(experts) else self.acquire(experts)

    def prefetch(self, experts: Sequence[int], keep_evictable: int) -> int:
        """Begin reading those of `experts` that are not in memory; return how many."""
        del keep_evictable
        missing = self._ask(experts)
        self._stats += ExpertStats(bytes_read=sum(missing.values()))
        return len(missing)

    def look_ahead(self, experts: Sequence[int], most: int, *, certain: bool) -> None:
        """Expect a request for distinct `experts`, best guess first, and begin reading the first `most` not in memory."""
        del certain
        missing = self._ask(experts, most)
        self._guesses.note(experts, missing)
        self._stats += ExpertStats(bytes_read=sum(missing.values()))

    def non_resident(self, experts: Sequence[int]) -> Sequence[int]:
        """Return those of `experts` that are not in memory, once each, in order."""
        asked = dict.fromkeys(experts)
        return tuple(expert for expert in asked if self._unproven(expert) or self._missing_bytes(expert))

    def note_all_hit_use(self, experts: Sequence[int]) -> None:
        """Count a use of experts that are in memory."""
        self._stats += ExpertStats(hits=len(experts))

    def reads_pending(self, array: mx.array, slots: Collection[int] | None = None) -> None:
        """Do nothing: slots are never refilled."""
        del array, slots

    def reads_done(self) -> None:
        """Do nothing."""

    def copied(self, experts: Sequence[int]) -> Mapping[str, mx.array]:
        """Return copies of `experts` for operations that take arrays: part name to (len(experts), *part.shape)."""
        slab = Slab(self.layer.parts, len(experts), in_place=True)
        for expert, views in zip(experts, slab.landing(range(len(experts))).views, strict=True):
            for name, (file, offset, size) in self._parts_of(expert).items():
                file.populate(offset, size)
                views[name][:] = file.view(offset, size)
        return slab.arrays

    def _ask(self, experts: Sequence[int], most: int | None = None) -> dict[int, int]:
        """Begin reading what is not in memory of `experts`, of at most so many; return the bytes missing of each of those."""
        if self._before_first_read is not None:
            self._before_first_read(self.layer.layer)
            self._before_first_read = None
        self._files.check_open()
        now, missing = time.monotonic(), dict[int, int]()
        for expert in experts:
            if len(missing) == most:
                break
            if now - self._seen[expert] < RECHECK_SECONDS:
                continue
            size, unproven = self._missing_bytes(expert), self._unproven(expert)
            if size or unproven:
                missing[expert] = size
                self.slots_in_memory[expert] = -1
                if size:
                    for file, offset, length in self._spans[expert]:
                        file.will_need(offset, length)
                if unproven and expert not in self._proving:
                    self._proving[expert] = self._files.begin(partial(self._prove, expert))
            else:
                self._seen[expert] = now
                self.slots_in_memory[expert] = expert
        return missing

    def check_open(self) -> None:
        """Raise `StreamError` if the files were closed: their memory is gone."""
        self._files.check_open()

    def look(self) -> None:
        """Learn of all experts whether they are in memory, once the layer may be read."""
        if self._before_first_read is None:
            now = time.monotonic()
            for expert in range(self.experts):
                here = not (self._unproven(expert) or self._missing_bytes(expert))
                self._seen[expert] = now if here else -RECHECK_SECONDS
                self.slots_in_memory[expert] = expert if here else -1

    def _missing_bytes(self, expert: int) -> int:
        return sum(file.missing_bytes(offset, size) for file, offset, size in self._spans[expert])

    def _wait(self, experts: Collection[int]) -> None:
        start = time.perf_counter()
        for expert in experts:
            proving = self._proving.pop(expert, None)
            if proving is not None:
                proving.result()
            else:
                self._populate(expert)
                if self._unproven(expert):  # an earlier attempt failed
                    self._prove(expert)
        self._stats += ExpertStats(stall_seconds=time.perf_counter() - start)

    def _populate(self, expert: int) -> None:
        for file, offset, size in self._spans[expert]:
            file.populate(offset, size)

    def _unproven(self, expert: int) -> bool:
        return self.layer.proof is not None and self.layer.proof.pending(expert)

    def _prove(self, expert: int) -> None:
        """Verify an expert where it lies; done by threads that `close` of the files waits for."""
        assert self.layer.proof is not None
        self._populate(expert)
        self.layer.proof.check(expert, (file.view(offset, size) for file, offset, size in self._spans[expert]))

    def _spans_of(self, expert: int) -> list[Place]:
        """Return the extents of an expert, each checked to lie inside its file."""
        spans = list[Place]()
        for extent in self.layer.extents(expert):
            file, span = self._files.get(extent.span.path), extent.span
            if span.offset + span.size > file.size:
                raise StreamError(
                    what=f"expert file {span.path}",
                    got=f"{file.size} bytes long",
                    expected=f"at least {span.offset + span.size}",
                    remedy="verify or reinstall the model",
                )
            spans.append((file, span.offset, span.size))
        return spans

    def _parts_of(self, expert: int) -> dict[str, Place]:
        """Return where each part of an expert lies."""
        sizes, found = {part.name: part.size for part in self.layer.parts}, dict[str, Place]()
        for extent in self.layer.extents(expert):
            file, offset = self._files.get(extent.span.path), extent.span.offset
            for name in extent.parts:
                found[name] = (file, offset, sizes[name])
                offset += sizes[name]
        return found


def _table(parts: Iterable[Mapping[str, Place]]) -> "ctypes.Array[ctypes.c_void_p]":
    """Return nine addresses per expert: codes, scales and biases of gate, up and down; 0 for a part it has not."""
    places = (held.get(name) for held in parts for name in PART_NAMES)
    addresses = [place[0].address + place[1] if place else 0 for place in places]
    return (ctypes.c_void_p * len(addresses))(*addresses)
