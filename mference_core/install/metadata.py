"""What a repository holds, without its weights: commit, config, index, tensor headers, tokenizer files (gturbo-format 17)."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from attrs import frozen

from mference_core.checkpoint import CONFIG_CAP_BYTES, Peek, peek_config
from mference_core.errors import DigestMismatch, ManifestError, SourceError
from mference_core.install.answers import RemoteFile
from mference_core.install.finish import CONFIG_NAME, TOKENIZER_NAMES
from mference_core.install.http import HubClient
from mference_core.install.kept import Kept
from mference_core.safetensors_index import (
    INDEX_CAP_BYTES,
    INDEX_NAME,
    PREFIX_BYTES,
    ShardIndex,
    Source,
    decode_index,
    decode_shard,
    header_bytes,
    join_shards,
)

MIB = 1 << 20
SINGLE_NAME = "model.safetensors"
TOKENIZER_CAP_BYTES = {
    "tokenizer.json": 64 * MIB,
    "tokenizer_config.json": 4 * MIB,
    "special_tokens_map.json": 1 * MIB,
    "chat_template.jinja": 4 * MIB,
    "chat_template.json": 4 * MIB,
}


@frozen(kw_only=True)
class RemoteSource:
    """A repository at a commit: its headers as a `Source`, its files with what the hub says of them.

    `files` are the safetensors files by name, `heads` the first bytes of each; `tokenizer` the small files to copy;
    `parts` what was read of each file.
    """

    repo: str
    revision: str
    commit: str
    seen: Peek
    source: Source
    files: Mapping[str, RemoteFile]
    heads: Mapping[str, bytes]
    tokenizer: Mapping[str, RemoteFile]
    parts: tuple[tuple[RemoteFile, bytes], ...]


def read_metadata(
    client: HubClient,
    revision: str,
    *,
    commit: str | None = None,
    index_sha256: str | None = None,
    kept: Kept | None = None,
) -> RemoteSource:
    """Read everything but weights, all at one commit: `commit`, or the one `revision` is now.

    `index_sha256` is the pinned digest of the index file; what `kept` holds is not asked for again. Raises
    `SourceError`, `DigestMismatch` and, for content, `ManifestError`.
    """
    where, parts = Path(client.repo), list[tuple[RemoteFile, bytes]]()

    def known(file: RemoteFile, read: Callable[[], bytes]) -> bytes:
        found = kept.find(file) if kept is not None else None
        parts.append((file, read() if found is None else found))
        return parts[-1][1]

    first = client.head(INDEX_NAME, commit or revision)
    index = None
    if first is not None:
        data = known(first, lambda: client.read_small(first, INDEX_CAP_BYTES))
        index = decode_index(data, where / INDEX_NAME)
        _check_pinned(index, client.repo, index_sha256)
    elif index_sha256 is not None:
        raise _lacks(client.repo, INDEX_NAME)
    found = first or client.head(SINGLE_NAME, commit or revision)
    if found is None:
        raise ManifestError(
            what=f"{client.repo} at {revision}", got="without safetensors files", expected="a quantised MLX repository"
        )
    at = found.commit
    if commit is not None and at != commit:
        raise _moved(client.repo, found.name, at, commit)
    config = _required(client, CONFIG_NAME, at)
    seen = peek_config(where, known(config, lambda: client.read_small(config, CONFIG_CAP_BYTES)))
    files = {name: _shard_file(client, name, at) for name in (index.names if index else (SINGLE_NAME,))}
    heads = {name: known(file, partial(read_head, client, file)) for name, file in files.items()}
    shards = tuple(decode_shard(head, where / name, files[name].size or 0) for name, head in heads.items())
    tokenizer = {name: _optional(client, name, at) for name in TOKENIZER_NAMES}
    return RemoteSource(
        repo=client.repo,
        revision=revision,
        commit=at,
        seen=seen,
        source=join_shards(where, shards, index),
        files=files,
        heads=heads,
        tokenizer={name: file for name, file in tokenizer.items() if file is not None},
        parts=tuple(parts),
    )


def _check_pinned(index: ShardIndex, repo: str, pinned: str | None) -> None:
    if pinned is not None and index.sha256 != pinned:
        raise DigestMismatch(
            what=f"{repo} {INDEX_NAME} sha256",
            got=index.sha256,
            expected=f"the pinned {pinned}",
            remedy="the repository was changed: the pinned checkpoint is no longer there",
        )


def _optional(client: HubClient, name: str, commit: str) -> RemoteFile | None:
    file = client.head(name, commit)
    if file is not None and file.commit != commit:
        raise _moved(client.repo, name, file.commit, commit)
    return file


def _required(client: HubClient, name: str, commit: str) -> RemoteFile:
    file = _optional(client, name, commit)
    if file is None:
        raise _lacks(client.repo, name)
    return file


def _lacks(repo: str, name: str) -> ManifestError:
    return ManifestError(what=f"{repo} {name}", got="missing", expected="a quantised MLX repository")


def _shard_file(client: HubClient, name: str, commit: str) -> RemoteFile:
    file = _required(client, name, commit)
    if file.size is None:
        raise SourceError(what=f"{client.repo} {name}", got="of unknown size", expected="a size in the hub's answer")
    return file


def _moved(repo: str, name: str, found: str, commit: str) -> SourceError:
    return SourceError(what=f"{repo} {name}", got=f"at commit {found}", expected=commit)


def read_head(client: HubClient, file: RemoteFile) -> bytes:
    """Return the length prefix and header of a safetensors file; raises `SourceError` and `ManifestError`."""
    size = file.size or 0
    prefix = b"".join(client.read_range(file, 0, min(PREFIX_BYTES, size)))
    length = header_bytes(prefix, Path(client.repo) / file.name, size)
    return prefix + b"".join(client.read_range(file, PREFIX_BYTES, length))
