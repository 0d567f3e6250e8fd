"""
NetworkPolicies are enforced in the cluster: each denied connection was open before.

On the built-in node this tests the translator of `network_policies`.
"""

import pytest

from tests.cluster.connections import LISTEN, open_from, soon
from tests.cluster.network_policies import rules
from tests.cluster.release import SLEEP


@pytest.fixture(scope="module")
def api_server(cluster) -> str:
    return f"{cluster.service('default', 'kubernetes')}:443"


def policy(name: str, app: str, **spec) -> dict:
    kinds = [kind for kind in ("Ingress", "Egress") if kind.lower() in spec]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {"podSelector": {"matchLabels": {"app": app}}, "policyTypes": kinds, **spec},
    }


@pytest.fixture
def pair(namespace):
    """Pods `caller` and `server`, and the address of the second one."""
    namespace.pod("server", {"app": "server"}, LISTEN)
    namespace.pod("caller", {"app": "caller"}, SLEEP)
    return namespace, namespace.address("server")


def test_without_a_policy_everything_is_open(pair, api_server):
    """The positive control of all denials."""
    namespace, server = pair
    targets = (f"{server}:8000", f"{server}:8001", api_server)
    assert soon(lambda: all(open_from(namespace, "caller", *targets).values()))


def test_egress_opens_only_for_listed_peers_and_ports(pair, api_server):
    namespace, server = pair
    listed, other = f"{server}:8000", f"{server}:8001"
    assert soon(lambda: all(open_from(namespace, "caller", listed, other, api_server).values()))
    namespace.apply(policy("egress", "caller", egress=[]))
    assert soon(lambda: not any(open_from(namespace, "caller", listed, other, api_server).values()))
    peer = {"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["server"]}]}}
    namespace.apply(policy("egress", "caller", egress=[{"to": [peer], "ports": [{"port": "web"}]}]))
    assert soon(lambda: open_from(namespace, "caller", listed)[listed])
    assert not any(open_from(namespace, "caller", other, api_server).values())
    assert open_from(namespace, "server", api_server)[api_server], "a pod that no policy selects"


def test_ingress_opens_only_for_listed_peers(pair):
    namespace, server = pair
    target = f"{server}:8000"
    assert soon(lambda: open_from(namespace, "caller", target)[target])
    elsewhere = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}}}
    namespace.apply(policy("ingress", "server", ingress=[{"from": [elsewhere]}]))
    assert soon(lambda: not open_from(namespace, "caller", target)[target])
    here = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}},
        "podSelector": {"matchLabels": {"app": "caller"}},
    }
    namespace.apply(policy("ingress", "server", ingress=[{"from": [here], "ports": [{"port": 8000}]}]))
    assert soon(lambda: open_from(namespace, "caller", target)[target])
    assert not open_from(namespace, "caller", f"{server}:8001")[f"{server}:8001"]


def test_blocks_of_addresses_have_exceptions(pair, api_server):
    namespace, server = pair
    target = f"{server}:8000"
    block = {"cidr": "0.0.0.0/0", "except": [f"{server}/32"]}
    assert soon(lambda: all(open_from(namespace, "caller", target, api_server).values()))
    namespace.apply(policy("egress", "caller", egress=[{"to": [{"ipBlock": block}]}]))
    assert soon(lambda: not open_from(namespace, "caller", target)[target])
    assert open_from(namespace, "caller", api_server)[api_server]


def pod(name: str, address: str, **labels: str) -> dict:
    return {
        "metadata": {"name": name, "namespace": "one", "labels": labels},
        "spec": {"containers": []},
        "status": {"podIP": address, "phase": "Running"},
    }


def test_policy_of_another_namespace_selects_nothing():
    """Rules alone: the policy would otherwise select the pod."""
    selecting = policy("p", "a", egress=[])
    pods = [pod("a", "10.244.0.2", app="a")]
    for namespace, expected in (("one", True), ("two", False)):
        selecting["metadata"]["namespace"] = namespace
        assert ("jump egress_10_244_0_2" in rules([selecting], pods, [])) is expected


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        ({"key": "app", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "app", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "app", "operator": "Exists"}, True),
        ({"key": "app", "operator": "DoesNotExist"}, False),
    ],
)
def test_rules_select_pods_by_expression(expression, selected):
    selecting = policy("p", "", ingress=[])
    selecting["metadata"]["namespace"] = "one"
    selecting["spec"]["podSelector"] = {"matchExpressions": [expression]}
    assert (
        "jump ingress_10_244_0_2" in rules([selecting], [pod("a", "10.244.0.2", app="a")], [])
    ) is selected
