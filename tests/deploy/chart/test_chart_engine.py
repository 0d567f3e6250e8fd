"""The chart through a real Helm 4 engine: installed, upgraded, rolled back, tested, removed."""

import json

import pytest
import yaml

from tests.deploy.chart.api_server import BUILT_IN
from tests.deploy.chart.cluster import EngineRefusedError
from tests.deploy.chart.helm import CHART, render
from tests.deploy.chart.schemas import VERSIONS
from tests.deploy.chart.site import DRAFTED, SEVERAL, over, site

IMAGES = CHART / "examples" / "images.yaml"
EXAMPLES = sorted(path for path in IMAGES.parent.glob("*.yaml") if path != IMAGES)

BEFORE = site()
AFTER = site({"gateway": {"drainSeconds": 1200}, "models": [BEFORE["models"][0] | {"maxStartupMinutes": 60}]})


def gateway(cluster):
    (found,) = (o for name, o in cluster.server.kind("StatefulSet").items() if name.endswith("-gateway"))
    return found


def stripped(config_map):
    """Its texts; Helm 3 and 4 differ in whether a last line is ended."""
    return {key: text.rstrip("\n") for key, text in config_map.get("data", {}).items()}


def revisions(cluster):
    return {key: o["metadata"]["resourceVersion"] for key, o in cluster.server.installed().items()}


async def test_what_is_installed_is_what_was_rendered(cluster, helm):
    """Helm 4 and Helm 3 make the same objects, and each is one that this Kubernetes takes."""
    done = await cluster.helm("install", values=BEFORE)
    assert done["info"]["status"] == "deployed"
    rendered = render(BEFORE, kube_version=VERSIONS[-1], api_versions=["monitoring.coreos.com/v1"])
    hooks = [o for o in rendered.objects if "helm.sh/hook" in o["metadata"].get("annotations", {})]
    expected = {(o["kind"], o["metadata"]["name"]): o for o in rendered.objects if o not in hooks}
    installed = cluster.server.installed()
    assert set(installed) == set(expected)
    assert {kind for kind, _ in installed} >= {"StatefulSet", "Deployment", "NetworkPolicy", "ServiceMonitor"}
    for key, thing in expected.items():
        assert installed[key].get("spec") == thing.get("spec"), key
        assert stripped(installed[key]) == stripped(thing), key


async def test_upgrade_changes_only_the_requested_objects(cluster):
    """A longer drain is the gateway's, a longer start the worker's; Secrets and claims stay untouched."""
    await cluster.helm("install", values=BEFORE)
    first = revisions(cluster)
    grace = gateway(cluster)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    await cluster.helm("upgrade", values=AFTER)
    assert gateway(cluster)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == grace + 600
    changed = {key for key, revision in revisions(cluster).items() if first[key] != revision}
    assert {kind for kind, _ in changed} <= {"StatefulSet", "Deployment", "ConfigMap"}
    assert not {kind for kind, _ in first} & {"Secret"}, "the chart makes no secret, so that none can change"


async def test_an_upgrade_without_a_change_changes_nothing(cluster):
    """No rendering has a new password, date or certificate."""
    await cluster.helm("install", values=BEFORE)
    first = revisions(cluster)
    await cluster.helm("upgrade", values=BEFORE)
    assert revisions(cluster) == first


async def test_a_refused_upgrade_is_rolled_back(cluster):
    """The API accepts all objects but the last; earlier changes are reverted."""
    await cluster.helm("install", values=BEFORE)
    before = {key: o.get("spec") for key, o in cluster.server.installed().items()}
    admit = cluster.server.admit

    def refuse_slow_workers(sent):
        return ["no quota"] if sent["kind"] == "Deployment" and "390" in json.dumps(sent) else admit(sent)

    cluster.server.admit = refuse_slow_workers
    with pytest.raises(EngineRefusedError, match="no quota"):
        await cluster.helm("upgrade", values=AFTER, rollback_on_failure=True)
    assert {key: o.get("spec") for key, o in cluster.server.installed().items()} == before
    *_, last = sorted(await cluster.helm("history"), key=lambda release: release["version"])
    assert (last["info"]["status"], last["version"]) == ("deployed", 3)


