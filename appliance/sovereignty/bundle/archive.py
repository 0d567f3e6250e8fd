"""
A bundle as one tar stream, in one file or split into parts.

The stream is a function of the bundle: the head, then the files in the manifest's order, each after a
header with its path and size only.  A reader therefore knows every header and all padding beforehand and
compares; it never parses an unexpected header, and knows the offset of each file without reading what
precedes it.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from appliance.errors import BundleRefusedError, BundleStorageError
from appliance.sovereignty.bundle.manifest import BASE, MANIFEST, MAX_RECORD_BYTES, SIGNATURE, BundleFile
from appliance.sovereignty.bundle.source import CHUNK_BYTES, BundleHead, Contents, read_chunks

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePart:
    path: Path
    size: int
    sha256: str | None
    """Expected hash; None if there is no index."""


class SplitReader:
    """
    One or several files, read as one stream.

    Read once from beginning to end to be verified, each part hashed in passing, and afterwards at any
    offset.  Only one part is open at a time.
    """

    def __init__(self, name: str, parts: Sequence[ArchivePart]) -> None:
        self.name = name
        """For messages."""
        self.parts = tuple(parts)
        self.size = sum(part.size for part in parts)

    def reader(self) -> BinaryIO:
        """A reader from the beginning that verifies the hash of each part after its last byte."""
        return io.BufferedReader(_Reader(self, 0, self.size, hashing=True), 2**20)

    def window(self, start: int, size: int) -> io.RawIOBase:
        return _Reader(self, start, size, hashing=False)

    def read_at(self, start: int, size: int) -> bytes:
        """Bytes from an offset, fewer at the end; raises as a reader does."""
        with io.BufferedReader(self.window(start, max(0, min(size, self.size - start)))) as reader:
            return reader.read()

    def part_at(self, start: int, size: int) -> str:
        """Names of the parts that contain these bytes."""
        names, position = [], 0
        for part in self.parts:
            if position < start + max(size, 1) and start < position + part.size:
                names.append(part.path.name)
            position += part.size
        return " or ".join((names[0], names[-1]) if len(names) > 1 else names)


class _Reader(io.RawIOBase):
    def __init__(self, stream: SplitReader, start: int, size: int, *, hashing: bool) -> None:
        self._stream = stream
        self._left = size
        self._hash = hashlib.sha256() if hashing else None
        self._number = 0
        self._offset = start
        """Offset within the part."""
        self._file: io.FileIO | None = None
        while self._number < len(stream.parts) and self._offset >= stream.parts[self._number].size > 0:
            self._offset -= stream.parts[self._number].size
            self._number += 1

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer", /) -> int:
        view = memoryview(buffer).cast("B")
        while self._left and self._number < len(self._stream.parts):
            part = self._stream.parts[self._number]
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

    def _read(self, part: ArchivePart, view: memoryview) -> int:
        try:
            if self._file is None:
                self._file = part.path.open("rb", buffering=0)
                self._file.seek(self._offset)
            return self._file.readinto(view) or 0
        except FileNotFoundError as error:
            raise BundleRefusedError(f"the part {part.path} is missing: copy it") from error
        except OSError as error:
            raise BundleStorageError(f"cannot read {part.path}: {error.strerror}") from error

    def _finish(self, part: ArchivePart) -> None:
        """Verify the part that was read to its end, and continue with the next."""
        if self._hash is not None and part.sha256 not in {None, self._hash.hexdigest()}:
            raise BundleRefusedError(f"the part {part.path} is damaged: copy it again")
        if self._hash is not None:
            self._hash = hashlib.sha256()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._number += 1
        self._offset = 0


BLOCK_BYTES = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK_BYTES)


def tar_header(path: str, size: int) -> bytes:
    """Header of a file in the stream: POSIX pax, mode 0644, no owner, no time."""
    info = tarfile.TarInfo(path)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK_BYTES)


def frames(head: BundleHead, contents: Contents) -> Iterator[bytes]:
    """Yield the whole stream; raises as `Contents.stream` does."""
    for path, content in _head_files(head):
        yield tar_header(path, len(content)) + content + padding(len(content))
    for file, chunks in contents.stream():
        yield tar_header(file.path, file.size)
        yield from chunks
        yield padding(file.size)
    yield END


def stream_size(head: BundleHead, files: Sequence[BundleFile]) -> int:
    """Bytes that `frames` yields."""
    sizes = [(path, len(content)) for path, content in _head_files(head)]
    sizes += [(file.path, file.size) for file in files]
    return len(END) + sum(len(tar_header(path, size)) + size + len(padding(size)) for path, size in sizes)


class ArchiveSource:
    def __init__(self, stream: SplitReader, *, manifest: str | None = None) -> None:
        self._stream = stream
        self._manifest = manifest
        """Digest of MANIFEST.json in the index of the parts."""
        self._start = 0

    def head(self) -> BundleHead:
        found: dict[str, bytes] = {}
        self._start = 0
        for name in (MANIFEST, SIGNATURE, BASE):
            header = self._stream.read_at(self._start, BLOCK_BYTES)
            try:
                info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
            except (tarfile.HeaderError, UnicodeDecodeError) as error:
                raise BundleRefusedError(f"{self._stream.name} is not a bundle: it has no {name}") from error
            if name == BASE and info.name != BASE:
                break
            if info.name != name or info.size > MAX_RECORD_BYTES or header != tar_header(name, info.size):
                raise BundleRefusedError(f"{self._stream.name} is not a bundle: it must begin with {name}")
            content = self._stream.read_at(self._start + BLOCK_BYTES, info.size)
            if len(content) != info.size:
                raise BundleRefusedError(f"{self._stream.name} ends within {name}: copy it again")
            found[name] = content
            self._start += BLOCK_BYTES + info.size + len(padding(info.size))
        if self._manifest not in {None, f"sha256:{hashlib.sha256(found[MANIFEST]).hexdigest()}"}:
            raise BundleRefusedError(f"{self._stream.name} has parts of another bundle than its index names")
        return BundleHead(manifest=found[MANIFEST], signature=found[SIGNATURE], base=found.get(BASE))

    def contents(self, files: Sequence[BundleFile]) -> Contents:
        return _ArchiveContents(self._stream, self.head(), self._start, files)


class _ArchiveContents:
    def __init__(
        self, stream: SplitReader, head: BundleHead, start: int, files: Sequence[BundleFile]
    ) -> None:
        self._stream = stream
        self._head = head
        self.files = files
        self._size = stream_size(head, files)
        self._starts: dict[str, int] = {}
        for file in files:
            start += len(tar_header(file.path, file.size))
            self._starts[file.path] = start
            start += file.size + len(padding(file.size))

    def stream(self) -> Iterator[tuple[BundleFile, Iterator[bytes]]]:
        if self._stream.size != self._size:
            message = f"{self._stream.name} has {self._stream.size} bytes and should have {self._size}"
            raise BundleRefusedError(f"{message}: bytes are missing or added")
        reader = self._stream.reader()
        for path, content in _head_files(self._head):
            self._expect(reader, tar_header(path, len(content)) + content + padding(len(content)), path)
        for file in self.files:
            self._expect(reader, tar_header(file.path, file.size), file.path)
            yield file, read_chunks(reader, file, self.where(file))
            self._expect(reader, padding(file.size), file.path)
        self._expect(reader, END, "the end")
        reader.close()

    def open(self, file: BundleFile) -> AbstractContextManager[BinaryIO]:
        return io.BufferedReader(self._stream.window(self._starts[file.path], file.size), CHUNK_BYTES)

    def where(self, file: BundleFile) -> str:
        return f"{file.path} in {self._stream.part_at(self._starts[file.path], file.size)}"

    def _expect(self, reader: BinaryIO, content: bytes, what: str) -> None:
        found = b""
        while len(found) < len(content):
            chunk = reader.read(len(content) - len(found))
            if not chunk:
                break
            found += chunk
        if found != content:
            raise BundleRefusedError(f"{self._stream.name} was altered next to {what}: copy it again")


def _head_files(head: BundleHead) -> list[tuple[str, bytes]]:
    files = [(MANIFEST, head.manifest), (SIGNATURE, head.signature)]
    return files if head.base is None else [*files, (BASE, head.base)]
