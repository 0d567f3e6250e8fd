"""
The demo profile of `deploy/compose.yaml`, as a site brings it up.

Images from local wheels, internal networks, a chat from another machine through the published port, and
nothing that gets out.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.deploy.compose_project import PORT, START_SECONDS, ComposeProject, compose_project
from tests.deploy.container_engine import INSIDE, KNOCKED_PORT, OUTSIDE

SERVICE_PORT = 9999
PROMETHEUS = """
FROM {base}
COPY prometheus promtool /usr/bin/
RUN mkdir /prometheus && chown 65534:65534 /prometheus
USER 65534:65534
ENTRYPOINT ["/usr/bin/prometheus"]
"""
ASK_PROMETHEUS = """
import json, urllib.request
def get(path):
    with urllib.request.urlopen("http://prometheus:9090/api/v1/" + path, timeout=10) as answer:
        return json.load(answer)["data"]
rules = [rule for group in get("rules")["groups"] for rule in group["rules"]]
print(json.dumps([
    sorted([target["labels"]["job"], target["health"]] for target in get("targets")["activeTargets"]),
    [rule["name"] + ": " + rule["lastError"] for rule in rules if rule.get("lastError")],
    len(rules)]))
"""
SCRAPED = [["gateway", "up"], ["worker", "up"]]
HOST_SERVICE = (
    f"import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={SERVICE_PORT}, bind='0.0.0.0')"
)

GET_OUT = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
who, outside, port, host, service, peer = {arguments!r}
def connects(address):
    try:
        socket.create_connection(address, 3).close()
        return True
    except OSError:
        return False
def ask_for_a_name():
    try:
        socket.getaddrinfo(f"{{who}}.secret.example", 80)
    except OSError:
        pass
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
    for _ in range(3):
        try:
            datagrams.sendto(f"datagram of {{who}}".encode(), (outside, port))
        except OSError:
            pass
gateways = [line.split()[2] for line in open("/proc/net/route").read().splitlines()[1:]]
gateways = [socket.inet_ntoa(bytes.fromhex(each)[::-1]) for each in gateways if each != "00000000"]
with ThreadPoolExecutor(16) as at_once:
    at_once.submit(ask_for_a_name)
    neighbours = [address for address in (host, *gateways)]
    connected = at_once.map(connects, [(outside, port), *((address, service) for address in neighbours)])
    peer_answers = bool(peer) and connects(peer)
    got_out, *got_to_host = connected
print([outside] if got_out else [],
      [address for address, got in zip(neighbours, got_to_host, strict=True) if got],
      peer_answers)
"""
"""
Run in a container: try TCP, UDP and DNS to the machine outside, a service of the engine's machine at every
address of it that can be guessed, and a neighbour that has to answer.
"""


CONNECT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def connect(address):
    try:
        socket.create_connection(address, 3).close()
        return "connected"
    except OSError as error:
        return str(error)
with ThreadPoolExecutor(16) as at_once:
    print(json.dumps(list(at_once.map(connect, map(tuple, json.loads(sys.argv[1]))))))
