"""
Small bundles with one of everything, made by the real builder from real archives.
"""

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import yaml

from appliance.audit.signing_keys import Signer, create_signing_key, load_keys, mldsa_path
from appliance.sovereignty.bundle.build import Stamp, build_bundle
from appliance.sovereignty.bundle.bundle_verifier import Bundle, open_bundle, verify_bundle
from appliance.sovereignty.bundle.manifest import BundleManifest
from appliance.sovereignty.bundle.recipe import load_recipe
from appliance.sovereignty.bundle.signature import BUNDLE, TrustedKey, end_of

CREATED = 1_780_000_000
NOW = CREATED + 86_400.0
LAST_DAY = date(2030, 12, 31)
KEY_NAME = "example.com/releases"
GATEWAY = "sovereign-appliance/gateway:1.0.0"
DATABASE = "docker.io/library/postgres:15"


def tar_of(files: dict[str, bytes]) -> bytes:
    """A tar file; the same files give the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def image_config(*layers: bytes) -> bytes:
    """An image's configuration for uncompressed layers."""
    return json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": ["/hello"]},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]},
        }
    ).encode()


def write_saved_image(path: Path, reference: str, *contents: bytes) -> None:
    """An image as `docker save` wrote it for years, one layer for each content."""
    layers = [tar_of({f"file-{number}": content}) for number, content in enumerate(contents)]
    config = image_config(*layers)
    names = [f"{number:064x}/layer.tar" for number in range(len(layers))]
    listed = [{"Config": "config.json", "RepoTags": [reference], "Layers": names}]
    files = {"config.json": config, "manifest.json": json.dumps(listed).encode()}
    path.write_bytes(tar_of(files | dict(zip(names, layers, strict=True))))


def write_oci_image(path: Path, reference: str, content: bytes) -> str:
    """An image as an OCI archive, its layer compressed; returns its digest."""
    layer = tar_of({"hello": content})
    packed = gzip.compress(layer, mtime=0)
    config = image_config(layer)
    kinds = {"config": "application/vnd.oci.image.config.v1+json"}
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": kinds["config"], "digest": digest_of(config), "size": len(config)},
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                    "digest": digest_of(packed),
                    "size": len(packed),
                }
            ],
        }
    ).encode()
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": digest_of(manifest),
                "size": len(manifest),
                "annotations": {"org.opencontainers.image.ref.name": reference},
            }
        ],
    }
    blobs = {f"blobs/{digest_of(blob).replace(':', '/')}": blob for blob in (packed, config, manifest)}
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps(index).encode()}
    path.write_bytes(tar_of(files | blobs))
    return digest_of(manifest)


def write_chart(path: Path, images: list[str], version: str = "1.0.0") -> None:
    """A packaged chart whose annotation lists its images."""
    listed = yaml.safe_dump([{"name": "x", "image": image} for image in images])
    about = {
        "apiVersion": "v2",
        "name": "sovereign-appliance",
        "version": version,
        "annotations": {"artifacthub.io/images": listed},
    }
    path.write_bytes(gzip.compress(tar_of({"chart/Chart.yaml": yaml.safe_dump(about).encode()}), mtime=0))


@dataclass(frozen=True)
class Workshop:
    """Where bundles of a test are made."""

    place: Path
    signer: Signer

    @classmethod
    def open(cls, place: Path) -> "Workshop":
        place.mkdir(parents=True, exist_ok=True)
        create_signing_key(place / "release.key")
        return cls(
            place=place, signer=load_keys(place / "release.key", mldsa_path(place / "release.key"), KEY_NAME)
        )

    @property
    def trusted(self) -> list[TrustedKey]:
        return [TrustedKey(verifier_key=self.signer.verifier_key)]

    @property
    def stamp(self) -> Stamp:
        return Stamp(created=CREATED, key_not_after=end_of(LAST_DAY), signer=self.signer)

    def recipe(
        self,
        version: str = "1.0.0",
        *,
        weights: bytes = b"weights, first edition" * 100,
        upgrade_from: str = "0.1.0",
        **more: object,
    ) -> Path:
        """Write the inputs and a recipe of one of everything."""
        home = self.place / f"inputs-{version}"
        (home / "model" / "tokenizer").mkdir(parents=True, exist_ok=True)
        write_saved_image(home / "gateway.tar", GATEWAY, b"base layer" * 50, version.encode())
        database = write_oci_image(home / "postgres.tar", DATABASE, b"a database" * 50)
        write_chart(home / "chart.tgz", [f"docker.io/library/postgres:15@{database}"], version)
        (home / "model" / "config.json").write_bytes(b'{"hidden_size":8}')
        (home / "model" / "model.safetensors").write_bytes(weights)
        (home / "model" / "tokenizer" / "vocab.json").write_bytes(b'{"a":0}')
        (home / "model" / ".cache").write_bytes(version.encode())
        (home / "sbom.cdx.json").write_bytes(b'{"bomFormat":"CycloneDX"}')
        (home / "verifier-1.0-py3-none-any.whl").write_bytes(b"PK wheel")
        (home / "compose.yaml").write_text(f"services:\n  db:\n    image: postgres@{database}\n")
        said = {"licence": "Apache-2.0", "origin": "https://example.com/source"}
        document = {
            "name": "sovereign-appliance",
            "version": version,
            "upgrade_from": upgrade_from,
            "images": [
                {"archive": "gateway.tar", "reference": GATEWAY, "sbom": "sbom.cdx.json", **said},
                {"archive": "postgres.tar", "reference": DATABASE, **said},
            ],
            "charts": [{"file": "chart.tgz", **said}],
            "models": [{"name": "demo/target", "version": "r1", "directory": "model", **said}],
            "wheels": [
                {"name": "verifier", "version": "1.0", "files": ["verifier-1.0-py3-none-any.whl"], **said}
            ],
            "files": [{"name": "compose", "version": version, "files": ["compose.yaml"], **said}],
            "rendered": ["compose.yaml"],
        }
        path = home / "bundle.yaml"
        path.write_text(yaml.safe_dump(document | more))
        return path

    def build(self, version: str = "1.0.0", *, name: str | None = None, **changes: object) -> Path:
        """Build a bundle; returns its directory."""
        path = self.recipe(version, **changes)
        directory = self.place / (name or f"bundle-{version}")
        build_bundle(load_recipe(path), path.parent, directory, self.stamp, None)
        return directory

    def resign(self, directory: Path, manifest: BundleManifest) -> None:
        """Put another manifest into a bundle, properly signed, as by a careless or malicious signer."""
        (directory / "MANIFEST.json").write_bytes(manifest.encode())
        (directory / "MANIFEST.sig").write_bytes(BUNDLE.sign(manifest.encode(), self.signer))

    def open_bundle(self, path: Path, *, now: float = NOW, base: Path | None = None) -> Bundle:
        return open_bundle(path, trusted=self.trusted, now=now, base=base)

    def verify(self, path: Path, *, now: float = NOW, base: Path | None = None) -> Bundle:
        bundle = self.open_bundle(path, now=now, base=base)
        verify_bundle(bundle)
        return bundle


def all_files(directory: Path) -> dict[str, bytes]:
    """The files of a directory by path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
