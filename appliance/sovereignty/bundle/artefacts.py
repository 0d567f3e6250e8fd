"""
Blobs of a bundle that is being built, and OCI artefacts.

Charts are stored as in Helm registries, other items as files.  A model has one blob per file, so that the
difference to a version with one changed file is that file.
"""

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from appliance.errors import ConfigurationError
from appliance.infra.canonical_json import canonical
from appliance.infra.files import sync_file
from appliance.sovereignty.bundle.copying import PARTIAL, file_chunks, storage_error
from appliance.sovereignty.bundle.manifest import BLOBS, BundleFile, ItemKind
from appliance.sovereignty.bundle.oci import (
    ARTEFACT,
    EMPTY,
    EMPTY_CONTENT,
    HELM_CHART,
    HELM_CONFIG,
    IMAGE_MANIFEST,
    TITLE,
    Descriptor,
    describe,
    encode_manifest,
)


class BlobStore:
    """A directory of blobs, each named by its hash and stored once."""

    def __init__(
        self, place: Path, counted: Callable[[Iterable[bytes]], Iterable[bytes]] = lambda chunks: chunks
    ) -> None:
        """All bytes that are added pass through `counted`."""
        self._place = place
        self._counted = counted
        self._files: dict[str, BundleFile] = {}
        (place / BLOBS).mkdir(parents=True)

    @property
    def files(self) -> list[BundleFile]:
        return list(self._files.values())

    def add(self, content: bytes, media_type: str) -> Descriptor:
        return self.add_stream([content], media_type)

    def add_file(self, path: Path, media_type: str) -> Descriptor:
        return self.add_stream(file_chunks(path), media_type)

    def add_stream(
        self, chunks: Iterable[bytes], media_type: str, *, expected: str | None = None
    ) -> Descriptor:
        """Add a blob; raises ConfigurationError if it has another digest than `expected`."""
        partial = self._place / BLOBS / f"blob{PARTIAL}"
        digest, size = hashlib.sha256(), 0
        try:
            with partial.open("wb") as file:
                for chunk in self._counted(chunks):
                    digest.update(chunk)
                    size += len(chunk)
                    file.write(chunk)
                sync_file(file)
            hexadecimal = digest.hexdigest()
            if expected is not None and expected != f"sha256:{hexadecimal}":
                raise ConfigurationError(
                    f"a blob has the digest sha256:{hexadecimal}, and should have {expected}"
                )
            partial.rename(self._place / BLOBS / hexadecimal)
        except OSError as error:
            raise storage_error(partial, error) from error
        self._note(f"{BLOBS}/{hexadecimal}", size, hexadecimal, media_type)
        return Descriptor(media_type=media_type, digest=f"sha256:{hexadecimal}", size=size)

    def place(self, path: str, content: bytes, media_type: str) -> None:
        """Write a file that is not a blob."""
        try:
            (self._place / path).write_bytes(content)
        except OSError as error:
            raise storage_error(self._place / path, error) from error
        entry = describe(content, media_type)
        self._note(path, entry.size, entry.digest.removeprefix("sha256:"), media_type)

    def _note(self, path: str, size: int, sha256: str, media_type: str) -> None:
        # The same bytes may be added under two media types; the first one counts.
        self._files.setdefault(path, BundleFile(path=path, size=size, sha256=sha256, media_type=media_type))


MEDIA_TYPES = {
    ".json": "application/json",
    ".safetensors": "application/vnd.safetensors",
    ".whl": "application/zip",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
}
OTHER = "application/octet-stream"
MAX_CHART_YAML_BYTES = 2**20


def add_files(kind: ItemKind, files: Iterable[tuple[str, Path]], store: BlobStore) -> Descriptor:
    """Add files, as (path when loaded, file), as one artefact; raises ConfigurationError if none."""
    layers: dict[str, Descriptor] = {}
    for title, path in sorted(files):
        if title in layers:
            raise ConfigurationError(f"two files would be loaded to {title}: rename {path}")
        entry = store.add_file(path, MEDIA_TYPES.get(path.suffix, OTHER))
        layers[title] = entry.model_copy(update={"annotations": {TITLE: title}})
    if not layers:
        raise ConfigurationError(f"a {kind} has no files: check the recipe")
    config = store.add(EMPTY_CONTENT, EMPTY)
    manifest = encode_manifest(config, list(layers.values()), artefact=ARTEFACT.format(kind=kind))
    return store.add(manifest, IMAGE_MANIFEST)


def add_chart(path: Path, store: BlobStore) -> tuple[Descriptor, dict[str, Any]]:
    """Add a packaged chart as `helm push` does, and return its Chart.yaml too; raises ConfigurationError."""
    about = read_chart_yaml(path)
    layer = store.add_file(path, HELM_CHART)
    titled = layer.model_copy(update={"annotations": {TITLE: f"{about['name']}-{about['version']}.tgz"}})
    config = store.add(canonical(json.loads(json.dumps(about, default=str))), HELM_CONFIG)
    return store.add(encode_manifest(config, [titled]), IMAGE_MANIFEST), about


def read_chart_yaml(path: Path) -> dict[str, Any]:
    """Chart.yaml of a packaged chart; raises ConfigurationError if it lacks name or version."""
    try:
        with tarfile.open(path, "r:gz") as tar:
            for member in tar:
                if PurePosixPath(member.name).match("*/Chart.yaml") and member.name.count("/") == 1:
                    file = tar.extractfile(member)
                    about = yaml.safe_load(file.read(MAX_CHART_YAML_BYTES)) if file is not None else None
                    if isinstance(about, dict) and {"name", "version"} <= about.keys():
                        return about
    except (OSError, tarfile.TarError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path} is not a packaged chart: {reason}") from error
    raise ConfigurationError(f"{path} is not a packaged chart: it has no Chart.yaml with name and version")


def files_below(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield a directory's files with relative paths, without hidden ones; raises ConfigurationError."""
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is not a directory")
    for path in sorted(directory.rglob("*")):
        inner = path.relative_to(directory)
        # Download tools leave caches that contain times, which would make two builds differ.
        if path.is_file() and not any(step.startswith(".") for step in inner.parts):
            yield inner.as_posix(), path
