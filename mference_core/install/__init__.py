"""Installing: from a model directory or a hub to a verified .gturbo directory."""

from mference_core.install.local import install_local
from mference_core.install.report import InstallProgress, InstallReport
from mference_core.install.transaction import discard

__all__ = ["InstallProgress", "InstallReport", "discard", "install_local"]
