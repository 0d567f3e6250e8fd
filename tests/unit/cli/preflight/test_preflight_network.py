"""The checks of ports and egress."""

import socket

import pytest

from appliance.cli.preflight.check import CheckResult
from appliance.cli.preflight.network import (
    SeenPort,
    check_egress,
    check_ports,
    judge_egress,
    judge_ports,
    try_port,
)
from appliance.sovereignty.egress.judge import EgressJudgement, EgressVerdict
from tests.unit.cli.preflight.test_preflight_files import inquiry_in


@pytest.fixture
def taken():
    """A port of the loopback interface in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_port_in_use_is_a_failure(taken):
    """The line names the role that needs it."""
    check = judge_ports([try_port("gateway", "127.0.0.1", taken)])
    assert check.result is CheckResult.FAIL
    assert check.seen == f"gateway: 127.0.0.1 port {taken}: Address already in use"


def test_a_port_is_free_again_afterwards():
    """A second check gives the same result."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for _ in range(2):
        assert judge_ports([try_port("gateway", "127.0.0.1", port)]).result is CheckResult.OK


def test_an_address_of_another_machine_is_a_failure():
    """192.0.2.1 is reserved (RFC 5737)."""
    assert judge_ports([try_port("worker", "192.0.2.1", 8000)]).result is CheckResult.FAIL


def test_a_workers_control_port_in_use_is_a_failure(tmp_path, taken):
    """By default it is the one after the worker's."""
    for ports in ({"port": taken - 1}, {"control_port": taken}):
        inquiry = inquiry_in(tmp_path, worker=ports, api={"port": 0, "admin_port": 0})
        (check,) = check_ports(inquiry)
        assert check.seen == f"control listener: 127.0.0.1 port {taken}: Address already in use"


def test_gateway_and_worker_do_not_share_a_port():
    ports = [SeenPort(what=what, host="127.0.0.1", port=8080, problem=None) for what in ("gateway", "worker")]
    assert judge_ports(ports).result is CheckResult.FAIL


@pytest.mark.parametrize(
    ("verdict", "strict", "result"),
    [
        (EgressVerdict.CLOSED, True, CheckResult.OK),
        (EgressVerdict.OPEN, True, CheckResult.FAIL),
        (EgressVerdict.OPEN, False, CheckResult.WARN),
        (EgressVerdict.INCONCLUSIVE, True, CheckResult.WARN),
    ],
)
def test_only_closed_passes(verdict, strict, result):
    """Without the positive control, failed attempts prove nothing."""
    found = EgressJudgement(verdict=verdict, reasons=() if verdict is EgressVerdict.CLOSED else ("a", "b"))
    check = judge_egress(found, attempts=3, strict=strict)
    assert check.result is result
    assert verdict is EgressVerdict.CLOSED or "a (and 1 more)" in check.seen


def test_egress_is_not_checked_unless_enabled(tmp_path):
    (check,) = check_egress(inquiry_in(tmp_path))
    assert check.result is CheckResult.WARN
    assert "egress was not checked" in check.seen


def test_egress_is_checked_if_the_settings_enable_it(tmp_path):
    """The only target is a closed port of this machine."""
    targets = {"tcp_targets": ["127.0.0.1:1"], "udp_targets": [], "metadata_targets": [], "canary_name": None}
    (check,) = check_egress(
        inquiry_in(tmp_path, egress={"mode": "strict", "timeout_seconds": 0.5, **targets})
    )
    assert check.result is CheckResult.WARN
    assert "inconclusive" in check.seen