async def test_an_operator_rolls_back(cluster):
    """`helm rollback`: every object is as the first revision had it, what came later is gone."""
    await cluster.helm("install", values=BEFORE)
    before = {key: (o.get("spec"), o.get("data")) for key, o in cluster.server.installed().items()}
    drafted = site({"speculation": {"optOut": True}}, model=DRAFTED | {"targetOnlyReplicas": 1})
    await cluster.helm("upgrade", values=drafted)
    assert len(cluster.server.installed()) > len(before)
    try:
        await cluster.helm("rollback", revision=1)
    except EngineRefusedError as refused:
        # This binding of the engine forgets how to wait once all is done; the engine's own program does not.
        assert "wait strategy not set" in str(refused)  # noqa: PT017
    installed = {key: (o.get("spec"), o.get("data")) for key, o in cluster.server.installed().items()}
    assert installed == before


async def test_helm_test_makes_the_pods_that_check_egress_and_verify_the_log(cluster):
    """
    From a gateway's and from a worker's place; the pods are hooks of `helm test`, made by nothing else.

    The stand-in runs no pod: `test_compose_demo` runs both commands in containers.
    """
    sent = []
    admit = cluster.server.admit
    cluster.server.admit = lambda thing: sent.append(thing) or admit(thing)
    await cluster.helm("install", values=BEFORE)
    assert "Pod" not in {thing["kind"] for thing in sent}
    sent.clear()
    result = await cluster.helm("test")
    commands = {
        thing["metadata"]["name"].rpartition("-test-")[2]: thing["spec"]["containers"][0]["command"]
        for thing in sent
        if thing["kind"] == "Pod"
    }
    assert commands.keys() == {"egress", "worker-egress", "audit"}
    assert commands["egress"][:3] == commands["worker-egress"] == ["appliance", "egress", "check"]
    assert '"appliance","audit","verify"' in commands["audit"][-1]
    assert result["info"]["status"] == "deployed"


async def test_tables_are_upgraded_once_for_each_version(cluster):
    """A Job is immutable: unrelated changes keep it, another image creates another Job."""
    owner = {"database": {"external": {"owner": {"user": "owner", "existingSecret": "owner"}}}}
    await cluster.helm("install", values=site(SEVERAL, owner))
    (first,) = cluster.server.kind("Job")
    unrelated = {
        "gateway": {"drainSeconds": 1200, "resources": {"limits": {"memory": "8Gi"}}},
        "tests": {"resources": {"limits": {"memory": "8Gi"}}},
        "global": {"labels": {"cost-centre": "7"}, "imagePullSecrets": ["registry"]},
        "settings": {"audit": {"origin": "clinic.example/audit"}},
    }
    await cluster.helm("upgrade", values=site(SEVERAL, owner, unrelated))
    newer = {"images": {"gateway": {"digest": "sha256:" + "f" * 64}}}
    await cluster.helm("upgrade", values=site(SEVERAL, owner, unrelated, newer))
    (last,) = cluster.server.kind("Job")
    assert last != first


async def test_disks_may_grow_in_the_values_only_with_a_word_why(cluster):
    """The claims of a StatefulSet are immutable; Kubernetes refuses, and nothing is changed partially."""
    await cluster.helm("install", values=BEFORE)
    first = revisions(cluster)
    with pytest.raises(EngineRefusedError, match="immutable"):
        await cluster.helm(
            "upgrade", values=site({"gateway": {"persistence": {"size": "40Gi"}}}), rollback_on_failure=True
        )
    assert revisions(cluster).keys() == first.keys()


async def test_uninstalling_leaves_the_data_and_nothing_else(cluster):
    """Claims of a StatefulSet are Kubernetes' own and stay; every object of the chart goes."""
    await cluster.helm("install", values=BEFORE)
    retention = gateway(cluster)["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert retention == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    await cluster.helm("uninstall")
    assert cluster.server.objects == {}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
async def test_every_example_can_be_installed(cluster, example):
    """On a cluster that has what it needs, which checks each object by its schemas."""
    images, chosen = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in (IMAGES, example))
    done = await cluster.helm("install", values=over(images, chosen))
    assert done["info"]["status"] == "deployed"
    assert cluster.server.kind("NetworkPolicy")


async def test_a_cluster_without_operators_gets_nothing_for_them(cluster):
    """Helm reads the API versions of the cluster."""
    cluster.server.resources = BUILT_IN
    await cluster.helm("install", values=BEFORE)
    assert not {kind for kind, _ in cluster.server.installed()} & {"ServiceMonitor", "PrometheusRule"}


async def test_contradiction_is_refused_before_rendering(cluster):
    """The preflight speaks in Helm 4 as well, and the cluster stays empty."""
    with pytest.raises(EngineRefusedError, match=r"images\.gateway\.digest is empty"):
        await cluster.helm("install", values=site({"images": {"gateway": {"digest": ""}}}))
    assert cluster.server.installed() == {}
