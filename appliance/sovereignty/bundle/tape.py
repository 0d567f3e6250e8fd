"""
Bytes that may be cut into several files, read as one.

A tape is read once from beginning to end to be verified, each part hashed on the way, and afterwards
anywhere.  Only one part is open at a time.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from appliance.errors import BundleRefusedError, BundleStorageError

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a tape."""

    path: Path
    size: int
    """Bytes."""
    sha256: str | None
    """Hash it should have; None where no index says."""


class Tape:
    """One or several files, end to end."""

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        self.name = name
        """For messages."""
        self.parts = tuple(parts)
        self.size = sum(part.size for part in parts)

    def reader(self) -> BinaryIO:
        """Return a reader from the beginning that checks each part's hash when it has passed it."""
        return io.BufferedReader(_Reader(self, 0, self.size, hashing=True), 2**20)

    def window(self, start: int, size: int) -> io.RawIOBase:
        """Return a reader of some of the bytes."""
        return _Reader(self, start, size, hashing=False)

    def read_at(self, start: int, size: int) -> bytes:
        """Return bytes from a place, fewer at the end; raises as a reader does."""
        with io.BufferedReader(self.window(start, max(0, min(size, self.size - start)))) as reader:
            return reader.read()

    def part_at(self, start: int, size: int) -> str:
        """Name the parts that hold some of the bytes."""
        names, position = [], 0
        for part in self.parts:
            if position < start + max(size, 1) and start < position + part.size:
                names.append(part.path.name)
            position += part.size
        return " or ".join((names[0], names[-1]) if len(names) > 1 else names)


class _Reader(io.RawIOBase):
    def __init__(self, tape: Tape, start: int, size: int, *, hashing: bool) -> None:
        self._tape = tape
        self._left = size
        self._hash = hashlib.sha256() if hashing else None
        self._number = 0
        self._offset = start
        """Within the part."""
        self._file: io.FileIO | None = None
        while self._number < len(tape.parts) and self._offset >= tape.parts[self._number].size > 0:
            self._offset -= tape.parts[self._number].size
            self._number += 1

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer", /) -> int:
        view = memoryview(buffer).cast("B")
        while self._left and self._number < len(self._tape.parts):
            part = self._tape.parts[self._number]
            wanted = min(len(view), self._left, part.size - self._offset)
            count = self._read(part, view[:wanted])
            if count:
                self._left -= count
                self._offset += count
                if self._hash is not None:
                    self._hash.update(view[:count])
                if self._offset == part.size:
                    self._finish(part)
                return count
            if self._offset < part.size:
                raise BundleRefusedError(f"the part {part.path} is too short: copy it again")
            self._finish(part)
        return 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    def _read(self, part: Part, view: memoryview) -> int:
        try:
            if self._file is None:
                self._file = part.path.open("rb", buffering=0)
                self._file.seek(self._offset)
            return self._file.readinto(view) or 0
        except FileNotFoundError as error:
            raise BundleRefusedError(f"the part {part.path} is missing: copy it") from error
        except OSError as error:
            raise BundleStorageError(f"cannot read {part.path}: {error.strerror}") from error

    def _finish(self, part: Part) -> None:
        """Check the part that was read to its end, and go to the next."""
        if self._hash is not None and part.sha256 not in {None, self._hash.hexdigest()}:
            raise BundleRefusedError(f"the part {part.path} is damaged: copy it again")
        if self._hash is not None:
            self._hash = hashlib.sha256()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._number += 1
        self._offset = 0
