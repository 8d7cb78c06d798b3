"""The hooks answer, and the arch they accept is the one they were given."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from mference_acceptance.case import CaseFailed, Figures, require
from mference_acceptance.context import Context
from mference_core.arch import Arch, encode_arch, key_of
from mference_core.checkpoint import peek
from mference_core.engine import open_model
from mference_core.errors import ArchMismatch, MferenceError
from mference_core.graph import LayerGraph
from mference_core.hookspecs import REQUIRED
from mference_core.kv import KVLayout
from mference_core.placement import Resident
from mference_core.router import Router

HUGE = 2**40
SPOILT: tuple[Any, ...] = (None, "x", -1, 0, [], [[]], {}, True, 1.5)
WRONG_TYPES: tuple[Any, ...] = (None, "1", [], {}, [1.5], [True], float("nan"), float("inf"))


def reference_arch(context: Context) -> Arch:
    """Return the accepted arch of the reference checkpoint."""
    contract, config = context.family.contract, peek(context.reference).config
    return contract.accept(contract.from_config(config or {}))


def hooks_answer(context: Context) -> Figures:
    """Every required hook answers with a value of its kind, one layer per layer of the arch."""
    arch, family = reference_arch(context), context.family
    _check_plan(context, arch)
    layout = family.ask("mference_kv_layout", arch=arch, context=100, chunk=10, dtype="float32")
    require(isinstance(layout, KVLayout), "mference_kv_layout returns no KVLayout")
    require(len(layout.layers) == arch.num_layers, f"{len(layout.layers)} state layouts for {arch.num_layers} layers")
    require(layout.context == 100, f"state layout holds {layout.context} tokens where 100 were asked for")
    require(family.ask("mference_chat_format") is not None, "mference_chat_format answers nothing")
    with context.engine() as engine:
        router = family.ask("mference_router", arch=arch, weights=engine.weights)
        require(isinstance(router, Router), "mference_router returns no Router")
        counts = (router.experts, router.top_k)
        require(counts == (arch.num_experts, arch.top_k_experts), f"router chooses {counts[1]} of {counts[0]} experts")
        graph = family.ask("mference_layer_graph", arch=arch, weights=engine.weights, router=router)
        require(isinstance(graph, LayerGraph), "mference_layer_graph returns no LayerGraph")
        require(len(graph.layers) == arch.num_layers, f"{len(graph.layers)} layers for {arch.num_layers}")
        require(graph.vocab_size == arch.vocab_size, f"graph has {graph.vocab_size} tokens for {arch.vocab_size}")
        require(graph.dtype == engine.weights.dtype, f"hidden rows are {graph.dtype}, not {engine.weights.dtype}")
        for index, layer in enumerate(graph.layers):
            routed = index in engine.checkpoint.experts
            whole = (layer.route is not None) == routed and (layer.experts is not None) == routed
            require(whole, f"layer {index} has {'no ' if routed else ''}route and experts")
    return {"hooks": len(REQUIRED), "layers": arch.num_layers}


def _check_plan(context: Context, arch: Arch) -> None:
    plan = context.plan(arch)
    for name in plan.residents:
        place = plan.place(name)
        require(isinstance(place, Resident) and place.name == name, f"install plan places its own {name} elsewhere")
    require(all(0 <= layer < arch.num_layers for layer in plan.experts), "install plan has experts beyond the layers")
    require(plan.place("no.such.tensor") is None, "install plan places a tensor that no checkpoint has")
    missing = [name for name in plan.quant_slots.values() if name not in plan.residents]
    require(not missing, f"install plan states bit widths of {missing}, which it does not hold")


def pinned_archs(context: Context) -> Figures:
    """Recognise published archs after a round trip through JSON, and the reference as none of them."""
    contract = context.family.contract
    for arch in contract.pinned:
        values = json.loads(json.dumps(encode_arch(arch)))
        require(contract.is_pinned(contract.accept(values)), "a pinned arch is not recognised after a round trip")
        _check_plan(context, arch)
        layout = context.family.ask("mference_kv_layout", arch=arch, context=4096, chunk=128, dtype="bfloat16")
        require(len(layout.layers) == arch.num_layers, f"{len(layout.layers)} layouts for {arch.num_layers} layers")
    require(not contract.is_pinned(reference_arch(context)), "the reference arch is taken for a published one")
    require(len(contract.pinned) >= len(context.family.family.pinned), "a pinned checkpoint has no pinned arch")
    return {"pinned": len(contract.pinned)}


def arch_mutations(context: Context) -> Figures:
    """Each arch field, spoiled, is refused with an `ArchMismatch` naming a field, or accepted exactly as declared."""
    contract, arch = context.family.contract, reference_arch(context)
    refused = accepted = 0
    fields = {key_of(f): f for f in attrs.fields(contract.arch) if f.metadata.get("on_disk", True)}
    base = encode_arch(arch)
    for key, attribute in fields.items():
        for value, typed in _spoiled(base[key], attribute.type):
            changed = {k: v for k, v in base.items() if k != key} | ({} if value is MISSING else {key: value})
            if _refused(context, changed, key, value, typed=typed, optional=attribute.default is not attrs.NOTHING):
                refused += 1
            else:
                accepted += 1
    return {"refused": refused, "accepted": accepted}


MISSING = object()


def _spoiled(value: Any, kind: Any) -> Iterator[tuple[Any, bool]]:
    """Yield other values for a field, and whether each is of the field's type."""
    yield MISSING, False
    for wrong in WRONG_TYPES:
        fits_str = kind is str and isinstance(wrong, str)
        fits_tuple = isinstance(value, list) and wrong == []
        yield wrong, fits_str or fits_tuple
    if kind is bool:
        yield from ((not value, True), (0, False), (1, False))
    elif kind in (int, float):
        yield from ((True, False), (0, True), (-1, True), (HUGE, True), (-HUGE, True), (value + 1, True))
        yield from ((value - 1, True), (value * 2, True), (0.5, kind is float))
    elif kind is str:
        yield from (("", True), (value + "x", True), (0, False))
    else:
        yield from ((value[:-1], True), ([*value, *value[:1]], True), ([-1] * len(value), True))
        yield from (([HUGE] * len(value), True), (list(reversed(value)), True), ("01", False), (0, False))


