"""
The chart in a cluster: installed with the demo models, it serves, passes its own tests and keeps a valid log.
"""

from tests.cluster.release import NAME


def test_pods_meet_the_restricted_standard_and_become_ready(release):
    """The namespace enforces it, so pods that do not would not have been created."""
    pods = release.namespace.objects("pods", f"app.kubernetes.io/instance={NAME}")
    ready = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: all(
            status["ready"] for status in pod["status"]["containerStatuses"]
        )
        for pod in pods
    }
    assert ready == {"gateway": True, "worker": True}


def test_chat_through_the_service_is_answered_and_recorded(release):
    answer = release.chat(release.key("clinic"))
    assert answer["status"] == 200, answer
    assert answer["body"]["choices"][0]["message"]["content"]
    assert answer["body"]["usage"]["completion_tokens"] > 0
    assert "valid and complete" in release.appliance("audit", "verify")


def test_helm_test_passes(release):
    output = release.namespace.helm("test", NAME, "--timeout=300s")
    assert "Phase:          Succeeded" in output
    assert "Failed" not in output
