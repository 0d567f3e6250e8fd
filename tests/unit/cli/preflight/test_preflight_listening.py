"""Promises of the check of ports."""

import socket

import pytest

from appliance.cli.preflight.check import CheckResult
from appliance.cli.preflight.listening import SeenPort, judge_ports, try_port


@pytest.fixture
def taken():
    """A port of loopback in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_port_in_use_is_a_failure(taken):
    """The line names who wanted it."""
    check = judge_ports([try_port("gateway", "127.0.0.1", taken)])
    assert check.result is CheckResult.FAIL
    assert check.seen == f"gateway: 127.0.0.1 port {taken}: Address already in use"


def test_a_port_is_free_again_afterwards():
    """Asking twice gives the same answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for _ in range(2):
        assert judge_ports([try_port("gateway", "127.0.0.1", port)]).result is CheckResult.OK


def test_an_address_of_another_machine_is_a_failure():
    """192.0.2.1 is reserved (RFC 5737)."""
    assert judge_ports([try_port("worker", "192.0.2.1", 8000)]).result is CheckResult.FAIL


def test_gateway_and_worker_do_not_share_a_port():
    """Each is free by itself."""
    ports = [SeenPort(what=what, host="127.0.0.1", port=8080, problem=None) for what in ("gateway", "worker")]
    assert judge_ports(ports).result is CheckResult.FAIL