"""


@pytest.fixture(scope="module")
def demo(images) -> Iterator[ComposeProject]:
    engine = images.engine
    with compose_project(images, "demo", {"PROMETHEUS_IMAGE": "prometheus:debian"}) as project:
        # Something of the engine's own machine that containers must not reach.
        run = ("run", "--detach", "--network=host", "--name=host-service")
        engine.docker(*run, "--entrypoint=/opt/appliance/bin/python", images.gateway, "-c", HOST_SERVICE)
        try:
            project.compose("up", "--detach", seconds=START_SECONDS)
            project.wait_for("/readyz")
            yield project.with_key()
        finally:
            engine.docker("rm", "--force", "--volumes", "host-service")
    left = engine.docker("ps", "--all", "--format={{.Names}}") + engine.docker("volume", "ls", "--quiet")
    assert left == ""


def get_out(demo: ComposeProject, container: str, who: str, peer: tuple[str, int] | None) -> str:
    arguments = (who, OUTSIDE, KNOCKED_PORT, INSIDE, SERVICE_PORT, peer)
    return demo.engine.python(container, GET_OUT.format(arguments=arguments)).stdout.strip()


def heard(demo: ComposeProject, who: str) -> set[str]:
    """How the machine outside was reached: by `udp`, by `dns`."""
    return {knock["kind"] for knock in demo.engine.knocks() if who in knock["said"]}


def test_a_machine_outside_can_chat(demo):
    """Through the one published port; without a key it is refused."""
    assert demo.chat()
    status, _ = replace(demo, key="sk-wrong").ask("/v1/models")
    assert status == 401


def test_only_the_ingress_port_is_published(demo):
    """The addresses of gateway and worker take no connection from outside, though it knows the way there."""
    inside = []
    for service, port in (("gateway", 8080), ("worker-cpu", 8000)):
        inspected = demo.engine.docker("inspect", "--format={{json .NetworkSettings}}", demo.name(service))
        settings = json.loads(inspected)
        assert settings["Ports"].get(f"{port}/tcp") is None
        inside += [(network["IPAddress"], port) for network in settings["Networks"].values()]
    tried = json.loads(demo.engine.outside(CONNECT, json.dumps([*inside, (INSIDE, PORT)])))
    assert tried[-1] == "connected"
    assert len(tried) > 2
    assert all(re.search(r"timed out|unreachable|refused|No route", each) for each in tried[:-1]), tried


def test_an_ordinary_container_gets_out(demo):
    """The positive control: what fails elsewhere works here, so the networks are the cause."""
    run = ("run", "--detach", "--rm", "--entrypoint=/opt/appliance/bin/python")
    sleep = "import time; time.sleep(600)"
    container = demo.engine.docker(*run, demo.environment["GATEWAY_IMAGE"], "-c", sleep)
    try:
        outside, host, _ = get_out(demo, container, "ordinary", None).split("] ")
        assert OUTSIDE in outside
        assert INSIDE in host
        assert heard(demo, "datagram of ordinary") == {"udp"}
        assert heard(demo, "ordinary\x06secret") == {"dns"}
    finally:
        demo.engine.docker("kill", container)


@pytest.mark.parametrize(
    ("service", "peer"), [("worker-cpu", ("gateway", 8080)), ("gateway", ("worker", 8000))]
)
def test_nothing_gets_out_by_a_socket(demo, service, peer):
    """By TCP, UDP or the name of a host, to the outside or to the engine's machine; the neighbour answers."""
    assert get_out(demo, demo.name(service), service, peer) == "[] [] True"
    assert heard(demo, f"datagram of {service}") == set()
    assert heard(demo, f"{service}\x06secret") == set()


@pytest.mark.parametrize("service", ["worker-cpu", "gateway"])
def test_the_egress_check_says_closed(demo, service):
    """Also with a target that really listens."""
    targets = {"APPLIANCE_EGRESS__TCP_TARGETS": json.dumps([f"{OUTSIDE}:{KNOCKED_PORT}", "1.1.1.1:443"])}
    done = demo.appliance(service, "egress", "check", "--json", environment=targets, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["verdict"] == "closed"


def test_the_gateway_attests_it_in_the_log(demo):
    """What readiness in strict mode rests on is an entry of the audit log."""
    tail = demo.appliance("gateway", "audit", "tail", "--count=200", "--json", "--purpose=test").stdout
    assert '"egress.attested"' in tail
    assert '"closed"' in tail


@pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="PROMETHEUS IS NOT TRIED WITH COMPOSE: install the Debian package prometheus",
)
def test_prometheus_reads_gateway_and_worker(demo, images, tmp_path):
    """Debian's, in place of its makers' image, starts locked up, finds both, and takes the rules."""
    for program in ("prometheus", "promtool"):
        shutil.copy(shutil.which(program), tmp_path)
    (tmp_path / "Dockerfile").write_text(PROMETHEUS.format(base=images.base), encoding="utf-8")
    demo.engine.docker("build", "--quiet", "--network=none", "--tag=prometheus:debian", tmp_path)
    demo.compose("--profile", "monitoring", "up", "--detach", "prometheus", seconds=START_SECONDS)
    until = time.monotonic() + 120
    targets: list = []
    while targets != SCRAPED and time.monotonic() < until:
        time.sleep(0.5)
        asked = demo.engine.python(demo.name("gateway"), ASK_PROMETHEUS, check=False)
        targets, errors, rules = json.loads(asked.stdout) if asked.returncode == 0 else ([], [], 0)
    assert targets == SCRAPED, asked.stderr
    assert errors == []
    assert rules > 0


def test_the_log_outlives_the_containers(demo):
    """It verifies, `down` and `up` keep it and its keys, and it continues."""
    demo.chat()
    before = demo.appliance("gateway", "audit", "verify", "--json")
    demo.compose("down", "--timeout=60", seconds=300)
    assert demo.ask("/readyz")[0] == 0
    demo.compose("up", "--detach", seconds=START_SECONDS)
    # Without waiting for the worker: keys are of the gateway.
    demo.wait_for("/v1/models")
    assert replace(demo, key="sk-wrong").ask("/v1/models")[0] == 401
    after = demo.appliance("gateway", "audit", "verify", "--json")
    sizes = [json.loads(verified.stdout)["size"] for verified in (before, after)]
    assert sizes[0] < sizes[1]
