"""What was read of a repository before its weights, kept for the sessions to come: verified when it is read back."""

import json
from hashlib import sha256
from pathlib import Path

from attrs import frozen

from mference_core.errors import MferenceError
from mference_core.install.answers import RemoteFile
from mference_core.install.saved import replace_file
from mference_core.jsondata import read_capped
from mference_core.safetensors_index import HEADER_CAP_BYTES, PREFIX_BYTES

SEAL_BYTES = 64
KEPT_CAP_BYTES = SEAL_BYTES + PREFIX_BYTES + HEADER_CAP_BYTES


@frozen(kw_only=True)
class Kept:
    """A folder with a file for each remote file that was read, whole or its first bytes.

    Each holds a seal and the bytes. The seal is the SHA-256 of what the hub says of the remote file and of the bytes:
    one that is damaged, misplaced, of another commit or of a file that was changed since is as good as missing. No
    other program reads these files; one that makes the folder empty takes nothing but time.
    """

    folder: Path

    def path(self, file: RemoteFile) -> Path:
        """Return where the bytes of a remote file are kept: under no name that another program may use."""
        return self.folder / f"{sha256(file.name.encode()).hexdigest()[:32]}.kept"

    def find(self, file: RemoteFile) -> bytes | None:
        """Return what was kept of a file, proved by its seal and, if it is whole, by the hub's digest; else None."""
        try:
            held = read_capped(self.path(file), KEPT_CAP_BYTES, "kept metadata")
        except MferenceError:
            return None
        seal, data = held[:SEAL_BYTES], held[SEAL_BYTES:]
        return data if seal == _seal(file, data) and _as_stated(file, data) else None

    def keep(self, file: RemoteFile, data: bytes) -> None:
        """Keep what was read of a file, durable when this returns; raises `OSError`."""
        if self.find(file) != data:
            replace_file(self.path(file), _seal(file, data) + data)

    def forget(self, file: RemoteFile) -> None:
        """Have a file read from the hub again; raises `OSError`."""
        self.path(file).unlink(missing_ok=True)


def _seal(file: RemoteFile, data: bytes) -> bytes:
    stated = file.digest.value if file.digest else None
    digest = sha256(json.dumps([file.name, file.commit, file.size, stated, file.xet_hash]).encode())
    digest.update(data)
    return digest.hexdigest().encode()


def _as_stated(file: RemoteFile, data: bytes) -> bool:
    if file.digest is None or len(data) != file.size:
        return True
    digest = file.digest.start()
    digest.update(data)
    return bool(digest.hexdigest() == file.digest.value)
