"""
The chart installed with the demo models on the CPU.
"""

import json
import secrets
from dataclasses import dataclass
from typing import Any

from tests.cluster.cluster import WAIT_SECONDS, Namespace
from tests.cluster.connections import open_from, soon
from tests.deploy.chart.site import Values

NAME = "appliance"
GATEWAY = f"{NAME}-gateway"
MODEL = "demo-coder"
WORKER = f"{NAME}-m-{MODEL}"
"""Name of its Deployment."""
CONTROL_TOKEN = "control-token"
CLIENT = "client"
"""A pod of the same namespace, which may call gateways."""
CONFIG = ("--config", "/etc/appliance/appliance.yaml")
VALUES: Values = {
    "keys": {"controlToken": {"existingSecret": CONTROL_TOKEN}},
    "models": [
        {
            "name": MODEL,
            "device": "cpu",
            "method": "eagle3",
            "target": {"path": "models/demo-coder"},
            "draft": {"path": "models/demo-coder-eagle31"},
            "resources": {
                "requests": {"cpu": "250m", "memory": "4Gi", "ephemeral-storage": "1Gi"},
                "limits": {"cpu": "2", "memory": "8Gi", "ephemeral-storage": "8Gi"},
            },
            "shmSize": "1Gi",
            "cacheSize": "4Gi",
        }
    ],
    # What is requested of two cores, beside other pods of the tests.
    "gateway": {"resources": {"requests": {"cpu": "100m", "memory": "512Mi"}}},
    "tests": {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}},
}
SLEEP = "import signal; signal.pause()"
CHAT = """
import json, ssl, sys, time, urllib.error, urllib.request
url, key, seconds, authority = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
trusted = ssl.create_default_context(cadata=authority or None)
body = {"model": "demo-coder", "messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 16}
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
began, refused = time.monotonic(), 0
while True:
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120, context=trusted) as answer:
            print(json.dumps({"status": answer.status, "refused": refused, "body": json.load(answer)}))
        break
    except urllib.error.HTTPError as error:
        # A new key is known to the gateway a moment later.
        if error.code != 401 or time.monotonic() > began + seconds:
            print(json.dumps({"status": error.code, "refused": refused, "body": error.read().decode()}))
            break
        refused += 1
        time.sleep(0.2)
"""
"""One request, again while its key is not known yet: URL, key, maximum seconds of that, authority (PEM)."""
KEY_SECONDS = 30


@dataclass(frozen=True)
class Release:
    """An installed chart, and how its operator uses it."""

    namespace: Namespace
    gateway: str
    """Name of its Service, and, with `-0`, of the first pod of its StatefulSet."""

    def appliance(self, *words: str, check: bool = True) -> str:
        """What a command in a gateway's pod prints."""
        done = self.namespace.exec(f"service/{self.gateway}", "appliance", *words, *CONFIG, check=check)
        return done.stdout

    def key(self, tenant: str) -> str:
        """A new tenant's API key."""
        self.appliance("tenant", "create", tenant)
        return self.appliance("key", "create", tenant).split()[0]

    def chat(self, key: str, authority: str = "") -> dict[str, Any]:
        """
        What a pod gets that calls the Service: `status`, `body`, and how often its key was `refused`.

        Args:
            key: API key.
            authority: trusted one (PEM), for a gateway with TLS.
        """
        url = f"{'https' if authority else 'http'}://{self.host}:8080"
        return json.loads(self.namespace.python(CLIENT, CHAT, url, key, str(KEY_SECONDS), authority))

    @property
    def host(self) -> str:
        """Name of the Service in the cluster."""
        return f"{self.gateway}.{self.namespace.name}.svc"

    def wait_until_served(self) -> None:
        """Wait until all pods are ready, and the nodes know it and lead the Service's clients there."""
        for workload in (f"statefulset/{self.gateway}", f"deployment/{WORKER}"):
            words = ("rollout", "status", workload, f"--timeout={WAIT_SECONDS}s")
            self.namespace.kubectl(*words, seconds=WAIT_SECONDS + 60)
        target = f"{self.host}:8080"
        assert soon(lambda: open_from(self.namespace, CLIENT, target)[target])

    def pod_of(self, component: str) -> dict[str, Any]:
        """The only pod of a component that is not on its way out."""
        pods = self.namespace.objects("pods", f"app.kubernetes.io/component={component}")
        (pod,) = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return pod

    @property
    def url(self) -> str:
        return f"http://{self.host}:8080"


def installed(namespace: Namespace, values: Values = VALUES) -> Release:
    """Install it, and start `CLIENT`."""
    namespace.secret(CONTROL_TOKEN, token=secrets.token_hex(32))
    namespace.install(values, NAME)
    namespace.pod(CLIENT, {"app": CLIENT}, SLEEP)
    return Release(namespace, GATEWAY)
