"""Tensors on disk: where their bytes lie, in what dtype and shape. No array library is imported here."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from attrs import frozen

DTYPE_BYTES = {"U32": 4, "BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4}
FLOATS, INTEGERS = ("BF16", "F16", "F32"), ("I64", "I32")
UNSUPPORTED = "use an MLX checkpoint quantised with affine 2, 4 or 8 bits, or the float checkpoint"
"""The remedy for values stored in a way this program does not read."""


@frozen(kw_only=True)
class Span:
    """Bytes `[offset, offset + size)` of a file."""

    path: Path
    offset: int
    size: int


@frozen(kw_only=True)
class Quant:
    """Affine quantisation: w = code * scale + bias per `group_size` inputs of a row, codes of `bits` bits."""

    bits: int
    group_size: int


@frozen(kw_only=True)
class Weight:
    """A resident tensor; for a quantised one `data` holds U32 codes and `companions` is the dtype of scales and biases.

    `shape` is logical: the last axis counts unpacked inputs. `add` is added to every value of a plain one when it is
    read: the file holds the weight less that constant.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Span
    quant: Quant | None = None
    scales: Span | None = None
    biases: Span | None = None
    companions: str = "BF16"
    add: float = 0.0


@frozen(kw_only=True)
class ExpertPart:
    """One sub-tensor of every expert of a layer: `gate`, `gate_scales`, `gate_biases`, `up`, ... `down_biases`.

    `shape` is the stored one (packed words for codes), of one expert; `size` its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    quant: Quant | None = None


@frozen(kw_only=True)
class Extent:
    """Contiguous bytes of one expert that hold `parts`, in order, without gaps."""

    span: Span
    parts: tuple[str, ...]


class ExpertProof(Protocol):
    """What verifies the experts of one layer one by one. Callable from any thread."""

    def pending(self, expert: int) -> bool:
        """Say whether an expert is still to be verified."""

    def check(self, expert: int, pieces: Iterable[memoryview]) -> None:
        """Hold the bytes of an expert, in the order of its extents; raises `DigestMismatch` if they are not its own."""


@frozen(kw_only=True)
class ExpertLayer:
    """The experts of one layer on disk: their parts, and where the bytes of expert `e` lie: `extents(e)`.

    Where there is a `proof`, who reads an expert that is `pending` must `check` it before it is used.
    """

    layer: int
    count: int
    parts: tuple[ExpertPart, ...]
    extents: Callable[[int], tuple[Extent, ...]]
    proof: ExpertProof | None = None

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, padding not counted."""
        return sum(part.size for part in self.parts)
