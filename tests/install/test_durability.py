"""What a power cut would find: nothing is recorded, and nothing promoted, before it is durable."""

import os
from collections import defaultdict
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from mference_core.install.saved import decode_saved
from mference_core.testing.fake_hub import FakeHub
from mference_core.testing.toy_installs import install_from, planned_toy


class Disk:
    """Which bytes of which files have been written since they were last synced, and which folders have changed."""

    def __init__(self) -> None:
        self.dirty = defaultdict[int, set[tuple[int, int]]](set)
        self.synced = set[int]()
        self.lock = Lock()
        self.real = {name: getattr(os, name) for name in ("write", "pwrite", "fsync", "rename")}

    def pwrite(self, handle: int, data: Any, offset: int) -> int:
        with self.lock:
            self.dirty[os.fstat(handle).st_ino].add((offset, len(data)))
        return int(self.real["pwrite"](handle, data, offset))

    def write(self, handle: int, data: Any) -> int:
        with self.lock:
            self.dirty[os.fstat(handle).st_ino].add((os.lseek(handle, 0, os.SEEK_CUR), len(data)))
        return int(self.real["write"](handle, data))

    def fsync(self, handle: int) -> None:
        inode = os.fstat(handle).st_ino
        with self.lock:
            before = set(self.dirty[inode])
        self.real["fsync"](handle)
        with self.lock:
            self.dirty[inode] -= before
            self.synced.add(inode)

    def is_dirty(self, path: Path, offset: int, size: int) -> bool:
        """Return whether a power cut now might lose some of these bytes."""
        with self.lock:
            spans = self.dirty[path.stat().st_ino]
            return any(at < offset + size and offset < at + count for at, count in spans)


def test_durable_first_recorded_second(hub: FakeHub, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every record: the ranges in it are synced, the record too. At the promotion: every file and every folder."""
    plan = {request.ident: request for request in planned_toy(hub).requests.ranges}
    disk, partial, renames = Disk(), Path(f"{output}.partial"), list[str]()

    def rename(source: Any, target: Any) -> None:
        source, target = Path(source), Path(target)
        renames.append(target.name)
        if target.name.endswith(".resume.json"):
            data = source.read_bytes()
            assert not disk.is_dirty(source, 0, len(data))
            for ident in decode_saved(data, source).ranges:
                for copy in plan[ident].copies:
                    assert not disk.is_dirty(partial / copy.dest_path, copy.dest_offset, copy.size)
        if target == output:
            for item in [partial, *partial.rglob("*")]:
                assert item.stat().st_ino in disk.synced, item
                assert not item.is_file() or not disk.is_dirty(item, 0, 1 << 40), item
        disk.real["rename"](source, target)

    for name in ("write", "pwrite", "fsync"):
        monkeypatch.setattr(os, name, getattr(disk, name))
    monkeypatch.setattr(os, "rename", rename)
    install_from(hub, output)
    assert renames.count("toy.gturbo.resume.json") > 2
    assert renames[-1] == "toy.gturbo"
