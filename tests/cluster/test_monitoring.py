"""
What an operator sees: the state of speculation, and metrics in a Prometheus of another namespace.
"""

import json
import urllib.parse

import pytest
import yaml

from tests.cluster.cluster import PROMETHEUS_IMAGE, Namespace
from tests.cluster.connections import open_from, soon
from tests.cluster.release import MODEL, SLEEP

NAME = "prometheus"


@pytest.fixture
def monitoring(release):
    """The namespace from which the chart lets a Prometheus scrape by default, and one in it that does."""
    cluster = release.namespace.cluster
    if not cluster.prometheus:
        pytest.skip(f"NO IMAGE OF PROMETHEUS, SO NONE SCRAPES IN THE CLUSTER: set {PROMETHEUS_IMAGE}")
    target = f"{release.gateway}-admin.{release.namespace.name}.svc:8081"
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "gateways", "static_configs": [{"targets": [target]}]}],
    }
    with cluster.namespace("monitoring") as namespace:
        namespace.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": NAME},
                "data": {"prometheus.yml": yaml.safe_dump(config)},
            }
        )
        container = {
            "image": cluster.prometheus,
            "args": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/tmp/data"],
            "volumeMounts": [{"name": "config", "mountPath": "/etc/prometheus"}],
            "readinessProbe": {"httpGet": {"path": "/-/ready", "port": 9090}, "periodSeconds": 1},
        }
        volume = {"name": "config", "configMap": {"name": NAME}}
        namespace.start(NAME, {"app.kubernetes.io/name": NAME}, container, volume)
        yield namespace


def values(namespace: Namespace, expression: str) -> list[float]:
    """The current values of an expression."""
    query = urllib.parse.urlencode({"query": expression})
    path = f"/api/v1/namespaces/{namespace.name}/pods/{NAME}:9090/proxy/api/v1/query?{query}"
    answer = json.loads(namespace.kubectl("get", "--raw", path))
    return [float(sample["value"][1]) for sample in answer["data"]["result"]]


def test_speculation_status_shows_the_draft_at_work(release):
    """Without a word about addresses or keys: the command finds both in the pod."""
    assert release.chat(release.key("radiology"))["status"] == 200
    (worker,) = json.loads(release.appliance("speculation", "status", "--json"))["workers"]
    assert (worker["models"], worker["mode"]) == ([MODEL], "speculative")


def test_prometheus_of_the_namespace_monitoring_scrapes_by_default(release, monitoring):
    assert release.chat(release.key("laboratory"))["status"] == 200
    assert soon(lambda: values(monitoring, 'up{job="gateways"}') == [1])
    tokens = f'sum(appliance_tokens_total{{model="{MODEL}"}}) > 0'
    assert soon(lambda: values(monitoring, tokens))


def test_other_pods_of_the_namespace_monitoring_reach_no_metrics(release, monitoring):
    monitoring.pod("stranger", {"app": "stranger"}, SLEEP)
    admin = f"{release.pod_of('gateway')['status']['podIP']}:8081"
    assert values(monitoring, 'up{job="gateways"}') or soon(lambda: values(monitoring, "up")), (
        "positive control"
    )
    assert not open_from(monitoring, "stranger", admin)[admin]
