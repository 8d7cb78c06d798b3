"""A toy family and its checkpoints on disk: small enough to write in milliseconds, complete enough to install."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import attrs

from mference_core.arch import Arch, ManifestContract, encode_arch
from mference_core.placement import Dropped, InstallPlan, Place, Resident, Routed
from mference_core.tensors import DTYPE_BYTES

TRUNK = "trunk."
GROUP, BITS, ROUTER_BITS = 64, 4, 8
_ROLES = {"experts.gate.weight": ("gate",), "experts.up.weight": ("up",), "experts.down.weight": ("down",)}
_FLOAT_ROLES = {"experts.gate_up": ("gate", "up"), "experts.down": ("down",)}
_RANKS = ("attn.weight", "router.weight", "shared.weight", "norm.weight", "scalar")

Spec = tuple[str, tuple[int, ...]]
"""A stored tensor: dtype and shape."""


def toy_arch(**changes: Any) -> Arch:
    """Return three layers of width 64, the first without experts; `changes` replace fields."""
    arch = Arch(
        hidden_size=64,
        ffn_intermediate=128,
        moe_intermediate_size=64,
        num_heads=2,
        num_kv_heads=1,
        num_full_kv_heads=1,
        head_dim=32,
        full_head_dim=32,
        vocab_size=96,
        sliding_window=8,
        final_logit_softcap=0.0,
        rope_theta=1e4,
        full_rope_theta=1e4,
        partial_rotary_factor=1.0,
        num_layers=3,
        num_experts=4,
        top_k_experts=2,
        tie_word_embeddings=True,
        attention_k_eq_v=False,
        hidden_activation="silu",
        full_attention_layer_mask=(0, 1, 0),
    )
    return attrs.evolve(arch, **changes)


def toy_contract(*pinned: Arch) -> ManifestContract:
    """Return a contract that accepts any arch; config.json holds it under `toy`."""
    return ManifestContract(family="toy", arch=Arch, pinned=pinned, from_config=lambda config: config["toy"])


def _layer_shapes(arch: Arch, layer: int) -> dict[str, tuple[int, ...]]:
    width, shared = arch.hidden_size, arch.ffn_intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "attn.weight": (width, width),
        "router.weight": (arch.num_experts, width),
        "shared.weight": (shared, width),
        "norm.weight": (width,),
        "scalar": (1,),
    }
    if layer == 0:
        del shapes["router.weight"]
    return shapes


def _place(arch: Arch, name: str) -> Place | None:
    if name.startswith("tower."):
        return Dropped(reason="the toy has no tower")
    rest = name.removeprefix(TRUNK)
    if rest in ("embed.weight", "norm.weight") and rest != name:
        return Resident(name=name, order=(0 if rest == "embed.weight" else 3, 0, 0))
    _, _, tail = rest.partition("layers.")
    number, _, tail = tail.partition(".")
    if not number.isdigit() or int(number) >= arch.num_layers:
        return None
    roles = (_ROLES | _FLOAT_ROLES).get(tail)
    if roles:
        return Routed(layer=int(number), roles=roles)
    return Resident(name=name, order=(1, int(number), _RANKS.index(tail))) if tail in _RANKS else None


def toy_plan(arch: Arch) -> InstallPlan:
    """Return the toy family's install plan."""
    residents: dict[str, tuple[int, ...]] = {f"{TRUNK}embed.weight": (arch.vocab_size, arch.hidden_size)}
    for layer in range(arch.num_layers):
        residents |= {f"{TRUNK}layers.{layer}.{name}": s for name, s in _layer_shapes(arch, layer).items()}
    residents[f"{TRUNK}norm.weight"] = (arch.hidden_size,)
    width, hidden = arch.moe_intermediate_size, arch.hidden_size
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    slots = {"embedding": "embed.weight", "attention": "layers.0.attn.weight", "sharedExpert": "layers.0.shared.weight"}
    if arch.num_layers > 1:
        slots["router"] = "layers.1.router.weight"
    return InstallPlan(
        place=lambda name: _place(arch, name),
        residents=residents,
        experts=dict.fromkeys(range(1, arch.num_layers), shapes),
        quant_slots={slot: TRUNK + name for slot, name in slots.items()},
    )


def mlx_tensors(arch: Arch) -> dict[str, Spec]:
    """Return the stored tensors of the quantised checkpoint: matrices in 4 bits, routers in 8, the rest BF16."""
    plan, specs = toy_plan(arch), dict[str, Spec]()
    matrices = {name: shape for name, shape in plan.residents.items() if len(shape) > 1}
    for layer, shapes in plan.experts.items():
        for role, shape in shapes.items():
            matrices[f"{TRUNK}layers.{layer}.experts.{role}.weight"] = (arch.num_experts, *shape)
    for name, (*rows, columns) in matrices.items():
        bits = ROUTER_BITS if name.endswith("router.weight") else BITS
        stem = name.removesuffix(".weight")
        specs[name] = ("U32", (*rows, columns * bits // 32))
        specs[stem + ".scales"] = specs[stem + ".biases"] = ("BF16", (*rows, columns // GROUP))
    specs |= {name: ("BF16", shape) for name, shape in plan.residents.items() if len(shape) == 1}
    return specs


def float_tensors(arch: Arch, dtype: str = "F32") -> dict[str, Spec]:
    """Return the stored tensors of the float checkpoint, gate and up stacked in one tensor."""
    plan = toy_plan(arch)
    specs: dict[str, Spec] = {name: (dtype, shape) for name, shape in plan.residents.items()}
    for layer, shapes in plan.experts.items():
        rows, columns = shapes["gate"]
        stem = f"{TRUNK}layers.{layer}.experts."
        specs[stem + "gate_up"] = (dtype, (arch.num_experts, 2 * rows, columns))
        specs[stem + "down"] = (dtype, (arch.num_experts, *shapes["down"]))
    return specs


def toy_config(arch: Arch, *, quantised: bool) -> dict[str, Any]:
    """Return config.json of a toy checkpoint."""
    config: dict[str, Any] = {"model_type": "toy", "toy": encode_arch(arch)}
    if quantised:
        routers = {f"{TRUNK}layers.{layer}.router": ROUTER_BITS for layer in range(1, arch.num_layers)}
        overrides = {name: {"bits": bits, "group_size": GROUP} for name, bits in routers.items()}
        config["quantization"] = {"bits": BITS, "group_size": GROUP, "mode": "affine", **overrides}
    return config


def write_safetensors(path: Path, specs: Mapping[str, Spec], seed: int | None = 0) -> None:
    """Write tensors of random bytes, or a sparse file of zeros when `seed` is None."""
    header, end = dict[str, Any](), 0
    for name, (dtype, shape) in specs.items():
        start, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    write_raw_safetensors(path, header, end if seed is None else Random(seed).randbytes(end))  # noqa: S311 (test data)


def write_raw_safetensors(path: Path, header: Mapping[str, Any] | bytes, payload: bytes | int) -> None:
    """Write a safetensors file of any header, true or not; an integer payload is that many zeros, sparse."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        if isinstance(payload, bytes):
            file.write(payload)
        else:
            file.truncate(8 + len(head) + payload)


def write_toy(directory: Path, arch: Arch, *, quantised: bool = True, seed: int | None = 0) -> Path:
    """Write a toy checkpoint with a tokenizer file; return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    specs = mlx_tensors(arch) if quantised else float_tensors(arch)
    write_safetensors(directory / "model.safetensors", specs, seed)
    (directory / "config.json").write_text(json.dumps(toy_config(arch, quantised=quantised)))
    (directory / "tokenizer.json").write_text("{}")
    return directory
