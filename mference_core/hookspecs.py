"""Every hook of the family contract, in call order; a docstring here is the contract.

Hooks run once per load and return plain values or callables. The token loop calls those, never a hook.
A run's plugin manager holds one family, so no hook is told which family is meant.
"""

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from mference_core.arch import Arch, ManifestContract
    from mference_core.chat import ChatFormat
    from mference_core.family import Family
    from mference_core.graph import LayerGraph
    from mference_core.kv import KVLayout
    from mference_core.placement import InstallPlan
    from mference_core.router import Router
    from mference_core.steps import StepFunction
    from mference_core.weights import Weights

PROJECT = "mference"
CONTRACT_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def mference_family() -> "Family | None":
    """Say who the family is.

    Called first, right after the plugin is registered.

    :return: name, spellings on disk, pinned checkpoints, embedded demo and reference folders.

    The name must be the entry point's name: lower case, letters and digits.
    """


@hookspec(firstresult=True)
def mference_manifest_contract() -> "ManifestContract | None":
    """Say which architectures the family runs.

    Called once per load, before any file is opened beyond its manifest or config.

    :return: the arch class with its constraints, the pinned values, and how a config.json becomes an arch.

    Other sizes of the same architecture must be accepted; a feature that the family does not compute must be refused.
    """


@hookspec(firstresult=True)
def mference_install_plan(arch: "Arch") -> "InstallPlan | None":
    """Say where each tensor of a source belongs.

    Called in every load and install, after the manifest is accepted; it may be asked more than once.

    :param arch: the accepted architecture.
    :return: source name -> place, every resident tensor with its shape, and the shapes of one expert.

    Names must be placed the same whether they are the published ones or those of a quantised repository.
    """


@hookspec(firstresult=True)
def mference_kv_layout(arch: "Arch", context: int, chunk: int, dtype: str) -> "KVLayout | None":
    """Say how each layer keeps its past.

    Called once per load, after the manifest is accepted, and to plan memory.

    :param arch: the accepted architecture.
    :param context: tokens a timeline must hold, prompt and response together.
    :param chunk: largest number of tokens one call advances.
    :param dtype: name of the dtype of stored rows.
    :return: one layout per layer of `arch`, in layer order.
    """


@hookspec(firstresult=True)
def mference_router(arch: "Arch", weights: "Weights") -> "Router | None":
    """State the routing rule.

    Called once per load, before the layer graph.

    :param arch: the accepted architecture.
    :param weights: resident weights by name.
    :return: scores and choice; equal scores must take the lower expert id first, on every backend.
    """


@hookspec(firstresult=True)
def mference_layer_graph(arch: "Arch", weights: "Weights", router: "Router") -> "LayerGraph | None":
    """Build the model.

    Called once per load, after the router; what it takes from `weights` is read then.

    :param arch: the accepted architecture.
    :param weights: resident weights by name; `weights.dtype` is the dtype of hidden rows.
    :param router: what `mference_router` returned.
    :return: embed, one `Layer` per layer of `arch`, final norm and head.

    A row's result must depend on neither the other rows of its batch nor where a chunk ends, rounding aside.
    """


@hookspec(firstresult=True)
def mference_prefill_step() -> "StepFunction | None":
    """Replace the core's own way to advance many tokens; answer nothing unless the family must differ.

    Called once per load.

    :return: a function of the signature of `mference_core.steps.advance`.
    """


@hookspec(firstresult=True)
def mference_decode_step() -> "StepFunction | None":
    """Replace the core's own way to advance one token per timeline; answer nothing unless the family must differ.

    Called once per load.

    :return: a function of the signature of `mference_core.steps.advance`.
    """


@hookspec(firstresult=True)
def mference_chat_format() -> "ChatFormat | None":
    """Say how the family speaks.

    Called when a model with a tokenizer is to be spoken to, before its tokenizer is loaded.

    :return: control and stop tokens, template, reasoning markers, tool-call grammar.

    What cannot be read as a tool call must come back as text, never as half a call.
    """


REQUIRED = (
    "mference_family",
    "mference_manifest_contract",
    "mference_install_plan",
    "mference_kv_layout",
    "mference_router",
    "mference_layer_graph",
    "mference_chat_format",
)
