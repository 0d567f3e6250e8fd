"""The chart as it ships: its defaults and each example, before Kubernetes' schemas and our policies."""

import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import references, schemas
from tests.deploy.chart.helm import CHART, LATER_HELM, ROOT, RefusedError, lint, render
from tests.deploy.chart.site import named, site

policies = pytest.importorskip(
    "tests.deploy.chart.policies", reason="regopy is not installed: no policy is asked"
)

pytestmark = pytest.mark.usefixtures("helm")
EXAMPLES_AT = CHART / "examples"
IMAGES = EXAMPLES_AT / "images.yaml"
EXAMPLES = sorted(path for path in EXAMPLES_AT.glob("*.yaml") if path != IMAGES)
KNOWN = (
    "monitoring.coreos.com/v1",
    "keda.sh/v1alpha1",
    "leaderworkerset.x-k8s.io/v1",
    "inference.networking.k8s.io/v1",
    "gateway.networking.k8s.io/v1",
    "cert-manager.io/v1",
    "route.openshift.io/v1",
)
EXCEPTIONS = yaml.safe_load(
    (ROOT / "tests" / "deploy" / "policy" / "exceptions.yaml").read_text(encoding="utf-8")
)
WANTED = {
    "one GPU box": "one-gpu-box",
    "eight-GPU node with TP=8 and a 70B model": "eight-gpu-node-70b",
    "Kimi-K2.6 with its EAGLE 3.1 draft at K=3": "kimi-k2.6",
    "two-node pipeline": "two-node-pipeline",
    "OpenShift": "openshift",
    "private registry and CA": "private-registry-and-ca",
    "external PostgreSQL": "external-postgresql",
    "speculative and target-only pools": "two-pools",
}


