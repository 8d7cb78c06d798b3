"""Installing the toy family: the call, what lies beside the output, and opening the whole result."""

from pathlib import Path
from typing import Any

from mference_core.checkpoint import open_checkpoint, peek
from mference_core.install import InstallReport, install_local
from mference_core.testing.toys import toy_contract, toy_plan


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
