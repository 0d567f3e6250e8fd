"""
The egress check in networks that are made for it: without egress, with egress, and one where nothing works.

What is reached as 1.1.1.1 or 8.8.8.8 here is a process of the test, at the other end of a virtual cable.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.sovereignty import landlock
from tests.command import run_command
from tests.integration.namespaces import Namespace, cable, namespace, why_not

MISSING = why_not()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"NO EGRESS TESTS: {MISSING}")

WORKER = """
import asyncio
from tests.fakes import FakeWorker
async def main():
    async with FakeWorker().serving() as worker:
        print(worker.url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
ROOT = Path(__file__).parents[2]
QUICK = {"APPLIANCE_EGRESS__TIMEOUT_SECONDS": "1"}
PATIENCE_SECONDS = 60.0


def check(inside: Namespace, **environment: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of the command."""
    done = inside.appliance("egress", "check", "--json", **{**QUICK, **environment})
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {f"{result['kind']} {result['target']}": result["outcome"] for result in report["probes"]}


@pytest.fixture
def inside() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


@pytest.fixture
def outside() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


def test_a_network_with_loopback_alone_is_closed(inside: Namespace):
    """Nothing is reached, and the check's own listener is."""
    code, report = check(inside)
    assert (code, report["verdict"], report["reasons"]) == (0, "closed", [])
    assert set(outcomes(report).values()) == {"unreachable", "unresolved"}
    assert report["control"]["outcome"] == "connected"


def test_report_prints_a_table(inside: Namespace):
    """With each attempt and the verdict; the exit code is the same."""
    done = inside.appliance("egress", "check", **QUICK)
    assert done.returncode == 0
    assert re.search(r"metadata\W+169\.254\.169\.254:80\W+unreachable", done.stdout)
    assert done.stdout.splitlines()[-1].strip() == "closed"


def test_network_without_any_connection_is_inconclusive():
    """Every attempt to get out fails there, too."""
    with namespace(loopback=False) as broken:
        code, report = check(broken)
    assert (code, report["verdict"]) == (2, "inconclusive")
    assert report["control"]["outcome"] == "unreachable"


def test_unreachable_control_makes_the_check_inconclusive(inside: Namespace, outside: Namespace):
    """With it the same network is closed."""
    control = {"APPLIANCE_EGRESS__CONTROL": "10.99.0.2:8000"}
    with cable(inside, outside):
        code, report = check(inside, **control)
        assert (code, report["verdict"]) == (2, "inconclusive")
        assert "control 10.99.0.2:8000 refused" in report["reasons"][0]
        with outside.listening("tcp,10.99.0.2,8000"):
            code, report = check(inside, **control)
        assert (code, report["verdict"]) == (0, "closed")


def test_egress_by_tcp_is_detected(inside: Namespace, outside: Namespace):
    """One connection is enough, and the report names it."""
    with cable(inside, outside, "1.1.1.1"), outside.listening("tcp,1.1.1.1,443"):
        inside.ip("route", "add", "1.1.1.1", "via", "10.99.0.2")
        code, report = check(inside)
    assert (code, report["verdict"]) == (1, "open")
    assert report["reasons"] == ["tcp 1.1.1.1:443 connected"]


def test_egress_by_udp_is_detected(inside: Namespace, outside: Namespace):
    """Queries that are answered carry data out, too."""
    with cable(inside, outside, "8.8.8.8"), outside.listening("udp,8.8.8.8,53"):
        inside.ip("route", "add", "8.8.8.8", "via", "10.99.0.2")
        code, report = check(inside)
    assert (code, report["verdict"]) == (1, "open")
    assert report["reasons"] == ["udp 8.8.8.8:53 connected (a query was answered)"]


def test_a_metadata_service_is_found(inside: Namespace, outside: Namespace):
    """It gives credentials to every caller."""
    with cable(inside, outside, "169.254.169.254"), outside.listening("tcp,169.254.169.254,80"):
        inside.ip("route", "add", "169.254.169.254", "via", "10.99.0.2")
        code, report = check(inside)
    assert (code, report["reasons"]) == (1, ["metadata 169.254.169.254:80 connected"])


def test_a_proxy_of_the_environment_is_found_and_its_password_is_not_shown(
    inside: Namespace, outside: Namespace
):
    """Programs that honour the variable would use it for egress."""
    proxy = {"HTTPS_PROXY": "http://nurse:hunter2@10.99.0.2:3128"}
    with cable(inside, outside), outside.listening("tcp,10.99.0.2,3128"):
        code, report = check(inside, **proxy)
    assert (code, report["reasons"]) == (1, ["proxy 10.99.0.2:3128 connected"])
    assert "hunter2" not in json.dumps(report)


@pytest.mark.parametrize(
    ("route", "outcome"),
    [("prohibit", "prohibited"), ("unreachable", "unreachable"), ("blackhole", "unreachable")],
)
def test_routes_that_end_here_are_closed(inside: Namespace, route: str, outcome: str):
    """For every way in which the kernel refuses; none is mistaken for the wall."""
    inside.ip("route", "add", route, "default")
    code, report = check(inside)
    assert (code, report["verdict"]) == (0, "closed")
    assert outcomes(report)["tcp 1.1.1.1:443"] == outcome


def test_dropped_packets_are_closed(inside: Namespace, outside: Namespace):
    """A router that drops everything, as most firewalls do."""
    with cable(inside, outside):
        inside.ip("route", "add", "default", "via", "10.99.0.2")
        outside.ip("route", "add", "blackhole", "default")
        code, report = check(inside)
    assert (code, report["verdict"]) == (0, "closed")
    assert outcomes(report)["tcp 1.1.1.1:443"] == outcomes(report)["udp 8.8.8.8:53"] == "timed_out"


def test_a_host_that_refuses_is_not_taken_for_a_firewall(inside: Namespace, outside: Namespace):
    """Its reset came from outside, so packets get there."""
    with cable(inside, outside, "1.1.1.1"):
        inside.ip("route", "add", "1.1.1.1", "via", "10.99.0.2")
        code, report = check(inside)
    assert (code, report["verdict"]) == (2, "inconclusive")
    assert "tcp 1.1.1.1:443 refused" in report["reasons"][0]


def test_behind_the_wall_the_network_is_not_tested(inside: Namespace):
    """A process behind Landlock reports `refused_by_wall`, not a closed network."""
    try:
        known = landlock.abi_version()
    except OSError:
        known = 0
    if known < landlock.NETWORK_ABI:
        pytest.skip(f"NO WALL TESTED: Landlock version {known} of this kernel knows no ports")
    script = (
        "import sys\n"
        "from appliance.sovereignty import landlock\n"
        "landlock.allow_connections([])\n"
        "sys.argv = ['appliance', 'egress', 'check', '--json']\n"
        "from appliance.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        inside.command(sys.executable, "-c", script),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **QUICK},
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"], report["wall"]) == (2, "inconclusive", "up")
    assert outcomes(report)["tcp 1.1.1.1:443"] == "refused_by_wall"
    assert outcomes(report)["udp 8.8.8.8:53"] == "unreachable"


def test_untestable_targets_are_inconclusive_not_open(inside: Namespace):
    """The exit code of other commands' errors would say `open` here."""
    done = inside.appliance("egress", "check", APPLIANCE_EGRESS__TCP_TARGETS='["resolver.example:53"]')
    assert done.returncode == 2
    assert "write an IP address" in done.stderr


class Gateway:
    """`appliance gateway` in a namespace, in front of a worker that is a stand-in."""

    def __init__(self, inside: Namespace, directory: Path, worker: str, **egress: Any) -> None:
        self.inside, self.data, self.url, self.admin_url = inside, directory / "data", "", ""
        config = directory / "appliance.yaml"
        sections = {"pool": {"urls": [worker]}, "egress": egress, "log": {"format": "json"}}
        config.write_text(yaml.safe_dump(sections), encoding="utf-8")
        words = [
            "gateway",
            "--config",
            str(config),
            "--data",
            str(self.data),
            "--port",
            "0",
            "--admin-port",
            "0",
        ]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            inside.command(sys.executable, "-m", "appliance", *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line)
            if found := re.match(r"ready\s+(https?://\S+)/v1", line):
                self.url = found[1]
            if found := re.match(r"admin API\s+(https?://\S+)/admin/v1", line):
                self.admin_url = found[1]

    def ready(self) -> tuple[int, dict[str, Any]]:
        return self.inside.get(f"{self.url}/readyz")

    def until_ready_is(self, status: int) -> dict[str, Any]:
        self.until(lambda: self.ready()[0] == status)
        return self.ready()[1]

    def until(self, true: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not true():
            assert self.process.poll() is None, "".join(self.lines)
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.1)

    def entries(self) -> list[dict[str, Any]]:
        """Its log lines about the checks."""
        words = ["audit", "tail", "--json", "--count", "10000", "--unrecorded", "--data", str(self.data)]
        done = run_command(*words)
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        return [entry.get("fields", entry) for entry in found if entry["type"] == "egress.attested"]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def gateway(inside: Namespace, directory: Path, **egress: Any) -> Iterator[Gateway]:
    worker = subprocess.Popen(
        inside.command(sys.executable, "-c", WORKER), stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert worker.stdout is not None
    try:
        url = worker.stdout.readline().strip()
        assert url, "the stand-in did not start"
        made = Gateway(inside, directory, url, timeout_seconds=0.5, **egress)
        try:
            made.until(lambda: made.admin_url)
            yield made
        finally:
            made.stop()
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


def test_a_strict_gateway_follows_the_network_and_its_log_proves_it(
    inside: Namespace, outside: Namespace, tmp_path: Path
):
    """Ready while closed, not ready while something outside can be reached, ready again; each an entry."""
    with cable(inside, outside, "1.1.1.1"), outside.listening("tcp,1.1.1.1,443"):
        with gateway(inside, tmp_path, mode="strict", interval_seconds=1, retry_seconds=1) as made:
            assert made.until_ready_is(200)["checks"]["egress"] == "ok"
            inside.ip("route", "add", "1.1.1.1", "via", "10.99.0.2")
            problem = made.until_ready_is(503)["checks"]
            assert problem["egress"] == "egress is possible: tcp 1.1.1.1:443 connected"
            assert problem["workers"] == problem["audit"] == "ok"
            # The gateway's own wall, where the kernel has one, refuses port 443: this was found outside it.
            asked = inside.appliance(
                "egress", "attest", "--json", "--url", made.admin_url, "--data", str(made.data)
            )
            report = json.loads(asked.stdout)
            assert (asked.returncode, report["verdict"]) == (1, "open")
            assert report["wall"] == ("up" if any("wall_raised" in line for line in made.lines) else "absent")
            shown = inside.appliance("status", "--once", "--url", made.admin_url, "--data", str(made.data))
            assert re.search(r"egress\W+open, ", shown.stdout), shown.stdout + shown.stderr
            inside.ip("route", "delete", "1.1.1.1")
            made.until_ready_is(200)
            entries = made.entries()
        assert {"closed", "open"} <= {entry["result"] for entry in entries}
        assert entries[0]["trigger"] == "start"
        (ordered,) = (entry for entry in entries if entry["trigger"] == "request")
        assert (ordered["result"], ordered["host"]) == ("open", report["host"])
        assert "tcp 1.1.1.1:443 connected" in ordered["outcomes"]
        assert ordered["actor"]
        verified = run_command("audit", "verify", "--data", made.data)
        assert verified.returncode == 0, verified.stdout + verified.stderr


def test_strict_gateway_without_a_conclusive_check_is_not_ready(inside: Namespace, tmp_path: Path):
    """Its control is away, so no check concludes anything."""
    settings = {"mode": "strict", "interval_seconds": 1, "retry_seconds": 1, "control": "127.0.0.1:9"}
    with gateway(inside, tmp_path, **settings) as made:
        made.until(made.entries)
        status, body = made.ready()
        assert status == 503
        assert body["checks"]["egress"].startswith("no egress check has been conclusive yet")
        assert {entry["result"] for entry in made.entries()} == {"inconclusive"}


def test_killed_prober_is_reported(inside: Namespace, tmp_path: Path):
    """No later check reports `closed`."""
    settings = {"mode": "warn", "interval_seconds": 1, "retry_seconds": 1}
    with gateway(inside, tmp_path, **settings) as made:
        made.until(lambda: made.entries()[:1])
        (prober,) = (
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and _is_prober_of(int(entry.name), made.process.pid)
        )
        os.kill(prober, 9)
        made.until(lambda: made.ready()[1]["warnings"])
        status, body = made.ready()
        assert status == 200
        assert "restart the gateway" in body["warnings"][0]


def _is_prober_of(number: int, gateway: int) -> bool:
    try:
        words = Path(f"/proc/{number}/cmdline").read_bytes()
        parent = re.search(r"PPid:\s+(\d+)", Path(f"/proc/{number}/status").read_text(encoding="ascii"))
    except OSError:
        return False
    return b"egress.child" in words and parent is not None and int(parent[1]) == gateway
