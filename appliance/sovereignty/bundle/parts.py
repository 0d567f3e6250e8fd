"""
A bundle cut into parts that fit on a carrier medium, with an index of their hashes.

PARTS.json is not signed: it tells a damaged part from a good one and which bundle they make up.  What
the bundle holds is proved by the manifest alone, whatever PARTS.json says.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from appliance.errors import BundleRefusedError, ConfigurationError
from appliance.infra.files import sync_file
from appliance.sovereignty.bundle.archive import ArchiveSource, frames, stream_size
from appliance.sovereignty.bundle.copying import making, storage_error, write_durably
from appliance.sovereignty.bundle.manifest import Count, Digest, Hex
from appliance.sovereignty.bundle.record import Record
from appliance.sovereignty.bundle.source import (
    Contents,
    DirectorySource,
    Head,
    Source,
    open_beneath,
    read_small,
)
from appliance.sovereignty.bundle.tape import Part, Tape

PARTS = "PARTS.json"
FAT32_BYTES = 4 * 2**30 - 2**20
"""Default size of a part: FAT32 holds no file of 4 GiB."""
MOST_PARTS = 9999


class ListedPart(Record):
    """One part, as the index has it."""

    name: Annotated[str, Field(pattern=r"^bundle\.tar\.[0-9]{4}$")]
    size: Count
    sha256: Hex


class PartsIndex(Record):
    """PARTS.json."""

    format: Literal[1] = 1
    manifest: Digest
    """Digest of the bundle's MANIFEST.json."""
    parts: Annotated[tuple[ListedPart, ...], Field(min_length=1)]
    """In the order in which they make up the stream."""

    @model_validator(mode="after")
    def _numbered(self) -> Self:
        if [part.name for part in self.parts] != [part_name(number + 1) for number in range(len(self.parts))]:
            raise ValueError("parts must be numbered from 1 on")
        return self


def part_name(number: int) -> str:
    """Return the name of a part, counted from 1."""
    return f"bundle.tar.{number:04}"


def open_source(path: Path) -> Source:
    """
    Return the bundle at a path: a directory, a directory of parts, or a tar file.

    Raises:
        ConfigurationError: there is nothing at the path.
        BundleRefusedError: the index of the parts is malformed, or a part is missing.
    """
    if path.is_dir() and (path / PARTS).exists():
        with open_beneath(path, PARTS) as file:
            index = PartsIndex.decode(read_small(file, PARTS), PARTS)
        parts = [Part(path=path / part.name, size=part.size, sha256=part.sha256) for part in index.parts]
        for part in parts:
            _check_size(part)
        return ArchiveSource(Tape(str(path), parts), manifest=index.manifest)
    if path.is_dir():
        return DirectorySource(path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigurationError(f"there is no bundle at {path}: {error.strerror}") from error
    return ArchiveSource(Tape(str(path), [Part(path=path, size=size, sha256=None)]))


def split(head: Head, contents: Contents, directory: Path, part_bytes: int) -> PartsIndex:
    """
    Write a bundle as parts into a new directory; what is split twice is cut alike.

    Raises:
        BundleRefusedError: the bundle is not whole.
        BundleStorageError: the parts cannot be written.
        ConfigurationError: it would take more than 9,999 parts.
    """
    if stream_size(head, contents.files) > part_bytes * MOST_PARTS:
        raise ConfigurationError(f"more than {MOST_PARTS} parts: make each larger with --part-bytes")
    with making(directory) as place:
        listed = list(_write_parts(place, frames(head, contents), part_bytes))
        digest = f"sha256:{hashlib.sha256(head.manifest).hexdigest()}"
        index = PartsIndex(manifest=digest, parts=tuple(listed))
        # The index is written last: without it a directory holds no parts.
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
    """Cut a stream into parts of so many bytes; each part is to be used up before the next is asked for."""
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


def _check_size(part: Part) -> None:
    try:
        size = part.path.stat().st_size
    except OSError as error:
        raise BundleRefusedError(f"the part {part.path} is missing: copy it") from error
    if size != part.size:
        raise BundleRefusedError(
            f"the part {part.path} has {size} bytes and should have {part.size}: copy it again"
        )
