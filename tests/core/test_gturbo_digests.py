"""Digests of parts: each expert is verified when it is first read, by slots and mappings alike, and never falsely."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from mference_core.errors import DigestMismatch, ManifestError
from mference_core.experts.mapped_files import MappedFiles
from mference_core.experts.mapping import MappedExperts
from mference_core.experts.pool import ExpertPool, Lease
from mference_core.experts.reader import ExpertReader
from mference_core.gturbo.digests import DIGESTS_NAME, Digests, encode_digests
from mference_core.gturbo.model import GturboModel, open_gturbo
from mference_core.gturbo.verification import LayerFiles, Verification
from mference_core.install import install_local
from mference_core.install.verify import verify_install
from mference_core.manifest import read_manifest
from mference_core.testing.toys import toy_arch, toy_contract, toy_plan, write_toy

LAYER_1, LAYER_2 = "packed_experts/layer_01.bin", "packed_experts/layer_02.bin"
STRIDE, EXPERTS, EXPERT_BYTES = 16384, 4, 6912
Acquire = Callable[[GturboModel, int], Callable[[Sequence[int]], Lease | None]]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an install with digests that nobody changes: layers 1 and 2 routed."""
    root = tmp_path_factory.mktemp("pristine")
    install_local(write_toy(root / "source", toy_arch()), root / "toy.gturbo", toy_contract(), toy_plan)
    assert verify_install(root / "toy.gturbo", expert_digests=True).digests
    return root / "toy.gturbo"


@pytest.fixture
def install(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "toy.gturbo"))


def opened(path: Path, policy: str = "full-sha256") -> GturboModel:
    return open_gturbo(path, read_manifest(path / "manifest.json"), policy)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture(params=["slots", "mapped"])
def acquire(request: pytest.FixtureRequest) -> Iterator[Acquire]:
    """Return what serves experts of a layer, as a load would."""
    reader, files = ExpertReader(), MappedFiles()

    def serve(model: GturboModel, layer: int) -> Callable[[Sequence[int]], Lease | None]:
        found = model.expert_layers()[layer]
        source: ExpertPool | MappedExperts
        if request.param == "slots":
            source = ExpertPool(found, reader, slots=2, before_first_read=model.touch_layer)
        else:
            source = MappedExperts(found, files, before_first_read=model.touch_layer)

        def lease(experts: Sequence[int]) -> Lease | None:
            held = source.acquire(experts)
            assert held is not None
            held.wait()
            return source.at_hand(experts)

        return lease

    yield serve
    reader.close()
    files.close()


def test_damaged_expert_is_found_when_it_is_read(install: Path, acquire: Acquire) -> None:
    """Every time, until it is good; the others serve as if nothing were."""
    flip(install / LAYER_1, 2 * STRIDE + EXPERT_BYTES - 1)
    use = acquire(opened(install), 1)
    assert use([0, 3])
    for _ in range(3):
        with pytest.raises(DigestMismatch, match=r"layer_01\.bin expert 2 sha256 is \w+; expected \w+; repair it"):
            use([1, 2])
    assert use([0, 1])
    flip(install / LAYER_1, 2 * STRIDE + EXPERT_BYTES - 1)
    assert use([2])


def test_opening_and_using_hash_what_they_need(install: Path, acquire: Acquire) -> None:
    """Each expert once, though slots are refilled; the rest of the file not at all."""
    model = opened(install)
    at_open = model.verification.bytes
    names = {LAYER_1, LAYER_2}
    assert at_open == sum(entry.size for name, entry in model.manifest.files.items() if name not in names)
    use = acquire(model, 1)
    for experts in ([0, 1], [2], [0, 1], [2, 0]):
        assert use(experts)
    assert model.verification.bytes - at_open == 3 * EXPERT_BYTES
    assert model.verification.seconds > 0


def test_experts_that_changed_places(install: Path, acquire: Acquire) -> None:
    """In one file, or between layers: bytes that are right elsewhere are wrong."""
    one, two = ((install / name).read_bytes() for name in (LAYER_1, LAYER_2))
    (install / LAYER_1).write_bytes(one[STRIDE : 2 * STRIDE] + one[:STRIDE] + one[2 * STRIDE :])
    (install / LAYER_2).write_bytes(one[:STRIDE] + two[STRIDE:])
    model = opened(install)
    for layer, expert in ((1, 0), (1, 1), (2, 0)):
        with pytest.raises(DigestMismatch, match=f"expert {expert} sha256"):
            acquire(model, layer)([expert])
    assert acquire(model, 2)([1])


