"""
Write the bill of materials of an image, as CycloneDX 1.6.

    sbom.py IMAGE VERSION ENVIRONMENT

It lists what is installed, not what was asked for: every Python distribution of the environment, with the
digest of the wheel it came from, and every Debian package of the base image.  It runs while the image is
built and leaves `sbom.cdx.json` in the environment.  The same content gives the same bytes.
"""

import importlib.metadata
import json
import os
import re
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

DPKG_STATUS = Path("/var/lib/dpkg/status")
LICENSE_CHARACTERS = 100
"""Maximum length of a licence name; longer fields hold the licence text."""


def python_components(site_packages: list[str]) -> Iterator[Component]:
    """Each installed distribution, with its licence if it names one."""
    licenses = LicenseFactory()
    for found in importlib.metadata.distributions(path=site_packages):
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
        purl = PackageURL("pypi", name=name, version=found.version)
        stated = (found.metadata.get("License-Expression") or found.metadata.get("License") or "").strip()
        short = stated and "\n" not in stated and len(stated) < LICENSE_CHARACTERS
        yield Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=found.version,
            purl=purl,
            bom_ref=str(purl),
            licenses=[licenses.make_from_string(stated)] if short else [],
            hashes=list(_wheel_hashes(found)),
        )


def debian_components(status: str) -> Iterator[Component]:
    """Each installed package in the text of dpkg's status file."""
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status") != "install ok installed":
            continue
        purl = PackageURL(
            "deb",
            namespace="debian",
            name=fields["Package"],
            version=fields["Version"],
            qualifiers={"arch": fields["Architecture"]},
        )
        yield Component(
            type=ComponentType.LIBRARY,
            name=fields["Package"],
            version=fields["Version"],
            purl=purl,
            bom_ref=str(purl),
        )


def write_sbom(image: str, version: str, environment: Path) -> None:
    """Write the bill of materials of an image with this Python environment into it."""
    site_packages = [str(path) for path in environment.glob("lib/python3*/site-packages")]
    components = list(python_components(site_packages))
    if DPKG_STATUS.exists():
        components += debian_components(DPKG_STATUS.read_text(encoding="utf-8"))
    root = Component(type=ComponentType.CONTAINER, name=image, version=version, bom_ref=image)
    bom = Bom(components=components)
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), tz=UTC)
    content = "\n".join([image, version, *sorted(str(each.bom_ref) for each in components)])
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_OID, content)
    bom.register_dependency(root, components)
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    (environment / "sbom.cdx.json").write_text(text + "\n", encoding="utf-8")


def _wheel_hashes(found: importlib.metadata.Distribution) -> Iterator[HashType]:
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    digest = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
    if digest:
        yield HashType(alg=HashAlgorithm.SHA_256, content=digest)


if __name__ == "__main__":
    write_sbom(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
