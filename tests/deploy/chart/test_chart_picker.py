"""The endpoint picker in the chart, for vLLM pods of others."""

import pytest
import yaml

from tests.deploy.chart.helm import render
from tests.deploy.chart.site import PICKER, over, site

pytestmark = pytest.mark.usefixtures("helm")
WITHOUT_MODELS = over(PICKER, {"models": []})
PODS = PICKER["picker"]["pods"]["labels"]


def settings(rendered, part):
    return yaml.safe_load(rendered.one("ConfigMap", part)["data"]["appliance.yaml"])


def test_pool_route_and_picker_name_each_other_and_fail_open():
    rendered = render(site(WITHOUT_MODELS))
    pool = rendered.one("InferencePool")
    assert pool["spec"]["selector"] == {"matchLabels": PODS}
    assert pool["spec"]["targetPorts"] == [{"number": 8080}]
    chosen = pool["spec"]["endpointPickerRef"]
    service = rendered.kind("Service")[chosen["name"]]
    assert chosen["port"] == {"number": service["spec"]["ports"][0]["port"]}
    assert chosen["failureMode"] == "FailOpen"
    pod = rendered.kind("Deployment")[chosen["name"]]["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    route = rendered.one("HTTPRoute")["spec"]
    assert route["parentRefs"] == [{"name": "inference", "namespace": "gateways"}]
    assert route["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]


def test_picker_and_gateway_find_the_same_pods():
    rendered = render(site(WITHOUT_MODELS))
    url = settings(rendered, "picker")["pool"]["discover"]
    assert settings(rendered, "gateway")["pool"]["discover"] == url
    service = rendered.kind("Service")[url.removeprefix("http://").partition(".")[0]]["spec"]
    assert service["selector"] == PODS
    assert service["clusterIP"] == "None"
    assert url.endswith(":8080")
    assert settings(rendered, "picker")["pool"]["control_port"] == 8081
    chosen = render(site(WITHOUT_MODELS, {"settings": {"pool": {"control_port": 9000}}}))
    for component in ("picker", "gateway"):
        assert settings(chosen, component)["pool"]["control_port"] == 9000


def test_picker_is_reached_by_proxies_and_prometheus_and_reaches_pods_and_resolver():
    prometheus = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    scraped = {"networkPolicy": {"metrics": {"from": prometheus}}}
    (policy,) = [
        each["spec"]
        for name, each in render(site(WITHOUT_MODELS, scraped)).kind("NetworkPolicy").items()
        if name.endswith("-picker")
    ]
    assert policy["ingress"] == [
        {"from": PICKER["picker"]["proxies"], "ports": [{"protocol": "TCP", "port": 9002}]},
        {"from": prometheus, "ports": [{"protocol": "TCP", "port": 9090}]},
    ]
    assert policy["egress"][0]["to"] == [{"podSelector": {"matchLabels": PODS}}]
    assert [port["port"] for port in policy["egress"][0]["ports"]] == [8080, 8081]
    assert {port["port"] for port in policy["egress"][1]["ports"]} == {53}


def test_its_certificate_comes_from_the_secret_that_is_named():
    named = over(WITHOUT_MODELS, {"picker": {"tls": {"existingSecret": "picker-tls"}}})
    assert settings(render(site(named)), "picker")["tls"]["certificate_file"] == "/etc/appliance/tls/tls.crt"
    assert "tls" not in settings(render(site(WITHOUT_MODELS)), "picker")


def test_nothing_of_it_is_there_by_default():
    rendered = render(site())
    assert not rendered.kind("InferencePool")
    assert not [name for name in rendered.names() if "pick" in name]
