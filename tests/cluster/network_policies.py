"""
NetworkPolicies for the node of the tests, which has no network plugin that enforces them.

    policies, pods, namespaces of the API server ──► `rules` (pure) ──► nft in the node's network

Packets of an allowed connection pass, and all that the node itself starts, such as probes.  Calls of pods
to their node are filtered, because the API server runs there.  A pod without rules yet reaches nothing.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.cluster.node import PODS, Node

Object = dict[str, Any]
TABLE = "network_policies"
SECONDS = 0.25
"""Between two looks at the API server."""
PATHS = ("/apis/networking.k8s.io/v1/networkpolicies", "/api/v1/pods", "/api/v1/namespaces")


def rules(policies: list[Object], pods: list[Object], namespaces: list[Object]) -> str:
    """The rules for `nft`, which replace those before in one step."""
    cluster = _Cluster(
        [pod for pod in map(_pod, pods) if pod], {each["metadata"]["name"]: each for each in namespaces}
    )
    chains, jumps = [], []
    for pod in cluster.pods:
        for direction in ("Egress", "Ingress"):
            selecting = [each for each in policies if _selects(each, pod) and direction in _types(each)]
            if not selecting:
                continue
            name = f"{direction.lower()}_{pod.address.replace('.', '_')}"
            allowed = [line for each in selecting for line in _allowed(each, direction, cluster)]
            chains.append(_chain(name, [*allowed, "drop"]))
            own = "saddr" if direction == "Egress" else "daddr"
            jumps.append(f"ip {own} {pod.address} jump {name}")
    known = ", ".join(sorted({pod.address for pod in cluster.pods}))
    not_known = f"!= {{ {known} }} " if known else f"{PODS} "
    check = [
        "ct state established,related accept",
        f"ip saddr {PODS} ip saddr {not_known}drop",
        f"ip daddr {PODS} ip daddr {not_known}drop",
        *jumps,
    ]
    chains.append(_chain("check", check))
    # Forwarded: from a pod to another, or to another machine.  Input: to the node.
    chains.extend(
        _chain(hook, [f"type filter hook {hook} priority filter; policy accept;", "jump check"])
        for hook in ("forward", "input")
    )
    return f"table ip {TABLE}\ndelete table ip {TABLE}\ntable ip {TABLE} {{\n" + "".join(chains) + "}\n"


@dataclass(frozen=True)
class _Pod:
    namespace: str
    labels: dict[str, str]
    address: str
    ports: dict[tuple[str, str], int]
    """Number by name and protocol."""


@dataclass(frozen=True)
class _Cluster:
    pods: list[_Pod]
    namespaces: dict[str, Object]


def _pod(pod: Object) -> _Pod | None:
    """A pod with an address of its own."""
    address = pod.get("status", {}).get("podIP")
    ended = pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}
    if not address or ended or pod["spec"].get("hostNetwork"):
        return None
    return _Pod(
        namespace=pod["metadata"]["namespace"],
        labels=pod["metadata"].get("labels", {}),
        address=address,
        ports={
            (port["name"], port.get("protocol", "TCP")): port["containerPort"]
            for container in pod["spec"]["containers"]
            for port in container.get("ports", [])
            if "name" in port
        },
    )


def _types(policy: Object) -> list[str]:
    spec = policy["spec"]
    return spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]


def _selects(policy: Object, pod: _Pod) -> bool:
    same = policy["metadata"]["namespace"] == pod.namespace
    return same and _matches(policy["spec"].get("podSelector", {}), pod.labels)


def _allowed(policy: Object, direction: str, cluster: _Cluster) -> Iterator[str]:
    """Statements that end a chain for what the policy allows."""
    peer_key, other = ("to", "daddr") if direction == "Egress" else ("from", "saddr")
    selected = [pod for pod in cluster.pods if _selects(policy, pod)]
    for rule in policy["spec"].get(direction.lower()) or []:
        for addresses in _peers(rule.get(peer_key), other, policy["metadata"]["namespace"], cluster):
            # A named port has a number in each pod that is called.
            called = addresses.pods if direction == "Egress" else selected
            for port in _ports(rule.get("ports"), called, by_pod=direction == "Egress"):
                yield f"{addresses.match} {port} return".strip()


@dataclass(frozen=True)
class _Addresses:
    match: str
    """For nft; empty: all."""
    pods: list[_Pod]


def _peers(peers: list[Object] | None, other: str, namespace: str, cluster: _Cluster) -> Iterator[_Addresses]:
    if not peers:
        yield _Addresses("", cluster.pods)
    for peer in peers or []:
        if block := peer.get("ipBlock"):
            match = f"ip {other} {block['cidr']}"
            if excepted := block.get("except"):
                match += f" ip {other} != {_set(excepted)}"
            yield _Addresses(match, cluster.pods)
            continue
        in_namespaces = {namespace}
        if "namespaceSelector" in peer:
            in_namespaces = {
                name
                for name, each in cluster.namespaces.items()
                if _matches(peer["namespaceSelector"], each["metadata"].get("labels", {}))
            }
        pods = [
            pod
            for pod in cluster.pods
            if pod.namespace in in_namespaces and _matches(peer.get("podSelector", {}), pod.labels)
        ]
        if pods:
            yield _Addresses(f"ip {other} {_set(pod.address for pod in pods)}", pods)


def _ports(ports: list[Object] | None, called: list[_Pod], *, by_pod: bool) -> Iterator[str]:
    if not ports:
        yield ""
    for port in ports or []:
        protocol = port.get("protocol", "TCP")
        number = port.get("port")
        if number is None:
            yield f"meta l4proto {protocol.lower()}"
        elif isinstance(number, int):
            last = port.get("endPort", number)
            yield f"{protocol.lower()} dport {number}" + (f"-{last}" if last != number else "")
        else:
            for pod in called:
                if (number, protocol) in pod.ports:
                    own = f"ip daddr {pod.address} " if by_pod else ""
                    yield f"{own}{protocol.lower()} dport {pod.ports[number, protocol]}"


def _matches(selector: Object, labels: dict[str, str]) -> bool:
    """A label selector of Kubernetes; an empty one matches everything."""
    tests: dict[str, Callable[[str, list[str]], bool]] = {
        "In": lambda key, values: labels.get(key) in values,
        "NotIn": lambda key, values: labels.get(key) not in values,
        "Exists": lambda key, _: key in labels,
        "DoesNotExist": lambda key, _: key not in labels,
    }
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        tests[each["operator"]](each["key"], each.get("values", []))
        for each in selector.get("matchExpressions", [])
    )


def _set(addresses: Iterable[str]) -> str:
    return "{ " + ", ".join(sorted(set(addresses))) + " }"


def _chain(name: str, statements: Iterable[str]) -> str:
    return f"  chain {name} {{\n" + "".join(f"    {each}\n" for each in statements) + "  }\n"


class Enforcer:
    """Keeps the node's rules up to date; `enforced` runs it."""

    def __init__(self, node: Node, path: Path) -> None:
        self._node = node
        self._path = path
        self._loaded = ""
        self._ended = threading.Event()
        self.error: Exception | None = None
        """Why rules are not up to date any more."""

    def step(self) -> None:
        """Read the API server, and load the rules if they have changed."""
        wanted = rules(*map(self._list, PATHS))
        if wanted != self._loaded:
            self._node.run("nft", "--file", "-", stdin=wanted)
            self._loaded = wanted

    def run(self) -> None:
        """Run until `end`; after an error everything stays as it is, and `error` says so."""
        while not self._ended.wait(SECONDS):
            try:
                self.step()
            except Exception as error:  # noqa: BLE001 - raised by `enforced`
                self.error = error
                return

    def end(self) -> None:
        self._ended.set()

    def _list(self, path: str) -> list[Object]:
        connection = _UnixConnection(self._path)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError(f"{path}: {answer.status} {body[:200].decode(errors='replace')}")
        return json.loads(body)["items"]


class _UnixConnection(HTTPConnection):
    """To `kubectl proxy`, because tests connect to no address but loopback."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@contextmanager
def enforced(node: Node, path: Path) -> Iterator[Enforcer]:
    """
    Enforce the policies of a node.

    Args:
        node: the node.
        path: of a socket to make; short, as sockets' paths are.
    """
    node.start("kubectl-proxy", "kubectl", "proxy", f"--unix-socket={path}")
    node.wait(path.exists, "kubectl proxy listens")
    enforcer = Enforcer(node, path)
    enforcer.step()
    thread = threading.Thread(target=enforcer.run, daemon=True)
    thread.start()
    try:
        yield enforcer
    finally:
        enforcer.end()
        thread.join()
    if enforcer.error:
        raise enforcer.error