def offline() -> dict[str, str]:
    """The environment of every worker, from the file that compose and systemd read too."""
    lines = (ROOT / "deploy" / "offline.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def shown(example: Path, **how):
    """An example with the digests of images, in a cluster that knows every custom resource."""
    return render(files=[IMAGES, example], api_versions=KNOWN, **how)


def said_by(example: Path) -> frozenset[str]:
    """Names of existing objects in the example's values."""
    return named(yaml.safe_load(example.read_text(encoding="utf-8")))


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
def test_there_is_an_example_for(wanted):
    """Each documented kind of site."""
    assert EXAMPLES_AT / f"{wanted}.yaml" in EXAMPLES


@pytest.mark.parametrize("version", schemas.BOUNDS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_kubernetes_knows_every_field_of_every_object(example, version):
    """Strictly, in the oldest and newest of three minor versions; custom resources by our minimal shapes."""
    faults = [
        fault
        for one in shown(example, kube_version=version).objects
        for fault in schemas.faults(one, version)
    ]
    assert faults == []


@pytest.mark.parametrize("version", schemas.VERSIONS)
def test_the_defaults_with_images_and_a_model_are_as_valid(version):
    """`values.yaml` with the least that it needs."""
    assert [
        f for one in render(site(), kube_version=version).objects for f in schemas.faults(one, version)
    ] == []
    without_models = render(files=[IMAGES], kube_version=version)
    assert [f for one in without_models.objects for f in schemas.faults(one, version)] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_all_references_between_objects_resolve(example):
    """Volumes, claims, Secrets, ports, selectors name rendered objects, or existing ones from the values."""
    assert references.dangling(shown(example).objects, existing=said_by(example)) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_keeps_every_policy(example):
    """Except for exceptions in `exceptions.yaml`, by name and with the reason."""
    granted = EXCEPTIONS.get(example.stem, {})
    objects = shown(example).objects
    assert policies.denied_by_any(objects, exceptions=granted.get("allowed"), offline=offline()) == {}


@pytest.mark.parametrize("stem", EXCEPTIONS)
def test_every_exception_is_needed(stem):
    """An unused one could only hide later violations."""
    objects = shown(EXAMPLES_AT / f"{stem}.yaml").objects
    assert policies.denied("pod_security", objects)
    assert EXCEPTIONS[stem]["because"]


def test_the_defaults_keep_every_policy():
    """A site that changes nothing has no exception at all."""
    assert policies.denied_by_any(render(site(), api_versions=KNOWN).objects, offline=offline()) == {}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_helm_lint_reports_nothing(example):
    """`helm lint --strict` has no option for the Kubernetes version, and assumes one before image volumes."""
    text = example.read_text(encoding="utf-8").replace("source: image", "source: initCopy")
    assert "0 chart(s) failed" in lint(yaml.safe_load(text), files=[IMAGES])


def test_lint_can_fail(tmp_path):
    """So that the test above can fail."""
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: broken\n", encoding="utf-8")
    with pytest.raises(RefusedError, match="version is required"):
        lint(chart=tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_later_helm_renders_the_same(example):
    """The oldest version promised and one sixteen months younger."""
    assert shown(example, binary=LATER_HELM).objects == shown(example).objects


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_two_renderings_are_equal(example):
    """No random value and no date: the diff of an upgrade shows only real changes."""
    assert shown(example, again=True).objects == shown(example).objects


def test_templates_use_no_lookup_and_no_randomness():
    """`lookup` renders differently offline; a random secret would change with every upgrade."""
    forbidden = (
        "lookup ",
        "randAlpha",
        "randNumeric",
        "randBytes",
        "genCA",
        "genSelfSigned",
        "genPrivateKey",
        "uuidv4",
        "now ",
    )
    # A hook of the first installation, for `profile: evaluation` only; no upgrade runs it.
    once = CHART / "templates" / "control-token.yaml"
    for path in sorted((CHART / "templates").rglob("*")):
        if path.is_file() and path != once:
            text = path.read_text(encoding="utf-8")
            assert not [word for word in forbidden if f"{{{{ {word}" in text or f"({word}" in text], path


def test_the_strict_schemas_do_refuse():
    """A misspelt field, and a kind that this Kubernetes has not."""
    good = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"a": "b"}}
    assert schemas.faults(good, schemas.VERSIONS[-1]) == []
    assert "datta" in schemas.faults(good | {"datta": {}}, schemas.VERSIONS[-1])[0]
    old = good | {"apiVersion": "policy/v1beta1", "kind": "PodSecurityPolicy"}
    assert "has no PodSecurityPolicy" in schemas.faults(old, schemas.VERSIONS[-1])[0]
    monitor = {"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor", "metadata": {"name": "a"}}
    assert schemas.faults(
        monitor | {"spec": {"selector": {"matchLabels": {}}, "endpoint": []}}, schemas.VERSIONS[-1]
    )


def test_dangling_references_are_found():
    """One spoilt object for each kind of reference."""
    objects = render(site()).objects
    assert references.dangling(objects, existing=named(site())) == []
    assert any("control-token" in fault for fault in references.dangling(objects))
    gone = [o for o in objects if (o["kind"], o["metadata"]["name"]) != ("ConfigMap", "appliance-gateway")]
    assert any(
        "ConfigMap/appliance-gateway" in fault for fault in references.dangling(gone, existing=named(site()))
    )
    assert any(
        "2 times" in fault for fault in references.dangling([*objects, objects[0]], existing=named(site()))
    )
    without = [o for o in objects if o["kind"] != "Deployment"]
    assert any("selects nothing" in fault for fault in references.dangling(without, existing=named(site())))


def test_the_three_newest_versions_are_three():
    """And in a row."""
    minors = [int(version.split(".")[1]) for version in schemas.VERSIONS]
    assert minors == list(range(minors[0], minors[0] + 3))


def test_what_package_indexes_show_is_true():
    """Annotations for Artifact Hub: every image of the values, the licence, changes, links."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    shown = {
        name.removeprefix("artifacthub.io/"): yaml.safe_load(text)
        for name, text in chart["annotations"].items()
    }
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    images = {
        f"{image['repository']}:{image['tag'] or chart['appVersion']}"
        for name, image in values["images"].items()
        if name != "pullPolicy"
    }
    assert {each["image"] for each in shown["images"]} == images
    assert shown["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")[:200]
    kinds = {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert {change["kind"] for change in shown["changes"]} <= kinds
    known = (CHART / "README.md").read_text(encoding="utf-8")
    for change in shown["changes"]:
        named = re.findall(r"[a-zA-Z]+(?:\.[a-zA-Z]+)+", change["description"])
        assert all(f"`{value}`" in known for value in named), change
    assert all(link["name"] and link["url"].startswith("https://") for link in shown["links"])
