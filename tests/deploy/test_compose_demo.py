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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.deploy.compose_project import PORT, START, START_SECONDS, ComposeProject, compose_project
from tests.deploy.container_engine import INSIDE, KNOCKED_PORT, OUTSIDE, ROOT

SERVICE_PORT = 9999
RECEIVER_PORT = 9997
FROM_DEBIAN = """
FROM {base}
COPY {program} {tool} /usr/bin/
COPY templates /usr/share/prometheus/alertmanager/
RUN mkdir /{program} && chown 65534:65534 /{program}
USER 65534:65534
ENTRYPOINT ["/usr/bin/{program}"]
"""
PAGE = (ROOT / "docs" / "how-to" / "install-with-compose.md").read_text(encoding="utf-8")
ASK_PROMETHEUS = """
import json, urllib.request
def get(path):
    with urllib.request.urlopen("http://prometheus:9090/api/v1/" + path, timeout=10) as answer:
        return json.load(answer)["data"]
rules = [rule for group in get("rules")["groups"] for rule in group["rules"]]
print(json.dumps([
    sorted([target["labels"]["job"], target["health"]] for target in get("targets")["activeTargets"]),
    [rule["name"] + ": " + rule["lastError"] for rule in rules if rule.get("lastError")],
    len(rules),
    [each["url"] for each in get("alertmanagers")["activeAlertmanagers"]]]))
"""
RECEIVE = f"""
import http.server as h, sys
class Receiver(h.BaseHTTPRequestHandler):
    def do_POST(self):
        print(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(200)
        self.end_headers()
server = h.HTTPServer(("{OUTSIDE}", {RECEIVER_PORT}), Receiver)
server.timeout = 240
server.handle_request()
"""
"""Run on the machine outside: one message of Alertmanager."""
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
    alerts = engine.directory / "alertmanager.yaml"
    sample = (ROOT / "deploy" / "compose" / "alertmanager.yaml").read_text(encoding="utf-8")
    alerts.write_text(
        f"{sample}    webhook_configs: [{{url: 'http://notify:9000/alerts'}}]\n", encoding="utf-8"
    )
    values = {
        "PROMETHEUS_IMAGE": "prometheus:debian",
        "ALERTMANAGER_IMAGE": "alertmanager:debian",
        "APPLIANCE_ALERTMANAGER_CONFIG": str(alerts),
        "ALERT_RECEIVER": f"{OUTSIDE}:{RECEIVER_PORT}",
    }
    with compose_project(images, "demo", values) as project:
        # Something of the engine's own machine that containers must not reach.
        run = ("run", "--detach", "--network=host", "--name=host-service")
        engine.docker(*run, "--entrypoint=/opt/appliance/bin/python", images.gateway, "-c", HOST_SERVICE)
        try:
            refused = engine.run("sh", START, "gpu", environment=project.environment, check=False)
            assert (refused.returncode, project.compose("ps", "-q")) == (1, "")
            assert "images are missing: sovereign-appliance/worker-gpu:" in refused.stderr
            said = engine.run("sh", START, environment=project.environment, seconds=START_SECONDS).stdout
            yield replace(project, key=project.demo_key.read_text(encoding="utf-8").strip(), said=said)
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


def test_the_page_ends_with_an_answer(demo):
    """The script prints the request of the page, and that is answered, from the machine outside."""
    (page,) = re.findall(r"^curl .*?\n(?=```)", PAGE, re.DOTALL | re.MULTILINE)
    printed = page.replace("sudo cat deploy/secrets/demo.key", f"cat {demo.demo_key}")
    printed = printed.replace("http://127.0.0.1:8080", f"http://{INSIDE}:{PORT}")
    assert printed in demo.said
    answer = json.loads(demo.engine.outside_shell(printed))
    assert answer["choices"][0]["message"]["content"].strip()


def test_starting_again_keeps_what_is_there(demo):
    """Secrets, tenant, key and containers."""
    before = demo.demo_key.read_text(encoding="utf-8"), demo.compose("ps", "-q")
    demo.engine.run("sh", START, environment=demo.environment, seconds=START_SECONDS)
    assert (demo.demo_key.read_text(encoding="utf-8"), demo.compose("ps", "-q")) == before


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


@pytest.fixture
def monitoring(demo, images, tmp_path) -> None:
    """Debian's programs, in place of their makers' images, start locked up."""
    for program, tool in (("prometheus", "promtool"), ("alertmanager", "amtool")):
        place = tmp_path / program
        place.mkdir()
        for name, found in ((program, f"prometheus-{program}"), (tool, tool)):
            path = shutil.which(name) or shutil.which(found)
            if path is None:
                pytest.skip(
                    f"PROMETHEUS AND ALERTMANAGER ARE NOT TRIED WITH COMPOSE: {name} is not installed"
                )
            shutil.copy(path, place / name)
        # Alertmanager of Debian starts only with its templates.
        shutil.copytree("/usr/share/prometheus/alertmanager", place / "templates")
        text = FROM_DEBIAN.format(base=images.base, program=program, tool=tool)
        (place / "Dockerfile").write_text(text, encoding="utf-8")
        demo.engine.docker("build", "--quiet", "--network=none", f"--tag={program}:debian", place)
    up = ("up", "--detach", "prometheus", "alertmanager", "notify")
    demo.compose("--profile", "monitoring", "--profile", "notify", *up, seconds=START_SECONDS)


def test_alerts_are_told_to_a_machine_outside(demo, monitoring):
    """
    Prometheus finds gateway, worker and Alertmanager, and takes the rules.

    What fires reaches the one address that `notify` connects to.
    """
    until = time.monotonic() + 120
    found: list = []
    while found[:1] != [SCRAPED] and time.monotonic() < until:
        time.sleep(0.5)
        asked = demo.engine.python(demo.name("gateway"), ASK_PROMETHEUS, check=False)
        found = json.loads(asked.stdout) if asked.returncode == 0 else []
    assert found[:2] == [SCRAPED, []], asked.stderr
    assert found[2] > 0
    assert found[3] == ["http://alertmanager:9093/api/v2/alerts"]
    with ThreadPoolExecutor() as outside:
        received = outside.submit(demo.engine.outside, RECEIVE)
        add = (
            "alert",
            "add",
            "--alertmanager.url=http://127.0.0.1:9093",
            "alertname=Tried",
            "severity=critical",
        )
        demo.engine.docker("exec", demo.name("alertmanager"), "amtool", *add)
        (alert,) = json.loads(received.result())["alerts"]
    assert alert["labels"] == {"alertname": "Tried", "severity": "critical"}


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
