"""What cases work with: the family, its reference checkpoint in three kinds of directory, its goldens, a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from attrs import define, field, frozen

from mference_acceptance.arrays import listed
from mference_core.arch import Arch
from mference_core.checkpoint import Checkpoint
from mference_core.engine import Engine, LoadOptions, open_model
from mference_core.errors import ContractError
from mference_core.install import install_local
from mference_core.placement import InstallPlan
from mference_core.plugins import LoadedFamily

KINDS = ("float", "mlx", "gturbo")
"""The reference checkpoint as published, quantised, and as an install made of the quantised one."""

ROOM_TOKENS = 64
"""Context beyond the longest golden prompt."""


@frozen(kw_only=True)
class Golden:
    """One prompt and what an independent float32 implementation made of it; `arrays` as stored, prompt axis first."""

    name: str
    ids: tuple[int, ...]
    arrays: dict[str, mx.array] = field(repr=False)

    @property
    def decoded(self) -> tuple[int, ...]:
        """Greedy continuation."""
        return tuple(listed(self.arrays["decode.tokens"]))


@define(kw_only=True)
class Context:
    """A family under test. `folder` is an empty folder that cases may fill."""

    family: LoadedFamily
    folder: Path
    _install: Path | None = None
    _goldens: tuple[Golden, ...] = ()
    _folders: int = 0

    @property
    def reference(self) -> Path:
        """Folder with the tiny checkpoint and its goldens; raises `ContractError` where the family has none."""
        folder = self.family.family.reference
        if folder is None or not (folder / "goldens").is_dir():
            raise ContractError(
                what=f"reference of family {self.family.family.name}",
                got="missing",
                expected="a folder with config.json, model.safetensors, mlx/, goldens/ and chat.json",
            )
        return folder

    @property
    def goldens(self) -> tuple[Golden, ...]:
        """Every golden, shortest prompt first."""
        if not self._goldens:
            found = []
            for path in (self.reference / "goldens").glob("*.safetensors"):
                arrays = mx.load(str(path))
                assert isinstance(arrays, dict)
                found.append(Golden(name=path.stem, ids=tuple(listed(arrays["input_ids"])), arrays=arrays))
            self._goldens = tuple(sorted(found, key=lambda golden: len(golden.ids)))
        if not self._goldens:
            raise ContractError(what=f"goldens of {self.reference}", got="missing", expected="at least one")
        return self._goldens

    @property
    def longest(self) -> Golden:
        """The golden with the longest prompt."""
        return self.goldens[-1]

    def directory(self, kind: str) -> Path:
        """Return the reference checkpoint in one of `KINDS`; the install is made on first use."""
        if kind == "float":
            return self.reference
        if kind == "mlx":
            return self.reference / "mlx"
        if self._install is None:
            output = self.folder / "reference.gturbo"
            install_local(self.reference / "mlx", output, self.family.contract, self.plan)
            self._install = output
        return self._install

    @property
    def checkpoint(self) -> Checkpoint:
        """The float reference checkpoint, opened."""
        return open_model(self.family, self.reference, "full-sha256")

    def plan(self, arch: Arch) -> InstallPlan:
        """Return the family's install plan of an arch."""
        plan = self.family.ask("mference_install_plan", arch=arch)
        assert isinstance(plan, InstallPlan)
        return plan

    def fresh_folder(self) -> Path:
        """Return a new empty folder."""
        self._folders += 1
        made = self.folder / f"case{self._folders}"
        made.mkdir()
        return made

    def engine(self, kind: str = "float", **options: Any) -> Engine:
        """Load the reference checkpoint, to be closed by the caller.

        Unless `options` say otherwise: float32, all experts resident, one chunk for the longest golden prompt.
        """
        longest = len(self.longest.ids)
        usual = {"dtype": "float32", "slots": "resident", "chunk": longest, "context": longest + ROOM_TOKENS}
        return Engine.load(self.family, self.directory(kind), LoadOptions(**{**usual, **options}))


def slot_counts(engine: Engine) -> Sequence[int]:
    """Return slot counts worth trying: one, a token's and those beside it, half way, and all but one."""
    arch = engine.checkpoint.arch
    k, count = arch.top_k_experts, arch.num_experts
    return sorted({n for n in (1, k - 1, k, k + 1, k + 2, (k + count) // 2, count - 1) if 1 <= n < count})
