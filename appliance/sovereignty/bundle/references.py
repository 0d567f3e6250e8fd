"""
What images are called, and the completeness gate: every one that a chart or compose file names is there.

Pure.  An image counts only if it is named by a digest that the bundle has: of its manifest, or of its
configuration, which is what an engine without a registry calls it by.  A tag alone could mean
another image tomorrow.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from appliance.errors import BundleIncompleteError, ConfigurationError
from appliance.sovereignty.bundle.manifest import Item, Kind, Manifest

ANNOTATION = "artifacthub.io/images"
"""Where a chart lists its images, as YAML in a text."""

_DIGEST = re.compile(r"(?:^|@)(sha256:[0-9a-f]{64})$")
_INTERPOLATED = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*):?-([^}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """An image as something names it."""

    reference: str
    where: str
    """What names it, for messages."""


def repository_of(item: Item) -> tuple[str, str]:
    """Return the repository and tag of an item in a site's registry; another registry's host is left off."""
    if item.kind is Kind.CHART:
        # Helm writes a plus sign, which a tag may not have, as an underscore.
        return f"charts/{item.name.lower()}", item.version.replace("+", "_")
    repository, _, tag = (item.reference or item.label).rpartition(":")
    host, slash, rest = repository.partition("/")
    foreign = slash and ("." in host or ":" in host or host == "localhost")
    return (rest if foreign else repository), tag


def chart_path(item: Item) -> str:
    """Where `appliance bundle load --files` puts a chart."""
    return f"charts/{item.name}-{item.version}.tgz"


def images_in(text: str, where: str, variables: Mapping[str, str] | None = None) -> list[Named]:
    """
    Find the images that YAML text names: every `image` that is a text, or an image volume's reference.

    Args:
        text: YAML, of any number of documents.
        where: what it is, for messages.
        variables: values of what compose files write as `${NAME:-default}`; the default counts without one.

    Raises:
        ConfigurationError: it is not YAML.
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
    """
    Read the images that a chart says it can ask for.

    Raises:
        ConfigurationError: there is no such list, or it is malformed.
    """
    listed = (chart_yaml.get("annotations") or {}).get(ANNOTATION)
    if not isinstance(listed, str):
        message = f"{where} has no annotation {ANNOTATION}, and was not rendered"
        raise ConfigurationError(f"{message}: install helm and give it `values`, or list its images")
    return images_in(listed, where)


def check_complete(manifest: Manifest, named: list[Named]) -> None:
    """
    Check that the bundle has every image that is named.

    Raises:
        BundleIncompleteError: one is not there, or is named by tag only.
    """
    images = list(manifest.of_kind(Kind.IMAGE))
    known = {item.digest for item in images} | {item.image_id for item in images if item.image_id}
    for image in named:
        digest = _DIGEST.search(image.reference)
        if digest is None:
            raise BundleIncompleteError(
                f"{image.where} names {image.reference} without a digest: a tag can be moved, add @sha256:..."
            )
        if digest[1] not in known:
            raise BundleIncompleteError(f"{image.where} names {image.reference}, which is not in the bundle")


def check_listed(manifest: Manifest, listed: list[Named], unused: Collection[str]) -> None:
    """
    Check that the bundle has every image a chart can ask for, but those the site never uses.

    A chart's list has names and tags; by which digest each is taken, values say.  So here the name
    and tag must be those of an image of the bundle, or the digest, where there is one.

    Raises:
        BundleIncompleteError: one is not there.
    """
    known = {_plain(item.reference) for item in manifest.of_kind(Kind.IMAGE) if item.reference}
    for image in listed:
        if image.reference in unused or _plain(image.reference) in known:
            continue
        if not _DIGEST.search(image.reference):
            raise BundleIncompleteError(
                f"{image.where} can ask for {image.reference}, which is not in the bundle: add it, or say "
                "under `unused` that the site never uses it"
            )
        check_complete(manifest, [image])


def _plain(reference: str) -> str:
    """A reference without what engines add to short names."""
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
