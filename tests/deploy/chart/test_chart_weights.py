"""The Job that fills a claim with weights: its command runs here, on directories in place of its volumes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.bundles import Workshop, all_files
from tests.deploy.chart import references, schemas
from tests.deploy.chart.helm import render
from tests.deploy.chart.site import DIGEST, WEIGHTS_LOAD, named, over, site

policies = pytest.importorskip(
    "tests.deploy.chart.policies", reason="regopy is not installed: no policy is asked"
)

pytestmark = pytest.mark.usefixtures("helm")
DIRECTORY = {"content": "directory", "name": "llama", "trustedKeys": {"existingConfigMap": ""}}
SOURCES = {
    "pvc": {"source": "pvc", "claimName": "medium"},
    "hostPath": {"source": "hostPath", "hostPath": "/mnt/usb"},
    "image": {"source": "image", "image": {"repository": "weights", "digest": DIGEST}},
}


def load(path: str, **changes: object) -> dict:
    """Values of a site whose model is below `path` in the claim that the Job fills."""
    return over(site(WEIGHTS_LOAD, model={"target": {"path": path}}), {"weightsLoad": changes})


class Volumes:
    """Directories in place of what the Job mounts."""

    def __init__(self, values: dict, **places: Path) -> None:
        self.rendered = render(values)
        self.container = self.rendered.one("Job")["spec"]["template"]["spec"]["containers"][0]
        mounts = {mount["name"]: mount["mountPath"] for mount in self.container["volumeMounts"]}
        self.places = {mounts[name.replace("_", "-")]: place for name, place in places.items()}
        self.claim = places["claim"]

    def run(self) -> subprocess.CompletedProcess[str]:
        words = list(self.container["args"])
        for mounted, place in self.places.items():
            words = [
                f"{place}{word.removeprefix(mounted)}" if word.startswith(mounted) else word for word in words
            ]
        assert self.container["command"] == ["appliance"]
        return subprocess.run(
            [sys.executable, "-m", "appliance", *words], capture_output=True, text=True, check=False
        )

    def served(self) -> Path:
        """Where the worker, which mounts the same claim, looks for the model."""
        model = yaml.safe_load(self.rendered.one("ConfigMap", "ministry-8b")["data"]["appliance.yaml"])
        return self.claim / model["worker"]["model"].removeprefix("/models/target/")


@pytest.fixture
def claim(tmp_path) -> Path:
    place = tmp_path / "claim"
    place.mkdir()
    return place


def test_the_job_verifies_a_bundle_and_places_the_model_where_the_worker_looks(tmp_path, claim):
    """A second run changes nothing, and a bundle that no trusted key signed places nothing."""
    workshop = Workshop.open(tmp_path / "workshop")
    bundle = workshop.build().rename(tmp_path / "workshop" / "bundle")
    keys = tmp_path / "keys"
    keys.mkdir()
    volumes = Volumes(load("demo/target/current"), **{"from": bundle.parent}, claim=claim, bundle_keys=keys)
    stranger = Workshop.open(tmp_path / "stranger")
    (keys / "bundle-keys.txt").write_text(f"{stranger.signer.vkey}\n")
    refused = volumes.run()
    assert refused.returncode == 1
    assert refused.stderr.startswith("appliance: ")
    assert not volumes.served().exists()
    (keys / "bundle-keys.txt").write_text(f"{workshop.signer.vkey}\n")
    done = volumes.run()
    assert done.returncode == 0, done.stderr
    files = all_files(volumes.served())
    assert json.loads(files["config.json"]) == {"hidden_size": 8}
    again = volumes.run()
    assert "nothing changed" in again.stdout, again.stderr
    assert all_files(volumes.served()) == files


def test_the_job_copies_a_directory_to_where_the_worker_looks(tmp_path, claim):
    """From a node's disk, a volume or an image; a second run changes nothing."""
    source = tmp_path / "node"
    (source / "bundle").mkdir(parents=True)
    (source / "bundle" / "config.json").write_text("{}")
    volumes = Volumes(load("llama/current", **DIRECTORY), **{"from": source}, claim=claim)
    done = volumes.run()
    assert done.returncode == 0, done.stderr
    assert all_files(volumes.served()) == {"config.json": b"{}"}
    assert "nothing changed" in volumes.run().stdout


@pytest.mark.parametrize("content", [{}, DIRECTORY], ids=["bundle", "directory"])
@pytest.mark.parametrize("source", SOURCES)
def test_the_job_is_as_restricted_as_every_pod(source, content):
    """Its source is read-only, it may call nothing, and Kubernetes knows every field."""
    values = load("llama/current", **content, **{"from": SOURCES[source]})
    objects = render(values).objects
    (pod,) = (pod for owner, pod in references.pods(objects) if owner.startswith("Job/"))
    (mount,) = (m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == "from")
    assert mount["readOnly"] is True
    assert references.dangling(objects, existing=named(values)) == []
    granted = {"hostPath": ["/mnt/usb"]} if source == "hostPath" else None
    assert policies.denied_by_any(objects, exceptions=granted) == {}
    assert [fault for one in objects for fault in schemas.faults(one, schemas.VERSIONS[-1])] == []
    labels = pod["metadata"]["labels"].items()
    chosen = {
        name
        for name, policy in render(values).kind("NetworkPolicy").items()
        if (selector := policy["spec"]["podSelector"])["matchLabels"].items() <= labels
        and "matchExpressions" not in selector
    }
    assert chosen == {"appliance-default-deny"}


def test_no_job_fills_a_claim_unless_asked():
    assert not render(site()).kind("Job")
