"""The index of model_weights.bin: its bytes, round trips, and one refusal per lie."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mference_core.errors import ManifestError
from mference_core.gturbo.index import (
    ENTRY_BYTES,
    HEADER_BYTES,
    Resident,
    decode_index,
    encode_index,
    plan_index,
    read_index,
)
from mference_core.tensors import Quant

Q4 = Quant(bits=4, group_size=64)


def toy_index() -> bytes:
    """Return the image of three entries: quantised, BF16 of one element, F32."""
    tensors = [
        Resident(name="a.weight", dtype="U32", shape=(4, 128), quant=Q4),
        Resident(name="scalar", dtype="BF16", shape=(1,)),
        Resident(name="c", dtype="F32", shape=(3, 2)),
    ]
    return encode_index(plan_index(tensors))


PAYLOAD = 4 * 64 + 2 * 16 + 2 + 24


def test_index_bytes() -> None:
    """Header, entries, names and padding lie where the format says, the payload without gaps."""
    image = toy_index()
    assert len(image) == 16384
    assert struct.unpack_from("<3Q", image) == (16384, PAYLOAD, 3)
    first = struct.unpack_from("<IHBBQQ4I4Q", image, 24)
    assert first == (24 + 72 * 3, 8, 0, 0, 16384, 256, 4, 128, 0, 0, 16640, 16, 16656, 16)
    assert struct.unpack_from("<IHBBQQ4I4Q", image, 96) == (248, 6, 1, 0, 16672, 2, 1, 0, 0, 0, 0, 0, 0, 0)
    assert struct.unpack_from("<IHBBQQ4I4Q", image, 168) == (254, 1, 3, 0, 16674, 24, 3, 2, 0, 0, 0, 0, 0, 0)
    assert image[240:255] == b"a.weightscalarc"
    assert not any(image[255:])


def test_index_reads_back() -> None:
    index = decode_index(toy_index(), 16384 + PAYLOAD)
    assert encode_index(index) == toy_index()
    assert [entry.quant for entry in index.entries] == [Q4, None, None]


TENSORS = st.lists(
    st.one_of(
        st.builds(
            lambda name, rows, groups, quant: Resident(
                name=name + ".weight", dtype="U32", shape=(*rows, groups * quant.group_size), quant=quant
            ),
            name=st.text("abcé.", min_size=1, max_size=9),
            rows=st.lists(st.integers(1, 9), min_size=1, max_size=3),
            groups=st.integers(1, 4),
            quant=st.builds(Quant, bits=st.sampled_from([2, 4, 8]), group_size=st.sampled_from([32, 64, 128])),
        ),
        st.builds(
            Resident,
            name=st.text("abcé.", min_size=1, max_size=9).map(lambda name: name + "_"),
            dtype=st.sampled_from(["BF16", "F16", "F32", "I64", "I32"]),
            shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
        ),
    ),
    max_size=12,
    unique_by=lambda tensor: tensor.name,
)


@given(TENSORS)
def test_any_index_round_trips(tensors: list[Resident]) -> None:
    planned = plan_index(tensors)
    read = decode_index(encode_index(planned), planned.file_size)
    assert read == planned
    for tensor, entry in zip(tensors, read.entries, strict=True):
        assert (entry.name, entry.dtype, entry.shape) == (tensor.name, tensor.dtype, tensor.shape)
        assert entry.quant == tensor.quant
        assert (entry.size, entry.scales_size, entry.biases_size) == tensor.sizes


def poke(entry: int, offset: int, code: str, value: int) -> Callable[[bytearray], Any]:
    """Overwrite a member of an entry, given by its offset in the entry."""
    return lambda image: struct.pack_into("<" + code, image, HEADER_BYTES + ENTRY_BYTES * entry + offset, value)


def head(offset: int, value: int) -> Callable[[bytearray], Any]:
    return lambda image: struct.pack_into("<Q", image, offset, value)


def rename(name: bytes) -> Callable[[bytearray], Any]:
    """Put other bytes where the second entry's name is."""
    return lambda image: image.__setitem__(slice(248, 248 + len(name)), name)


