"""
The bytes of files on this gateway's disk.

    <directory>/<gateway>/file-<ulid>          a file, mode 0600
    <directory>/<gateway>/.file-<ulid>         a draft, until its row exists
    <directory>/<gateway>/batch_<ulid>         results of a running batch

Everything new is written to `directory`.  What lies in `former`, the place before `batch.directory` was set,
is read, finished and removed there, so an upgrade or a new setting loses no file.

If a tenant's content is `encrypted`, each has its own key in the directory of payload keys,
`<tenant>.<ulid>.file`, which is destroyed with it: a copy of the bytes alone cannot be decrypted.
Gateways may share the directory; each writes and sweeps only its own part of it.

Synchronous: callers use a thread.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from appliance.audit.content.payload_keys import DIRECTORY_MODE, KeyName, PayloadKeys, Purpose
from appliance.audit.content.payloads import ULID_CHARACTERS
from appliance.audit.entry import new_entry_id
from appliance.errors import AuditKeyError, ConfigurationError, StorageUnavailableError
from appliance.gateway.batch.batch import FILE_PREFIX, Batch, StoredFile
from appliance.gateway.batch.journal import ResultJournal
from appliance.gateway.batch.pieces import PIECE_BYTES, Pieces, PlainPieces, SealedPieces
from appliance.infra.files import OWNER_ONLY, sync_directory, sync_file

ULID_RANDOM_BYTES = 10
DRAFT = f".{FILE_PREFIX}"  # prefix of the name of a file without a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Id and codec of new content."""

    ulid: str
    pieces: Pieces


