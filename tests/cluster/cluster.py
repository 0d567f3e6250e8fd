"""
The cluster that the tests use: the built-in node, or the one that KUBECONFIG names.
"""

import base64
import json
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.chart.helm import CHART
from tests.deploy.chart.site import Values, over
from tests.deploy.container_engine import CommandError, run_command

PYTHON = "/opt/appliance/bin/python"
"""In the product's images."""
PROMETHEUS_IMAGE = "CLUSTER_PROMETHEUS"
"""Variable with the image of Prometheus in the cluster of KUBECONFIG."""
WAIT_SECONDS = 600
FORMER_TAG = "CLUSTER_FORMER_TAG"
"""Variable with the tag of an earlier version's images, for the cluster of KUBECONFIG."""

Run = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Cluster:
    """What tests do with a cluster."""

    run: Run
    """Runs a program that finds the API server: words, and `seconds`, `check`, `stdin`."""
    helm_programs: Mapping[str, str]
    """Programs by major version, such as `helm3`."""
    values: Values
    """Values of the chart: where images and the demo models are."""
    directory: Path
    """For files that these programs read."""
    prometheus: str
    """Image of Prometheus; empty: none."""
    outside: tuple[str, ...] = ()
    """`host:port` of listeners outside the cluster."""
    former_tag: str = ""
    """Tag of the images of an earlier version; empty: there are none."""

    def kubectl(self, *words: str, **options: Any) -> str:
        """What a command prints."""
        return self.run("kubectl", *words, **options).stdout

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl(
            "apply",
            "--filename",
            "-",
            stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
        )

    def image(self, name: str) -> str:
        """Reference of an image of the chart."""
        return self._reference(self._all_values()["images"][name])

    def demo_models(self) -> str:
        """Reference of the image of the demo models."""
        return self._reference(self._all_values()["modelDefaults"]["target"]["image"])

    def _all_values(self) -> Values:
        return over(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")), self.values)

    def _reference(self, image: Values) -> str:
        registry = self._all_values()["global"]["imageRegistry"]
        return "/".join(filter(None, (registry, f"{image['repository']}@{image['digest']}")))

    def service(self, namespace: str, name: str) -> str:
        """Address of a Service; a pod that may not call the resolver would wait long for its name."""
        words = ("get", "service", name, "--output=jsonpath={.spec.clusterIP}")
        return self.kubectl("--namespace", namespace, *words)

    @contextmanager
    def namespace(self, name: str = "") -> Iterator["Namespace"]:
        """A new one, with the pod security standard that the product promises; removed with all in it."""
        name = name or f"appliance-{uuid.uuid4().hex[:8]}"
        labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        self.kubectl("create", "--filename", "-", stdin=json.dumps(made))
        try:
            yield Namespace(self, name)
        finally:
            self.remove(name)

    def remove(self, namespace: str) -> None:
        """Delete a namespace with all in it."""
        # Kubernetes looks at a namespace again after half its pods' grace periods, so they end before it.
        kinds = "cronjobs,deployments,statefulsets,jobs,pods"
        for words in (
            ("--namespace", namespace, "delete", kinds, "--all"),
            ("delete", "namespace", namespace),
        ):
            self.kubectl(*words, "--wait=true", "--ignore-not-found", seconds=WAIT_SECONDS)


@dataclass(frozen=True)
class Namespace:
    """One namespace of it."""

    cluster: Cluster
    name: str

    def kubectl(self, *words: str, **options: Any) -> str:
        return self.cluster.kubectl("--namespace", self.name, *words, **options)

    def objects(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        return json.loads(self.kubectl("get", kind, "--selector", selector, "--output", "json"))["items"]

    def apply(self, *objects: dict[str, Any]) -> None:
        self.cluster.apply(
            *({**each, "metadata": {**each["metadata"], "namespace": self.name}} for each in objects)
        )

    def helm(self, action: str, *words: str, version: str = "helm3", seconds: float = WAIT_SECONDS) -> str:
        """What an action prints, with the logs of its pods where it fails."""
        command = (self.cluster.helm_programs[version], action, "--namespace", self.name, *words)
        done = self.cluster.run(*command, seconds=seconds, check=False)
        if done.returncode:
            raise CommandError(
                f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}\n{self.state()}"
            )
        return done.stdout

    def install(
        self,
        values: Values,
        release: str,
        *,
        action: str = "install",
        version: str = "helm3",
        chart: Path = CHART,
    ) -> str:
        """Install or upgrade the chart, and wait until all of it is ready."""
        file = self.cluster.directory / f"{self.name}.yaml"
        file.write_text(yaml.safe_dump(over(self.cluster.values, values)), encoding="utf-8")
        words = (release, str(chart), "--values", str(file), "--wait", "--timeout", f"{WAIT_SECONDS}s")
        return self.helm(action, *words, version=version, seconds=WAIT_SECONDS + 60)

    def secret(self, name: str, kind: str = "Opaque", **data: str) -> None:
        """Create or replace one."""
        head = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
        self.apply({**head, "type": kind, "stringData": data})

    def data_of(self, secret: str) -> dict[str, str]:
        found = json.loads(self.kubectl("get", "secret", secret, "--output=json"))["data"]
        return {key: base64.b64decode(value).decode() for key, value in found.items()}

    def pod(
        self, name: str, labels: Mapping[str, str], source: str, volumes: Mapping[str, Values] | None = None
    ) -> None:
        """
        Start a pod that runs Python, and wait until it runs.

        Args:
            name: its name.
            labels: its labels.
            source: the program.
            volumes: by their names, which are also their directories in the root.
        """
        volumes = volumes or {}
        container = {
            "image": self.cluster.image("gateway"),
            "command": [PYTHON, "-I", "-u", "-c", source],
            "ports": [{"name": "web", "containerPort": 8000}],
            "readinessProbe": {"exec": {"command": ["true"]}},
            "volumeMounts": [{"name": each, "mountPath": f"/{each}"} for each in volumes],
        }
        self.start(name, labels, container, *({"name": each, **volume} for each, volume in volumes.items()))

    def start(
        self, name: str, labels: Mapping[str, str], container: dict[str, Any], *volumes: dict[str, Any]
    ) -> None:
        """Start a pod of one container, and wait until it is ready; meets the standard `restricted`."""
        security = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        own = {
            "name": name,
            "securityContext": security,
            "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        }
        spec = {
            "containers": [{**own, **container}],
            "volumes": volumes,
            "securityContext": {"fsGroup": 10001},
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "enableServiceLinks": False,
        }
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": dict(labels)},
                "spec": spec,
            }
        )
        self.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=120s", seconds=150)

    def address(self, pod: str) -> str:
        return self.kubectl("get", "pod", pod, "--output", "jsonpath={.status.podIP}")

    def exec(
        self, pod: str, *words: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in a pod that runs."""
        return self.cluster.run(
            "kubectl",
            "--namespace",
            self.name,
            "exec",
            "--stdin",
            pod,
            "--",
            *words,
            stdin=stdin,
            check=check,
        )

    def python(self, pod: str, source: str, *words: str) -> str:
        """What Python prints in a pod of the product's images."""
        return self.exec(pod, PYTHON, "-I", "-", *words, stdin=source).stdout

    def state(self) -> str:
        """Pods, events and the ends of logs: what one looks at first when something is not ready."""
        parts = [self.kubectl("get", "pods,pvc", "--output=wide", check=False)]
        parts.append(self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)[-3000:])
        for pod in self.objects("pods"):
            words = ("logs", pod["metadata"]["name"], "--all-containers", "--prefix", "--tail=15")
            parts.append(self.kubectl(*words, check=False)[-3000:])
        return "\n".join(parts)


def from_kubeconfig(values: Path, directory: Path) -> Cluster:
    """The cluster of KUBECONFIG; `kubectl` and `helm` are on the PATH."""

    def run(
        *words: str, seconds: float = 120, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return run_command(list(words), seconds, os.environ, check=check, stdin=stdin)

    read = yaml.safe_load(values.read_text(encoding="utf-8"))
    programs = {"helm3": "helm", "helm4": "helm"}
    prometheus, former = (os.environ.get(name, "") for name in (PROMETHEUS_IMAGE, FORMER_TAG))
    return Cluster(run, programs, read, directory, prometheus, former_tag=former)
