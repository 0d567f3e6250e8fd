"""
What the chart's NetworkPolicies deny, for each component, next to a pod without policies that can do it.
"""

import pytest

from tests.cluster.connections import LISTEN, open_from, soon
from tests.cluster.release import CLIENT


@pytest.fixture(scope="module")
def elsewhere(cluster):
    """Another namespace, with a pod that listens and calls."""
    with cluster.namespace() as namespace:
        namespace.pod("stranger", {"app": "stranger"}, LISTEN)
        yield namespace


def test_no_component_calls_the_api_server_other_namespaces_or_the_outside(release, elsewhere):
    api_server = elsewhere.cluster.service("default", "kubernetes")
    targets = (f"{api_server}:443", f"{elsewhere.address('stranger')}:8000", *elsewhere.cluster.outside)
    assert soon(lambda: all(open_from(release.namespace, CLIENT, *targets).values())), "positive control"
    for component in ("gateway", "worker"):
        name = release.pod_of(component)["metadata"]["name"]
        assert not any(open_from(release.namespace, name, *targets).values()), component


def test_gateway_calls_workers_and_nothing_calls_workers_but_gateways(release, elsewhere):
    worker = f"{release.pod_of('worker')['status']['podIP']}:8000"
    assert open_from(release.namespace, f"{release.gateway}-0", worker)[worker], "positive control"
    assert not open_from(release.namespace, CLIENT, worker)[worker]
    assert not open_from(elsewhere, "stranger", worker)[worker]


def test_worker_does_not_call_the_gateway_or_the_resolver(release):
    gateway = f"{release.pod_of('gateway')['status']['podIP']}:8080"
    resolver = release.namespace.cluster.service("kube-system", "kube-dns")
    targets = (gateway, f"{resolver}:53")
    assert all(open_from(release.namespace, CLIENT, *targets).values()), "positive control"
    assert not any(
        open_from(release.namespace, release.pod_of("worker")["metadata"]["name"], *targets).values()
    )


def test_clients_reach_only_the_api_of_gateways_and_only_from_the_namespace(release, elsewhere):
    address = release.pod_of("gateway")["status"]["podIP"]
    api, admin = f"{address}:8080", f"{address}:8081"
    itself = open_from(release.namespace, f"{release.gateway}-0", api, admin)
    assert itself == {api: True, admin: True}, "positive control: both listen"
    assert open_from(release.namespace, CLIENT, api, admin) == {api: True, admin: False}
    assert open_from(elsewhere, "stranger", api, admin) == {api: False, admin: False}
