"""
A bundle has every image that our chart and our compose file need, checked with the real Helm.
"""

import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from appliance.cli import cli
from appliance.sovereignty.bundle.emit import Form, emit
from appliance.sovereignty.bundle.references import images_in
from tests.bundles import CREATED, Workshop, write_saved_image
from tests.deploy.chart.helm import CHART, HELM, ROOT, render
from tests.deploy.chart.site import IN_CHART, SEVERAL, site

COMPOSE = ROOT / "deploy" / "compose.yaml"
SAID = {"licence": "Apache-2.0", "origin": "a test"}


def asked_for() -> list[str]:
    """Every image of the compose file; the chart's are among them."""
    return [image.reference for image in images_in(COMPOSE.read_text(), "compose.yaml")]


@pytest.fixture
def chart(tmp_path) -> Path:
    """Our chart, packaged."""
    if not HELM.exists():
        pytest.skip("NO HELM: run `make deploy`, which says why it cannot be had; the chart is not packaged")
    subprocess.run([HELM, "package", CHART, "--destination", tmp_path], check=True, capture_output=True)
    (packaged,) = tmp_path.glob("*.tgz")
    return packaged


@pytest.fixture
def builder(tmp_path):
    """Builds a bundle with some images, a chart with values, and rendered files."""
    workshop = Workshop.open(tmp_path / "workshop")

    def build(images: list[str], *, helm: bool, **more: object):
        entries = []
        for number, reference in enumerate(images):
            write_saved_image(workshop.place / f"{number}.tar", reference, reference.encode())
            entries.append({"archive": f"{number}.tar", "reference": reference, **SAID})
        versions = {"version": "0.1.0", "upgrade_from": "0.1.0"}
        recipe = {"name": "sovereign-appliance", **versions, "images": entries, **more}
        (workshop.place / "bundle.yaml").write_text(yaml.safe_dump(recipe))
        words = ["bundle", "build", workshop.place / "bundle.yaml", tmp_path / "bundle"]
        words += ["--key", workshop.place / "release.key", "--key-name", "example.com/releases"]
        words += ["--key-not-after", "2099-12-31", "--created", CREATED]
        path = f"{HELM.parent}:/usr/bin:/bin" if helm else "/nonexistent"
        result = CliRunner().invoke(cli, [str(word) for word in words], env={"PATH": path})
        return workshop, tmp_path / "bundle", result

    return build


def test_a_bundle_with_every_image_serves_the_chart_rendered_and_the_compose_file(chart, builder, tmp_path):
    """With several gateways, PostgreSQL and a certificate of cert-manager; digests come from the bundle."""
    everything = site(SEVERAL, IN_CHART, {"gateway": {"tls": {"issuerRef": {"name": "enclave"}}}})
    del everything["images"]
    (tmp_path / "everything.yaml").write_text(yaml.safe_dump(everything))
    entry = {"file": str(chart), "values": [str(tmp_path / "everything.yaml")], **SAID}
    workshop, bundle, result = builder(asked_for(), helm=True, charts=[entry], rendered=[str(COMPOSE)])
    assert result.exception is None, result.exception
    manifest = workshop.verify(bundle).manifest
    values = yaml.safe_load(emit(manifest, Form.HELM))
    shown = render(everything | values, api_versions=["cert-manager.io/v1"])
    named = {image.reference for image in images_in(str(shown.objects), "chart")}
    assert {reference.rpartition("@")[2] for reference in named} <= {item.digest for item in manifest.items}
    assert any("/gateway" in reference for reference in named)
    assert any("postgres" in reference for reference in named)


@pytest.mark.parametrize("lacking", ["gateway", "worker-gpu", "postgres"])
def test_one_image_less_and_the_bundle_is_not_built(chart, builder, tmp_path, lacking):
    """Helm renders the image names; a missing image has no digest."""
    everything = site(SEVERAL, IN_CHART, {"global": {"allowTags": True}})
    del everything["images"]
    (tmp_path / "everything.yaml").write_text(yaml.safe_dump(everything))
    entry = {"file": str(chart), "values": [str(tmp_path / "everything.yaml")], **SAID}
    images = [reference for reference in asked_for() if f"/{lacking}:" not in reference]
    _, bundle, result = builder(images, helm=True, charts=[entry])
    assert f"{lacking}:" in str(result.exception)
    assert "without a digest" in str(result.exception)
    assert not bundle.exists()


def test_without_helm_the_list_in_the_chart_counts(chart, builder):
    """It names every image that the chart can use."""
    entry = {"file": str(chart), **SAID}
    images = [reference for reference in asked_for() if "postgres" not in reference]
    _, bundle, result = builder(images, helm=False, charts=[entry])
    assert "lists postgres:" in str(result.exception)
    assert not bundle.exists()
    (unused,) = [image for image in yaml.safe_load(listed()) if "postgres" in image["image"]]
    _, bundle, result = builder(images, helm=False, charts=[{**entry, "unused": [unused["image"]]}])
    assert result.exception is None


def listed() -> str:
    return yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]["artifacthub.io/images"]


@pytest.mark.parametrize("lacking", ["worker-cpu", "grafana"])
def test_bundle_without_an_image_of_the_compose_file_is_not_built(builder, lacking):
    """Its variables take the ids of the bundle's images."""
    images = [reference for reference in asked_for() if f"/{lacking}:" not in reference]
    _, _, result = builder(images, helm=False, rendered=[str(COMPOSE)])
    assert f"/{lacking}:" in str(result.exception)
