"""Promises of `appliance.sovereignty.egress.probing` and of the process that runs it, on loopback."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from appliance.sovereignty.egress.probe import EgressProbe, ProbeKind, ProbeOutcome, ProbePlan, ProbeResult
from appliance.sovereignty.egress.prober import Prober
from appliance.sovereignty.egress.probing import run_probes

LOOPBACK = "127.0.0.1"


@contextmanager
def bound(kind: socket.SocketKind) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, kind) as made:
        made.bind((LOOPBACK, 0))
        yield made


def port_of(made: socket.socket) -> int:
    return int(made.getsockname()[1])


def probe(kind: ProbeKind, port: int = 0, host: str = LOOPBACK) -> EgressProbe:
    return EgressProbe(kind=kind, host=host, port=port)


def tried(
    *probes: EgressProbe, seconds: float = 1.0, control: EgressProbe | None = None
) -> list[ProbeResult]:
    """The control's result first."""
    observation = run_probes(ProbePlan(probes=probes, control=control, timeout_seconds=seconds))
    assert observation.control is not None
    return [observation.control, *observation.results]


def outcome(*probes: EgressProbe, **settings: float) -> ProbeOutcome:
    _control, result = tried(*probes, **settings)
    return result.outcome


def test_without_a_control_of_the_settings_it_opens_one():
    """And closes it afterwards."""
    (control,) = tried()
    assert control.outcome is ProbeOutcome.CONNECTED
    assert outcome(probe(ProbeKind.TCP, control.probe.port)) is ProbeOutcome.REFUSED


@pytest.mark.parametrize("kind", [ProbeKind.TCP, ProbeKind.PROXY, ProbeKind.METADATA])
def test_a_connection_is_a_connection(kind):
    """To an address and, where the kind allows one, to a name."""
    with bound(socket.SOCK_STREAM) as listener:
        assert outcome(probe(kind, port_of(listener))) is ProbeOutcome.REFUSED
        listener.listen()
        assert outcome(probe(kind, port_of(listener))) is ProbeOutcome.CONNECTED
        assert outcome(probe(kind, port_of(listener), "localhost")) is ProbeOutcome.CONNECTED


def test_udp_answer_is_egress_and_silence_is_not():
    """It sends several queries, since a packet may be lost."""
    with bound(socket.SOCK_DGRAM) as resolver:
        assert outcome(probe(ProbeKind.UDP, port_of(resolver)), seconds=0.3) is ProbeOutcome.TIMED_OUT
        queries = []
        resolver.setblocking(False)
        while len(queries) < 3:
            queries.append(resolver.recv(512))
        resolver.setblocking(True)

        def answer_the_second() -> None:
            resolver.recvfrom(512)
            query, client = resolver.recvfrom(512)
            resolver.sendto(query, client)

        answering = threading.Thread(target=answer_the_second)
        answering.start()
        assert outcome(probe(ProbeKind.UDP, port_of(resolver)), seconds=3) is ProbeOutcome.CONNECTED
        answering.join()
    assert outcome(probe(ProbeKind.UDP, closed_port())) is ProbeOutcome.REFUSED


def closed_port() -> int:
    with bound(socket.SOCK_DGRAM) as made:
        return port_of(made)


@pytest.mark.parametrize(
    ("found", "expected", "detail"),
    [
        (["93.184.215.14"], ProbeOutcome.CONNECTED, "resolved to 93.184.215.14"),
        (["10.0.0.1", "2606:2800:21f::1"], ProbeOutcome.CONNECTED, "resolved to 2606:2800:21f::1"),
        (["10.0.0.1"], ProbeOutcome.UNRESOLVED, "answered with 10.0.0.1, which is not a public address"),
        (["0.0.0.0"], ProbeOutcome.UNRESOLVED, "answered with 0.0.0.0, which is not a public address"),
        (
            ["fe80::1%eth0"],
            ProbeOutcome.UNRESOLVED,
            "answered with fe80::1%eth0, which is not a public address",
        ),
    ],
)
def test_a_name_is_resolved_outside_if_its_address_is_public(monkeypatch, found, expected, detail):
    """A resolver that answers every name with its own address forwards no query."""
    asked = []

    def resolve(name, *_arguments, **_options):
        asked.append(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    _control, result = tried(probe(ProbeKind.DNS, host="example.com"))
    assert (result.outcome, result.detail) == (expected, detail)
    assert "example.com." in asked


def test_a_name_that_is_not_resolved(monkeypatch):
    """For every error of the resolver."""

    def resolve(*_arguments, **_options):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert outcome(probe(ProbeKind.DNS, host="example.com")) is ProbeOutcome.UNRESOLVED


def test_invalid_name_makes_the_check_inconclusive():
    """A label is longer than DNS allows, so no query was sent."""
    _control, result = tried(probe(ProbeKind.DNS, host="x" * 64 + ".example"))
    assert result.outcome is ProbeOutcome.FAILED


def test_a_resolver_that_hangs_does_not_hold_up_the_check(monkeypatch):
    """A lookup cannot be cancelled, so its thread is abandoned."""
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_options: over.wait(30) and [])
    began = time.monotonic()
    assert outcome(probe(ProbeKind.DNS, host="example.com"), seconds=0.2) is ProbeOutcome.TIMED_OUT
    assert time.monotonic() - began < 20
    over.set()


