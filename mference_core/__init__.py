"""mference: big mixture-of-experts models in a fraction of their size, exactly.

The public names are listed here once and imported when first used, so that commands which need no array library do
not pay for one.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # float32 means float32; read when mlx is first imported

if TYPE_CHECKING:
    from mference_core.arch import Arch as Arch
    from mference_core.arch import ManifestContract as ManifestContract
    from mference_core.arch import must as must
    from mference_core.chat import ChatFormat as ChatFormat
    from mference_core.engine import Engine as Engine
    from mference_core.errors import ArchMismatch as ArchMismatch
    from mference_core.errors import MferenceError as MferenceError
    from mference_core.errors import RequestError as RequestError
    from mference_core.family import Family as Family
    from mference_core.family import Pinned as Pinned
    from mference_core.graph import Attended as Attended
    from mference_core.graph import Layer as Layer
    from mference_core.graph import LayerGraph as LayerGraph
    from mference_core.graph import NativeLayer as NativeLayer
    from mference_core.graph import Routing as Routing
    from mference_core.graph import Step as Step
    from mference_core.hookspecs import hookimpl as hookimpl
    from mference_core.kv import Composite as Composite
    from mference_core.kv import Compressed as Compressed
    from mference_core.kv import KVLayout as KVLayout
    from mference_core.kv import Linear as Linear
    from mference_core.kv import Recurrent as Recurrent
    from mference_core.kv import Ring as Ring
    from mference_core.placement import Dropped as Dropped
    from mference_core.placement import InstallPlan as InstallPlan
    from mference_core.placement import Place as Place
    from mference_core.placement import Resident as Resident
    from mference_core.placement import Routed as Routed
    from mference_core.placement import Transform as Transform
    from mference_core.router import Router as Router
    from mference_core.router import no_router as no_router
    from mference_core.session import Session as Session
    from mference_core.state import LayerState as LayerState
    from mference_core.state import RecurrentState as RecurrentState
    from mference_core.state import RowState as RowState
    from mference_core.states import CompositeState as CompositeState
    from mference_core.states import CompressedState as CompressedState
    from mference_core.weights import Weights as Weights

_HOMES = {
    "arch": ("Arch", "ManifestContract", "must"),
    "chat": ("ChatFormat",),
    "engine": ("Engine",),
    "errors": ("ArchMismatch", "MferenceError", "RequestError"),
    "family": ("Family", "Pinned"),
    "graph": ("Attended", "Layer", "LayerGraph", "NativeLayer", "Routing", "Step"),
    "hookspecs": ("hookimpl",),
    "kv": ("Composite", "Compressed", "KVLayout", "Linear", "Recurrent", "Ring"),
    "placement": ("Dropped", "InstallPlan", "Place", "Resident", "Routed", "Transform"),
    "router": ("Router", "no_router"),
    "session": ("Session",),
    "state": ("LayerState", "RecurrentState", "RowState"),
    "states": ("CompositeState", "CompressedState"),
    "weights": ("Weights",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'mference_core' has no attribute {name!r}")
    value = getattr(import_module(f"mference_core.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
