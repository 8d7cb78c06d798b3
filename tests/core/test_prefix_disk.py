"""Prefixes on disk: they outlive the process, are bounded, and what is damaged or another's never serves."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest

from mference_core import plugins
from mference_core.engine import Engine, LoadOptions
from mference_core.prefix.cache import PrefixCache
from mference_core.prefix.disk import DiskPieces, Unreadable, read_piece, write_piece
from mference_core.prefix.key import cache_key
from mference_core.prefix.pieces import POINT, RING, ROWS, Piece
from mference_core.session import Session

FAMILIES = [name for name in plugins.installed() if plugins.load(name).family.reference is not None]
PROMPT = [(37 * i + 11) % 250 for i in range(300)]
MUCH = 1 << 30
KEY = "ab" * 32


def load(name: str, **options: Any) -> Engine:
    family = plugins.load(name)
    assert family.family.reference is not None
    usual = LoadOptions(dtype="float32", slots="resident", chunk=128, context=512)
    return Engine.load(family, family.family.reference / "mlx", attrs.evolve(usual, **options))


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with load(request.param) as loaded:
        yield loaded


def open_cache(engine: Engine, root: Path, limit: int = MUCH, disk: int = MUCH, **more: Any) -> PrefixCache:
    pieces = DiskPieces(root, cache_key(engine), disk, **more)
    return PrefixCache(engine=engine, limit_bytes=limit, disk=pieces)


def take(cache: PrefixCache, prompt: Sequence[int]) -> tuple[int, mx.array]:
    """Serve a prompt as the scheduler does; return the tokens reused and the logits."""
    session, logits = cache.engine.session(), None
    if (future := cache.fetch(prompt)) is not None:
        cache.adopt(prompt, future.result())
    reused = cache.restore(session, prompt)
    while session.length < len(prompt):
        end = cache.end(session.length, prompt)
        logits = cache.engine.forward([session], [prompt[session.length : end]])
        cache.keep(session, prompt)
    assert logits is not None
    mx.eval(logits)
    return reused, logits[0]


def cold(engine: Engine, prompt: Sequence[int]) -> mx.array:
    return Session(engine=engine).prefill(prompt)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_it_outlives_the_process(engine: Engine, tmp_path: Path) -> None:
    """What one cache wrote another finds, bit for bit; prompts that differ find what they share."""
    first = open_cache(engine, tmp_path)
    assert take(first, PROMPT)[0] == 0
    first.close()
    assert files(tmp_path)
    second = open_cache(engine, tmp_path)
    assert second.figures().disk_bytes == sum(path.stat().st_size for path in files(tmp_path))
    reused, logits = take(second, PROMPT)
    assert reused == 256
    assert mx.array_equal(logits, cold(engine, PROMPT))
    other = [*PROMPT[:270], 9, 8, 7, *PROMPT[:40]]
    reused, logits = take(second, other)
    assert reused >= 256
    assert mx.array_equal(logits, cold(engine, other))
    second.close()
    assert all(path.name.endswith(".safetensors") for path in files(tmp_path))


def test_files_are_plain_safetensors(engine: Engine, tmp_path: Path) -> None:
    cache = open_cache(engine, tmp_path)
    take(cache, PROMPT)
    cache.close()
    for path in files(tmp_path):
        arrays = mx.load(str(path))
        assert isinstance(arrays, dict)
        assert all(name.split(".")[0].isdigit() for name in arrays)


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "bit":
        data[-1 if len(data) < 3000 else len(data) // 2] ^= 1
    elif how == "header":
        data[60] ^= 1
    elif how == "short":
        del data[-1:]
    elif how == "long":
        data += b"x"
    elif how == "empty":
        data.clear()
    else:
        data[:8] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["bit", "header", "short", "long", "empty", "length"])
def test_damaged_files_are_removed_and_never_serve(tmp_path: Path, how: str) -> None:
    with load("gemma4") as engine:
        cache = open_cache(engine, tmp_path)
        take(cache, PROMPT)
        cache.close()
        for path in files(tmp_path):
            damage(path, how)
        count = len(files(tmp_path))
        again = open_cache(engine, tmp_path)
        reused, logits = take(again, PROMPT)
        assert reused == 0
        assert mx.array_equal(logits, cold(engine, PROMPT))
        again.close()
        third = open_cache(engine, tmp_path)
        assert take(third, PROMPT)[0] == 256
        third.close()
        assert len(files(tmp_path)) == count


def test_one_damaged_file_costs_only_what_needs_it(engine: Engine, tmp_path: Path) -> None:
    cache = open_cache(engine, tmp_path)
    take(cache, PROMPT)
    names = [stretch.name.hex() for stretch in cache.tree.grow(PROMPT, partly=False)]
    cache.close()
    for path in files(tmp_path):
        if path.name.startswith(names[2]):
            damage(path, "bit")
    again = open_cache(engine, tmp_path)
    reused, logits = take(again, PROMPT)
    assert reused in (0, 128)
    assert mx.array_equal(logits, cold(engine, PROMPT))
    again.close()


def test_files_of_others_are_left_alone(engine: Engine, tmp_path: Path) -> None:
    """A file under a wrong name, of another stretch, another model or no cache at all."""
    cache = open_cache(engine, tmp_path)
    take(cache, PROMPT)
    cache.close()
    folder = cache.disk.folder if cache.disk is not None else tmp_path
    (tmp_path / "notes.txt").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    (folder / f"{'0' * 64}.rows.safetensors.part77").write_text("interrupted")
    rows = sorted(path for path in files(folder) if path.name.endswith(".rows.safetensors"))
    shutil.copyfile(rows[0], folder / "swap")
    shutil.copyfile(rows[1], rows[0])
    (folder / "swap").replace(rows[1])
    again = open_cache(engine, tmp_path)
    _, logits = take(again, PROMPT)
    assert mx.array_equal(logits, cold(engine, PROMPT))
    again.close()
    assert (tmp_path / "notes.txt").read_text() == (folder / "notes.txt").read_text() == "mine"
    assert not (folder / f"{'0' * 64}.rows.safetensors.part77").exists()


def test_it_is_bounded_and_forgets_the_oldest(tmp_path: Path) -> None:
    with load("gemma4") as engine:
        cache = open_cache(engine, tmp_path / "probe")
        take(cache, PROMPT)
        cache.close()
        one = sum(path.stat().st_size for path in files(tmp_path / "probe"))
        root = tmp_path / "cache"
        talks = [[salt, *PROMPT] for salt in range(6)]
        for talk in talks:
            cache = open_cache(engine, root, disk=int(2.5 * one))
            take(cache, talk)
            cache.close()
            assert sum(path.stat().st_size for path in files(root)) <= 2.5 * one
            cache = open_cache(engine, root, disk=int(2.5 * one))
            assert take(cache, talks[0])[0] == 256  # used again and again: it stays
            cache.close()
        cache = open_cache(engine, root, disk=int(2.5 * one))
        assert [take(cache, talk)[0] for talk in (talks[5], talks[1])] == [256, 0]
        cache.close()


def test_what_another_model_left_grows_old_too(tmp_path: Path) -> None:
    old = DiskPieces(tmp_path, "cd" * 32, MUCH)
    piece = Piece(arrays={"0.k": mx.zeros((1, 64, 8))})
    mx.eval(piece.arrays["0.k"])
    old.write(b"\1" * 32, ROWS, piece)
    old.close()
    (path,) = files(tmp_path)
    os.utime(path, (time.time() - 1000, time.time() - 1000))
    new = DiskPieces(tmp_path, KEY, path.stat().st_size + 100)
    assert new.nbytes == path.stat().st_size
    new.write(b"\2" * 32, ROWS, piece)
    new.flush()
    assert [found.parent for found in files(tmp_path)] == [new.folder]
    assert not path.parent.exists()
    new.close()


def test_a_limit_of_memory_limits_what_is_read(tmp_path: Path) -> None:
    """What does not fit in memory is not brought in, but its beginning is."""
    with load("gemma4") as engine:
        cache = open_cache(engine, tmp_path)
        take(cache, PROMPT)
        size = cache.tree.nbytes
        cache.close()
        small = open_cache(engine, tmp_path, limit=int(size * 0.3))
        reused, logits = take(small, PROMPT)
        assert 64 <= reused < 256
        assert small.tree.nbytes <= size * 0.3
        assert mx.array_equal(logits, cold(engine, PROMPT))
        small.close()


def test_a_disk_that_cannot_be_written_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And everything else goes on."""
    told: list[str] = []
    with load("gemma4") as engine:
        cache = open_cache(engine, tmp_path, notice=told.append)

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("mference_core.prefix.disk.write_piece", full)
        take(cache, PROMPT)
        assert cache.disk is not None
        cache.disk.flush()
        assert told == [f"warning: prompts are not kept in {tmp_path}: No space left on device"]
        assert take(cache, PROMPT)[0] == 299
        cache.close()
        (tmp_path / "file").write_text("")
        told.clear()
        cache = open_cache(engine, tmp_path / "file" / "below", notice=told.append)
        assert take(cache, PROMPT)[0] == 0
        cache.close()
        assert len(told) == 1


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = mx.zeros((1, 64, 8))
    mx.eval(array)
    path = tmp_path / KEY[:32] / f"{'0' * 64}.rows.safetensors"

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_piece(path, {"key": KEY}, Piece(arrays={"0.k": array}), [("0.k", array, memoryview(bytes(array.nbytes)))])
    assert files(tmp_path) == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.uint8])
