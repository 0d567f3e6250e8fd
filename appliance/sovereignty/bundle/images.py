"""
Container images as a bundle takes them: from `docker save`, an OCI archive or an OCI directory.

Nothing is unpacked to a disk.  What is already OCI keeps its digests; the older form of `docker save`
gets a manifest of its own, made of the configuration and the layers as they are.
"""

import json
import posixpath
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from appliance.errors import BundleRefusedError, ConfigurationError
from appliance.sovereignty.bundle.copying import file_chunks
from appliance.sovereignty.bundle.depot import Depot
from appliance.sovereignty.bundle.manifest import INDEX
from appliance.sovereignty.bundle.oci import (
    IMAGE_CONFIG,
    IMAGE_MANIFEST,
    INDEXES,
    LAYER,
    MANIFESTS,
    MAX_DOCUMENT_BYTES,
    REF_NAME,
    Descriptor,
    encode_manifest,
    parse_index,
    parse_manifest,
)
from appliance.sovereignty.bundle.source import CHUNK_BYTES

SAVED = "manifest.json"
"""The list of images in what `docker save` writes."""
CONTAINERD_NAME = "io.containerd.image.name"
LINKS = 8


class Archive(Protocol):
    """Files of an image, by the names they have in it."""

    name: str

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield a file's bytes; raises ConfigurationError when there is none."""
        ...

    def has(self, path: str) -> bool:
        """Whether there is such a file."""
        ...


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """
    Open a tar file or a directory with images.

    Raises:
        ConfigurationError: it is neither.
    """
    if path.is_dir():
        yield _Directory(path)
        return
    try:
        with tarfile.open(path, "r:*") as tar:
            yield _Tar(str(path), tar)
    except (OSError, tarfile.TarError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path} is no archive of an image: {reason}") from error


def import_image(archive: Archive, reference: str, depot: Depot) -> tuple[Descriptor, str | None]:
    """
    Copy an image into the depot.

    Returns:
        Its manifest or index, and the digest of its configuration where it is for one platform.

    Raises:
        ConfigurationError: the archive does not hold this image, or not whole.
    """
    try:
        if archive.has(INDEX):
            root = _choose(archive, reference)
            return root, _copy(archive, root, depot)
        if archive.has(SAVED):
            return _convert(archive, reference, depot)
        raise ConfigurationError(f"{archive.name} holds neither {INDEX} nor {SAVED}: it is no image")
    except BundleRefusedError as error:
        raise ConfigurationError(f"{archive.name} cannot be taken in: {error}") from error


def _choose(archive: Archive, reference: str) -> Descriptor:
    """The one entry of the index that is the image, by name, or because there is no other."""
    entries = parse_index(_small(archive, INDEX), INDEX).manifests
    names = {
        reference,
        reference.rpartition(":")[2],
        f"docker.io/{reference}",
        f"docker.io/library/{reference}",
    }
    named = [
        entry
        for entry in entries
        if entry.annotations.get(CONTAINERD_NAME, entry.annotations.get(REF_NAME)) in names
    ]
    chosen = named or list(entries)
    if len({entry.digest for entry in chosen}) != 1:
        raise ConfigurationError(
            f"{archive.name} holds {len(entries)} images, and not just one named {reference}"
        )
    return chosen[0]


def _copy(archive: Archive, entry: Descriptor, depot: Depot) -> str | None:
    """Copy a manifest or index and all below it, digests unchanged; return the image's id if it is one."""
    if entry.media_type not in INDEXES | MANIFESTS:
        raise ConfigurationError(f"{archive.name} holds {entry.digest}, which is no manifest")
    content = _small(archive, _blob(entry))
    depot.add_stream([content], entry.media_type, expected=entry.digest)
    if entry.media_type in INDEXES:
        for child in parse_index(content, entry.digest).manifests:
            _copy(archive, child, depot)
        return None
    manifest = parse_manifest(content, entry.digest)
    for blob in (manifest.config, *manifest.layers):
        depot.add_stream(archive.chunks(_blob(blob)), blob.media_type, expected=blob.digest)
    return manifest.config.digest


def _convert(archive: Archive, reference: str, depot: Depot) -> tuple[Descriptor, str]:
    """Make a manifest for an image in the older form of `docker save`."""
    try:
        images: list[dict[str, Any]] = json.loads(_small(archive, SAVED))
        named = [image for image in images if reference in (image["RepoTags"] or [])]
        chosen = named or images
        config, layers = str(chosen[0]["Config"]), [str(layer) for layer in chosen[0]["Layers"]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigurationError(f"{SAVED} in {archive.name} is not what `docker save` writes") from error
    if len(chosen) != 1:
        raise ConfigurationError(
            f"{archive.name} holds {len(images)} images, and not just one named {reference}"
        )
    described = depot.add(_small(archive, config), IMAGE_CONFIG)
    entries = [depot.add_stream(archive.chunks(layer), LAYER) for layer in layers]
    return depot.add(encode_manifest(described, entries), IMAGE_MANIFEST), described.digest


def _blob(entry: Descriptor) -> str:
    return f"blobs/{entry.digest.replace(':', '/')}"


def _small(archive: Archive, path: str) -> bytes:
    content = b""
    for chunk in archive.chunks(path):
        content += chunk
        if len(content) > MAX_DOCUMENT_BYTES:
            raise ConfigurationError(f"{path} in {archive.name} is too large to be what it is named")
    return content


class _Directory:
    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def has(self, path: str) -> bool:
        return (self._path / path).is_file()

    def chunks(self, path: str) -> Iterator[bytes]:
        return file_chunks(self._path / path)


class _Tar:
    def __init__(self, name: str, tar: tarfile.TarFile) -> None:
        self.name = name
        self._tar = tar
        self._members = {posixpath.normpath(member.name): member for member in tar.getmembers()}

    def has(self, path: str) -> bool:
        return path in self._members

    def chunks(self, path: str) -> Iterator[bytes]:
        member = self._members.get(path)
        for _ in range(LINKS):
            # Layers that are alike are links to each other in what `docker save` writes.
            if member is None or not member.issym():
                break
            target = posixpath.join(posixpath.dirname(member.name), member.linkname)
            member = self._members.get(posixpath.normpath(target))
        file = None if member is None else self._tar.extractfile(member)
        if file is None:
            raise ConfigurationError(f"{self.name} lacks {path}: save the image again")
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