def test_expert_files_that_changed_places(install: Path) -> None:
    (install / LAYER_1).rename(install / "x")
    (install / LAYER_2).rename(install / LAYER_1)
    (install / "x").rename(install / LAYER_2)
    model = opened(install)
    assert all(model.proofs[layer].pending(0) for layer in (1, 2))
    view = memoryview((install / LAYER_1).read_bytes())[:EXPERT_BYTES]
    with pytest.raises(DigestMismatch):
        model.proofs[1].check(0, [view])
    assert model.proofs[1].pending(0)
    model.proofs[2].check(0, [view])
    assert not model.proofs[2].pending(0)


def test_trusted_receipt_verifies_no_expert(pristine: Path, acquire: Acquire) -> None:
    flip(pristine / LAYER_1, 3)
    try:
        model = opened(pristine, "trusted-receipt")
        before = model.verification.bytes
        assert acquire(model, 1)([0])
        assert model.verification.bytes == before
    finally:
        flip(pristine / LAYER_1, 3)


def test_guesses_that_fail_are_forgotten(install: Path) -> None:
    """A damaged expert that was read ahead of its use is found when it is used."""
    flip(install / LAYER_1, 0)
    model = opened(install)
    with ExpertReader() as reader:
        pool = ExpertPool(model.expert_layers()[1], reader, slots=4, before_first_read=model.touch_layer)
        assert pool.prefetch([0, 1], 0) == 2
        deadline = monotonic() + 5
        while 1 in pool.non_resident([1]) and monotonic() < deadline:
            sleep(0.001)
            pool.prefetch([1], 0)
        lease = pool.acquire([0])
        assert lease is not None
        with pytest.raises(DigestMismatch):
            lease.wait()


def test_mapping_ahead_of_use(install: Path) -> None:
    """What native loops may use without asking is verified first."""
    flip(install / LAYER_1, 0)
    model, files = opened(install), MappedFiles()
    source = MappedExperts(model.expert_layers()[1], files, before_first_read=model.touch_layer)
    source.look_ahead([0, 1], 2, certain=False)
    deadline = monotonic() + 5
    while model.proofs[1].pending(1) and monotonic() < deadline:
        sleep(0.001)
    source.look()
    assert source.non_resident([0]) == (0,)
    assert source.slots_in_memory[0] == -1
    assert source.slots_in_memory[1] in (1, -1)
    assert source.at_hand([0]) is None
    with pytest.raises(DigestMismatch):
        source.acquire([0]).wait()
    files.close()


def test_mapping_closed_while_it_verifies(install: Path) -> None:
    """Nothing is unmapped under a thread that reads it."""
    for _ in range(20):
        model, files = opened(install), MappedFiles()
        source = MappedExperts(model.expert_layers()[1], files, before_first_read=model.touch_layer)
        lease = source.acquire(range(EXPERTS))
        files.close()
        with suppress(Exception):
            lease.wait()


# --- the file itself


def test_flipped_byte_and_truncation(install: Path) -> None:
    for change in (lambda p: flip(p, 90), lambda p: p.write_bytes(p.read_bytes()[:-1]), lambda p: p.unlink()):
        shutil.copy(install / DIGESTS_NAME, install.parent / "kept")
        change(install / DIGESTS_NAME)
        with pytest.raises((DigestMismatch, ManifestError), match=r"digests\.json .*repair it with 'mference repair'"):
            opened(install)
        shutil.copy(install.parent / "kept", install / DIGESTS_NAME)


def test_digests_that_nobody_lists_are_not_read(install: Path) -> None:
    """Then whole files are hashed, as without."""
    manifest = json.loads((install / "manifest.json").read_text())
    del manifest["files"][DIGESTS_NAME]
    (install / "manifest.json").write_text(json.dumps(manifest))
    (install / DIGESTS_NAME).write_text("nonsense")
    flip(install / LAYER_1, STRIDE - 1)
    model = opened(install)
    assert not model.proofs
    with pytest.raises(DigestMismatch, match=r"layer_01\.bin sha256"):
        model.touch_layer(1)


