"""Promises of `appliance.sovereignty.egress.plan`, and of the settings it is made from."""

from dataclasses import asdict

import pytest

from appliance.errors import ConfigurationError
from appliance.infra.settings import load_settings
from appliance.sovereignty.egress.plan import digest_of, plan_egress
from appliance.sovereignty.egress.probe import ProbeKind, ProbePlan


def settings(**sections):
    return load_settings(environment={}, overrides=sections)


def targets(plan, kind):
    return [probe.target for probe in plan.probes if probe.kind is kind]


def test_every_kind_of_egress_is_probed_by_default():
    """TCP and UDP of both families, the metadata services and a name, with a witness for refusals each."""
    plan = plan_egress(settings(), {})
    for kind in (ProbeKind.TCP, ProbeKind.UDP):
        tried = [probe for probe in plan.probes if probe.kind is kind]
        for six in (False, True):
            family = [probe for probe in tried if (":" in probe.host) == six]
            assert any(probe.is_reserved for probe in family)
            assert any(not probe.is_reserved for probe in family)
    assert targets(plan, ProbeKind.METADATA) == ["169.254.169.254:80", "[fd00:ec2::254]:80"]
    assert targets(plan, ProbeKind.DNS) == ["example.com"]
    assert targets(plan, ProbeKind.PROXY) == []


def test_plan_round_trips_through_json():
    """Every probe, and the control where there is one."""
    for plan in (
        plan_egress(settings(), {"HTTPS_PROXY": "http://p:1"}),
        plan_egress(settings(egress={"control": "worker:8000"}), {}),
    ):
        assert ProbePlan.from_json(asdict(plan)) == plan


@pytest.mark.parametrize(
    ("value", "target"),
    [
        ("http://user:secret@proxy.bank:3128/path", "proxy.bank:3128"),
        ("proxy.bank:3128", "proxy.bank:3128"),
        ("https://proxy.bank", "proxy.bank:443"),
        ("socks5://[fd00::1]", "[fd00::1]:1080"),
        ("http://proxy.bank:many", "proxy.bank"),
    ],
)
def test_proxy_is_probed_without_its_password(value, target):
    """Of the URL only host and port are kept."""
    assert targets(plan_egress(settings(), {"https_proxy": value}), ProbeKind.PROXY) == [target]


def test_proxy_named_twice_is_probed_once():
    """In lower and upper case."""
    environment = {"http_proxy": "http://p:1", "HTTP_PROXY": "http://p:1", "ALL_PROXY": "socks5://q:2"}
    plan = plan_egress(settings(), {**environment, "NO_PROXY": "bank", "HTTPS_PROXY": ""})
    assert targets(plan, ProbeKind.PROXY) == ["p:1", "q:2"]


@pytest.mark.parametrize(("host", "target"), [("10.96.0.1", "10.96.0.1:443"), ("fd00::1", "[fd00::1]:443")])
def test_in_a_pod_the_clusters_api_server_is_tried(host, target):
    """Every pod can reach it, unless a network policy is enforced."""
    environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"}
    assert targets(plan_egress(settings(), environment), ProbeKind.KUBERNETES) == [target]
    assert targets(plan_egress(settings(), {}), ProbeKind.KUBERNETES) == []


@pytest.mark.parametrize(
    ("sections", "control"),
    [
        ({}, None),
        ({"audit": {"database_url": "postgresql+pg8000://u:p@db.bank/audit"}}, "db.bank:5432"),
        ({"audit": {"database_url": "postgresql://10.0.0.9:6000/audit"}}, "10.0.0.9:6000"),
        ({"audit": {"database_url": "sqlite:////var/lib/audit.db"}}, None),
        (
            {
                "egress": {"control": "[fd00::5]:8000"},
                "audit": {"database_url": "postgresql://10.0.0.9/audit"},
            },
            "[fd00::5]:8000",
        ),
    ],
)
def test_the_control_is_the_settings_or_the_database_or_its_own_listener(sections, control):
    """In this order."""
    planned = plan_egress(settings(**sections), {}).control
    assert (planned.target if planned else None) == control


@pytest.mark.parametrize("field", ["tcp_targets", "udp_targets", "metadata_targets"])
@pytest.mark.parametrize(
    "text", ["resolver.example:53", "1.1.1.1", "1.1.1.1:0", "::1:53", "a@1.1.1.1:53", ""]
)
def test_a_target_is_an_address_and_a_port(field, text):
    """A name would need a resolver, and an attempt that fails without one proves nothing."""
    with pytest.raises(ConfigurationError, match=field):
        settings(egress={field: [text]})


def test_no_more_targets_than_an_entry_holds():
    """All lists together."""
    many = [f"192.0.2.{number}:443" for number in range(1, 25)]
    with pytest.raises(ConfigurationError, match="at most 24 targets"):
        settings(egress={"tcp_targets": many})


def test_a_bare_off_in_yaml_is_the_mode_off(tmp_path):
    """YAML reads it as no."""
    file = tmp_path / "settings.yaml"
    file.write_text("egress:\n  mode: off\n", encoding="utf-8")
    assert load_settings(file, environment={}).egress.mode == "off"


def test_digest_differs_between_settings():
    """Equal settings have an equal one."""
    assert digest_of(settings().egress) == digest_of(settings().egress)
    assert digest_of(settings().egress) != digest_of(settings(egress={"timeout_seconds": 2}).egress)
