"""Qwen 3.6 35B-A3B as an mference family."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from mference_core import Arch, Family, InstallPlan, KVLayout, ManifestContract, hookimpl
from mference_qwen36.arch import CHECKPOINT, PINNED, Qwen36Arch, arch_from_config

if TYPE_CHECKING:
    from mference_core import ChatFormat, LayerGraph, Router, Weights

HERE = Path(__file__).parent


@hookimpl
def mference_family() -> Family:
    """Return the name, the pinned checkpoint and the embedded folders."""
    return Family(
        name="qwen36",
        title="Qwen 3.6 35B-A3B",
        spellings=("qwen36",),
        model_types=("qwen3_5_moe",),
        pinned=(CHECKPOINT,),
        demo=HERE / "demo",
        reference=HERE / "reference",
    )


@hookimpl
def mference_manifest_contract() -> ManifestContract:
    """Return the arch class and its pinned values."""
    return ManifestContract(family="qwen36", arch=Qwen36Arch, pinned=(PINNED,), from_config=arch_from_config)


@hookimpl
def mference_install_plan(arch: Arch) -> InstallPlan:
    """Return the tensor places."""
    from mference_qwen36.install import install_plan  # noqa: PLC0415

    return install_plan(cast("Qwen36Arch", arch))


@hookimpl
def mference_kv_layout(arch: Arch, context: int, dtype: str) -> KVLayout:
    """Return append-only rows and recurrent states."""
    from mference_qwen36.model import kv_layout  # noqa: PLC0415

    return kv_layout(cast("Qwen36Arch", arch), context, dtype)


@hookimpl
def mference_router(arch: Arch, weights: "Weights") -> "Router":
    """Return the routing rule."""
    from mference_qwen36.model import router  # noqa: PLC0415

    return router(cast("Qwen36Arch", arch), weights)


@hookimpl
def mference_layer_graph(arch: Arch, weights: "Weights", router: "Router") -> "LayerGraph":
    """Return the model."""
    from mference_qwen36.model import layer_graph  # noqa: PLC0415

    return layer_graph(cast("Qwen36Arch", arch), weights, router)


@hookimpl
def mference_chat_format() -> "ChatFormat":
    """Return the dialect."""
    from mference_qwen36.chat import chat_format  # noqa: PLC0415

    return chat_format()
