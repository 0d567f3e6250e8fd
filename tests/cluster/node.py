"""
A Kubernetes cluster of one node, in namespaces of its own, next to a machine outside of it.

    outside (198.51.100.2) ──── node (198.51.100.1): API server, kubelet, bridge ──── pods (10.244.0.0/24)

Nothing that it does to interfaces, packet filters, mounts or settings touches this machine.  The exception is
its control groups `kubepods` and `k8s.io`, removed at the end.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.deploy.container_engine import (
    INSIDE,
    OUTSIDE,
    CommandError,
    Networks,
    make_networks,
    remove_tree,
    remove_what_killed_runs_left,
    run_command,
    start,
    wait_until,
)

FILES = Path(__file__).with_name("node")
PROGRAMS = {
    "curl": "curl",
    "ip": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "runc": "runc",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
"""Programs, and the Debian packages they come in."""
CNI = Path("/usr/lib/cni/bridge")
NODE = "node"
PODS = "10.244.0.0/16"
SERVICES = "10.96.0.0/16"
CONFIG = "/etc/kubernetes"
PKI = f"{CONFIG}/pki"
START_SECONDS = 600
IMPORT_SECONDS = 1500
CONTROL_GROUPS = ("kubepods", "k8s.io")
SYSTEM_IMAGES = {"localhost/pause:1": "pause", "localhost/coredns:1": "coredns"}
"""Images of one program each."""
DISK_BYTES = 12 << 30
"""Images, as archives and as layers, and what pods write."""
VOLUMES = 40
"""Number of claims that can be bound, in all."""


class NoNodeError(Exception):
    """There can be no node here; says why."""


class Node:
    """One node; `kubernetes_node` starts and removes it."""

    def __init__(self, networks: Networks, tools: Path, stack: ExitStack) -> None:
        self.networks = networks
        self.directory = networks.directory
        self._stack = stack
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # nsenter reads the namespaces of process 1, `_enter` sets it.
        self.enter: tuple[str, ...] = ()
        self.environment = {
            **os.environ,
            "PATH": f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.directory),
            "KUBECONFIG": f"{CONFIG}/super-admin.conf",
            "CONTAINERD_NAMESPACE": "k8s.io",
        }

    def run(
        self, *words: str | Path, seconds: float = 120, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the node."""
        command = ["nsenter", *self.enter, "--", *map(str, words)]
        return run_command(command, seconds, self.environment, check=check, stdin=stdin)

    def start(self, name: str, *words: str) -> None:
        """Start a component; its log is NAME.log."""
        log = self.directory / f"{name}.log"
        # All they keep is removed with the node.
        self._processes[name] = start(
            [*self.enter, "--", *words], log, self._stack, self.environment, end=signal.SIGKILL
        )

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for a condition; fails at once if a component has ended."""

        def seen() -> bool:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    lines = (self.directory / f"{name}.log").read_text(encoding="utf-8").splitlines()[-5:]
                    raise OSError(f"{name} ended with {process.returncode}: {' '.join(lines)[-1000:]}")
            return ready()

        # Most conditions cost a start of kubectl.
        wait_until(seen, what, seconds=START_SECONDS, every=1)

    def succeeds(self, *words: str) -> Callable[[], bool]:
        """A condition: the program exits with 0."""
        return lambda: self.run(*words, check=False).returncode == 0

    def import_images(self, save: list[str], environment: Mapping[str, str]) -> None:
        """Copy images from a program that writes them as an archive, under their names and digests."""
        with subprocess.Popen(save, stdout=subprocess.PIPE, env=environment) as archive:
            try:
                done = subprocess.run(
                    ["nsenter", *self.enter, "--", "ctr", "images", "import", "-"],
                    stdin=archive.stdout,
                    env=self.environment,
                    capture_output=True,
                    text=True,
                    timeout=IMPORT_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                archive.kill()
                raise
        if done.returncode or archive.returncode:
            raise CommandError(f"images were not imported: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        for name, digest in self.digests().items():
            self.run("ctr", "images", "tag", "--force", name, f"{name.rpartition(':')[0]}@{digest}")

    def digests(self) -> dict[str, str]:
        """Digests of the images by name and tag."""
        rows = [line.split() for line in self.run("ctr", "images", "ls").stdout.splitlines()[1:]]
        # The store also lists them by digest alone.
        return {row[0]: row[2] for row in rows if "@" not in row[0] and not row[0].startswith("sha256:")}

    def _enter(self) -> None:
        """Make the node's namespaces."""
        words = [
            f"--net=/run/netns/{self.networks.names[0]}",
            "unshare",
            "--mount",
            "--propagation",
            "private",
        ]
        words += ["--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--uts"]
        words += ["sh", str(FILES / "enter.sh"), str(self.directory)]
        log = self.directory / "enter.log"
        process = start(words, log, self._stack, self.environment, end=signal.SIGKILL)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def entered() -> bool:
            if process.poll() is not None:
                raise OSError(f"namespaces of a node: {log.read_text(encoding='utf-8').strip()[-500:]}")
            return (self.directory / "entered").exists()

        wait_until(entered, "the node's namespaces")
        first = children.read_text(encoding="ascii").strip()
        self.enter = ("--target", first, "--mount", "--pid", "--net", "--ipc", "--uts")