INDEX_LIES: dict[str, tuple[Callable[[bytearray], Any], str]] = {
    "indexSize": (head(0, 32768), "indexSize is 32768; expected the 16384 bytes that are there"),
    "residentSize": (head(8, PAYLOAD - 2), f"size is {16384 + PAYLOAD} bytes; expected indexSize + residentSize"),
    "entryCount": (head(16, 1 << 40), "entryCount is 1099511627776; expected entries that fit indexSize 16384"),
    "name in the header": (poke(0, 0, "I", 20), "entry 0 name is at 20, 8 bytes; expected a name inside the index"),
    "name after the index": (poke(0, 0, "I", 16380), "entry 0 name is at 16380, 8 bytes"),
    "name empty": (poke(0, 4, "H", 0), "entry 0 name is at 240, 0 bytes"),
    "name not UTF-8": (rename(b"\xff"), "entry 1 name is not UTF-8"),
    "dtype unknown": (poke(1, 6, "B", 6), "scalar dtype is 6; expected a code from 0 to 5"),
    "dtype of another size": (poke(1, 6, "B", 3), "scalar size is 2 bytes; expected 4 for F32 [1]"),
    "axis of zero before another": (poke(2, 24, "I", 0), "c shape is [0, 2]; expected axes above 0"),
    "shape too large": (poke(2, 24, "I", 4), "c size is 24 bytes; expected 32 for F32 [4, 2]"),
    "size too small": (poke(2, 16, "Q", 20), "c size is 20 bytes; expected 24 for F32 [3, 2]"),
    "offset odd": (poke(2, 8, "Q", 16675), "c offset is odd"),
    "scales offset odd": (poke(0, 40, "Q", 16641), "a.weight offset is odd"),
    "offset in the index": (poke(1, 8, "Q", 16000), "scalar bytes is 16000 to 16002; expected a span inside"),
    "offset past the end": (poke(1, 8, "Q", 1 << 40), "scalar bytes is 1099511627776 to"),
    "scales in the index": (poke(0, 40, "Q", 16000), "a.weight bytes is 16000 to 16016"),
    "biases past the end": (poke(0, 56, "Q", 1 << 40), "a.weight bytes is 1099511627776 to"),
    "entries overlap": (poke(2, 8, "Q", 16672), "bytes is overlapping"),
    "scales overlap the weight": (poke(0, 40, "Q", 16384), "a.weight bytes is overlapping a.weight"),
    "packed size of no width": (poke(0, 16, "Q", 192), "a.weight size is 192 bytes; expected the packed size"),
    "scales missing": (poke(0, 48, "Q", 0), "a.weight scales and biases is 0 and 16 bytes; expected both"),
    "biases missing": (poke(0, 64, "Q", 0), "a.weight scales and biases is 16 and 0 bytes"),
    "scales of no group": (
        lambda image: [poke(0, at, "Q", 12)(image) for at in (48, 64)],
        "a.weight scales is 12 bytes; expected one BF16 per group of 32, 64 or 128",
    ),
    "companions on a plain tensor": (poke(1, 48, "Q", 2), "scalar scales and biases is present; expected none"),
}


@pytest.mark.parametrize(("change", "text"), INDEX_LIES.values(), ids=INDEX_LIES)
def test_lying_index_is_refused(change: Callable[[bytearray], Any], text: str) -> None:
    image = bytearray(toy_index())
    change(image)
    with pytest.raises(ManifestError) as caught:
        decode_index(bytes(image), 16384 + PAYLOAD)
    assert text in str(caught.value)
    assert str(caught.value).startswith("model_weights.bin ")


def test_name_listed_twice_is_refused() -> None:
    twins = [Resident(name="x", dtype="BF16", shape=(1,))] * 2
    with pytest.raises(ManifestError, match="x entry is listed twice"):
        plan_index(twins)
    image = bytearray(encode_index(plan_index([twins[0], Resident(name="y", dtype="BF16", shape=(1,))])))
    image[24 + 2 * 72 + 1] = ord("x")
    with pytest.raises(ManifestError, match="x entry is listed twice"):
        decode_index(bytes(image), 16384 + 4)


def test_padding_between_tensors_is_allowed() -> None:
    """Offsets are explicit: a writer may align tensors."""
    image = bytearray(toy_index())
    poke(2, 8, "Q", 16704)(image)
    head(8, 16728 - 16384)(image)
    assert decode_index(bytes(image), 16728).entries[2].offset == 16704


def test_index_at_the_cap_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    with path.open("wb") as file:
        file.write(struct.pack("<3Q", 1 << 20, 0, 0))
        file.truncate(1 << 20)
    with pytest.raises(ManifestError, match="indexSize is 1048576; expected 24 to 1048575 bytes"):
        read_index(path)


@pytest.mark.parametrize(("size", "text"), [(23, "header is cut short at 23 bytes"), (100, "indexSize is 16384")])
def test_weights_file_cut_short_is_refused(tmp_path: Path, size: int, text: str) -> None:
    (tmp_path / "w.bin").write_bytes(toy_index()[:size])
    with pytest.raises(ManifestError, match=text):
        read_index(tmp_path / "w.bin")


def test_planner_refuses_what_an_index_cannot_hold() -> None:
    with pytest.raises(ManifestError, match="x rank is 5; expected at most 4 axes"):
        plan_index([Resident(name="x", dtype="BF16", shape=(1, 1, 1, 1, 1))])
    with pytest.raises(ManifestError, match="resident index is"):
        plan_index([Resident(name=f"{'n' * 200}{i}", dtype="BF16", shape=(1,)) for i in range(4000)])
