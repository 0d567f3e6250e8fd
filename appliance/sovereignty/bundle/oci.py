"""
The OCI documents in a bundle: indexes, manifests, descriptors.

Pure.  Sources: github.com/opencontainers/image-spec v1.1 (image layout, index, manifest, the empty
descriptor), helm.sh/docs/topics/registries (media types of charts).
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.errors import BundleRefusedError
from appliance.infra.canonical_json import canonical

IMAGE_INDEX = "application/vnd.oci.image.index.v1+json"
IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES = frozenset({IMAGE_INDEX, DOCKER_LIST})
MANIFESTS = frozenset({IMAGE_MANIFEST, DOCKER_MANIFEST})
EMPTY = "application/vnd.oci.empty.v1+json"
EMPTY_CONTENT = b"{}"
HELM_CONFIG = "application/vnd.cncf.helm.config.v1+json"
HELM_CHART = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
ARTEFACT = "application/vnd.sovereign-appliance.{kind}.v1"
"""Artefact type of items that are neither image nor chart."""
REF_NAME = "org.opencontainers.image.ref.name"
TITLE = "org.opencontainers.image.title"
MAX_DOCUMENT_BYTES = 4 * 2**20
"""Maximum of registries for a manifest."""


class Platform(BaseModel):
    model_config = ConfigDict(frozen=True)
    architecture: str = ""
    os: str = ""


class Descriptor(BaseModel):
    model_config = ConfigDict(frozen=True, populate_by_name=True)
    media_type: str = Field(alias="mediaType")
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size: int = Field(ge=0)
    annotations: Mapping[str, str] = {}
    platform: Platform | None = None

    def document(self) -> dict[str, Any]:
        annotations = {"annotations": dict(self.annotations)} if self.annotations else {}
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size, **annotations}


class ImageIndex(BaseModel):
    manifests: tuple[Descriptor, ...]


class ImageManifest(BaseModel):
    config: Descriptor
    layers: tuple[Descriptor, ...]


class _RootFs(BaseModel):
    diff_ids: tuple[str, ...]


class _ImageConfig(BaseModel):
    rootfs: _RootFs
    config: dict[str, Any] | None = None


def parse_image_config(config: bytes, name: str) -> tuple[list[str], dict[str, Any]]:
    """Digests of an image's unpacked layers, and its run configuration."""
    try:
        parsed = _ImageConfig.model_validate_json(config)
        return list(parsed.rootfs.diff_ids), parsed.config or {}
    except ValidationError as error:
        raise BundleRefusedError(
            f"the configuration of {name} has no layers: it is not a container image"
        ) from error


def parse_index(content: bytes, name: str) -> ImageIndex:
    try:
        return ImageIndex.model_validate_json(content)
    except ValidationError as error:
        raise BundleRefusedError(f"{name} is not an OCI index") from error


def parse_manifest(content: bytes, name: str) -> ImageManifest:
    try:
        return ImageManifest.model_validate_json(content)
    except ValidationError as error:
        raise BundleRefusedError(f"{name} is not an OCI manifest") from error


def describe(content: bytes, media_type: str, annotations: Mapping[str, str] | None = None) -> Descriptor:
    return Descriptor(
        media_type=media_type,
        digest=f"sha256:{hashlib.sha256(content).hexdigest()}",
        size=len(content),
        annotations=annotations or {},
    )


def encode_manifest(
    config: Descriptor, layers: Sequence[Descriptor], *, artefact: str | None = None
) -> bytes:
    kind = {} if artefact is None else {"artifactType": artefact}
    return canonical(
        {
            "schemaVersion": 2,
            "mediaType": IMAGE_MANIFEST,
            **kind,
            "config": config.document(),
            "layers": [layer.document() for layer in layers],
        }
    )


def encode_index(manifests: Sequence[Descriptor]) -> bytes:
    listed = [manifest.document() for manifest in manifests]
    return canonical({"schemaVersion": 2, "mediaType": IMAGE_INDEX, "manifests": listed})
