"""Throw-away virtual environments that see this one's packages, so that only one distribution has to be installed."""

import os
import subprocess
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

SCRIPTS = {
    "mference": "from mference_core.cli import main",
    "pip": "from pip._internal.cli.main import main",
    "pytest": "from pytest import main",
}

Done = subprocess.CompletedProcess[str]


class Venv:
    """A new environment at `folder` with its own data directory; what is installed there stays there.

    Its `bin` has python, mference, pip and pytest. Needs hatchling here, or a package index, to install folders.
    """

    def __init__(self, folder: Path, data_dir: Path) -> None:
        venv.create(folder, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        here = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        lines = [f"import site; site.addsitedir({path!r})" for path in here]
        (self.site_packages / "parent.pth").write_text("\n".join(lines) + "\n")
        for name, line in SCRIPTS.items():
            script = folder / "bin" / name
            script.write_text(f"#!{self.python}\nimport sys\n{line}\nsys.exit(main())\n")
            script.chmod(0o755)
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "MFERENCE_DATA_DIR": str(data_dir),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if find_spec("hatchling") is not None:
            self.environment["PIP_NO_BUILD_ISOLATION"] = "0"  # which means that there is none

    def run(self, *command: object, cwd: Path | None = None, timeout: float = 300) -> Done:
        """Run a command with this environment's programs first; return its output as text."""
        words = [str(word) for word in command]
        return subprocess.run(
            words,
            cwd=cwd or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            executable=self._program(words[0]),
        )

    def _program(self, name: str) -> str:
        own = self.folder / "bin" / name
        return str(own) if own.exists() else name

    def mference(self, *arguments: object) -> Done:
        """Run the command line."""
        return self.run("mference", *arguments)

    def install(self, *what: object) -> Done:
        """Install folders or requirements with pip, their dependencies left out."""
        return self.run("pip", "install", "--quiet", "--no-deps", *what)
