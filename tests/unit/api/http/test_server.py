"""The server's use of addresses and open files."""

import io
import resource

import pytest
import structlog

from appliance.api.http.server import OTHER_FILES, allow_open_files, is_loopback
from appliance.app.run import _fit
from appliance.infra.settings import ApiSettings


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("gateway.bank.internal", False)],
)  # fmt: skip
def test_loopback_addresses_are_recognised(host, local):
    """The wildcard address is not one of them."""
    assert is_loopback(host) is local


def test_connections_leave_open_files_for_the_admin_listener(monkeypatch):
    """A machine that allows few open files has a lower limit of connections."""
    logger = structlog.wrap_logger(structlog.PrintLogger(io.StringIO()))
    monkeypatch.setattr(resource, "setrlimit", lambda *_limits: None)
    for limit, expected in ((4096, 4096 - OTHER_FILES), (1_000_000, 5000)):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, limit=limit: (limit, limit))
        fitted = _fit(ApiSettings(max_connections=5000), logger, is_plain=True)
        assert fitted.max_connections == expected


@pytest.mark.parametrize(
    ("limits", "fitting", "raised"),
    [
        ((1024, 1_000_000), 5000, 10_768),
        ((1024, resource.RLIM_INFINITY), 5000, 10_768),
        ((1024, 4096), 1664, 4096),
        ((500_000, 1_000_000), 5000, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 5000, None),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_allowed(monkeypatch, limits, fitting, raised):
    """Two for each connection of the API, the admin listener's besides; returns how many of the API fit."""
    assert OTHER_FILES == 768
    asked: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, pair: asked.append(pair[0]))
    assert allow_open_files(ApiSettings(max_connections=5000)) == fitting
    assert asked == ([] if raised is None else [raised])