class FileVault:
    """In the gateway's own part of the directory; raises ConfigurationError if that cannot be used."""

    def __init__(
        self,
        directory: Path,
        gateway: str,
        keys: PayloadKeys,
        *,
        former: Path | None = None,
        keep_free_bytes: int,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.gateway = gateway
        self._directories = [directory]
        if former is not None and former != directory and former.is_dir():
            self._directories.append(former)
        self._mine = directory / gateway
        self._keys = keys
        self._keep_free_bytes = keep_free_bytes
        self._clock = clock
        self._random_bytes = random_bytes
        try:
            self._mine.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        except OSError as error:
            message = f"the directory of files {self._mine} cannot be used ({error.strerror}): "
            raise ConfigurationError(f"{message}name another with batch.directory") from error

    def new_place(self, tenant: str, *, sealed: bool) -> Place:
        """A new id, and if `sealed` a new key under it; raises StorageUnavailableError."""
        if not sealed:
            now_ms = int(self._clock() * 1000)
            return Place(
                ulid=new_entry_id(now_ms, self._random_bytes(ULID_RANDOM_BYTES)), pieces=PlainPieces()
            )
        try:
            key = self._keys.make(tenant, Purpose.FILE)
        except AuditKeyError as error:
            raise StorageUnavailableError(str(error)) from error
        ulid = _ulid(key.key_id)
        return Place(ulid=ulid, pieces=SealedPieces(key.key, ulid, self._random_bytes))

    def check_room(self, more_bytes: int, place: Path | None = None) -> None:
        """Raise StorageUnavailableError unless the disk keeps `keep_free_bytes` beyond so many bytes."""
        if shutil.disk_usage(place or self._mine).free - more_bytes < self._keep_free_bytes:
            raise StorageUnavailableError("The disk of files is nearly full. Ask the operator to free space.")

    def write(self, place: Place) -> "FileWriter":
        return FileWriter(self._mine, place, self.check_room)

    def read(self, stored: StoredFile) -> Iterator[bytes]:
        """Yield it piece by piece; raises StorageUnavailableError if bytes or key are missing or damaged."""
        pieces, size = self._pieces(stored.tenant, stored.ulid, sealed=stored.sealed), 0
        try:
            with self._find(stored.gateway, stored.file_id).open("rb") as file:
                index = 0
                while data := file.read(pieces.stored_bytes):
                    piece = pieces.open(index, data)
                    size, index = size + len(piece), index + 1
                    yield piece
        except OSError as error:
            why = f"This gateway cannot read the bytes of {stored.file_id} ({error.strerror})"
            raise StorageUnavailableError(f"{why}: ask the gateway that stored it.") from error
        if size != stored.size:
            raise StorageUnavailableError(f"{stored.file_id} was damaged on disk: create it again.")

    def has_bytes(self, stored: StoredFile) -> bool:
        return self._find(stored.gateway, stored.file_id).exists()

    def journal(self, batch: Batch) -> ResultJournal:
        """Raises StorageUnavailableError."""
        pieces = self._pieces(batch.tenant, batch.ulid, sealed=batch.sealed)
        path = self._find(self.gateway, batch.batch_id)
        return ResultJournal.open(path, pieces, partial(self.check_room, place=path.parent))

    def has_key(self, tenant: str, ulid: str) -> bool:
        """Of an encrypted file or batch."""
        return self._keys.is_in_use(f"{tenant}.{ulid}", Purpose.FILE)

    def remove(self, tenant: str, name: str) -> None:
        """
        Remove a file or a batch's results: key first, then bytes.  Durable on return, idempotent.

        Raises StorageUnavailableError if not everything was removed.
        """
        try:
            self._keys.destroy(_key_name(tenant, _ulid(name)))
            for mine in self._all_mine():
                (mine / name).unlink(missing_ok=True)
                (mine / f".{name}").unlink(missing_ok=True)
                sync_directory(mine)
        except AuditKeyError as error:
            raise StorageUnavailableError(str(error)) from error
        except OSError as error:
            raise StorageUnavailableError(f"{name} could not be removed: {error.strerror}") from error

    def publish(self, file_id: str) -> None:
        """
        Rename the draft of a file whose row exists; raises StorageUnavailableError.

        A start removes only drafts without a row: the database may be the wrong one, so no other file is
        removed because its row is missing.
        """
        with _storing():
            draft = self._find(self.gateway, file_id)
            draft.rename(draft.with_name(file_id))

    def sweep(self, known: frozenset[str], ended: frozenset[str]) -> None:
        """
        Publish or remove drafts and remove results of ended batches; call it before any write.

        `known` are all files with a row, `ended` all ended batches.  Raises StorageUnavailableError if not
        all was done.
        """
        try:
            keys = {_ulid(name.key_id): name for name in self._keys.names(purpose=Purpose.FILE)}
            mine = self._all_mine()
            for path in [path for directory in mine for path in directory.iterdir()]:
                file_id = path.name.removeprefix(".")
                if path.name in ended or (path.name.startswith(DRAFT) and file_id not in known):
                    if _ulid(path.name) in keys:
                        self._keys.destroy(keys[_ulid(path.name)])
                    path.unlink()
                elif path.name.startswith(DRAFT):
                    path.rename(path.with_name(file_id))
            for directory in mine:
                sync_directory(directory)
        except AuditKeyError as error:
            raise StorageUnavailableError(str(error)) from error
        except OSError as error:
            raise StorageUnavailableError(f"{self._mine} could not be swept: {error.strerror}") from error

    def _all_mine(self) -> list[Path]:
        return [mine for each in self._directories if (mine := each / self.gateway).is_dir()]

    def _find(self, gateway: str, name: str) -> Path:
        """Where it lies, after a crash perhaps still as a draft; if nowhere, where it would be created."""
        paths = [directory / gateway / name for directory in self._directories]
        found = (path for each in paths for path in (each.with_name(f".{name}"), each) if path.exists())
        return next(found, paths[0])

    def _pieces(self, tenant: str, ulid: str, *, sealed: bool) -> Pieces:
        if not sealed:
            return PlainPieces()
        try:
            if not self.has_key(tenant, ulid):
                raise StorageUnavailableError("Its key was destroyed: its content was erased.")
            return SealedPieces(self._keys.read(_key_name(tenant, ulid)).key, ulid, self._random_bytes)
        except AuditKeyError as error:
            raise StorageUnavailableError(str(error)) from error


class FileWriter:
    """Its draft exists from its first whole piece on, so a caller that is interrupted loses no open file."""

    def __init__(self, directory: Path, place: Place, check_room: Callable[[int], None]) -> None:
        self._directory = directory
        self._check_room = check_room
        self._pieces = place.pieces
        self._draft = directory / f"{DRAFT}{place.ulid}"
        self._waiting = bytearray()
        self._index = 0
        self.size = 0  # so far, before encryption
        self._opened: BinaryIO | None = None

    def write(self, data: bytes | bytearray) -> None:
        """Raises StorageUnavailableError."""
        self.size += len(data)
        self._waiting += data
        with _storing():
            while len(self._waiting) >= PIECE_BYTES:
                self._put(bytes(self._waiting[:PIECE_BYTES]))
                del self._waiting[:PIECE_BYTES]

    def finish(self) -> None:
        """Make the draft durable; raises StorageUnavailableError."""
        with _storing():
            if self._waiting:
                self._put(bytes(self._waiting))
            sync_file(self._file)
            self._file.close()
            sync_directory(self._directory)

    def discard(self) -> None:
        """The caller removes its key."""
        with _storing():
            self._draft.unlink(missing_ok=True)
        with suppress(OSError):  # a full disk does not take what it still buffers
            if self._opened is not None:
                self._opened.close()

    @property
    def _file(self) -> BinaryIO:
        if self._opened is None:
            descriptor = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
            self._opened = os.fdopen(descriptor, "wb")
        return self._opened

    def _put(self, piece: bytes) -> None:
        stored = self._pieces.close(self._index, piece)
        # Each time: others write to the disk as well.
        self._check_room(len(stored))
        self._file.write(stored)
        self._index += 1


@contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageUnavailableError(f"the file could not be stored: {error.strerror}") from error


def _key_name(tenant: str, ulid: str) -> KeyName:
    return KeyName(key_id=f"{tenant}.{ulid}", tenant=tenant, purpose=Purpose.FILE)


def _ulid(name: str) -> str:
    """At the end of the id of a file, a batch or a key."""
    return name[-ULID_CHARACTERS:]
