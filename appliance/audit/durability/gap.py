"""
Entries that were not recorded, counted: in memory, and in one small file that a crash leaves behind.

The file keeps its size, so that it can be written when the disk is full.  It fails open, as the mode
it belongs to does: a count that cannot be written is kept in memory, and a crash then loses it.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from appliance.errors import ConfigurationError

FILE_BYTES = 2**17
"""Room for a name of every entry that a full queue can leave in doubt."""
NAME_CHARACTERS = 16
REASON_CHARACTERS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Requests were served and not recorded."""

    reason: str
    entries: int
    since: str
    """Entry time of the first."""
    size: int
    """Durable entries when it began: an `audit.gap` that admits it comes after."""

    doubtful: tuple[str, ...] = ()
    """Those of the entries that the database may have taken although it said no, by `name_of`."""

    def grown(self, entries: int, doubtful: Iterable[str]) -> "Gap":
        """The same gap with so many entries more, some of them in doubt."""
        return replace(self, entries=self.entries + entries, doubtful=(*self.doubtful, *doubtful))


def name_of(leaf_hash: bytes) -> str:
    """A short name of a leaf, told from all others that are in doubt at the same time."""
    return leaf_hash.hex()[:NAME_CHARACTERS]


class GapFile:
    """Where a gap is kept until the log admits it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """
        Open the file, and take its space on the disk.

        Raises:
            ConfigurationError: that is not possible.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            size = os.fstat(descriptor).st_size
            if size < FILE_BYTES:
                os.pwrite(descriptor, bytes(FILE_BYTES - size), size)
                os.fsync(descriptor)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be used ({error.strerror})") from error
        return cls(path, descriptor)

    def read(self) -> Gap | None:
        """
        Return the gap that a former process left, or None.

        Raises:
            ConfigurationError: it cannot be read.
        """
        try:
            content = os.pread(self._descriptor, FILE_BYTES, 0).rstrip(b"\0 ")
            if not content:
                return None
            fields = json.loads(content)
            return Gap(**fields | {"doubtful": tuple(fields["doubtful"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            message = (
                f"{self.path} cannot be read ({error}): it counts unrecorded entries; note it, remove it"
            )
            raise ConfigurationError(message) from error

    def write(self, gap: Gap | None) -> None:
        """Replace what is kept; raises OSError."""
        content = b"" if gap is None else json.dumps(asdict(gap), ensure_ascii=False).encode()
        if gap is not None and len(content) > FILE_BYTES:
            # Without names, too many are counted after a crash, never too few.
            content = json.dumps(asdict(replace(gap, doubtful=())), ensure_ascii=False).encode()
        os.pwrite(self._descriptor, content.ljust(FILE_BYTES, b"\0"), 0)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)
