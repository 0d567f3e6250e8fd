"""
Gateways and workers are replaced, rolled back, killed and deleted, while clients keep 20 streams running.

The tests of this file run in order: each leaves a release that the next one changes.
"""

import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.cluster.cluster import WAIT_SECONDS
from tests.cluster.connections import soon
from tests.cluster.release import CLIENT, CONTROL_TOKEN, GATEWAY, NAME, SLEEP, VALUES, Release
from tests.cluster.streams import Streams, streams
from tests.deploy.chart.site import Values, over

IDLE_SECONDS = 10
"""Maximum seconds from the deletion of an idle worker's pod to its end."""
BUSY_SECONDS = 30
"""The same from the last stream of a busy one, while its successor starts on the same cores."""
WORKERS = "app.kubernetes.io/component=worker"
REPLACED = ("gateway", "worker")
"""Components whose pods an upgrade replaces."""


FIRST, SECOND = "100m", "300m"
"""
CPU requests of a worker before and after an upgrade, which replaces all pods of gateways and workers.

The new worker gets most of two cores while it starts, although the old one uses all it is given.  Beside
three workers and three gateways, two cores have room for the release of the other tests.
"""
KILL_WHILE_SERVING = """
import os, signal, time, urllib.request
token = open("/etc/appliance/control-token/token").read().strip()
bearer = {"Authorization": "Bearer " + token}
metrics = urllib.request.Request("http://127.0.0.1:8000/metrics", headers=bearer)
until = time.monotonic() + 100
while time.monotonic() < until:
    shown = urllib.request.urlopen(metrics, timeout=10).read().decode()
    running = [line for line in shown.splitlines() if line.startswith("vllm:num_requests_running")]
    if any(float(line.split()[-1]) for line in running):
        time.sleep(0.5)
        os.kill(-1, signal.SIGKILL)
        break
    time.sleep(0.1)
else:
    raise SystemExit("gateways send it no streams")
"""
"""A worker that has just become ready gets its first requests once the gateways have found it."""


def release_values(cpu: str, *, workers: int) -> Values:
    """Two gateways on PostgreSQL in the chart."""
    small = {"requests": {"cpu": "100m", "memory": "512Mi"}}
    (model,) = VALUES["models"]
    worker = {
        "replicas": workers,
        "resources": {"requests": {"cpu": cpu, "memory": "3Gi"}, "limits": {"memory": "5Gi"}},
        "shmSize": "512Mi",
    }
    values = {
        "keys": {
            "signingKey": {"existingSecret": "signing-key"},
            "tenantsMac": {"existingSecret": "tenants-mac"},
        },
        "database": {"kind": "inChart", "inChart": {"existingSecret": "postgres", "resources": small}},
        "gateway": {
            "kind": "Deployment",
            "replicas": 2,
            "podAnnotations": {"revision": cpu},
            "resources": small,
        },
        "models": [over(model, worker)],
    }
    return over(VALUES, values)


@pytest.fixture(scope="module")
def pair(cluster) -> Iterator[Release]:
    """Two gateways and one worker."""
    with cluster.namespace() as namespace:
        key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        namespace.secret(CONTROL_TOKEN, token=secrets.token_hex(32))
        namespace.secret("signing-key", **{"audit.key": key.decode()})
        namespace.secret("tenants-mac", **{"tenants-mac.key": secrets.token_hex(32)})
        passwords = {f"{role}-password": secrets.token_hex(16) for role in ("owner", "gateway")}
        namespace.secret("postgres", **passwords)
        namespace.install(release_values(FIRST, workers=1), NAME)
        namespace.pod(CLIENT, {"app": CLIENT}, SLEEP)
        yield Release(namespace, GATEWAY)


@pytest.fixture(scope="module")
def key(pair) -> str:
    """A tenant's key that the gateways accept."""
    key = pair.key("clinic")
    assert pair.chat(key)["status"] == 200
    return key


def pods(pair: Release, component: str) -> dict[str, str]:
    """Names of pods by the id that changes when a pod is replaced."""
    found = pair.namespace.objects("pods", f"app.kubernetes.io/component={component}")
    return {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in found}


def assert_valid(pair: Release) -> None:
    """The audit log is valid and complete: it has no entry of a request without its end."""
    assert soon(lambda: "valid and complete" in pair.appliance("audit", "verify", check=False)), (
        pair.appliance("audit", "verify", check=False)
    )


def assert_ends_soon(pair: Release, pod: str) -> float:
    """Seconds until the pod's object is gone."""
    began = time.monotonic()
    pair.namespace.kubectl("wait", "--for=delete", f"pod/{pod}", f"--timeout={IDLE_SECONDS}s", check=False)
    seconds = time.monotonic() - began
    left = pair.namespace.kubectl("get", "pod", pod, "--ignore-not-found", "--output=name")
    assert not left, f"{pod} still exists after {seconds:.1f} s\n{pair.namespace.state()}"
    return seconds


