"""
The tree of blobs below each item of a bundle, and whether index, items and files agree.

A blob that no item refers to, a name in index.json with another digest than in the manifest, and a size
that differs between two places are refused, so that two readers of a bundle cannot see different content.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from appliance.errors import BundleRefusedError
from appliance.sovereignty.bundle.manifest import (
    INDEX,
    BundleFile,
    BundleManifest,
    Item,
    ItemKind,
    is_inner_path,
)
from appliance.sovereignty.bundle.oci import (
    INDEXES,
    MANIFESTS,
    MAX_DOCUMENT_BYTES,
    REF_NAME,
    TITLE,
    Descriptor,
    Platform,
    parse_index,
    parse_manifest,
)

DEEPEST = 4
"""Maximum nesting of indexes."""

Read = Callable[[BundleFile], bytes]
"""Returns the verified bytes of a small file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformImage:
    file: BundleFile
    config: BundleFile
    layers: tuple[BundleFile, ...]
    titles: tuple[str, ...]
    """Names of the layers that are files; empty for others."""
    platform: Platform | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTree:
    item: Item
    documents: tuple[BundleFile, ...]
    """Indexes and manifests, each after those it refers to, the item's own last."""
    images: tuple[PlatformImage, ...]

    @property
    def blobs(self) -> tuple[BundleFile, ...]:
        """Configurations and layers, without duplicates."""
        found = (file for image in self.images for file in (image.config, *image.layers))
        return tuple({file.path: file for file in found}.values())

    def named_files(self) -> dict[str, BundleFile]:
        """Files by the path they are loaded to; raises BundleRefusedError for an unsafe or repeated path."""
        named: dict[str, BundleFile] = {}
        for image in self.images:
            for title, file in zip(image.titles, image.layers, strict=True):
                if not is_inner_path(title) or title in named:
                    raise BundleRefusedError(
                        f"{self.item.label}: the path {title!r} is unsafe or occurs twice"
                    )
                named[title] = file
        return named


def read_trees(manifest: BundleManifest, read: Read) -> tuple[ItemTree, ...]:
    """Read every item's tree; raises BundleRefusedError if index.json, items and files do not agree."""
    blobs = manifest.blobs()
    by_path = {file.path: file for file in manifest.files}
    listed = parse_index(read(by_path[INDEX]), INDEX).manifests
    found = [(entry.annotations.get(REF_NAME), entry.digest) for entry in listed]
    if found != [(item.label, item.digest) for item in manifest.items]:
        raise BundleRefusedError(f"{INDEX} and the manifest name different items: a name was moved")
    trees = tuple(
        _Walk(blobs, read).tree(item, entry) for item, entry in zip(manifest.items, listed, strict=True)
    )
    used = {file.path for tree in trees for file in (*tree.documents, *tree.blobs)}
    for file in blobs.values():
        if file.path not in used:
            raise BundleRefusedError(f"{file.path} belongs to no item of the bundle")
    for item in manifest.items:
        if item.sbom is not None and item.sbom not in blobs:
            raise BundleRefusedError(f"the bill of materials of {item.label} is not in the bundle")
    return trees


class _Walk:
    def __init__(self, blobs: dict[str, BundleFile], read: Read) -> None:
        self._blobs = blobs
        self._read = read

    def tree(self, item: Item, entry: Descriptor) -> ItemTree:
        documents: dict[str, BundleFile] = {}
        images = tuple(self._images(entry, documents, 0))
        tree = ItemTree(item=item, documents=tuple(documents.values()), images=images)
        ids = {f"sha256:{image.config.sha256}" for image in images}
        if item.image_id is not None and item.image_id not in ids:
            raise BundleRefusedError(f"{item.label} does not have the image id in the manifest")
        if item.kind not in {ItemKind.IMAGE, ItemKind.CHART}:
            tree.named_files()
        return tree

    def _images(
        self, entry: Descriptor, documents: dict[str, BundleFile], depth: int
    ) -> Iterator[PlatformImage]:
        file = self._file(entry)
        if file.size > MAX_DOCUMENT_BYTES or depth > DEEPEST:
            raise BundleRefusedError(f"{file.path} is too large or nested too deep for an OCI manifest")
        if entry.media_type in INDEXES:
            for child in parse_index(self._read(file), file.path).manifests:
                yield from self._images(child, documents, depth + 1)
        elif entry.media_type in MANIFESTS:
            manifest = parse_manifest(self._read(file), file.path)
            yield PlatformImage(
                file=file,
                config=self._file(manifest.config),
                layers=tuple(self._file(layer) for layer in manifest.layers),
                titles=tuple(layer.annotations.get(TITLE, "") for layer in manifest.layers),
                platform=entry.platform,
            )
        else:
            raise BundleRefusedError(f"{file.path} has the type {entry.media_type}, which is not a manifest")
        documents[file.path] = file

    def _file(self, entry: Descriptor) -> BundleFile:
        file = self._blobs.get(entry.digest)
        if file is None or file.size != entry.size:
            raise BundleRefusedError(f"the blob {entry.digest} is not in the manifest, or has another size")
        return file
