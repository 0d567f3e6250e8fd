"""
A release of Helm 3 is upgraded and rolled back by Helm 4.
"""

from tests.cluster.release import NAME, VALUES


def pods_of(release) -> dict[str, str]:
    """Pods of the release by name, with the id that changes when a pod is replaced."""
    pods = release.namespace.objects("pods", f"app.kubernetes.io/instance={NAME}")
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}


def test_helm_4_upgrades_a_release_of_helm_3_without_restarting_pods(release):
    before = pods_of(release)
    release.namespace.install(VALUES, NAME, action="upgrade", version="helm4")
    assert pods_of(release) == before
    release.namespace.helm("rollback", NAME, "1", "--wait", version="helm4")
    assert pods_of(release) == before
    assert release.chat(release.key("archive"))["status"] == 200