Json = dict[str, Any]
FOREIGN: dict[str, tuple[Callable[[Json], Any], str]] = {
    "of another file": (
        lambda v: v["files"][LAYER_1].update(sha256="0" * 64),
        r"layer_01.bin sha256 is 0{64}; expected",
    ),
    "layers swapped": (
        lambda v: v.update(files={**v["files"], LAYER_1: v["files"][LAYER_2], LAYER_2: v["files"][LAYER_1]}),
        "layer_01.bin sha256 is",
    ),
    "a layer missing": (lambda v: v["files"].pop(LAYER_2), "layer_02.bin is missing"),
    "a layer too many": (lambda v: v["files"].update(x={}), "x is there; expected no such file"),
    "an expert missing": (lambda v: v["files"][LAYER_1]["experts"].pop(), "experts is 3 in number; expected 4"),
    "a block missing": (lambda v: v["files"]["model_weights.bin"]["blocks"].pop(), "blocks is 0 in number; expected 1"),
    "no digest": (lambda v: v["files"][LAYER_1]["experts"].__setitem__(0, "x"), "expected 64 lower-case hex"),
    "another schema": (lambda v: v.update(schema=2), "schema is 2; expected 1"),
    "no blocks": (lambda v: v.update(blockBytes=0), "blockBytes is 0"),
    "not an object": (lambda v: v["files"].update({LAYER_1: 3}), "expected an object"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_digests_of_something_else(install: Path, case: str) -> None:
    """Even if the manifest lists them."""
    change, text = FOREIGN[case]
    values = json.loads((install / DIGESTS_NAME).read_text())
    change(values)
    data = json.dumps(values).encode()
    (install / DIGESTS_NAME).write_bytes(data)
    manifest = json.loads((install / "manifest.json").read_text())
    manifest["files"][DIGESTS_NAME] = {"size": len(data), "sha256": sha256(data).hexdigest()}
    (install / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match=text) as caught:
        opened(install)
    assert "\n" not in str(caught.value)


def test_flipped_weights_are_named_by_block(install: Path) -> None:
    flip(install / "model_weights.bin", 20_000)
    with pytest.raises(DigestMismatch, match=r"model_weights\.bin block at 0 sha256"):
        opened(install)


def test_encoding_is_stable() -> None:
    digests = Digests(files={"a": "1", "model_weights.bin": "2"}, experts={"a": ("3",)}, blocks=("4",), block_bytes=8)
    assert json.loads(encode_digests(digests)) == {
        "blockBytes": 8,
        "files": {"a": {"experts": ["3"], "sha256": "1"}, "model_weights.bin": {"blocks": ["4"], "sha256": "2"}},
        "schema": 1,
    }


# --- whole files, ahead of their use


def test_files_are_hashed_ahead_and_the_one_waited_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mference_core.gturbo.verification.LINE_SECONDS", 0.0)
    order, gate, lock = list[int](), threading.Semaphore(0), threading.Lock()

    def check(layer: int) -> None:
        with lock:
            order.append(layer)
        assert gate.acquire(timeout=5)

    said = list[str]()
    files = LayerFiles(range(20), check, Verification("full-sha256", tell=said.append), 1 << 40)
    waiting = threading.Thread(target=files.touch, args=(17,))
    waiting.start()
    deadline = monotonic() + 5
    while not order and monotonic() < deadline:
        sleep(0.001)
    assert order[0] == 17
    gate.release(20)
    waiting.join(5)
    for layer in range(20):
        files.touch(layer)
    assert sorted(order) == list(range(20))
    assert said[0] == "verifying 1024.0GiB in 20 expert files as they are needed"
    assert "verifying expert files: 10 of 20" in said
    deadline = monotonic() + 5
    while not said[-1].startswith("verified") and monotonic() < deadline:
        sleep(0.001)
    assert said[-1].startswith("verified 1024.0GiB in 20 expert files in ")


def test_listener_that_fails_ends_nothing() -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError

    files = LayerFiles(range(3), lambda _: None, Verification("full-sha256", tell=broken), 1 << 40)
    for layer in range(3):
        files.touch(layer)


def test_stopped_and_gone_on_with() -> None:
    seen = list[int]()
    files = LayerFiles(range(50), lambda layer: (sleep(0.001), seen.append(layer))[1], Verification("x"), 1)
    files.begin()
    files.stop()
    sleep(0.05)
    assert len(seen) < 50
    files.touch(49)
    assert 49 in seen


def test_wait_is_counted() -> None:
    done = Verification("full-sha256")
    LayerFiles([0], lambda _: sleep(0.02), done, 1).touch(0)
    assert done.waited_seconds >= 0.02