def _refused(context: Context, values: Mapping[str, Any], key: str, value: Any, *, typed: bool, optional: bool) -> bool:
    contract = context.family.contract
    shown = "nothing" if value is MISSING else repr(value)
    try:
        arch = contract.accept(values)
    except ArchMismatch as error:
        named = [k for k in encode_arch_keys(contract.arch) if f"arch.{k} " in f"{error} "]
        require(bool(named), f"arch.{key} = {shown} is refused without naming a field: {error}")
        require(typed or key in named, f"arch.{key} = {shown} is refused as if arch.{named[0]} were wrong")
        return True
    except Exception as error:
        raise CaseFailed(f"arch.{key} = {shown} raises {type(error).__name__}: {error}") from error
    if value is MISSING:
        require(optional, f"arch.{key} may be missing though it has no default")
        return False
    require(typed, f"arch.{key} = {shown} is accepted though it is of another type")
    require(encode_arch(arch)[key] == value, f"arch.{key} = {shown} is accepted as {encode_arch(arch)[key]!r}")
    require(not contract.is_pinned(arch), f"arch.{key} = {shown} is taken for a published arch")
    return False


def encode_arch_keys(kind: type[Arch]) -> list[str]:
    """Return the JSON keys of an arch class."""
    return [key_of(attribute) for attribute in attrs.fields(kind)]


def config_mutations(context: Context) -> Figures:
    """Each entry of config.json, spoiled or removed, gives an error of ours or a model that opens; nothing else."""
    folder = context.fresh_folder()
    for path in context.reference.glob("*.safetensors*"):
        shutil.copyfile(path, folder / path.name)
    config = json.loads((context.reference / "config.json").read_text("utf-8"))
    outcomes = [_opens(context, folder, changed, what) for changed, what in _changed(config)]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    open_model(context.family, folder, "full-sha256")
    return {"refused": outcomes.count(False), "accepted": outcomes.count(True)}


def _changed(config: Any, path: str = "config") -> Iterator[tuple[Any, str]]:
    """Yield copies of a JSON object with one entry, at any depth, removed or replaced."""
    for key, value in config.items():
        yield {k: v for k, v in config.items() if k != key}, f"{path}.{key} missing"
        for wrong in SPOILT:
            if wrong != value or type(wrong) is not type(value):
                yield {**config, key: wrong}, f"{path}.{key} = {wrong!r}"
        if isinstance(value, dict):
            for changed, what in _changed(value, f"{path}.{key}"):
                yield {**config, key: changed}, what


def _opens(context: Context, folder: Path, config: Any, what: str) -> bool:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    try:
        open_model(context.family, folder, "full-sha256")
    except MferenceError as error:
        require("\n" not in str(error), f"{what}: the error has several lines")
        return False
    except Exception as error:
        raise CaseFailed(f"{what} raises {type(error).__name__}: {error}") from error
    return True
