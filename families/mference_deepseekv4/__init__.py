"""DeepSeek-V4-Flash 284B-A13B as an mference family."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from mference_core import Arch, Family, InstallPlan, KVLayout, ManifestContract, hookimpl
from mference_deepseekv4.arch import CHECKPOINT, PINNED, DeepseekV4Arch
from mference_deepseekv4.config import arch_from_config

if TYPE_CHECKING:
    from mference_core import ChatFormat, LayerGraph, Router, Weights

HERE = Path(__file__).parent


@hookimpl
def mference_family() -> Family:
    """Return the name, the pinned checkpoint and the embedded folders."""
    return Family(
        name="deepseekv4",
        title="DeepSeek-V4-Flash 284B-A13B",
        spellings=("deepseekV4Flash",),
        model_types=("deepseek_v4",),
        pinned=(CHECKPOINT,),
        demo=HERE / "demo",
        reference=HERE / "reference",
    )


@hookimpl
def mference_manifest_contract() -> ManifestContract:
    """Return the arch class and its pinned values."""
    return ManifestContract(family="deepseekv4", arch=DeepseekV4Arch, pinned=(PINNED,), from_config=arch_from_config)


@hookimpl
def mference_install_plan(arch: Arch) -> InstallPlan:
    """Return the tensor places."""
    from mference_deepseekv4.install import install_plan  # noqa: PLC0415

    return install_plan(cast("DeepseekV4Arch", arch))


@hookimpl
def mference_kv_layout(arch: Arch, context: int, chunk: int, dtype: str) -> KVLayout:
    """Return windows, entries and open windows of entries."""
    from mference_deepseekv4.model import kv_layout  # noqa: PLC0415

    return kv_layout(cast("DeepseekV4Arch", arch), context, chunk, dtype)


@hookimpl
def mference_router(arch: Arch, weights: "Weights") -> "Router":
    """Return the routing rule."""
    from mference_deepseekv4.model import router  # noqa: PLC0415

    return router(cast("DeepseekV4Arch", arch), weights)


@hookimpl
def mference_layer_graph(arch: Arch, weights: "Weights", router: "Router") -> "LayerGraph":
    """Return the model."""
    from mference_deepseekv4.model import layer_graph  # noqa: PLC0415

    return layer_graph(cast("DeepseekV4Arch", arch), weights, router)


@hookimpl
def mference_chat_format() -> "ChatFormat":
    """Return the dialect."""
    from mference_deepseekv4.chat import chat_format  # noqa: PLC0415

    return chat_format()
