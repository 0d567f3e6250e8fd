"""
A bundle as one tar stream, in one file or cut into parts.

The stream is a function of the bundle: the head, then the files in the manifest's order, each behind a
header that says nothing but its path and size.  A reader therefore knows every header and every byte
of padding beforehand and compares; it never parses a header it was not expecting, and knows where
each file lies without reading what comes before.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO

from appliance.errors import BundleRefusedError
from appliance.sovereignty.bundle.manifest import BASE, MANIFEST, SIGNATURE, BundleFile
from appliance.sovereignty.bundle.record import MAX_RECORD_BYTES
from appliance.sovereignty.bundle.source import CHUNK_BYTES, Contents, Head, read_chunks
from appliance.sovereignty.bundle.tape import Tape

BLOCK_BYTES = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK_BYTES)


def tar_header(path: str, size: int) -> bytes:
    """Return the header of a file in the stream: POSIX pax, mode 0644, no owner, no time."""
    info = tarfile.TarInfo(path)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


def padding(size: int) -> bytes:
    """Return what fills the last block of a file."""
    return bytes(-size % BLOCK_BYTES)


def frames(head: Head, contents: Contents) -> Iterator[bytes]:
    """Yield the whole stream; raises as `Contents.stream` does."""
    for path, content in _head_files(head):
        yield tar_header(path, len(content)) + content + padding(len(content))
    for file, chunks in contents.stream():
        yield tar_header(file.path, file.size)
        yield from chunks
        yield padding(file.size)
    yield END


def stream_size(head: Head, files: Sequence[BundleFile]) -> int:
    """Return how many bytes `frames` yields."""
    sizes = [(path, len(content)) for path, content in _head_files(head)]
    sizes += [(file.path, file.size) for file in files]
    return len(END) + sum(len(tar_header(path, size)) + size + len(padding(size)) for path, size in sizes)


class ArchiveSource:
    """A bundle as a tar stream on a tape."""

    def __init__(self, tape: Tape, *, manifest: str | None = None) -> None:
        self._tape = tape
        self._manifest = manifest
        """Digest of MANIFEST.json as the index of the parts has it."""
        self._start = 0

    def head(self) -> Head:
        """Read the head, which is first in the stream."""
        found: dict[str, bytes] = {}
        self._start = 0
        for name in (MANIFEST, SIGNATURE, BASE):
            header = self._tape.read_at(self._start, BLOCK_BYTES)
            try:
                info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
            except (tarfile.HeaderError, UnicodeDecodeError) as error:
                raise BundleRefusedError(f"{self._tape.name} is no bundle: it holds no {name}") from error
            if name == BASE and info.name != BASE:
                break
            if info.name != name or info.size > MAX_RECORD_BYTES or header != tar_header(name, info.size):
                raise BundleRefusedError(f"{self._tape.name} is no bundle: it should begin with {name}")
            content = self._tape.read_at(self._start + BLOCK_BYTES, info.size)
            if len(content) != info.size:
                raise BundleRefusedError(f"{self._tape.name} ends within {name}: copy it again")
            found[name] = content
            self._start += BLOCK_BYTES + info.size + len(padding(info.size))
        if self._manifest not in {None, f"sha256:{hashlib.sha256(found[MANIFEST]).hexdigest()}"}:
            raise BundleRefusedError(f"{self._tape.name} holds parts of another bundle than their index says")
        return Head(manifest=found[MANIFEST], signature=found[SIGNATURE], base=found.get(BASE))

    def contents(self, files: Sequence[BundleFile]) -> Contents:
        """Return the files."""
        return _ArchiveContents(self._tape, self.head(), self._start, files)


class _ArchiveContents:
    def __init__(self, tape: Tape, head: Head, start: int, files: Sequence[BundleFile]) -> None:
        self._tape = tape
        self._head = head
        self.files = files
        self._size = stream_size(head, files)
        self._starts: dict[str, int] = {}
        for file in files:
            start += len(tar_header(file.path, file.size))
            self._starts[file.path] = start
            start += file.size + len(padding(file.size))

    def stream(self) -> Iterator[tuple[BundleFile, Iterator[bytes]]]:
        if self._tape.size != self._size:
            message = f"{self._tape.name} has {self._tape.size} bytes and should have {self._size}"
            raise BundleRefusedError(f"{message}: something was cut off or added")
        reader = self._tape.reader()
        for path, content in _head_files(self._head):
            self._expect(reader, tar_header(path, len(content)) + content + padding(len(content)), path)
        for file in self.files:
            self._expect(reader, tar_header(file.path, file.size), file.path)
            yield file, read_chunks(reader, file, self.where(file))
            self._expect(reader, padding(file.size), file.path)
        self._expect(reader, END, "the end")
        reader.close()

    def open(self, file: BundleFile) -> AbstractContextManager[BinaryIO]:
        return io.BufferedReader(self._tape.window(self._starts[file.path], file.size), CHUNK_BYTES)

    def where(self, file: BundleFile) -> str:
        return f"{file.path} in {self._tape.part_at(self._starts[file.path], file.size)}"

    def _expect(self, reader: BinaryIO, content: bytes, what: str) -> None:
        found = b""
        while len(found) < len(content):
            chunk = reader.read(len(content) - len(found))
            if not chunk:
                break
            found += chunk
        if found != content:
            raise BundleRefusedError(f"{self._tape.name} was altered beside {what}: copy it again")


def _head_files(head: Head) -> list[tuple[str, bytes]]:
    files = [(MANIFEST, head.manifest), (SIGNATURE, head.signature)]
    return files if head.base is None else [*files, (BASE, head.base)]
