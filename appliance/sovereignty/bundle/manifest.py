"""
MANIFEST.json: what a bundle holds, byte for byte, and where each thing came from.

Pure.  Every file's path is one of three shapes, so no path in a manifest can lead out of a
directory; names that become directories when loaded are held to a pattern for the same reason.
"""

import hashlib
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from appliance.sovereignty.bundle.record import Record

MANIFEST = "MANIFEST.json"
SIGNATURE = "MANIFEST.sig"
BASE = "BASE.json"
LAYOUT = "oci-layout"
INDEX = "index.json"
BLOBS = "blobs/sha256"
LAYOUT_CONTENT = b'{"imageLayoutVersion":"1.0.0"}'
"""The whole of `oci-layout` (OCI image layout, version 1.0.0)."""

_HEX = r"[0-9a-f]{64}"
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*(?:/[A-Za-z0-9][A-Za-z0-9._+-]*)*"
_TEXT = r"[^\x00-\x1f\x7f]+"

Hex = Annotated[str, Field(pattern=f"^{_HEX}$")]
Digest = Annotated[str, Field(pattern=f"^sha256:{_HEX}$")]
Version = Annotated[str, Field(pattern=rf"^{_NUMBER}\.{_NUMBER}\.{_NUMBER}$")]
Name = Annotated[str, Field(pattern=f"^{_NAME}$", max_length=128)]
Text = Annotated[str, Field(pattern=f"^{_TEXT}$", max_length=512)]
Reference = Annotated[
    str, Field(pattern=r"^[a-z0-9][a-z0-9.:/_-]*:[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=255)
]
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]


class Kind(StrEnum):
    """What an item is, which says where it is loaded."""

    IMAGE = "image"
    CHART = "chart"
    MODEL = "model"
    WHEELS = "wheels"
    FILES = "files"
    SBOM = "sbom"


class BundleFile(Record):
    """One file of the bundle."""

    path: Annotated[str, Field(pattern=f"^(?:{LAYOUT}|{INDEX}|{BLOBS}/{_HEX})$")]
    size: Count
    """Bytes."""
    sha256: Hex
    media_type: Text

    @model_validator(mode="after")
    def _blob_bears_its_hash(self) -> Self:
        if self.path.startswith("blobs/") and self.path != f"{BLOBS}/{self.sha256}":
            raise ValueError("a blob's path must end in its SHA-256")
        return self


class Item(Record):
    """One thing the bundle brings: the root of a tree of blobs."""

    kind: Kind
    name: Name
    version: Text
    digest: Digest
    """Of its OCI manifest or index."""
    reference: Reference | None = None
    """Name and tag of an image."""
    image_id: Digest | None = None
    """Digest of an image's configuration: what a container engine calls its id."""
    licence: Text
    """SPDX expression."""
    origin: Text
    """Where it was taken from."""
    sbom: Digest | None = None
    """Blob with its software bill of materials (CycloneDX or SPDX JSON)."""

    @model_validator(mode="after")
    def _version_stays_below(self) -> Self:
        # Charts and bills of materials are loaded to paths that the version is a part of.
        if self.kind in {Kind.CHART, Kind.SBOM} and not is_inner_path(self.version):
            raise ValueError("its version is part of a path, and must be a plain one")
        return self

    @property
    def label(self) -> str:
        """How index.json names it: an image by its reference, anything else by kind, name and version."""
        return self.reference or f"{self.kind}/{self.name}:{self.version}"


class Manifest(Record):
    """Everything a bundle holds."""

    format: Literal[1] = 1
    name: Name
    version: Version
    upgrade_from: Version
    """Oldest version that this one can follow."""
    created: Count
    """Seconds since the epoch; SOURCE_DATE_EPOCH of the build."""
    key_not_after: Count
    """When whoever signs stops vouching for the key, in seconds since the epoch."""
    items: tuple[Item, ...]
    """Sorted by label."""
    files: tuple[BundleFile, ...]
    """Every file but MANIFEST.json, MANIFEST.sig and BASE.json, sorted by path."""

    @model_validator(mode="after")
    def _sorted_and_once(self) -> Self:
        labels = [item.label for item in self.items]
        paths = [file.path for file in self.files]
        if labels != sorted(set(labels)) or paths != sorted(set(paths)):
            raise ValueError("items and files must be sorted, each named once")
        if not {LAYOUT, INDEX} <= set(paths):
            raise ValueError(f"{LAYOUT} and {INDEX} must be listed")
        return self

    @property
    def digest(self) -> str:
        """Digest of MANIFEST.json, which names the bundle."""
        return f"sha256:{hashlib.sha256(self.encode()).hexdigest()}"

    @property
    def size(self) -> int:
        """Bytes of all files it lists."""
        return sum(file.size for file in self.files)

    def blobs(self) -> dict[str, BundleFile]:
        """The blobs by digest."""
        return {f"sha256:{file.sha256}": file for file in self.files if file.path.startswith("blobs/")}

    def of_kind(self, *kinds: Kind) -> Iterator[Item]:
        """The items of these kinds."""
        return (item for item in self.items if item.kind in kinds)


def version_order(version: str) -> tuple[int, ...]:
    """What versions are compared by: three numbers."""
    return tuple(int(number) for number in version.split("."))


def is_inner_path(path: str) -> bool:
    """Whether a path that a bundle names stays below the directory it is loaded into."""
    steps = path.split("/")
    return re.fullmatch(r"[^\x00-\x1f\x7f\\]{1,255}", path) is not None and not {"", ".", ".."} & set(steps)
