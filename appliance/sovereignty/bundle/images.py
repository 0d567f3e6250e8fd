"""
Import container images: from `docker save`, an OCI archive or an OCI directory.

Nothing is unpacked to disk.  OCI content keeps its digests; the older format of `docker save` gets a new
manifest of its unchanged configuration and layers.
"""

import json
import posixpath
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from appliance.errors import BundleRefusedError, ConfigurationError
from appliance.sovereignty.bundle.artefacts import BlobStore
from appliance.sovereignty.bundle.copying import file_chunks
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
"""The list of images in the output of `docker save`."""
CONTAINERD_NAME = "io.containerd.image.name"
LINKS = 8


class Archive(Protocol):
    name: str

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield a file's bytes; raises ConfigurationError if there is none."""
        ...

    def has(self, path: str) -> bool: ...


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open a tar file or a directory of images; raises ConfigurationError if it is neither."""
    if path.is_dir():
        yield _Directory(path)
        return
    try:
        with tarfile.open(path, "r:*") as tar:
            yield _Tar(str(path), tar)
    except (OSError, tarfile.TarError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path} is not an image archive: {reason}") from error


def import_image(archive: Archive, reference: str, store: BlobStore) -> tuple[Descriptor, str | None]:
    """Copy an image into the store; returns its root, and its image id if it is for one platform."""
    try:
        if archive.has(INDEX):
            root = _choose(archive, reference)
            return root, _copy(archive, root, store)
        if archive.has(SAVED):
            return _convert(archive, reference, store)
        raise ConfigurationError(f"{archive.name} has neither {INDEX} nor {SAVED}: it is not an image")
    except BundleRefusedError as error:
        raise ConfigurationError(f"{archive.name} cannot be imported: {error}") from error


def _choose(archive: Archive, reference: str) -> Descriptor:
    """The entry of the index that is the image: by name, or the only one."""
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
            f"{archive.name} has {len(entries)} images, and not exactly one named {reference}"
        )
    return chosen[0]


def _copy(archive: Archive, entry: Descriptor, store: BlobStore) -> str | None:
    """Copy a manifest or index and everything below it, digests unchanged; returns an image's id."""
    if entry.media_type not in INDEXES | MANIFESTS:
        raise ConfigurationError(f"{archive.name} has {entry.digest}, which is not a manifest")
    content = _small(archive, _blob(entry))
    store.add_stream([content], entry.media_type, expected=entry.digest)
    if entry.media_type in INDEXES:
        for child in parse_index(content, entry.digest).manifests:
            _copy(archive, child, store)
        return None
    manifest = parse_manifest(content, entry.digest)
    for blob in (manifest.config, *manifest.layers):
        store.add_stream(archive.chunks(_blob(blob)), blob.media_type, expected=blob.digest)
    return manifest.config.digest


def _convert(archive: Archive, reference: str, store: BlobStore) -> tuple[Descriptor, str]:
    """Create a manifest for an image in the older format of `docker save`."""
    try:
        images: list[dict[str, Any]] = json.loads(_small(archive, SAVED))
        named = [image for image in images if reference in (image["RepoTags"] or [])]
        chosen = named or images
        config, layers = str(chosen[0]["Config"]), [str(layer) for layer in chosen[0]["Layers"]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigurationError(f"{SAVED} in {archive.name} is not what `docker save` writes") from error
    if len(chosen) != 1:
        raise ConfigurationError(
            f"{archive.name} has {len(images)} images, and not exactly one named {reference}"
        )
    described = store.add(_small(archive, config), IMAGE_CONFIG)
    entries = [store.add_stream(archive.chunks(layer), LAYER) for layer in layers]
    return store.add(encode_manifest(described, entries), IMAGE_MANIFEST), described.digest


def _blob(entry: Descriptor) -> str:
    return f"blobs/{entry.digest.replace(':', '/')}"


def _small(archive: Archive, path: str) -> bytes:
    content = b""
    for chunk in archive.chunks(path):
        content += chunk
        if len(content) > MAX_DOCUMENT_BYTES:
            raise ConfigurationError(f"{path} in {archive.name} is too large")
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
            # `docker save` stores identical layers as links to each other.
            if member is None or not member.issym():
                break
            target = posixpath.join(posixpath.dirname(member.name), member.linkname)
            member = self._members.get(posixpath.normpath(target))
        file = None if member is None else self._tar.extractfile(member)
        if file is None:
            raise ConfigurationError(f"{self.name} lacks {path}: save the image again")
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
