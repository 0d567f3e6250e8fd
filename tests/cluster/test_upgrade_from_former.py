"""
A release of an earlier version of chart and images, upgraded to the present ones with its data.
"""

import secrets

import pytest

from tests.cluster.conftest import FORMER, former_source
from tests.cluster.release import CLIENT, CONTROL_TOKEN, GATEWAY, NAME, SLEEP, VALUES, Release
from tests.deploy.chart.site import Values, over

IMAGE: Values = {"tag": FORMER, "digest": ""}
ENTRIES = ("audit", "tail", "--count=1000", "--json", "--purpose=test")


def entries(release: Release) -> list[str]:
    """Of the audit log, oldest first, as they are stored."""
    return release.appliance(*ENTRIES).splitlines()


def test_upgrade_keeps_keys_and_the_audit_log(cluster, namespace, tmp_path):
    """The key of the former version still opens the API, and its entries are in the log that continues."""
    if not cluster.former_tag:
        pytest.skip(f"NO UPGRADE IS TRIED: there are no images of {FORMER}")
    source = former_source(tmp_path / FORMER, "deploy/helm")
    assert source, f"the history of this checkout has no {FORMER}"
    images: Values = {"images": {"gateway": IMAGE, "workerCpu": IMAGE}, "global": {"allowTags": True}}
    # Its pods always wait as long before they end; and it does not know `extraEnv`.
    model = {**VALUES["models"][0], "drainSeconds": 5}
    del model["extraEnv"]
    former = over(VALUES, {**images, "models": [model]})
    namespace.secret(CONTROL_TOKEN, token=secrets.token_hex(32))
    namespace.install(former, NAME, chart=source / "deploy" / "helm")
    namespace.pod(CLIENT, {"app": CLIENT}, SLEEP)
    release = Release(namespace, GATEWAY)
    key = release.key("clinic")
    assert release.chat(key)["status"] == 200
    before = entries(release)
    disks = [disk["metadata"]["uid"] for disk in namespace.objects("pvc")]

    namespace.install(VALUES, NAME, action="upgrade")
    answer = release.chat(key)
    assert (answer["status"], answer["refused"]) == (200, 0), answer
    assert "valid and complete" in release.appliance("audit", "verify")
    after = entries(release)
    assert after[: len(before)] == before
    assert len(after) > len(before)
    assert [disk["metadata"]["uid"] for disk in namespace.objects("pvc")] == disks
