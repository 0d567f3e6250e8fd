"""Traces stay in the enclave unless the settings allow a public collector."""

import pytest
from pydantic import ValidationError

from appliance.errors import ConfigurationError
from appliance.gateway.tracing.endpoint import public_address, refuse_public
from appliance.infra.settings import Settings, TracingSettings
from appliance.sovereignty.environment import OFFLINE_VARIABLES, offline_environment
from appliance.sovereignty.ports import collector_ports, gateway_ports

NAMED = TracingSettings(enabled=True, endpoint="https://collector.bank:4318/v1/traces")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.0.0.7", "192.168.1.4", "[fd00::7]", "[::1]", "100.64.0.3", "collector", "[fe80::1]"],
)
def test_a_private_address_is_accepted(host):
    TracingSettings(endpoint=f"http://{host}:4318/v1/traces")


@pytest.mark.parametrize("host", ["8.8.8.8", "[2001:4860:4860::8888]", "1.1.1.1"])
def test_a_public_address_is_refused(host):
    """Unless the settings allow it."""
    with pytest.raises(ValidationError, match="a public address: name a collector inside"):
        TracingSettings(endpoint=f"http://{host}:4318/v1/traces")
    TracingSettings(endpoint=f"http://{host}:4318/v1/traces", allow_public=True)


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4318",
        "grpc://collector:4317",
        "http://",
        "http://user:pass@collector/",
        "http://c/v1?key=1",
    ],
)
def test_a_malformed_url_is_refused(endpoint):
    with pytest.raises(ValidationError, match="without user, query or fragment"):
        TracingSettings(endpoint=endpoint)


def test_a_name_that_resolves_to_a_public_address_is_refused():
    """One public address among several is enough; a name without any is checked later."""
    with pytest.raises(
        ConfigurationError, match=r"tracing\.endpoint resolves to 8\.8\.8\.8, a public address"
    ):
        refuse_public(NAMED, lambda _host: ["10.0.0.7", "8.8.8.8"])
    refuse_public(NAMED, lambda _host: ["10.0.0.7", "fe80::1%eth0"])
    refuse_public(NAMED.model_copy(update={"enabled": False}), lambda _host: ["8.8.8.8"])

    def fails(_host: str) -> list[str]:
        raise OSError

    refuse_public(NAMED, fails)
    assert public_address(NAMED.model_copy(update={"allow_public": True}), lambda _host: ["8.8.8.8"]) is None


def test_the_wall_allows_the_collector_if_tracing_is_on():
    """Its port and, for a name, DNS."""
    off = NAMED.model_copy(update={"enabled": False})
    assert collector_ports(NAMED) == gateway_ports(Settings(tracing=NAMED)) == {53, 4318}
    assert collector_ports(off) == gateway_ports(Settings(tracing=off)) == set()
    assert collector_ports(TracingSettings(enabled=True)) == {4318}


def test_a_worker_traces_only_what_gateways_chose():
    """The offline variables change only as tracing needs."""
    environment = offline_environment({"OTEL_TRACES_SAMPLER": "always_on"}, tracing=NAMED)
    assert environment["OTEL_SDK_DISABLED"] == "false"
    assert environment["OTEL_TRACES_SAMPLER"] == "parentbased_always_off"
    assert environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    changed = {name for name in environment if environment[name] != offline_environment({}).get(name)}
    assert all(name.startswith("OTEL_") for name in changed)
    others = {row.name: row.value for row in OFFLINE_VARIABLES if row.name != "OTEL_SDK_DISABLED"}
    assert others.items() <= environment.items()
    off = NAMED.model_copy(update={"enabled": False})
    assert offline_environment({}, tracing=off) == offline_environment({})
