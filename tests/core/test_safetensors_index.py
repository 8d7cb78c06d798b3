"""Headers of safetensors files: offsets as written by the reference library, and one refusal per lie."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from safetensors import deserialize

from mference_core.errors import ManifestError
from mference_core.safetensors_index import HEADER_CAP_BYTES, INDEX_NAME, read_shard, read_source
from mference_core.testing.toys import write_raw_safetensors, write_safetensors

Header = dict[str, Any]


def entry(dtype: str, shape: list[int], begin: int, end: int) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def header() -> Header:
    return {"a": entry("BF16", [2, 3], 0, 12), "b": entry("U32", [2], 12, 20)}


def test_offsets_agree_with_the_reference_library(tmp_path: Path) -> None:
    """A file written by mlx, taken apart by the safetensors package and by our spans."""
    path = tmp_path / "x.safetensors"
    arrays = {
        "a": mx.arange(6, dtype=mx.uint32).reshape(2, 3),
        "b": mx.array([1.0, 2.0, 3.0], dtype=mx.bfloat16),
        "c": mx.array(5.0),
        "d": mx.array([7], dtype=mx.int64),
    }
    mx.save_safetensors(str(path), arrays, {"format": "mlx"})
    blob, tensors = path.read_bytes(), read_shard(path).tensors
    expected = dict(deserialize(blob))  # type: ignore[no-untyped-call]
    assert tensors.keys() == expected.keys() == arrays.keys()
    for name, tensor in tensors.items():
        assert blob[tensor.span.offset : tensor.span.offset + tensor.span.size] == expected[name]["data"]
        assert list(tensor.shape) == expected[name]["shape"]
        assert tensor.dtype == expected[name]["dtype"]


def test_what_the_toy_writer_writes_is_accepted_by_the_reference_library(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": ("U32", (2, 2)), "b": ("BF16", (3,))})
    parsed = dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    assert sorted(parsed) == ["a", "b"]
    assert sorted(read_shard(path).tensors) == ["a", "b"]


def put(**changes: Any) -> Callable[[Header], None]:
    def change(values: Header) -> None:
        values["b"].update(changes)

    return change


LIES: dict[str, tuple[Callable[[Header], Any], str]] = {
    "dtype unknown": (put(dtype="F8_E4M3"), "tensor b dtype is F8_E4M3; expected U32 or BF16"),
    "dtype missing": (lambda h: h["b"].pop("dtype"), "tensor b dtype is missing"),
    "tensor not an object": (lambda h: h.update(b=3), "tensor b is 3; expected an object"),
    "shape missing": (lambda h: h["b"].pop("shape"), "tensor b shape is missing"),
    "shape of strings": (put(shape=["2"]), "tensor b shape is '2'; expected an integer"),
    "shape negative": (put(shape=[-1, -2]), "tensor b shape is [-1, -2]; expected axes of at least 0"),
    "offsets shorter than shape x dtype": (put(shape=[4]), "tensor b bytes is 8; expected 16 for U32 [4]"),
    "offsets longer than shape x dtype": (put(shape=[1]), "tensor b bytes is 8; expected 4 for U32 [1]"),
    "offsets reversed": (put(data_offsets=[20, 12]), "tensor b data_offsets is [20, 12]; expected [begin, end]"),
    "offsets negative": (put(data_offsets=[-8, 0]), "tensor b data_offsets is [-8, 0]"),
    "offsets three": (put(data_offsets=[12, 16, 20]), "tensor b data_offsets is [12, 16, 20]"),
    "offsets fractional": (put(data_offsets=[12.5, 20]), "tensor b data_offsets is 12.5"),
    "offsets past the end": (put(data_offsets=[16, 24]), "expected a span inside the file's"),
    "overlap": (put(data_offsets=[8, 16]), "tensor b bytes is overlapping tensor a; expected a span of its own"),
    "same bytes twice": (lambda h: h.update(c=h["b"]), "tensor c bytes is overlapping tensor b"),
    "gap": (lambda h: h.pop("a"), "before tensor b is a gap of 12 bytes; expected no unused bytes"),
    "unused tail": (lambda h: h.pop("b"), "end is 8 bytes after tensor a"),
    "metadata not strings": (lambda h: h.update(__metadata__={"n": 1}), "__metadata__ n is 1; expected a string"),
}


@pytest.mark.parametrize(("change", "text"), LIES.values(), ids=LIES)
def test_lying_header_is_refused_naming_file_and_tensor(
    tmp_path: Path, change: Callable[[Header], Any], text: str
) -> None:
    path, values = tmp_path / "lie.safetensors", header()
    change(values)
    write_raw_safetensors(path, values, bytes(20))
    with pytest.raises(ManifestError) as caught:
        read_shard(path)
    assert text in str(caught.value)
    assert "lie.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_true_header_is_read(tmp_path: Path) -> None:
    """The table above starts from a header that is accepted."""
    write_raw_safetensors(tmp_path / "x.safetensors", header(), bytes(20))
    assert read_shard(tmp_path / "x.safetensors").tensors["b"].shape == (2,)


def test_file_cut_by_six_thousand_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": ("F32", (1000,)), "b": ("F32", (1000,))})
    path.write_bytes(path.read_bytes()[:-6000])
    with pytest.raises(ManifestError, match=r"tensor [ab] data_offsets is up to byte \d+; expected a span inside"):
        read_shard(path)


def test_hundred_bytes_after_the_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": ("F32", (10,))})
    path.write_bytes(path.read_bytes() + bytes(100))
    with pytest.raises(ManifestError, match="end is 100 bytes after tensor a"):
        read_shard(path)


@pytest.mark.parametrize("length", [10**12, HEADER_CAP_BYTES + 1, 2**64 - 1, 13])
def test_header_length_that_cannot_be_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}          ")
    with pytest.raises(ManifestError, match=f"header is {length} bytes long"):
        read_shard(path)


def test_header_above_the_cap_is_refused_even_if_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_raw_safetensors(path, b"{}".ljust(HEADER_CAP_BYTES + 1), 0)
    with pytest.raises(ManifestError, match=f"expected at most {HEADER_CAP_BYTES}"):
        read_shard(path)


@pytest.mark.parametrize("data", [b"", b"1234567"])
def test_file_without_a_length_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ManifestError, match="header is cut short"):
        read_shard(tmp_path / "x.safetensors")


@pytest.mark.parametrize("head", [b"not json", b"[]", b'{"a": 1, "a": 2}', b'{"a": "\xff"}'])
def test_header_that_is_no_json_object_is_refused(tmp_path: Path, head: bytes) -> None:
    write_raw_safetensors(tmp_path / "x.safetensors", head, b"")
    with pytest.raises(ManifestError, match=r"x\.safetensors header is"):
        read_shard(tmp_path / "x.safetensors")


# --- directories of several shards


def write_shards(directory: Path) -> dict[str, str]:
    """Write two shards and their index; return its weight map."""
    write_safetensors(directory / "model-00001-of-00002.safetensors", {"a": ("F32", (2,)), "c": ("F32", (1,))})
    write_safetensors(directory / "model-00002-of-00002.safetensors", {"b": ("F32", (3,))})
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    weight_map = {"b": second, "a": first, "c": first}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_come_in_order_of_their_first_tensor(tmp_path: Path) -> None:
    write_shards(tmp_path)
    source = read_source(tmp_path)
    assert [shard.path.name[6:11] for shard in source.shards] == ["00001", "00002"]
    assert sorted(source.tensors) == ["a", "b", "c"]


def refused(directory: Path, text: str) -> None:
    with pytest.raises(ManifestError) as caught:
        read_source(directory)
    assert text in str(caught.value)


def test_missing_shard_is_refused_naming_its_first_tensor(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00002.safetensors is missing; expected the shard of tensor b")


def test_shard_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_safetensors(tmp_path / "model-00003-of-00003.safetensors", {"z": ("F32", (1,))})
    refused(tmp_path, "model-00003-of-00003.safetensors is not in the index")


def test_file_of_another_kind_beside_the_shards_is_left_alone(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_safetensors(tmp_path / "consolidated.safetensors", {"a": ("F32", (2,))})
    assert len(read_source(tmp_path).shards) == 2


def test_tensor_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    del weight_map["c"]
    write_index(tmp_path, weight_map)
    refused(tmp_path, "tensor c is not in the index")


def test_tensor_listed_in_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    weight_map["c"] = weight_map["b"]
    write_index(tmp_path, weight_map)
    refused(tmp_path, "tensor c is listed in model-00002-of-00002.safetensors")


def test_listed_tensor_that_no_shard_holds_is_refused(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    weight_map["d"] = weight_map["b"]
    write_index(tmp_path, weight_map)
    refused(tmp_path, "tensor d is missing; expected as the index lists")


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"a": ("F32", (2,)), "b": ("F32", (3,))})
    refused(tmp_path, "tensor a is also in model-00001-of-00002.safetensors; expected one copy")


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", ".."])
def test_shard_name_outside_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    weight_map = write_shards(tmp_path)
    weight_map["d"] = name
    write_index(tmp_path, weight_map)
    refused(tmp_path, f"d is '{name}'; expected a bare file name")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}])
def test_malformed_weight_map_is_refused(tmp_path: Path, weight_map: Any) -> None:
    write_shards(tmp_path)
    write_index(tmp_path, weight_map)
    refused(tmp_path, INDEX_NAME)


def test_several_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    refused(tmp_path, f"{INDEX_NAME} is missing beside 2 shards")


def test_one_of_several_shards_without_an_index_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "is one shard of several")
