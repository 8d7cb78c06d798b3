"""Every error a user can meet: one line saying what, got, expected and the remedy."""

from typing import ClassVar

from attrs import frozen


@frozen(kw_only=True, str=False)
class MferenceError(Exception):
    """Base of all errors; `str()` is the line a user reads, `exit_code` what the command returns."""

    what: str
    got: str = ""
    expected: str = ""
    remedy: str = ""
    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        """Join the parts that are present into one line."""
        text = self.what
        if self.got:
            text += f" is {self.got}"
        if self.expected:
            text += f"; expected {self.expected}"
        if self.remedy:
            text += f"; {self.remedy}"
        return " ".join(text.split())


class UsageError(MferenceError):
    """An option or argument that cannot be meant."""

    exit_code: ClassVar[int] = 2


class PluginError(MferenceError):
    """A family package that cannot be used; names its distribution."""


class FamilyNotFound(PluginError):
    """No installed family answers to that name."""

    exit_code: ClassVar[int] = 2


class DuplicateFamily(PluginError):
    """Two distributions offer one family name."""


class ContractError(PluginError):
    """A family does not keep the plugin contract."""


class NotAccepted(PluginError):
    """The gate has no record that fits the family's files on this machine."""

    exit_code: ClassVar[int] = 3


class ManifestError(MferenceError):
    """A model directory that does not say what it should."""


class UnsupportedVersion(ManifestError):
    """A format version this program does not read."""


class UnknownFlag(ManifestError):
    """A manifest flag outside the known set."""


class ArchMismatch(ManifestError):
    """An architecture value outside the family's constraints."""


class InstallError(MferenceError):
    """Writing or verifying an install failed."""


class PartialInstall(InstallError):
    """The directory has no manifest: an install was not finished."""


class DigestMismatch(InstallError):
    """Bytes on disk differ from their recorded digest or size."""


class InstallLocked(InstallError):
    """Another process is working on the same output."""


class SourceError(InstallError):
    """A download source that cannot be reached, does not answer as it must, or has changed."""


class StreamError(MferenceError):
    """Reading expert weights failed."""


class NumericError(MferenceError):
    """A value that must be finite is not."""


class RequestError(MferenceError):
    """A prompt, message or option of one request that cannot be served."""

    exit_code: ClassVar[int] = 2


@frozen(kw_only=True, str=False)
class Busy(MferenceError):
    """The queue is full; `retry_after_seconds` says when to ask again."""

    retry_after_seconds: int = 1


class CannotRewind(MferenceError):
    """A state that no longer holds what a shorter timeline needs."""
