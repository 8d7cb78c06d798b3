"""Who a family is: its name, the spellings it answers to on disk, and the checkpoints it pins."""

from pathlib import Path

from attrs import field, frozen, validators

NAME = r"[a-z][a-z0-9]*"


@frozen(kw_only=True)
class Pinned:
    """A published checkpoint: where it comes from and what it measures, sizes in bytes."""

    repo: str
    revision: str
    index_sha256: str
    model_id: str
    download_bytes: int
    installed_bytes: int
    licence: str


@frozen(kw_only=True)
class Family:
    """What `mference_family` answers.

    `spellings` are the `arch.family` values accepted on disk, None standing for a manifest without the key;
    `model_types` are those of config.json. `demo` is an embedded model directory, `reference` a folder with a tiny
    checkpoint (config.json, model.safetensors, mlx/), its independent float32 `goldens/`, and conversations with their
    prompts (chat.json), for the gate.
    """

    name: str = field(validator=validators.matches_re(NAME))
    title: str
    spellings: tuple[str | None, ...]
    model_types: tuple[str, ...]
    pinned: tuple[Pinned, ...] = ()
    demo: Path | None = None
    reference: Path | None = None