def test_attempt_that_cannot_be_made_is_inconclusive(monkeypatch):
    """Too few open files, for one."""
    real = socket.create_connection

    def create(address, **options):
        if address[1] == 9:
            raise OSError(24, "Too many open files")
        return real(address, **options)

    monkeypatch.setattr(socket, "create_connection", create)
    _control, result = tried(probe(ProbeKind.TCP, 9))
    assert (result.outcome, result.detail) == (ProbeOutcome.FAILED, "EMFILE")


@pytest.fixture
def plan() -> ProbePlan:
    return ProbePlan(probes=(probe(ProbeKind.TCP, 9),), control=None, timeout_seconds=1.0)


def test_a_prober_runs_repeated_checks(plan):
    """It tries nothing before, and each answer is of a new attempt."""
    prober = Prober.start(plan)
    try:
        first, second = prober.observe(), prober.observe()
    finally:
        prober.close()
    for observation in (first, second):
        assert observation.failure == ""
        assert observation.control is not None
        assert observation.control.outcome is ProbeOutcome.CONNECTED
        assert [result.probe for result in observation.results] == list(plan.probes)
    assert first.control != second.control


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_for_the_gateway_does_not_end_its_prober(plan, number):
    """On SIGTERM a gateway finishes requests first, and on SIGHUP it reloads settings."""
    prober = Prober.start(plan)
    try:
        assert prober.observe().failure == ""
        os.kill(prober._process.pid, number)
        assert prober.observe().failure == ""
    finally:
        prober.close()


def test_a_prober_that_was_ended_observes_nothing(plan):
    """And says what to do."""
    prober = Prober.start(plan)
    try:
        os.kill(prober._process.pid, signal.SIGKILL)
        prober._process.wait()
        for _ in range(2):
            observation = prober.observe()
            assert (observation.control, observation.results) == (None, ())
            assert "restart the gateway" in observation.failure
    finally:
        prober.close()


def test_a_prober_that_does_not_answer_in_time_observes_nothing(plan, monkeypatch):
    """Its late answer is not taken for that to the next question."""
    monkeypatch.setattr("appliance.sovereignty.egress.prober.PATIENCE_SECONDS", -0.9)
    prober = Prober.start(plan)
    try:
        os.kill(prober._process.pid, signal.SIGSTOP)
        assert "did not answer in time" in prober.observe().failure
        os.kill(prober._process.pid, signal.SIGCONT)
        monkeypatch.undo()
        prober._read(time.monotonic() + 30)  # the late answer
        prober._asked += 1
        prober._write(str(prober._asked))  # an answer that is never read
        observation = prober.observe()
        assert observation.failure == ""
        assert prober._unread == b""
    finally:
        prober.close()


def test_closing_a_prober_ends_a_running_check():
    """A gateway that stops does not wait for it."""
    plan = ProbePlan(probes=(), control=probe(ProbeKind.CONTROL, 9), timeout_seconds=30.0)
    prober = Prober.start(plan)
    os.kill(prober._process.pid, signal.SIGSTOP)
    failures = []
    asking = threading.Thread(target=lambda: failures.append(prober.observe().failure))
    asking.start()
    while not prober._asked:
        time.sleep(0.01)
    prober.close()
    asking.join(30)
    assert len(failures) == 1
    assert "has ended" in failures[0]


def test_prober_ends_with_its_parent(plan):
    """Its standard input ends then."""
    prober = Prober.start(plan)
    try:
        assert prober._process.stdin is not None
        prober._process.stdin.close()
        assert prober._process.wait(30) == 0
    finally:
        prober.close()
