"""SmolLM2 as an mference family: a dense model, in its own distribution."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from mference_core import Arch, Family, InstallPlan, KVLayout, ManifestContract, hookimpl
from mference_smollm2.arch import PINNED, Smollm2Arch, arch_from_config

if TYPE_CHECKING:
    from mference_core import ChatFormat, LayerGraph, Router, Weights


@hookimpl
def mference_family() -> Family:
    """Return the name and the folder with the tiny reference checkpoint."""
    return Family(
        name="smollm2",
        title="SmolLM2 135M Instruct",
        spellings=("smollm2",),
        model_types=("llama",),
        reference=Path(__file__).parent / "reference",
    )


@hookimpl
def mference_manifest_contract() -> ManifestContract:
    """Return the arch class and its pinned values."""
    return ManifestContract(family="smollm2", arch=Smollm2Arch, pinned=(PINNED,), from_config=arch_from_config)


@hookimpl
def mference_install_plan(arch: Arch) -> InstallPlan:
    """Return the tensor places."""
    from mference_smollm2.install import install_plan  # noqa: PLC0415

    return install_plan(cast("Smollm2Arch", arch))


@hookimpl
def mference_kv_layout(arch: Arch, context: int, dtype: str) -> KVLayout:
    """Return append-only rows."""
    from mference_smollm2.model import kv_layout  # noqa: PLC0415

    return kv_layout(cast("Smollm2Arch", arch), context, dtype)


@hookimpl
def mference_router() -> "Router":
    """Return the rule of a model without experts."""
    from mference_core import no_router  # noqa: PLC0415

    return no_router()


@hookimpl
def mference_layer_graph(arch: Arch, weights: "Weights") -> "LayerGraph":
    """Return the model."""
    from mference_smollm2.model import layer_graph  # noqa: PLC0415

    return layer_graph(cast("Smollm2Arch", arch), weights)


@hookimpl
def mference_chat_format() -> "ChatFormat":
    """Return the dialect."""
    from mference_smollm2.chat import chat_format  # noqa: PLC0415

    return chat_format()
