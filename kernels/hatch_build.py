"""Build hook: compile the native CPU library into the package, or say in one line why there is none and go on."""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "mference_kernels"


def load_compile() -> Any:
    """Load the package's `compile` module by its path: nothing is installed yet."""
    spec = importlib.util.spec_from_file_location("mference_compile", PACKAGE / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeLibrary(BuildHookInterface):  # type: ignore[type-arg,misc,unused-ignore]
    """Adds the library to wheels and editable installs; a wheel that carries one is for this platform only."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before files are gathered; `version` is not used."""
        del version
        compiling = load_compile()
        problem = compiling.build()
        if problem is not None:
            compiling.LIBRARY.unlink(missing_ok=True)
            self.app.display_warning(f"{problem}; CPU products will run in mlx operations, much slower")
            return
        build_data["artifacts"].append(f"/{compiling.LIBRARY.relative_to(self.root).as_posix()}")
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"