@contextmanager
def kubernetes_node(place: Path, tools: Path, images: Callable[[Node], None], version: str) -> Iterator[Node]:
    """
    Start a node, wait until it is ready, and remove it.

    Args:
        place: an empty directory for layers of containers, volumes and logs; with `DISK_BYTES` free.
        tools: the programs of `tests.cluster.tools`.
        images: imports images, `SYSTEM_IMAGES` among them.
        version: of Kubernetes, such as `v1.36.4`.

    Raises:
        NoNodeError: a program is missing, or this machine does not allow it.
    """
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    missing += [] if CNI.exists() else ["containernetworking-plugins"]
    if missing:
        raise NoNodeError(f"the Debian packages {', '.join(missing)} are missing")
    if os.geteuid() != 0:
        raise NoNodeError("a node needs root")
    if shutil.disk_usage(place).free < DISK_BYTES:
        raise NoNodeError(f"a node needs {DISK_BYTES >> 30} GiB of disk at {place}")
    names = (f"clusternode-{os.getpid()}", f"clusteroutside-{os.getpid()}")
    with ExitStack() as stack:
        stack.callback(remove_tree, place)
        try:
            remove_what_killed_runs_left()
            _remove_control_groups()
            stack.callback(_remove_control_groups)
            networks = Networks(place, names, {})
            make_networks(networks, [PODS], stack)
            node = Node(networks, tools, stack)
            node._enter()
            # Unpacking takes both cores, so nothing else runs yet.
            _start_runtime(node, images)
            _start_control_plane(node, version)
            _start_pods(node)
        except (OSError, CommandError, subprocess.TimeoutExpired) as error:
            raise NoNodeError(str(error).strip()) from error
        yield node


def _start_runtime(node: Node, images: Callable[[Node], None]) -> None:
    node.start("containerd", "containerd", "--config", f"{CONFIG}/containerd.toml")
    node.wait(node.succeeds("ctr", "version"), "containerd answers")
    images(node)


