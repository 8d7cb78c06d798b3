"""A config.json that describes a wanted architecture, found by changing one that describes another.

Contracts read configs; none writes one. So each value that must change is looked for among the config's own values,
and the contract itself is the judge of the result.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from mference_core.arch import Arch, ManifestContract, encode_arch
from mference_core.errors import MferenceError, UsageError

Place = tuple[dict[str, Any], str]
"""An object of the config and a key of it."""


def fit_config(template: Mapping[str, Any], contract: ManifestContract, arch: Arch) -> dict[str, Any]:
    """Return `template` with as few values changed as make the contract read `arch` from it.

    Raises: UsageError naming the first key of `arch` that no value of the template states.
    """
    config = deepcopy(dict(template))
    _repeat_layers(config, contract, arch)
    wanted = encode_arch(arch)
    wrong = _wrong(config, contract, wanted)
    while wrong:
        for key in wrong:
            _set(config, contract, key, wanted)
        before, wrong = wrong, _wrong(config, contract, wanted)
        if len(wrong) >= len(before):  # else go on: a key may follow from two values and come right with the second
            raise _not_found(f"config value for arch.{wrong[0]}", repr(wanted[wrong[0]]))
    if contract.accept(contract.from_config(config)) != arch:
        raise _not_found("config of the arch", "one that the contract reads it from")
    return config


def _not_found(what: str, expected: str) -> UsageError:
    return UsageError(what=what, got="not found by trial", expected=expected, remedy="give the config.json to write")


def _wrong(config: Mapping[str, Any], contract: ManifestContract, wanted: Mapping[str, Any]) -> list[str]:
    """Return the keys that a config does not state as `wanted`."""
    now = _read(config, contract)
    return [key for key, value in wanted.items() if now.get(key) != value]


def _read(config: Mapping[str, Any], contract: ManifestContract) -> dict[str, Any]:
    """Return the arch object that a config states, empty where the contract refuses the config."""
    try:
        values = contract.from_config(config)
    except (MferenceError, KeyError, TypeError, ValueError, IndexError):
        return {}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _places(value: dict[str, Any]) -> Iterator[Place]:
    """Yield every member of every object of a config."""
    for key, member in value.items():
        yield value, key
        if isinstance(member, dict):
            yield from _places(member)


def _set(config: dict[str, Any], contract: ManifestContract, key: str, wanted: Mapping[str, Any]) -> None:
    """Change the one value of `config` that states `key`, if there is one.

    What the contract read right before must stay right.
    """
    now = _read(config, contract)
    for holder, name in _places(config):
        before = holder[name]
        if type(before) is not type(now.get(key)) or before != now[key]:
            continue
        holder[name] = wanted[key]
        changed = _read(config, contract)
        right = (k for k, value in now.items() if value == wanted.get(k))
        if changed.get(key) == wanted[key] and all(changed.get(k) == wanted[k] for k in right):
            _repeat(config, name, before, wanted[key])
            return
        holder[name] = before


def _repeat(config: dict[str, Any], name: str, before: Any, after: Any) -> None:
    """Change members of the same name and value too: configs say some things twice, for readers other than ours."""
    for holder, other in _places(config):
        if other == name and type(holder[other]) is type(before) and holder[other] == before:
            holder[other] = after


def _repeat_layers(config: dict[str, Any], contract: ManifestContract, arch: Arch) -> None:
    """Give every list with one entry per layer the arch's length, each entry that of a layer of the same kind.

    The number of layers is changed with them: most contracts hold the two together.
    """
    kinds, wanted = _read(config, contract)["fullAttentionLayerMask"], arch.full_attention_layer_mask
    for holder, name in _places(config):
        if isinstance(holder[name], list) and len(holder[name]) == len(kinds) > 1:
            entry_of = dict(zip(reversed(kinds), reversed(holder[name]), strict=True))
            holder[name] = [entry_of.get(kind, holder[name][0]) for kind in wanted]
    for holder, name in _places(config):
        if type(holder[name]) is int and holder[name] == len(kinds):
            holder[name] = arch.num_layers
            if _read(config, contract).get("numLayers") == arch.num_layers:
                return
            holder[name] = len(kinds)
