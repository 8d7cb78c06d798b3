"""The memory of one layer's slots: one array per part of an expert, and two ways to get bytes into it."""

import math
from collections.abc import Sequence
from ctypes import addressof, c_char
from mmap import PAGESIZE
from threading import Lock
from typing import Any, Protocol, cast

import mlx.core as mx

from mference_core.buffers import read_buffer
from mference_core.errors import StreamError
from mference_core.tensors import DTYPE_BYTES, ExpertPart

DTYPES = {
    "U32": mx.uint32,
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
    "I32": mx.int32,
    "I64": mx.int64,
}

Views = dict[str, memoryview]


def host_memory() -> bool:
    """Say whether arrays of the default device are best filled in place: everywhere but on a CUDA device.

    There arrays are managed memory, and touching it from the host makes the device fault every page over again.
    """
    return bool(mx.default_device() == mx.Device(mx.cpu) or not mx.cuda.is_available())


def _bytes(array: mx.array) -> memoryview:
    """Return the memory of an evaluated array as writable bytes."""
    return memoryview(cast("Any", array)).cast("B")


def page_zeros(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Return zeros whose memory begins with a page, to read files into: see `read_buffer` for what that is worth."""
    size = math.prod(shape) * dtype.size
    whole = mx.zeros((size + PAGESIZE,), dtype=mx.uint8)
    mx.eval(whole)
    start = -addressof(c_char.from_buffer(_bytes(whole))) % PAGESIZE
    return whole[start : start + size].view(dtype).reshape(*shape)


class Landing(Protocol):
    """Where reads put their bytes: `views[i]` is of the i-th slot asked for; then `land` or `drop`, once."""

    @property
    def views(self) -> Sequence[Views]:
        """Writable bytes of each slot, part by part."""

    def land(self) -> None:
        """Make the bytes in `views` the content of the slots."""

    def drop(self) -> None:
        """Forget them; what the slots hold is undefined."""


class Slab:
    """Memory for `slots` experts: `arrays[part]` is (slots, *part.shape), allocated once, zeros at first.

    With `in_place`, reads go straight into the arrays' memory; otherwise into a host buffer that `Landing.land`
    copies to the device. Raises: StreamError when a part's bytes, dtype and shape disagree.
    """

    def __init__(
        self, parts: Sequence[ExpertPart], slots: int, *, in_place: bool, staging: "Staging | None" = None
    ) -> None:
        for part in parts:
            if part.dtype not in DTYPES or math.prod(part.shape) * DTYPE_BYTES[part.dtype] != part.size:
                raise StreamError(
                    what=f"expert part {part.name}",
                    got=f"{part.size} bytes for {part.dtype} {list(part.shape)}",
                    expected=f"one of {', '.join(DTYPES)} and the bytes of its shape",
                )
        self.parts = tuple(parts)
        self.in_place = in_place
        zeros = page_zeros if in_place else mx.zeros
        self.arrays = {part.name: zeros((slots, *part.shape), DTYPES[part.dtype]) for part in parts}
        mx.eval(self.arrays)
        self._staging = staging or Staging()
        self._bytes = {name: _bytes(array) for name, array in self.arrays.items()} if in_place else {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(array.nbytes for array in self.arrays.values())

    def landing(self, slots: Sequence[int]) -> Landing:
        """Return where to put the bytes of `slots`; nothing queued may still read those (see `ExpertPool`)."""
        if self.in_place:
            return _InPlace([self._rows(slot) for slot in slots])
        return _Staged(self, slots, self._staging)

    def _rows(self, slot: int) -> Views:
        """Return the bytes of one slot, part by part."""
        sizes = {part.name: part.size for part in self.parts}
        return {name: self._bytes[name][slot * size : (slot + 1) * size] for name, size in sizes.items()}


class _InPlace:
    """The slots' own memory."""

    def __init__(self, views: Sequence[Views]) -> None:
        self.views = views

    def land(self) -> None:
        """Do nothing: the bytes are where they belong."""

    def drop(self) -> None:
        """Do nothing: the slots are not published."""


class Staging:
    """Host buffers used again and again, so that their pages are faulted in once; one instance serves all layers."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lock = Lock()

    def take(self, size: int) -> memoryview:
        """Lend a buffer of at least `size` bytes."""
        with self._lock:
            fits = [buffer for buffer in self._free if len(buffer) >= size]
            if fits:
                smallest = min(fits, key=len)
                self._free = [buffer for buffer in self._free if buffer is not smallest]
                return smallest
            if self._free:
                self._free.pop()  # too small for now: replaced, so that the number of buffers stays bounded
        return read_buffer(size)

    def give(self, buffer: memoryview) -> None:
        """Take a lent buffer back."""
        with self._lock:
            self._free.append(buffer)


class _Staged:
    """A host buffer, part-major, so that each part is one copy and one update however many slots it has."""

    def __init__(self, slab: Slab, slots: Sequence[int], staging: Staging) -> None:
        self._slab = slab
        self._slots = slots
        self._staging = staging
        self._buffer = staging.take(len(slots) * sum(part.size for part in slab.parts))
        self._areas: Views = {}
        start = 0
        for part in slab.parts:
            end = start + len(slots) * part.size
            self._areas[part.name] = self._buffer[start:end]
            start = end
        self.views = [
            {p.name: self._areas[p.name][i * p.size : (i + 1) * p.size] for p in slab.parts} for i in range(len(slots))
        ]

    def land(self) -> None:
        """Copy the buffer into new device arrays and update the slots with them."""
        arrays = self._slab.arrays
        where = mx.array(list(self._slots))
        for part in self._slab.parts:
            rows = mx.array(cast("Any", self._areas[part.name])).view(DTYPES[part.dtype])
            arrays[part.name][where] = rows.reshape(len(self._slots), *part.shape)
        mx.async_eval(*arrays.values())
        self.drop()

    def drop(self) -> None:
        """Give the buffer back."""
        self._areas, self.views = {}, []
        self._staging.give(self._buffer)