def further(running: Streams, count: int) -> None:
    """Wait until more streams are complete."""
    before = len(running.report().complete)
    assert soon(lambda: len(running.report().complete) >= before + count, WAIT_SECONDS), "no stream completes"


def test_a_busy_only_worker_ends_after_its_streams_and_requests_wait_for_the_next(pair, key):
    """As on GPUs, where the new worker cannot start beside the old one."""
    (worker,) = pods(pair, "worker").values()
    with streams(pair.namespace, pair.url, key) as running:
        deleted = time.time()  # noqa: TID251 - compared with the times of clients
        pair.namespace.kubectl("delete", "pod", worker, "--wait=false")
        pair.namespace.kubectl("wait", "--for=delete", f"pod/{worker}", "--timeout=300s", seconds=330)
        gone = time.time()  # noqa: TID251 - compared with the times of clients
        further(running, 20)
    report = running.report()
    assert all(visibly_refused(each) for each in report.failed), report.failed
    before_its_end = [end for each in report.complete if (end := each["began"] + each["seconds"]) <= gone]
    print(f"\nbusy worker: gone {gone - max(before_its_end):.1f} s after its last stream")  # noqa: T201
    assert not [each for each in report.failed if each["began"] <= deleted and not waited(each)]
    assert gone - max(before_its_end) < BUSY_SECONDS
    assert_valid(pair)


def waited(record: dict[str, Any]) -> bool:
    """The request was accepted, and no worker came in time: an event of the stream that has begun says so."""
    return record["status"] == 200 and "no_worker_available" in record["text"]


def visibly_refused(record: dict[str, Any]) -> bool:
    """With 503 and when to try again, or in the stream after waiting; never with a connection that fails."""
    return not record["error"] and (
        waited(record) or (record["status"] == 503 and bool(record["retry_after"]))
    )


def test_upgrade_of_a_single_worker_under_20_streams_fails_no_request(pair, key):
    """The new worker starts beside the old one."""
    assert_replaces_without_failure(pair, key, workers=1)


def test_rollback_restores_the_former_pods(pair, key):
    pair.namespace.helm("rollback", NAME, "1", "--wait", f"--timeout={WAIT_SECONDS}s")
    (pod,) = serving(pair)
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == FIRST
    assert pair.chat(key)["status"] == 200


def test_upgrade_of_two_gateways_and_two_workers_under_20_streams_fails_no_request(pair, key):
    pair.namespace.install(release_values(FIRST, workers=2), NAME, action="upgrade")
    assert len(serving(pair)) == 2
    assert_replaces_without_failure(pair, key, workers=2)


def assert_replaces_without_failure(pair: Release, key: str, *, workers: int) -> None:
    """An upgrade to `SECOND` under 20 streams, none of which fails."""
    before = {component: pods(pair, component) for component in REPLACED}
    with streams(pair.namespace, pair.url, key) as running:
        pair.namespace.install(release_values(SECOND, workers=workers), NAME, action="upgrade")
        for component, old in before.items():
            for pod in old.values():
                pair.namespace.kubectl("wait", "--for=delete", f"pod/{pod}", "--timeout=300s", seconds=330)
            assert not old.keys() & pods(pair, component).keys()
        further(running, 20)
    report = running.report()
    print(f"\nreplaced under load: {len(report.complete)} streams, {len(report.failed)} failed")  # noqa: T201
    assert not report.failed
    assert_valid(pair)


def test_killed_worker_ends_its_streams_visibly_and_new_requests_succeed(pair, key):
    """All processes in the container but the supervisor are killed; another worker serves meanwhile."""
    first = serving(pair)[0]["metadata"]["name"]
    with streams(pair.namespace, pair.url, key, tokens=128) as running:
        pair.namespace.python(first, KILL_WHILE_SERVING)
        further(running, 40)
        again = time.time()  # noqa: TID251 - compared with the times of clients
        further(running, 40)
    report = running.report()
    assert report.failed, "positive control: it was serving"
    assert all(each["status"] == 200 and "error" in each["text"] for each in report.failed), report.failed
    assert not [each for each in report.failed if each["began"] > again]
    assert_valid(pair)


def test_idle_worker_ends_in_10_seconds(pair):
    assert soon(lambda: len(serving(pair)) == 2, WAIT_SECONDS)
    first = serving(pair)[0]["metadata"]["name"]
    pair.namespace.kubectl("delete", "pod", first, "--wait=false")
    print(f"\nidle worker: gone after {assert_ends_soon(pair, first):.1f} s")  # noqa: T201


def serving(pair: Release) -> list[dict[str, Any]]:
    """Pods of workers that are ready and not on their way out."""
    return [
        pod
        for pod in pair.namespace.objects("pods", WORKERS)
        if "deletionTimestamp" not in pod["metadata"]
        and all(status["ready"] for status in pod["status"].get("containerStatuses", [{"ready": False}]))
    ]
