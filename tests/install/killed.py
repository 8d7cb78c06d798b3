"""Runs installs that kill themselves: reads commands, forks one process per command, says how it ended.

A step is a call that changes the file system. A command is `STEP OUTPUT ENDPOINT FOLDER OVERWRITE`: the install is
killed before its step of that number, or in the middle of it if the step is a write; `finish+N` is that many steps after
the last range, from where on they are the same in every run. No install code knows of this.
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mference_core.install import remote, transaction
from mference_core.testing.fake_hub import FakeHub
from mference_core.testing.toy_installs import hub_of, install_from

OWN = "killed"
"""A token, by which the hub tells these requests apart."""
WRITES = ("write", "pwrite")
CALLS = (*WRITES, "open", "ftruncate", "fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir")


class Killer:
    """Counts steps and kills this process at one of them, after saying which it was."""

    def __init__(self, step: str, said: int) -> None:
        self.after, _, count = step.rpartition("+")
        self.left, self.said, self.lock = int(count), said, threading.Lock()

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, counted."""

        def counted(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **options)
            with self.lock:
                self.after = "" if name == self.after else self.after
                self.left -= not self.after
                if self.left < 0:
                    if name in WRITES:
                        handle, data, *rest = arguments
                        call(handle, memoryview(data)[: len(data) // 2], *rest)
                    REAL["write"](self.said, f"{name}\n".encode())
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counted


REAL = {name: getattr(os, name) for name in CALLS}


def child(step: str, said: int, output: Path, hub: FakeHub, *, overwrite: bool) -> None:
    """Install until killed."""
    killer = Killer(step, said)
    for name, call in REAL.items():
        setattr(os, name, killer.wrap(name, call))
    transaction.swap = killer.wrap("swap", transaction.swap)
    remote.finish = killer.wrap("finish", remote.finish)
    install_from(hub, output, hub=hub_of(hub, token=OWN), overwrite=overwrite, connections=2)
    REAL["write"](said, f"done {int(step.rpartition('+')[2]) - killer.left}\n".encode())


def main() -> None:
    """Answer each command with the step that killed the install, `done STEPS` or `failed WHY`."""
    warm = False
    for line in sys.stdin:
        step, output, endpoint, folder, overwrite = line.split("\t")
        hub = FakeHub(Path(folder), commit="c" * 40, endpoint=endpoint)
        if not warm:  # once, so that no child has to import what an install imports late
            with TemporaryDirectory() as place:
                install_from(hub, Path(place) / "warm.gturbo", hub=hub_of(hub, token=OWN))
            gc.freeze()
            warm = True
        come, said = os.pipe()
        if (process := os.fork()) == 0:
            try:
                child(step, said, Path(output), hub, overwrite=overwrite.strip() == "1")
                os._exit(0)
            except BaseException as error:  # noqa: BLE001
                REAL["write"](said, f"failed {type(error).__name__} {error}\n".encode())
                os._exit(1)
        os.close(said)
        os.waitpid(process, 0)
        with os.fdopen(come) as words:
            sys.stdout.write(words.readline())
            sys.stdout.flush()


if __name__ == "__main__":
    main()
