"""
A node is drained and comes back: pods leave through their disruption budgets, and nothing is lost.
"""

from tests.cluster.release import NAME


def test_pods_of_a_drained_node_return_after_uncordon_with_a_complete_log(release):
    namespace = release.namespace
    key = release.key("ward")
    assert release.chat(key)["status"] == 200
    before = {component: release.pod_of(component)["metadata"]["uid"] for component in ("gateway", "worker")}
    node = release.pod_of("worker")["spec"]["nodeName"]
    ours = f"--pod-selector=app.kubernetes.io/instance={NAME}"
    try:
        namespace.kubectl("drain", node, ours, "--delete-emptydir-data", "--timeout=120s", seconds=150)
    finally:
        namespace.kubectl("uncordon", node)
    release.wait_until_served()
    after = {component: release.pod_of(component)["metadata"]["uid"] for component in ("gateway", "worker")}
    assert not set(before.values()) & set(after.values())
    assert release.chat(key)["status"] == 200
    assert "valid and complete" in release.appliance("audit", "verify")
