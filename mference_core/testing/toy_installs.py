"""Installing the toy family, from a folder or a hub: the call, what lies beside the output, opening the whole result."""

import json
from pathlib import Path
from typing import Any

from mference_core.arch import Arch
from mference_core.checkpoint import open_checkpoint, peek
from mference_core.install import InstallReport, install_local
from mference_core.install.hub import Hub, Retry
from mference_core.install.metadata import read_metadata
from mference_core.install.planning import Reader, RemotePlan, make_plan
from mference_core.install.remote import connected, install_remote
from mference_core.safetensors_index import INDEX_NAME
from mference_core.testing.fake_hub import REPO, FakeHub
from mference_core.testing.toys import mlx_tensors, toy_arch, toy_contract, toy_plan, write_safetensors, write_toy

CHUNK_BYTES = 8192
QUICK = Retry(first_seconds=0.01, most_seconds=0.02, jitter_seconds=0.0)
READER = Reader(contract=toy_contract(), plan_for=toy_plan)


def install_toy(source: Path, output: Path, **options: Any) -> InstallReport:
    """Install a toy checkpoint; takes the options of `install_local`, returns and raises as it does."""
    return install_local(source, output, toy_contract(), toy_plan, **options)


def beside(output: Path) -> list[str]:
    """Return what is beside an output, itself included, but for the lock file that stays behind."""
    return sorted({item.name for item in output.parent.iterdir()} - {f"{output.name}.install.lock"})


def open_whole(output: Path) -> None:
    """Open an installed toy under full-sha256 and touch every layer, so that every byte is verified."""
    checkpoint = open_checkpoint(peek(output), toy_contract(), toy_plan)
    for layer in checkpoint.experts:
        checkpoint.touch(layer)


def write_toy_repo(folder: Path, arch: Arch | None = None) -> Path:
    """Write a toy checkpoint as published ones are: two shards and an index, tensors in them that are dropped."""
    arch = arch or toy_arch()
    write_toy(folder, arch)
    (folder / "model.safetensors").unlink()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    specs = sorted(mlx_tensors(arch).items())
    half = len(specs) // 2
    first = [("tower.a", ("BF16", (64,))), *specs[:4], ("tower.b", ("BF16", (50,))), *specs[4:half]]
    last = [*specs[half:], ("tower.c", ("BF16", (4096,)))]
    listed = dict[str, str]()
    for number, part in enumerate((first, last), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_safetensors(folder / file, dict(part), seed=number)
        listed |= dict.fromkeys(dict(part), file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": dict(sorted(listed.items()))}))
    return folder


def shards_of(folder: Path) -> list[str]:
    """Return the names of a folder's safetensors files."""
    return sorted(path.name for path in folder.glob("*.safetensors"))


def hub_of(fake: FakeHub, **changes: Any) -> Hub:
    """Return how a fake hub is reached, without patience."""
    return Hub(**{"endpoint": fake.endpoint, "retry": QUICK, "read_seconds": 5.0, **changes})


def install_from(
    fake: FakeHub, output: Path, *, hub: Hub | None = None, revision: str = "main", connections: int = 4, **options: Any
) -> InstallReport:
    """Install the toy from a fake hub, in small ranges; takes the options of `install_remote`."""
    options = {"chunk_bytes": CHUNK_BYTES, **options}
    with connected(hub or hub_of(fake), REPO, revision, connections) as client:
        return install_remote(client, revision, output, lambda _: READER, **options)


def planned_toy(fake: FakeHub) -> RemotePlan:
    """Return the plan by which `install_from` works."""
    with connected(hub_of(fake), REPO, "main") as client:
        return make_plan(read_metadata(client, "main"), READER, CHUNK_BYTES)
