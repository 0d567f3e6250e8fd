"""
Every connection between the components that the chart can install: open where the chart needs it only.

The pods have the labels of the chart's pods and nothing else of them: they listen on every port.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Namespace
from tests.cluster.connections import LISTEN, PORTS, open_from, soon
from tests.cluster.release import NAME
from tests.deploy.chart.helm import CHART
from tests.deploy.chart.site import DRAFTED, IN_CHART, PICKER, REFRESH, SEVERAL, WEIGHTS_LOAD, site

PICKED = "vllm"
"""A pod that the picker may call, of others."""
OTHERS = {
    PICKED: PICKER["picker"]["pods"]["labels"],
    "client": {"app": "client"},
}
"""Pods in the release's namespace."""
ELSEWHERE = {
    "prometheus": {"app.kubernetes.io/name": "prometheus"},
    "proxy": {"app": "proxy"},
    "stranger": {"app": "stranger"},
}
"""Pods in the namespace `monitoring`."""
PROXIES = {
    "picker": {"proxies": [{"namespaceSelector": {}, "podSelector": {"matchLabels": ELSEWHERE["proxy"]}}]}
}
RESOLVER, API_SERVER, OUTSIDE = "resolver:53", "API server:443", "outside"
OPEN = {f"{name}:{port}" for name in (*OTHERS, *ELSEWHERE) for port in PORTS} | {RESOLVER, API_SERVER}
"""What no policy of the chart is about, for pods that are not of the chart."""
ALLOWED = {
    "gateway": {"worker:8000", "worker:8001", "postgres:5432", RESOLVER},
    "worker": set(),
    "worker-node": set(),
    "postgres": set(),
    "tools": {"gateway:8080", "worker:8000", "postgres:5432", RESOLVER},
    "draft-refresh": {"postgres:5432", RESOLVER},
    "weights-load": set(),
    "picker": {f"{PICKED}:8080", f"{PICKED}:8081", RESOLVER},
    PICKED: {"gateway:8080", *OPEN},
    "client": {"gateway:8080", *OPEN},
    "prometheus": {"gateway:8081", "picker:9090", *OPEN},
    "proxy": {"picker:9002", *OPEN},
    "stranger": OPEN,
}
"""By the pod that connects."""


def labels_of(objects: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Labels of the pods that objects are or create."""
    for each in objects:
        spec = each.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        pod = each if each["kind"] == "Pod" else spec.get("template")
        if pod and "containers" in pod["spec"]:
            yield pod["metadata"]["labels"]


@pytest.fixture(scope="module")
def site_of_pods(cluster) -> Iterator[tuple[dict[str, Namespace], Path]]:
    """Namespaces of all pods by name, and a file of the chart's policies, which are not there yet."""
    values = site(SEVERAL, IN_CHART, REFRESH, WEIGHTS_LOAD, PICKER, PROXIES, model=DRAFTED)
    with cluster.namespace() as namespace, cluster.namespace("monitoring") as elsewhere:
        file = cluster.directory / "components.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        words = ("--kube-version=1.35", "--values", str(file))
        shown = namespace.helm("template", NAME, str(CHART), *words)
        objects = [each for each in yaml.safe_load_all(shown) if each]
        pods = {labels["app.kubernetes.io/component"]: labels for labels in labels_of(objects)}
        made = [(namespace, *each) for each in {**pods, **OTHERS}.items()]
        made += [(elsewhere, *each) for each in ELSEWHERE.items()]
        with ThreadPoolExecutor() as side_by_side:
            list(side_by_side.map(lambda each: each[0].pod(*each[1:], LISTEN), made))
        policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
        file.write_text(yaml.safe_dump_all(policies), encoding="utf-8")
        yield dict.fromkeys((*pods, *OTHERS), namespace) | dict.fromkeys(ELSEWHERE, elsewhere), file


def test_each_component_connects_only_where_the_chart_needs_it(cluster, site_of_pods):
    pods, policies = site_of_pods
    assert set(pods) == set(ALLOWED), "a component of the chart is missing here, or gone"
    addresses = {name: namespace.address(name) for name, namespace in pods.items()}
    targets = {f"{addresses[name]}:{port}": f"{name}:{port}" for name in pods for port in PORTS}
    targets[f"{cluster.service('kube-system', 'kube-dns')}:53"] = RESOLVER
    targets[f"{cluster.service('default', 'kubernetes')}:443"] = API_SERVER
    targets |= dict.fromkeys(cluster.outside, OUTSIDE)

    def opened(name: str) -> set[str]:
        """To others: a pod always reaches itself."""
        reached = open_from(pods[name], name, *targets)
        return {
            each for target, each in targets.items() if reached[target] and not each.startswith(f"{name}:")
        }

    def expected(name: str) -> set[str]:
        others = {each for each in ALLOWED[name] if not each.startswith(f"{name}:")}
        return others | ({OUTSIDE} & set(targets.values()) if name in (*OTHERS, *ELSEWHERE) else set())

    everything = set(targets.values())
    for name in pods:
        own = {f"{name}:{port}" for port in PORTS}
        assert soon(lambda name=name, own=own: opened(name) == everything - own), f"positive control: {name}"
    cluster.kubectl("apply", "--filename", str(policies))
    assert soon(lambda: API_SERVER not in opened("worker"))
    found = {name: opened(name) for name in pods}
    assert found == {name: expected(name) for name in pods}
