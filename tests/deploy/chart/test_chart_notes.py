"""NOTES.txt as Helm prints it after an installation: what an operator does next."""

import json
import re
import shlex

import pytest
import yaml

from tests.command_line import assert_command_exists
from tests.deploy.chart.references import pods
from tests.deploy.chart.site import SEVERAL, WEIGHTS_LOAD, site

EVALUATION = {"profile": "evaluation"}
TLS = {"gateway": {"tls": {"existingSecret": "tls"}, "service": {"port": 443}}}
ISSUED = {"gateway": {"tls": {"issuerRef": {"name": "enclave"}, "dnsNames": ["llm.bank"]}}}
CASES = {
    "evaluation": EVALUATION,
    "strict": site(),
    "certificate": site(TLS),
    "issuer": site(ISSUED),
    "several gateways": site(SEVERAL),
    "no models": site({"models": []}),
    "workers of their own": site(
        {
            "models": [],
            "workers": {"urls": ["http://10.0.0.5:8000"]},
            "networkPolicy": {
                "gateway": {"peers": [{"to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}], "port": 8000}]}
            },
        }
    ),
    "weights": site(WEIGHTS_LOAD),
}


async def notes(cluster, values):
    return (await cluster.helm("install", values=values))["info"]["notes"]


def commands(text):
    """The words of every command, also of one whose output becomes a variable."""
    lines = re.findall(r"^  (\S.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(re.sub(r"^KEY=\$\((.*)\)$", r"\1", line)) for line in lines]


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
async def test_every_command_names_what_was_installed(cluster, values):
    """Workloads, Services and their ports, labels, our own commands, files; and JSON that is valid."""
    text = await notes(cluster, values)
    installed = cluster.server.installed()
    names = {f"{kind.lower()}/{name}" for kind, name in installed}
    labels = [pod["metadata"]["labels"] for _, pod in pods(list(installed.values()))]
    assert commands(text)
    for words in commands(text):
        program, *rest = words
        if program == "helm":
            assert rest == ["test", "appliance", "-n", "clinic"]
            continue
        if program == "curl":
            said = json.loads(rest[rest.index("-d") + 1])
            served = [
                yaml.safe_load(one["data"]["appliance.yaml"]).get("worker", {}).get("served_name")
                for (kind, _), one in installed.items()
                if kind == "ConfigMap" and "appliance.yaml" in one["data"]
            ]
            assert said["model"] in served
            continue
        assert (program, rest[:2]) == ("kubectl", ["-n", "clinic"])
        match rest[2:]:
            case ["exec", target, "--", "appliance", *ours]:
                assert target in names
                assert_command_exists(ours, text)
            case ["exec", pod, "--", "cat", "/var/lib/appliance/admin.key"]:
                assert f"statefulset/{pod.removesuffix('-0')}" in names
            case ["port-forward", service, port, *_]:
                assert service in names
                ports = installed["Service", service.partition("/")[2]]["spec"]["ports"]
                assert int(port.rpartition(":")[2]) in [each["port"] for each in ports]
            case ["rollout", "status", target]:
                assert target in names
            case ["get", "pods", "-l", selector] | ["logs", "-l", selector, "--tail=-1"]:
                name, _, value = selector.partition("=")
                assert any(label.get(name) == value for label in labels)
            case other:
                raise AssertionError(f"an unknown command: {other}")


async def test_evaluation_gets_to_the_first_chat(cluster):
    """Tenant, key, port and question, with the time that the demo may take and the profile's own warning."""
    text = await notes(cluster, EVALUATION)
    said = [" ".join(words) for words in commands(text)]
    steps = (
        "appliance tenant create first",
        "appliance key create first",
        "port-forward service/appliance-gateway 8080",
        "curl",
    )
    places = [next(i for i, each in enumerate(said) if step in each) for step in steps]
    assert places == sorted(places)
    assert "up to 10 minutes" in text
    assert "WARNING: profile is evaluation" in text


async def test_strict_values_get_no_warning(cluster):
    assert "WARNING" not in await notes(cluster, site())


@pytest.mark.parametrize(
    ("values", "name"),
    [(TLS, "appliance-gateway.clinic.svc"), (ISSUED, "llm.bank")],
    ids=["secret", "issuer"],
)
async def test_with_tls_the_first_chat_verifies_the_certificate(cluster, values, name):
    """By a name in it, although the port is forwarded from 127.0.0.1."""
    (asked,) = (words for words in commands(await notes(cluster, site(values))) if words[0] == "curl")
    assert asked[asked.index("--cacert") + 1] == "ca.crt"
    assert asked[asked.index("--connect-to") + 1] == "::127.0.0.1:8080"
    assert f"https://{name}:8080/v1/chat/completions" in asked


async def test_without_models_the_operator_learns_that_nothing_becomes_ready(cluster):
    """And what to do; workers of one's own are enough."""
    text = await notes(cluster, site({"models": []}))
    assert "`models` is empty: there is no worker, so no gateway becomes ready" in text
    assert "Add an entry to `models`" in text
    assert "rollout status" not in text


async def test_a_job_that_reads_a_nodes_disk_needs_a_namespace_that_allows_it(cluster):
    text = await notes(cluster, site(WEIGHTS_LOAD))
    assert "weightsLoad reads from the node's disk: the namespace has to allow privileged pods" in text
