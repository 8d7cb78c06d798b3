"""Ways to damage an install, and to have it repaired, that the tests of verifying and repairing share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from mference_core.install.original import Original, hub_original
from mference_core.install.remote import connected
from mference_core.install.repair import Recorded, RepairReport, repair_install
from mference_core.testing.fake_hub import FakeHub
from mference_core.testing.toy_installs import READER, hub_of

LAYER_1, LAYER_2 = "packed_experts/layer_01.bin", "packed_experts/layer_02.bin"
WEIGHTS, LAYOUT, DIGESTS = "model_weights.bin", "packed_experts/layout.json", "packed_experts/digests.json"
CONFIG = "tokenizer/config.json"
RECEIPT = "verified-install.json"
STRIDE, EXPERT = 16384, 6912
"""Bytes from one expert of the toy to the next, and of an expert."""


def flip(path: Path, at: int) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def tree(path: Path) -> dict[str, bytes]:
    """Return every file of a directory, the receipt left out as it holds a time."""
    files = (item for item in sorted(path.rglob("*")) if item.is_file() and item.name != "verified-install.json")
    return {item.relative_to(path).as_posix(): item.read_bytes() for item in files}


def from_hub(hub: FakeHub) -> "Callable[[Recorded], AbstractContextManager[Original]]":
    """Return what opens the recorded source on a fake hub."""

    @contextmanager
    def opening(recorded: Recorded) -> Iterator[Original]:
        assert recorded.origin is not None
        with connected(hub_of(hub), recorded.origin.repo, recorded.origin.commit) as client:
            yield hub_original(client, recorded.origin.commit, READER)

    return opening


def repair(hub: FakeHub, path: Path, **options: Any) -> RepairReport:
    """Repair an install from a fake hub, which then knows what was asked for."""
    hub.clear()
    report = repair_install(path, from_hub(hub), **options)
    hub.settle()
    return report


def state_of(path: Path) -> Path:
    """Return where the state of a repair is kept."""
    return path.with_name(f"{path.name}.repair.json")


def sent_weights(hub: FakeHub) -> int:
    """Return the bytes of source files sent, headers left out."""
    shards = [path.name for path in hub.folder.glob("*.safetensors")]
    total = 0
    for name in shards:
        head = 8 + int.from_bytes((hub.folder / name).read_bytes()[:8], "little")
        total += sum(size for first, size in hub.sent(name) if first >= head)
    return total
