"""
One file of a tenant, as it is known without its bytes.
"""

from dataclasses import dataclass
from enum import StrEnum

FILE_PREFIX = "file-"
LONGEST_FILENAME = 255


class Purpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"
    """Requests of a batch, sent by the tenant."""
    BATCH_OUTPUT = "batch_output"
    """What came of a batch, written by the gateway."""


class Deleted(StrEnum):
    """Why a file is gone; also the word in its `file.deleted` entry."""

    DELETED = "deleted"
    """Its tenant said so."""
    EXPIRED = "expired"
    ERASED = "erased"
    """An operator erased what is kept of the tenant."""
    REFUSED = "refused"
    """It came while others used up what the tenant may keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file."""

    file_id: str
    """`file-` and a ULID; where it is encrypted, the ULID is its key's as well."""
    tenant: str
    gateway: str
    """Whose directory has the bytes."""
    filename: str
    """As the client named it: for display, never a path here."""
    purpose: Purpose
    size: int
    """Bytes, as the tenant sees them."""
    sealed: bool
    """Whether they are encrypted on disk, under a key of their own."""
    created_at: int
    expires_at: int
    """Unix seconds, both."""

    @property
    def ulid(self) -> str:
        """The part of its id that sorts by time."""
        return self.file_id.removeprefix(FILE_PREFIX)


def clean_filename(name: str) -> str:
    """Return the last part of a client's file name, printable and of bounded length."""
    last = name.replace("\\", "/").rpartition("/")[2]
    kept = "".join(character for character in last if character.isprintable())
    return kept[:LONGEST_FILENAME] or "file"
