"""
MANIFEST.json, every file of a bundle with its hash and every item with its origin, and BASE.json.

Pure.  A file's path has one of three shapes, so no path in a manifest can leave the directory; names that
become directories when loaded must match a pattern for the same reason.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from appliance.errors import ApplianceError, BundleIncompleteError, BundleRefusedError
from appliance.infra.canonical_json import CanonicalModel

MAX_RECORD_BYTES = 64 * 2**20
"""Enough for 300,000 files; a larger file is refused before it is read into memory."""


class BundleRecord(CanonicalModel):
    """A JSON file of a bundle, or a part of one."""

    refusal: ClassVar[type[ApplianceError]] = BundleRefusedError


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


class ItemKind(StrEnum):
    """Decides where an item is loaded."""

    IMAGE = "image"
    CHART = "chart"
    MODEL = "model"
    WHEELS = "wheels"
    FILES = "files"
    SBOM = "sbom"


class BundleFile(BundleRecord):
    path: Annotated[str, Field(pattern=f"^(?:{LAYOUT}|{INDEX}|{BLOBS}/{_HEX})$")]
    size: Count
    sha256: Hex
    media_type: Text

    @model_validator(mode="after")
    def _blob_bears_its_hash(self) -> Self:
        if self.path.startswith("blobs/") and self.path != f"{BLOBS}/{self.sha256}":
            raise ValueError("a blob's path must end in its SHA-256")
        return self


class Item(BundleRecord):
    """One item of the bundle: the root of a tree of blobs."""

    kind: ItemKind
    name: Name
    version: Text
    digest: Digest
    """Of its OCI manifest or index."""
    reference: Reference | None = None
    """Name and tag of an image."""
    image_id: Digest | None = None
    """Digest of an image's configuration: its id in a container engine."""
    licence: Text
    """SPDX expression."""
    origin: Text
    """Where it was obtained."""
    sbom: Digest | None = None
    """Blob with its software bill of materials (CycloneDX or SPDX JSON)."""

    @model_validator(mode="after")
    def _version_stays_below(self) -> Self:
        # Charts and bills of materials are loaded to paths that contain the version.
        if self.kind in {ItemKind.CHART, ItemKind.SBOM} and not is_inner_path(self.version):
            raise ValueError("the version is part of a path and must not leave it")
        return self

    @property
    def label(self) -> str:
        """Name in index.json: an image's reference, otherwise kind, name and version."""
        return self.reference or f"{self.kind}/{self.name}:{self.version}"


class BundleManifest(BundleRecord):
    format: Literal[1] = 1
    name: Name
    version: Version
    upgrade_from: Version
    """Oldest version that this one can follow."""
    created: Count
    """Seconds since the epoch; SOURCE_DATE_EPOCH of the build."""
    key_not_after: Count
    """Until when the signer vouches for the key, in seconds since the epoch."""
    items: tuple[Item, ...]
    """Sorted by label."""
    files: tuple[BundleFile, ...]
    """Every file but MANIFEST.json, MANIFEST.sig and BASE.json, sorted by path."""

    @model_validator(mode="after")
    def _sorted_and_once(self) -> Self:
        labels = [item.label for item in self.items]
        paths = [file.path for file in self.files]
        if labels != sorted(set(labels)) or paths != sorted(set(paths)):
            raise ValueError("items and files must be sorted and unique")
        if not {LAYOUT, INDEX} <= set(paths):
            raise ValueError(f"{LAYOUT} and {INDEX} must be listed")
        return self

    @property
    def digest(self) -> str:
        """Digest of MANIFEST.json; it identifies the bundle."""
        return f"sha256:{hashlib.sha256(self.encode()).hexdigest()}"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def blobs(self) -> dict[str, BundleFile]:
        """By digest."""
        return {f"sha256:{file.sha256}": file for file in self.files if file.path.startswith("blobs/")}

    def of_kind(self, *kinds: ItemKind) -> Iterator[Item]:
        return (item for item in self.items if item.kind in kinds)


def version_order(version: str) -> tuple[int, ...]:
    """Sort key of a version: three numbers."""
    return tuple(int(number) for number in version.split("."))


def is_inner_path(path: str) -> bool:
    """Whether a path in a bundle stays below the directory it is loaded into."""
    steps = path.split("/")
    return re.fullmatch(r"[^\x00-\x1f\x7f\\]{1,255}", path) is not None and not {"", ".", ".."} & set(steps)


class Base(BundleRecord):
    """
    BASE.json of a difference: a bundle without the blobs of an earlier one.

    Manifest and signature are those of the whole bundle, so a difference needs no key, and a loaded
    difference is equivalent to the whole.  BASE.json is not signed, and need not be: a blob is taken from
    the base only if it has the hash in the signed manifest.
    """

    format: Literal[1] = 1
    name: Name
    version: Version
    created: Count
    manifest: Digest
    """Digest of the base's MANIFEST.json."""
    omitted: tuple[Digest, ...]
    """Sorted blobs of the base."""


def make_base(older: BundleManifest, newer: BundleManifest) -> Base:
    """The difference between two bundles; raises BundleRefusedError unless they are versions of one."""
    if older.name != newer.name:
        raise BundleRefusedError(f"{older.name} and {newer.name} are not two versions of one bundle")
    omitted = sorted(older.blobs().keys() & newer.blobs().keys())
    return Base(
        name=older.name,
        version=older.version,
        created=older.created,
        manifest=older.digest,
        omitted=tuple(omitted),
    )


def present_files(manifest: BundleManifest, base: Base | None) -> Sequence[BundleFile]:
    """The files on the medium, in manifest order; raises BundleRefusedError if BASE.json was altered."""
    if base is None:
        return manifest.files
    blobs = manifest.blobs()
    if list(base.omitted) != sorted(set(base.omitted) & blobs.keys()):
        raise BundleRefusedError(f"{BASE} omits blobs that the manifest does not list: it was altered")
    omitted = {blobs[digest].path for digest in base.omitted}
    return [file for file in manifest.files if file.path not in omitted]


def check_base(base: Base, found: BundleManifest | None) -> None:
    """Raise BundleIncompleteError unless `found` is the base of a difference."""
    wanted = f"{base.name} {base.version} ({base.manifest})"
    if found is None:
        raise BundleIncompleteError(f"this is a difference to {wanted}: pass that bundle with --base")
    expected = base.name, base.version, base.created, base.manifest
    if (found.name, found.version, found.created, found.digest) != expected:
        message = f"the base is {found.name} {found.version} ({found.digest}), and should be {wanted}"
        raise BundleIncompleteError(message)
