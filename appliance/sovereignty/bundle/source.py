"""
The media a bundle is read from: a directory, a tar file, or parts on a transport medium.

Names on the medium are not trusted: files are opened without following links, every file that the manifest
does not list is refused, and bytes are returned unverified, for the caller to hash.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from appliance.errors import BundleRefusedError, BundleStorageError
from appliance.sovereignty.bundle.manifest import (
    BASE,
    BLOBS,
    MANIFEST,
    MAX_RECORD_BYTES,
    SIGNATURE,
    BundleFile,
)

CHUNK_BYTES = 2**20
"""Bytes of a file in memory at a time."""
ByteCount = Callable[[int, int], None]
CountBytes = Callable[[Iterable[bytes]], Iterator[bytes]]
"""Passes the bytes of a file on and counts them."""
"""Is called with the bytes read so far and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleHead:
    """The files that describe the others, as bytes."""

    manifest: bytes
    signature: bytes
    base: bytes | None
    """BASE.json, if the bundle is a difference."""


class Contents(Protocol):
    """The other files of a bundle, after the manifest is known."""

    @property
    def files(self) -> Sequence[BundleFile]:
        """In the manifest's order."""
        ...

    def stream(self) -> Iterator[tuple[BundleFile, Iterator[bytes]]]:
        """
        Yield every file with its bytes, once, in the order of the medium.

        Raises BundleRefusedError if a file is missing, has another size or is not listed, and
        BundleStorageError if the medium cannot be read.
        """
        ...

    def open(self, file: BundleFile) -> AbstractContextManager[BinaryIO]:
        """Open one file at its beginning; raises as `stream` does."""
        ...

    def where(self, file: BundleFile) -> str:
        """Location of a file on the medium, for messages."""
        ...


class BundleSource(Protocol):
    def head(self) -> BundleHead:
        """Read the head; raises as `Contents.stream` does."""
        ...

    def contents(self, files: Sequence[BundleFile]) -> Contents:
        """`files` must be exactly the files on the medium."""
        ...


class DirectorySource:
    def __init__(self, path: Path) -> None:
        self._path = path

    def head(self) -> BundleHead:
        return BundleHead(
            manifest=self._small(MANIFEST),
            signature=self._small(SIGNATURE),
            base=self._small(BASE) if (self._path / BASE).exists() else None,
        )

    def contents(self, files: Sequence[BundleFile]) -> Contents:
        return _DirectoryContents(self._path, files)

    def _small(self, name: str) -> bytes:
        with open_beneath(self._path, name) as file:
            return read_small(file, name)


class _DirectoryContents:
    def __init__(self, path: Path, files: Sequence[BundleFile]) -> None:
        self._path = path
        self.files = files

    def stream(self) -> Iterator[tuple[BundleFile, Iterator[bytes]]]:
        self._refuse_others()
        for file in self.files:
            with self.open(file) as opened:
                yield file, read_chunks(opened, file, self.where(file))

    def open(self, file: BundleFile) -> AbstractContextManager[BinaryIO]:
        opened = open_beneath(self._path, file.path)
        size = os.fstat(opened.fileno()).st_size
        if size != file.size:
            opened.close()
            message = f"{self.where(file)} has {size} bytes and should have {file.size}: copy it again"
            raise BundleRefusedError(message)
        return opened

    def where(self, file: BundleFile) -> str:
        return str(self._path / file.path)

    def _refuse_others(self) -> None:
        """Refuse files that the manifest does not list: no signature covers them."""
        known = {MANIFEST, SIGNATURE, BASE, *(file.path for file in self.files)}
        directories = {"blobs", BLOBS}
        waiting = [""]
        while waiting:
            below = waiting.pop()
            try:
                with os.scandir(self._path / below) as found:
                    entries = sorted(found, key=lambda entry: entry.name)
            except OSError as error:
                raise _unreadable(self._path / below, error) from error
            for entry in entries:
                name = f"{below}/{entry.name}" if below else entry.name
                if name in directories and entry.is_dir(follow_symlinks=False):
                    waiting.append(name)
                elif name not in known:
                    message = (
                        f"{self._path / name} is not in {MANIFEST}: a bundle has no other files, remove it"
                    )
                    raise BundleRefusedError(message)


def open_beneath(root: Path, name: str) -> BinaryIO:
    """Open a regular file without following links below `root`; raises BundleRefusedError for any other."""
    *directories, last = name.split("/")
    try:
        below = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for step in directories:
                inner = os.open(step, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=below)
                os.close(below)
                below = inner
            # O_NONBLOCK, because opening a pipe would wait for its other end.
            descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=below)
        finally:
            os.close(below)
    except FileNotFoundError as error:
        raise BundleRefusedError(f"{root / name} is missing: copy the bundle again") from error
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise BundleRefusedError(
                f"{root / name} is reached through a link: a bundle has no links"
            ) from error
        raise _unreadable(root / name, error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BundleRefusedError(f"{root / name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_small(file: BinaryIO, name: str) -> bytes:
    """Read a file of the head; raises BundleRefusedError if it is too large."""
    try:
        content = file.read(MAX_RECORD_BYTES + 1)
    except OSError as error:
        raise _unreadable(name, error) from error
    if len(content) > MAX_RECORD_BYTES:
        raise BundleRefusedError(f"{name} is larger than {MAX_RECORD_BYTES} bytes")
    return content


def read_chunks(opened: BinaryIO, file: BundleFile, where: str) -> Iterator[bytes]:
    """Yield exactly the listed bytes; raises BundleRefusedError if there are fewer."""
    left = file.size
    while left:
        try:
            chunk = opened.read(min(CHUNK_BYTES, left))
        except OSError as error:
            raise _unreadable(where, error) from error
        if not chunk:
            raise BundleRefusedError(f"{where} ends {left} bytes too early: copy it again")
        left -= len(chunk)
        yield chunk


def ignore_bytes(_done: int, _total: int) -> None:
    pass


def byte_counter(count: ByteCount, total: int) -> CountBytes:
    """Return what passes the bytes of files on and counts them all together."""
    done = 0

    def counted(chunks: Iterable[bytes]) -> Iterator[bytes]:
        nonlocal done
        for chunk in chunks:
            yield chunk
            done += len(chunk)
            # A compressed archive has more bytes than its file.
            count(done, max(done, total))

    return counted


def _unreadable(what: object, error: OSError) -> BundleStorageError:
    return BundleStorageError(f"cannot read {what}: {error.strerror}")
