"""
A bundle split into parts that fit on a transport medium, with an index of their hashes.

PARTS.json is not signed: it distinguishes damaged parts from good ones, and names the bundle.  The content
of the bundle is proved by the manifest alone, whatever PARTS.json says.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from appliance.errors import BundleRefusedError, ConfigurationError
from appliance.infra.files import sync_file
from appliance.sovereignty.bundle.archive import ArchivePart, ArchiveSource, SplitReader, frames, stream_size
from appliance.sovereignty.bundle.copying import making, storage_error, write_durably
from appliance.sovereignty.bundle.manifest import BundleRecord, Count, Digest, Hex
from appliance.sovereignty.bundle.source import (
    BundleHead,
    BundleSource,
    ByteCount,
    Contents,
    DirectorySource,
    byte_counter,
    ignore_bytes,
    open_beneath,
    read_small,
)

PARTS = "PARTS.json"
FAT32_BYTES = 4 * 2**30 - 2**20
"""Default size of a part: FAT32 cannot hold a file of 4 GiB."""
MOST_PARTS = 9999


class ListedPart(BundleRecord):
    name: Annotated[str, Field(pattern=r"^bundle\.tar\.[0-9]{4}$")]
    size: Count
    sha256: Hex


class PartsIndex(BundleRecord):
    format: Literal[1] = 1
    manifest: Digest
    """Of the bundle's MANIFEST.json."""
    parts: Annotated[tuple[ListedPart, ...], Field(min_length=1)]
    """In the order of the stream."""

    @model_validator(mode="after")
    def _numbered(self) -> Self:
        if [part.name for part in self.parts] != [part_name(number + 1) for number in range(len(self.parts))]:
            raise ValueError("parts must be numbered from 1")
        return self


def part_name(number: int) -> str:
    return f"bundle.tar.{number:04}"


def open_source(path: Path) -> BundleSource:
    """Open a directory, a directory of parts, or a tar file; raises ConfigurationError for any other."""
    if path.is_dir() and (path / PARTS).exists():
        with open_beneath(path, PARTS) as file:
            index = PartsIndex.decode(read_small(file, PARTS), PARTS)
        parts = [
            ArchivePart(path=path / part.name, size=part.size, sha256=part.sha256) for part in index.parts
        ]
        for part in parts:
            try:
                size = part.path.stat().st_size
            except OSError as error:
                raise BundleRefusedError(f"the part {part.path} is missing: copy it") from error
            if size != part.size:
                raise BundleRefusedError(
                    f"the part {part.path} has {size} bytes and should have {part.size}: copy it again"
                )
        return ArchiveSource(SplitReader(str(path), parts), manifest=index.manifest)
    if path.is_dir():
        return DirectorySource(path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigurationError(f"there is no bundle at {path}: {error.strerror}") from error
    return ArchiveSource(SplitReader(str(path), [ArchivePart(path=path, size=size, sha256=None)]))


def split(
    head: BundleHead,
    contents: Contents,
    directory: Path,
    part_bytes: int,
    count: ByteCount = ignore_bytes,
) -> PartsIndex:
    """Write the parts, the same for the same input; raises ConfigurationError for more than 9,999."""
    size = stream_size(head, contents.files)
    if size > part_bytes * MOST_PARTS:
        raise ConfigurationError(f"more than {MOST_PARTS} parts: make each larger with --part-bytes")
    with making(directory) as place:
        stream = byte_counter(count, size)(frames(head, contents))
        listed = list(_write_parts(place, stream, part_bytes))
        digest = f"sha256:{hashlib.sha256(head.manifest).hexdigest()}"
        index = PartsIndex(manifest=digest, parts=tuple(listed))
        # The index is written last: without it the directory is not a set of parts.
        write_durably(place / PARTS, index.encode())
    return index


def _write_parts(place: Path, stream: Iterable[bytes], part_bytes: int) -> Iterator[ListedPart]:
    pieces = _pieces(stream, part_bytes)
    for number, part in enumerate(pieces, 1):
        path = place / part_name(number)
        digest, size = hashlib.sha256(), 0
        try:
            with path.open("xb") as file:
                for piece in part:
                    file.write(piece)
                    digest.update(piece)
                    size += len(piece)
                sync_file(file)
        except OSError as error:
            raise storage_error(path, error) from error
        yield ListedPart(name=path.name, size=size, sha256=digest.hexdigest())


def _pieces(stream: Iterable[bytes], part_bytes: int) -> Iterator[Iterator[bytes]]:
    """Split a stream into parts of `part_bytes`; each part must be consumed before the next is requested."""
    waiting = iter(stream)
    rest = next(waiting, b"")

    def part() -> Iterator[bytes]:
        nonlocal rest
        left = part_bytes
        while left and rest:
            piece, rest = rest[:left], rest[left:]
            left -= len(piece)
            yield piece
            while not rest:
                following = next(waiting, None)
                if following is None:
                    return
                rest = following

    while rest:
        yield part()
