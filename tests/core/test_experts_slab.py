"""Memory of expert slots: the declared arrays and bytes, filled without copies that were not declared."""

import subprocess
import sys
from ctypes import addressof, c_char
from mmap import PAGESIZE
from pathlib import Path

import mlx.core as mx
import pytest

from mference_core.errors import StreamError
from mference_core.experts.slab import Slab, Staging, host_memory
from mference_core.tensors import ExpertPart

PARTS = (
    ExpertPart(name="gate", dtype="U32", shape=(3, 4), size=48),
    ExpertPart(name="gate_scales", dtype="BF16", shape=(3, 2), size=12),
    ExpertPart(name="down", dtype="F16", shape=(5,), size=10),
    ExpertPart(name="bias", dtype="F32", shape=(2,), size=8),
)
BLOB = sum(part.size for part in PARTS)


@pytest.fixture(params=[True, False], ids=["in place", "staged"])
def in_place(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def ones(value: float) -> dict[str, bytes]:
    """Return the bytes of parts whose every element is `value`."""
    kinds = {"gate": mx.uint32, "gate_scales": mx.bfloat16, "down": mx.float16, "bias": mx.float32}
    full = {part.name: mx.full(part.shape, value).astype(kinds[part.name]) for part in PARTS}
    return {name: bytes(memoryview(array.view(mx.uint8))) for name, array in full.items()}  # type: ignore[arg-type]


def test_arrays_have_the_declared_dtypes_shapes_and_bytes(*, in_place: bool) -> None:
    slab = Slab(PARTS, 4, in_place=in_place)
    assert {name: (array.dtype, array.shape) for name, array in slab.arrays.items()} == {
        "gate": (mx.uint32, (4, 3, 4)),
        "gate_scales": (mx.bfloat16, (4, 3, 2)),
        "down": (mx.float16, (4, 5)),
        "bias": (mx.float32, (4, 2)),
    }
    assert slab.nbytes == 4 * BLOB
    assert not any(array.any().item() for array in slab.arrays.values())


def test_memory_that_files_are_read_into_begins_with_a_page() -> None:
    """Else the system's copy runs at a quarter of its speed on some processors."""
    for array in Slab(PARTS, 4, in_place=True).arrays.values():
        assert addressof(c_char.from_buffer(memoryview(array))) % PAGESIZE == 0  # type: ignore[arg-type]
    assert addressof(c_char.from_buffer(Staging().take(100))) % PAGESIZE == 0


def test_what_lands_is_in_its_slots_and_nowhere_else(*, in_place: bool) -> None:
    slab = Slab(PARTS, 4, in_place=in_place)
    landing = slab.landing([3, 1])
    for value, views in zip([5.0, 7.0], landing.views, strict=True):
        for name, data in ones(value).items():
            views[name][:] = data
    landing.land()
    for array in slab.arrays.values():
        expected = mx.array([0, 7, 0, 5]).reshape(4, *[1] * (array.ndim - 1))
        assert mx.array_equal(array.astype(mx.float32), mx.broadcast_to(expected, array.shape)).item()


def test_staged_bytes_that_are_dropped_never_show() -> None:
    staging = Staging()
    slab = Slab(PARTS, 2, in_place=False, staging=staging)
    landing = slab.landing([0])
    for views in landing.views:
        for view in views.values():
            view[:] = b"\x11" * view.nbytes
    landing.drop()
    assert not any(array.any().item() for array in slab.arrays.values())
    assert len(staging._free) == 1


def test_host_buffers_are_few() -> None:
    """A buffer too small is replaced by the larger one, not kept beside it."""
    staging = Staging()
    for size in (10, 20, 15, 30):
        staging.give(staging.take(size))
    assert [len(buffer) for buffer in staging._free] == [30]
    one, two = staging.take(5), staging.take(6)
    assert one is not two
    staging.give(one)
    staging.give(two)
    assert staging.take(6) is two, "the smallest that fits"


def test_only_arrays_of_a_cuda_device_are_not_filled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    for device in (mx.cpu, mx.gpu):
        for backend in ("metal", "cuda", "neither"):
            monkeypatch.setattr(mx, "default_device", lambda device=device: mx.Device(device))
            monkeypatch.setattr(mx.cuda, "is_available", lambda backend=backend: backend == "cuda")
            seen[device, backend] = host_memory()
    assert [key for key, host in seen.items() if not host] == [(mx.gpu, "cuda")]


@pytest.mark.parametrize(
    "part",
    [
        ExpertPart(name="up", dtype="U32", shape=(3,), size=10),
        ExpertPart(name="up", dtype="BF16", shape=(3,), size=12),
        ExpertPart(name="up", dtype="Q4", shape=(3,), size=12),
    ],
)
def test_parts_whose_bytes_disagree_are_refused(part: ExpertPart) -> None:
    with pytest.raises(StreamError, match="expert part up"):
        Slab([part], 2, in_place=True)


MEMORY = """
import os, resource, sys
import mlx.core as mx
from pathlib import Path
from mference_core.experts.pool import ExpertPool
from mference_core.experts.reader import ExpertReader
from mference_core.tensors import ExpertLayer, ExpertPart, Extent, Span

MIB = 2**20
unit = 1 if sys.platform == "darwin" else 1024
path, in_place = Path(sys.argv[1]), sys.argv[2] == "in place"
part = ExpertPart(name="gate", dtype="BF16", shape=(MIB,), size=2 * MIB)
os.truncate(path, 64 * part.size)
layer = ExpertLayer(layer=0, count=64, parts=(part,),
    extents=lambda e: (Extent(span=Span(path=path, offset=e * part.size, size=part.size), parts=("gate",)),))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
with ExpertReader() as reader:
    pool = ExpertPool(layer, reader, slots=32, in_place=in_place)
    before, arrays = peak(), mx.get_active_memory()
    mx.reset_peak_memory()
    for first in range(0, 64, 4):
        pool.acquire(range(first, first + 4)).wait()
        mx.eval(pool.slab["gate"])
    print((peak() - before) // MIB, (mx.get_peak_memory() - arrays) // MIB, arrays // MIB)
"""


def test_filling_does_not_copy_the_slab(tmp_path: Path, *, in_place: bool) -> None:
    """A slab of 64 MiB is filled twice over: in place for nothing, else with two copies of the 8 MiB under way."""
    path = tmp_path / "layer"
    path.touch()
    mode = "in place" if in_place else "staged"
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path), mode], capture_output=True, text=True, check=True, timeout=60
    )
    process, peak, arrays = map(int, run.stdout.split())
    assert arrays == 64
    assert process <= (4 if in_place else 32)
    assert peak <= (0 if in_place else 16)