def test_values_come_back_bit_for_bit(tmp_path: Path, dtype: mx.Dtype) -> None:
    array = (mx.arange(2 * 64 * 8).reshape(2, 64, 8) / 3).astype(dtype)
    empty = mx.zeros((2, 0, 8), dtype)
    mx.eval(array, empty)
    disk = DiskPieces(tmp_path, KEY, MUCH)
    disk.write(b"\3" * 32, POINT, Piece(arrays={"1.s": array, "1.t": empty}, written={1: 5, 2: 9}))
    disk.flush()
    ((name, raw),) = disk.read([(b"\3" * 32, POINT), (b"\4" * 32, POINT)]).result().items()
    piece = raw.piece()
    assert name == (b"\3" * 32, POINT)
    assert piece.written == {1: 5, 2: 9}
    assert mx.array_equal(piece.arrays["1.s"], array)
    assert piece.arrays["1.t"].shape == (2, 0, 8)
    disk.close()
    (path,) = files(tmp_path)
    for facts in ({"key": "other"}, {"kind": RING}, {"name": "00"}):
        with pytest.raises(Unreadable):
            read_piece(path, facts)


def test_writing_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is more than may wait is not kept; the caller goes on at once."""
    release: Future[int] = Future()
    monkeypatch.setattr("mference_core.prefix.disk.write_piece", lambda *_: release.result())
    monkeypatch.setattr("mference_core.prefix.disk.PENDING_BYTES", 5000)
    disk = DiskPieces(tmp_path, KEY, MUCH)
    piece = Piece(arrays={"0.k": mx.zeros((1, 64, 8))})
    mx.eval(piece.arrays["0.k"])
    started = time.monotonic()
    for number in range(10):
        disk.write(bytes([number]) * 32, ROWS, piece)
    assert time.monotonic() - started < 1
    release.set_result(7)
    disk.flush()
    assert disk.nbytes == 2 * 7
    disk.close()


def test_keys_tell_models_and_settings_apart(tmp_path: Path) -> None:
    family = plugins.load("gemma4")
    assert family.family.reference is not None
    shutil.copytree(family.family.reference / "mlx", tmp_path / "model")
    path = tmp_path / "model"

    def key(**options: Any) -> str:
        usual = LoadOptions(dtype="float32", slots="resident", chunk=128, context=512)
        with Engine.load(family, path, attrs.evolve(usual, **options)) as engine:
            return cache_key(engine)

    first = key()
    assert key() == first
    assert key(slots=4) == first
    assert len({first, key(dtype="bfloat16"), key(chunk=100)}) == 3
    weights = next(path.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)  # the same header, another value
    assert key() != first