def _start_control_plane(node: Node, version: str) -> None:
    kubeadm = ("--config", f"{CONFIG}/kubeadm.yaml")
    node.run("sh", "-c", f"echo 'kubernetesVersion: {version}' >>{CONFIG}/kubeadm.yaml")
    node.run("sh", "-c", f"echo 'nameserver {OUTSIDE}' >{CONFIG}/resolv.conf")
    node.run("kubeadm", "init", "phase", "certs", "all", *kubeadm)
    node.run("kubeadm", "init", "phase", "kubeconfig", "all", *kubeadm)
    proxy = node.run("kubeadm", "kubeconfig", "user", *kubeadm, "--client-name", "system:kube-proxy").stdout
    node.run("tee", f"{CONFIG}/kube-proxy.conf", stdin=proxy)

    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    node.start(
        "etcd",
        "etcd",
        "--data-dir=/var/lib/etcd",
        # What a power cut would lose is removed at the end anyway.
        "--unsafe-no-fsync",
        "--log-level=warn",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    )
    node.start(
        "kube-apiserver",
        "kube-apiserver",
        f"--advertise-address={INSIDE}",
        f"--etcd-servers={client}",
        "--allow-privileged=true",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--client-ca-file={PKI}/ca.crt",
        f"--tls-cert-file={PKI}/apiserver.crt",
        f"--tls-private-key-file={PKI}/apiserver.key",
        f"--kubelet-client-certificate={PKI}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={PKI}/apiserver-kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--proxy-client-cert-file={PKI}/front-proxy-client.crt",
        f"--proxy-client-key-file={PKI}/front-proxy-client.key",
        f"--requestheader-client-ca-file={PKI}/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={PKI}/sa.pub",
        f"--service-account-signing-key-file={PKI}/sa.key",
        f"--service-cluster-ip-range={SERVICES}",
    )
    node.wait(node.succeeds("kubectl", "get", "--raw", "/readyz"), "the API server is ready")
    for name in ("controller-manager", "scheduler"):
        config = f"{CONFIG}/{name}.conf"
        words = [f"--kubeconfig={config}", "--bind-address=127.0.0.1", "--leader-elect=false"]
        if name == "controller-manager":
            words += [
                f"--root-ca-file={PKI}/ca.crt",
                f"--service-account-private-key-file={PKI}/sa.key",
                "--use-service-account-credentials=true",
                f"--cluster-signing-cert-file={PKI}/ca.crt",
                f"--cluster-signing-key-file={PKI}/ca.key",
            ]
        node.start(f"kube-{name}", f"kube-{name}", *words)


def _start_pods(node: Node) -> None:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    node.run("sh", "-c", f"echo 'maxOpenFiles: {min(files, 1_000_000)}' >>{CONFIG}/kubelet.yaml")
    node.start(
        "kubelet",
        "kubelet",
        f"--config={CONFIG}/kubelet.yaml",
        f"--kubeconfig={CONFIG}/kubelet.conf",
        f"--hostname-override={NODE}",
        f"--node-ip={INSIDE}",
    )
    node.wait(node.succeeds("kubectl", "get", "node", NODE), "the kubelet registers the node")
    node.start("kube-proxy", "kube-proxy", f"--config={CONFIG}/kube-proxy.yaml")
    node.run("kubectl", "apply", "--filename", f"{CONFIG}/objects.yaml")
    volumes = [_volume(number) for number in range(VOLUMES)]
    node.run("mkdir", *(volume["spec"]["local"]["path"] for volume in volumes))
    node.run(
        "kubectl",
        "apply",
        "--filename",
        "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": volumes}),
    )
    ready = ("kubectl", "wait", "--for=condition=Ready", f"node/{NODE}", "--timeout=1s")
    node.wait(node.succeeds(*ready), "the node is ready")
    dns = (
        "kubectl",
        "--namespace=kube-system",
        "wait",
        "--for=condition=Available",
        "deployment/coredns",
        "--timeout=1s",
    )
    node.wait(node.succeeds(*dns), "DNS answers")


def _volume(number: int) -> dict[str, Any]:
    """A PersistentVolume of the kind `local`: hostPath would ignore the group that a pod asks for."""
    path = f"/var/lib/volumes/{number}"
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"volume-{number}"},
        "spec": {
            "capacity": {"storage": "1Ti"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "storageClassName": NODE,
            "local": {"path": path},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }


def _remove_control_groups() -> None:
    """
    Remove those of pods.

    Raises:
        OSError: processes are in them, so another node runs here.
    """
    left = [path for name in CONTROL_GROUPS for path in Path("/sys/fs/cgroup").glob(f"**/{name}")]
    until = time.monotonic() + 30
    for path in left:
        # Depth first; a group empties a moment after its processes have been killed.
        for group in sorted((path, *filter(Path.is_dir, path.rglob("*"))), key=lambda each: -len(each.parts)):
            while True:
                try:
                    group.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError as error:
                    if time.monotonic() > until:
                        raise OSError(f"{group} is in use: does another node run here?") from error
                    time.sleep(0.1)
