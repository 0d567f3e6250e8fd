"""The Job that fills a claim with weights: its command runs here, on directories in place of its volumes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from tests.bundles import Workshop, all_files
from tests.deploy.chart import references, schemas
from tests.deploy.chart.helm import ROOT, render
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
        """Run the command as a pod of its own: what it leaves in an emptyDir is gone after it."""
        assert self.container["command"] == ["appliance"]
        with TemporaryDirectory() as empty:
            places = {"/tmp": Path(empty), **self.places}
            words = [_in_place(word, places) for word in self.container["args"]]
            return subprocess.run(
                [sys.executable, "-m", "appliance", *words], capture_output=True, text=True, check=False
            )

    def served(self) -> Path:
        """Where the worker, which mounts the same claim, looks for the model."""
        model = yaml.safe_load(self.rendered.one("ConfigMap", "ministry-8b")["data"]["appliance.yaml"])
        return self.claim / model["worker"]["model"].removeprefix("/models/target/")


def _in_place(word: str, places: dict[str, Path]) -> str:
    for mounted, place in places.items():
        if word == mounted or word.startswith(f"{mounted}/"):
            return f"{place}{word.removeprefix(mounted)}"
    assert not word.startswith("/"), f"{word} is in no volume, and the root file system is read-only"
    return word


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


def test_a_later_job_does_not_load_an_older_bundle_into_the_claim(tmp_path, claim):
    """Which versions were loaded is recorded in the claim, so no pod can forget it."""
    workshop = Workshop.open(tmp_path / "workshop")
    older, newer = workshop.build("1.0.0"), workshop.build("1.1.0", weights=b"second edition")
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "bundle-keys.txt").write_text(f"{workshop.signer.vkey}\n")
    runs = []
    for bundle in (newer, older):
        values = over(load("demo/target/current"), {"weightsLoad": {"from": {"path": bundle.name}}})
        volumes = Volumes(values, **{"from": workshop.place}, claim=claim, bundle_keys=keys)
        runs.append(volumes.run())
    assert [run.returncode for run in runs] == [0, 1], runs
    assert "is not newer" in runs[1].stderr
    assert (volumes.served() / "model.safetensors").read_bytes() == b"second edition"


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


def test_the_values_on_the_page_fill_the_claim_that_the_model_reads():
    """And the claim on the page is one that Kubernetes takes."""
    page = (ROOT / "docs" / "how-to" / "install-with-helm.md").read_text(encoding="utf-8")
    section = page.split("### Fill a claim with weights")[1].split("\n### ")[0]
    values = yaml.safe_load(re.search(r"```yaml\n(.*?)```", section, re.DOTALL)[1])
    rendered = render(over({**site(), "models": []}, values))
    claim = yaml.safe_load(re.search(r"<<'EOF'\n(.*?)EOF", section, re.DOTALL)[1])
    assert schemas.faults(claim, schemas.VERSIONS[-1]) == []
    for kind, name in (("Job", "claim"), ("Deployment", "target")):
        volumes = rendered.one(kind)["spec"]["template"]["spec"]["volumes"]
        (mounted,) = (volume for volume in volumes if volume["name"] == name)
        assert mounted["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_no_job_fills_a_claim_unless_asked():
    assert not render(site()).kind("Job")


@pytest.mark.parametrize("filled", [True, False])
def test_a_worker_that_mounts_the_claim_first_leaves_it_writable_for_the_job(filled):
    """The kubelet gives a local volume its group with its first pod, unless that mounts it read-only."""
    pod = render(load("llama/current", enabled=filled)).one("Deployment", "ministry-8b")["spec"]["template"][
        "spec"
    ]
    (volume,) = (each for each in pod["volumes"] if each["name"] == "target")
    assert volume["persistentVolumeClaim"]["readOnly"] is not filled
    (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "target")
    assert mount["readOnly"] is True
