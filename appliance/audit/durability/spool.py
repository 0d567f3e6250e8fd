"""
Entries that wait for the database, on this machine's disk.

    segment = frame(start) frame(leaf) frame(leaf) ...
    frame   = length (4 bytes, big endian) | RFC 6962 leaf hash (32 bytes) | that many bytes

A segment is written once, front to back, and removed when all its entries are in the log.  An entry is kept
once the fsync after its frame has returned.  A frame that is cut off or altered ends its segment: after a
failed write the next segment begins, so no acknowledged entry can lie behind it.

Fails closed: what could not be made durable here is refused.  The spool is not signed: an account that may
write to its directory can alter what waits in it, as it could alter entries before they are recorded.

Blocks; for one thread at a time.
"""

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Self

from appliance.audit.entry import MAX_LEAF_BYTES
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import HASH_BYTES, hash_leaf
from appliance.errors import AuditUnavailableError, ConfigurationError
from appliance.infra.files import open_locked, sync_directory, sync_file

SUFFIX = ".spool"
LENGTH_BYTES = 4
FRAME_BYTES = LENGTH_BYTES + HASH_BYTES
SEGMENTS = 8
MAX_SEGMENT_BYTES = 2**24
ENDS_SHARE = 8
"""An eighth of the spool is reserved for entries that end a request: every accepted request must get one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolStart:
    """When and why the spool was begun; at the head of every segment."""

    spool: str
    log: str
    size: int
    """Durable entries then: an entry whose commit was in doubt comes after."""
    since: str
    """Entry time."""
    reason: str


@dataclass(slots=True, kw_only=True)
class _Segment:
    number: int
    path: Path
    size: int
    """Bytes up to the last good frame."""


class Spool:
    """The segments of one directory; made by `open`."""

    def __init__(self, directory: Path, lock: BinaryIO, *, max_bytes: int) -> None:
        self._directory, self._lock, self._max_bytes = directory, lock, max_bytes
        self._segments: deque[_Segment] = deque()
        self._file: BinaryIO | None = None
        self._read_at = 0
        self._created = 0
        self.start: SpoolStart | None = None
        """How it began; None while it is empty."""
        self.entries = 0
        """Entries that wait in it."""
        self.total = 0
        """Entries since it was begun."""
        self.torn_bytes = 0
        """Bytes found at `open` that are no entries: a write that was cut off, or damage."""
        self.begun: dict[str, None] = {}
        """Requests with an intent and no end among what `open` found."""
        self.ended: set[str] = set()
        """Requests whose end was among what `open` found."""

    @classmethod
    def open(cls, directory: Path, *, max_bytes: int) -> Self:
        """Raises ConfigurationError if the directory cannot be used, or another gateway uses it."""
        lock: BinaryIO | None = None
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = open_locked(directory / "lock")
            spool = cls(directory, lock, max_bytes=max_bytes)
            spool._load()
            lock = None
        except BlockingIOError as error:
            message = f"another gateway uses the spool {directory}: give each its own audit.spool_directory"
            raise ConfigurationError(message) from error
        except (OSError, ValueError, TypeError) as error:
            message = f"the spool {directory} cannot be used ({error}): see audit.spool_directory"
            raise ConfigurationError(message) from error
        finally:
            if lock is not None:
                lock.close()
        return spool

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in tuple(self._segments))

    def room(self, entry_type: EntryType) -> int:
        """Bytes left for frames of entries of this type."""
        limit = self._max_bytes
        if not entry_type.closes_request:
            limit -= limit // ENDS_SHARE
        return limit - self.size_bytes

    def append(self, leaves: Sequence[bytes], start: SpoolStart) -> None:
        """
        Keep leaves durably in order, all of them or, with AuditUnavailableError, none.

        The caller checks that they fit; `start` is recorded if this begins the spool.
        """
        data = b"".join(map(_frame, leaves))
        try:
            file = self._writable(self.start or start)
            _write(file, data)
            # A crash before this line: the entries are not acknowledged yet.
            sync_file(file)
        except OSError as error:
            self._give_up_segment()
            raise AuditUnavailableError(f"the spool {self._directory} cannot be written: {error}") from error
        self._segments[-1].size += len(data)
        self.start = self.start or start
        self.entries += len(leaves)
        self.total += len(leaves)

    def read(self, count: int) -> list[bytes]:
        """Return the oldest leaves, at most `count`; they stay.  Raises AuditUnavailableError."""
        leaves: list[bytes] = []
        start = self._read_at
        try:
            for segment in self._segments:
                leaves += islice(_frames(segment.path, start, segment.size), count - len(leaves))
                start = 0
        except OSError as error:
            raise AuditUnavailableError(f"the spool {self._directory} cannot be read: {error}") from error
        return leaves

    def advance(self, leaves: Sequence[bytes]) -> None:
        """Skip the oldest leaves, which are in the log now; removes finished segments."""
        for leaf in leaves:
            self._skip_empty()
            self._read_at += FRAME_BYTES + len(leaf)
        self._skip_empty()
        self.entries -= len(leaves)

    def clear(self) -> None:
        """
        Remove everything; only when all of it is in the log.

        After AuditUnavailableError something is left, which the next drain skips.
        """
        self._close_file()
        try:
            while self._segments:
                # Oldest first: a crash between two leaves a spool whose entries are all in the log.
                self._segments[0].path.unlink(missing_ok=True)
                self._segments.popleft()
            sync_directory(self._directory)
        except OSError as error:
            raise AuditUnavailableError(f"the spool {self._directory} cannot be emptied: {error}") from error
        self.start, self._read_at, self.entries, self.total = None, 0, 0, 0
        self.begun, self.ended = {}, set()

    def close(self) -> None:
        """Release the directory; what waits stays for the next start."""
        self._close_file()
        self._lock.close()

    def _writable(self, start: SpoolStart) -> BinaryIO:
        largest = min(MAX_SEGMENT_BYTES, self._max_bytes // SEGMENTS)
        if self._file is not None and self._segments[-1].size < largest:
            return self._file
        self._close_file()
        self._created += 1
        path = self._directory / f"{self._created:08d}{SUFFIX}"
        file = path.open("xb", buffering=0)
        self._file = file
        head = _frame(json.dumps(asdict(start)).encode())
        self._segments.append(_Segment(number=self._created, path=path, size=0))
        _write(file, head)
        sync_file(file)
        sync_directory(self._directory)
        self._segments[-1].size = len(head)
        return file

    def _give_up_segment(self) -> None:
        """After a failed write the end of the file is unknown: continue in another file."""
        if self._file is None:
            return
        newest = self._segments[-1]
        with suppress(OSError):  # a frame that was cut off is recognised by its hash
            os.ftruncate(self._file.fileno(), newest.size)
        self._close_file()
        if not newest.size:
            self._segments.pop()
            with suppress(OSError):
                newest.path.unlink()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _skip_empty(self) -> None:
        """Move to the next segment when the oldest is finished and another follows."""
        if self._read_at == 0 and self._segments:
            self._read_at = _head_bytes(self._segments[0])
        while len(self._segments) > 1 and self._read_at >= self._segments[0].size:
            done = self._segments.popleft()
            done.path.unlink(missing_ok=True)
            self._read_at = _head_bytes(self._segments[0])

    def _load(self) -> None:
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            number = int(path.stem)
            self._created = max(self._created, number)
            segment = _Segment(number=number, path=path, size=0)
            frames = _frames(path, 0, path.stat().st_size, with_head=True)
            head = next(frames, None)
            if head is None:
                path.unlink()  # it was being made when the process ended
                continue
            self.start = self.start or SpoolStart(**json.loads(head))
            segment.size = FRAME_BYTES + len(head)
            for leaf in frames:
                segment.size += FRAME_BYTES + len(leaf)
                self._remember(leaf)
            self.torn_bytes += path.stat().st_size - segment.size
            self._segments.append(segment)
        self.total = self.entries

    def _remember(self, leaf: bytes) -> None:
        self.entries += 1
        fields = json.loads(leaf)
        entry_type, request_id = EntryType(fields["type"]), fields.get("request_id")
        if entry_type is EntryType.REQUEST_INTENT:
            self.begun[request_id] = None
        elif entry_type.closes_request:
            self.begun.pop(request_id, None)
            self.ended.add(request_id)


def _frame(content: bytes) -> bytes:
    return len(content).to_bytes(LENGTH_BYTES) + hash_leaf(content) + content


def _frames(path: Path, start: int, end: int, *, with_head: bool = False) -> Iterator[bytes]:
    """Yield the contents of the good frames between two offsets, without the start of the segment."""
    with path.open("rb") as file:
        file.seek(start)
        at = start
        while at + FRAME_BYTES <= end:
            prefix = file.read(FRAME_BYTES)
            length = int.from_bytes(prefix[:LENGTH_BYTES])
            if length > MAX_LEAF_BYTES or at + FRAME_BYTES + length > end:
                return
            content = file.read(length)
            if hash_leaf(content) != prefix[LENGTH_BYTES:]:
                return
            if at or with_head:
                yield content
            at += FRAME_BYTES + length


def _head_bytes(segment: _Segment) -> int:
    with segment.path.open("rb") as file:
        return FRAME_BYTES + int.from_bytes(file.read(LENGTH_BYTES))


def _write(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
