"""
Results of a running batch: one file, to which the result of each line is added once.

It is the only record of progress: a line is done if and only if its result is here.  A result counts
once `add` has returned, which is after an fsync.  A crash before that loses it, and the line is run
again; a crash during a write leaves a torn record at the end, which `ResultJournal.open` cuts off.

    record = length (4 bytes) ─ CRC-32 of the rest (4 bytes) ─ piece
    piece  = line number ─ " " ─ "1" if it succeeded, else "0" ─ newline ─ line of the output or error file

Synchronous: called in a thread, one call at a time.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Self

from appliance.errors import StorageUnavailableError
from appliance.gateway.batch.pieces import Pieces
from appliance.gateway.batch.results import LineResult
from appliance.infra.files import OWNER_ONLY, sync_directory, sync_file

_HEAD = struct.Struct(">II")


class ResultJournal:
    def __init__(
        self, file: BinaryIO, pieces: Pieces, check_room: Callable[[int], None], done: dict[int, bool]
    ) -> None:
        self._file = file
        self._pieces = pieces
        self._check_room = check_room
        self._count = len(done)
        self.done = done  # whether each finished line succeeded, by its number

    @classmethod
    def open(cls, path: Path, pieces: Pieces, check_room: Callable[[int], None]) -> Self:
        """
        Open a batch's journal, or create it; raises StorageUnavailableError.

        `check_room` raises it if the disk has no room for so many bytes.
        """
        done, end = dict[int, bool](), 0
        with ExitStack() as stack:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, OWNER_ONLY)
                file = stack.enter_context(os.fdopen(descriptor, "r+b"))
                for result, end in _read(file, pieces):  # noqa: B007 - the last one is wanted
                    done[result.number] = result.succeeded
                # The rest was being written when the process died; `add` has not returned for it.
                file.truncate(end)
                file.seek(end)
                sync_file(file)
                sync_directory(path.parent)
            except OSError as error:
                raise StorageUnavailableError(f"cannot use {path.name}: {error.strerror}") from error
            stack.pop_all()
        return cls(file, pieces, check_room, done)

    def add(self, results: Sequence[LineResult]) -> None:
        """Durable on return; after a StorageUnavailableError the journal must be opened again."""
        records = b"".join(self._record(result) for result in results)
        self._check_room(len(records))
        try:
            self._file.write(records)
            sync_file(self._file)
        except OSError as error:
            raise StorageUnavailableError(f"results could not be kept: {error.strerror}") from error
        # A crash before this line: the lines are done, and the next start finds them here.
        self.done.update({result.number: result.succeeded for result in results})

    def results(self) -> Iterator[LineResult]:
        """In the order they were added."""
        self._file.seek(0)
        for result, _ in _read(self._file, self._pieces):
            yield result
        self._file.seek(0, os.SEEK_END)

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def _record(self, result: LineResult) -> bytes:
        piece = f"{result.number} {result.succeeded:d}\n{result.line}".encode()
        stored = self._pieces.close(self._count, piece)
        self._count += 1
        return _HEAD.pack(len(stored), zlib.crc32(stored)) + stored


def _read(file: BinaryIO, pieces: Pieces) -> Iterator[tuple[LineResult, int]]:
    """Yield each whole record and the offset after it; stop at the first that is not."""
    end = index = 0
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, check = _HEAD.unpack(head)
        stored = file.read(length)
        if len(stored) < length or zlib.crc32(stored) != check:
            return
        about, _, line = pieces.open(index, stored).decode().partition("\n")
        number, _, succeeded = about.partition(" ")
        end, index = end + _HEAD.size + length, index + 1
        yield LineResult(number=int(number), succeeded=succeeded == "1", line=line), end
