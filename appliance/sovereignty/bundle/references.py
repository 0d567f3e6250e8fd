"""
Image references, and the completeness check: the bundle has every image that a chart or compose file names.

Pure.  An image counts only if it is named by a digest that the bundle has: of its manifest, or of its
configuration, which is its id in an engine without a registry.  A tag alone could mean another image later.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from appliance.errors import BundleIncompleteError, ConfigurationError
from appliance.sovereignty.bundle.manifest import BundleManifest, Item, ItemKind

ANNOTATION = "artifacthub.io/images"
"""Where a chart lists its images, as YAML in a string."""

_DIGEST = re.compile(r"(?:^|@)(sha256:[0-9a-f]{64})$")
_INTERPOLATED = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*):?-([^}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    reference: str
    where: str
    """Document that contains it, for messages."""


def repository_of(item: Item) -> tuple[str, str]:
    """Repository and tag of an item in a site's registry, without the host of another registry."""
    if item.kind is ItemKind.CHART:
        # Helm writes a plus sign, which a tag may not have, as an underscore.
        return f"charts/{item.name.lower()}", item.version.replace("+", "_")
    repository, _, tag = (item.reference or item.label).rpartition(":")
    host, slash, rest = repository.partition("/")
    foreign = slash and ("." in host or ":" in host or host == "localhost")
    return (rest if foreign else repository), tag


def chart_path(item: Item) -> str:
    """Path of a chart below the directory of `appliance bundle load --files`."""
    return f"charts/{item.name}-{item.version}.tgz"


def images_in(text: str, where: str, variables: Mapping[str, str] | None = None) -> list[Named]:
    """
    Find the images that YAML text names: every `image` string, or an image volume's reference.

    `variables` are values for `${NAME:-default}` in compose files.  Raises ConfigurationError for other text.
    """
    known = variables or {}
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    found = {
        _INTERPOLATED.sub(lambda match: known.get(match[1], match[2]), reference)
        for document in documents
        for reference in _walk(document)
    }
    return [Named(reference=reference, where=where) for reference in sorted(found)]


def annotated_images(chart_yaml: Mapping[str, Any], where: str) -> list[Named]:
    """The images in a chart's annotation; raises ConfigurationError if it is absent or malformed."""
    listed = (chart_yaml.get("annotations") or {}).get(ANNOTATION)
    if not isinstance(listed, str):
        message = f"{where} has no annotation {ANNOTATION}, and was not rendered"
        raise ConfigurationError(f"{message}: install helm and set `values`, or list its images")
    return images_in(listed, where)


def check_complete(manifest: BundleManifest, named: list[Named]) -> None:
    """Raise BundleIncompleteError if a named image is missing, or is named by tag only."""
    images = list(manifest.of_kind(ItemKind.IMAGE))
    known = {item.digest for item in images} | {item.image_id for item in images if item.image_id}
    for image in named:
        digest = _DIGEST.search(image.reference)
        if digest is None:
            raise BundleIncompleteError(
                f"{image.where} names {image.reference} without a digest: a tag can move, add @sha256:..."
            )
        if digest[1] not in known:
            raise BundleIncompleteError(f"{image.where} names {image.reference}, which is not in the bundle")


def check_listed(manifest: BundleManifest, listed: list[Named], unused: Collection[str]) -> None:
    """
    Raise BundleIncompleteError if an image that a chart lists is missing, except those the site never uses.

    A chart's list has names and tags; the digests are in values.  So the name and tag must be those of an
    image of the bundle, or the digest, if there is one.
    """
    known = {_plain(item.reference) for item in manifest.of_kind(ItemKind.IMAGE) if item.reference}
    for image in listed:
        if image.reference in unused or _plain(image.reference) in known:
            continue
        if not _DIGEST.search(image.reference):
            raise BundleIncompleteError(
                f"{image.where} lists {image.reference}, which is not in the bundle: add it, or list it "
                "under `unused`"
            )
        check_complete(manifest, [image])


def _plain(reference: str) -> str:
    """A reference without the prefixes that engines add to short names."""
    return reference.removeprefix("docker.io/").removeprefix("library/")


def _walk(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for inner in value:
            yield from _walk(inner)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name == "image" and isinstance(inner, str) and inner:
                yield inner
            elif name == "image" and isinstance(inner, dict) and isinstance(inner.get("reference"), str):
                yield inner["reference"]
            else:
                yield from _walk(inner)
