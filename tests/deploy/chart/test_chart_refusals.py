"""What the chart refuses to render: values it does not know, and values that contradict each other."""

import re

import pytest

from tests.deploy.chart.helm import CHART, RefusedError, render
from tests.deploy.chart.site import DIGEST, DRAFTED, IN_CHART, PICKER, SEVERAL, WEIGHTS_LOAD, site

pytestmark = pytest.mark.usefixtures("helm")
ARTEFACT = {"repository": "weights", "digest": DIGEST}

UNKNOWN = {
    "top": {"replicas": 3},
    "global": {"global": {"registry": "enclave.example"}},
    "image": {"images": {"gateway": {"name": "x"}}},
    "gateway": {"gateway": {"replica": 3}},
    "resources": {"gateway": {"resources": {"limit": {}}}},
    "settings section": {"settings": {"audits": {}}},
    "settings field": {"settings": {"audit": {"durabillity": "strict"}}},
    "decided by the chart": {"settings": {"data": {"directory": "/elsewhere"}}},
    "database": {"database": {"external": {"password": "hunter2"}}},
    "network policy": {"networkPolicy": {"enable": False}},
    "monitoring": {"monitoring": {"rules": {"enable": True}}},
    "key": {"keys": {"controlToken": {"value": "hunter2"}}},
}
WRONG = {
    "digest": {"images": {"gateway": {"digest": "sha256:abc"}}},
    "pull policy": {"images": {"pullPolicy": "Sometimes"}},
    "kind": {"gateway": {"kind": "DaemonSet"}},
    "replicas": {"gateway": {"replicas": "three"}},
    "negative": {"gateway": {"replicas": -1}},
    "port": {"gateway": {"service": {"port": 70000}}},
    "quantity": {"gateway": {"tmpSize": "lots"}},
    "database": {"database": {"kind": "mysql"}},
    "termination": {"gateway": {"route": {"termination": "none"}}},
    "name": {"keys": {"controlToken": {"existingSecret": "Not A Name"}}},
    "settings value": {"settings": {"audit": {"durability": "sometimes"}}},
    "model list": {"models": "a"},
    "model map": {"models": {"a": {"name": "b", "targets": {}}}},
    "profile": {"profile": "test"},
    "weights for a load": {"weightsLoad": {"from": {"source": "workerImage"}}},
    "name of weights": {"weightsLoad": {"name": "../elsewhere"}},
}
WRONG_MODELS = {
    "unknown field": {"targets": {}},
    "unknown in target": {"target": {"claim": "weights"}},
    "device": {"device": "tpu"},
    "task": {"task": "chat"},
    "method": {"method": "eagle4"},
    "source": {"target": {"source": "http"}},
    "draft tokens": {"draftTokens": 0},
    "too many draft tokens": {"draftTokens": 17},
    "worker setting": {"settings": {"trust_remote_codes": True}},
    "worker setting of the chart": {"settings": {"control_port": 9000}},
}

CONTRADICTIONS = [
    (
        site(model={"target": {"source": "workerImage", "path": ""}}),
        r"target\.source is workerImage and target\.path is empty",
    ),
    (
        site({"gateway": {"extraEnv": [{"name": "HTTPS_PROXY", "value": "http://p:1"}]}}),
        r"gateway\.extraEnv sets HTTPS_PROXY: no program of the appliance uses a proxy",
    ),
    (
        site(model={"extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "0"}]}),
        r'models\.ministry-8b\.extraEnv sets HF_HUB_OFFLINE, which keeps the appliance offline with "1"',
    ),
    (site({"gateway": {"extraEnv": [{"name": "APPLIANCE_API__PORT", "value": "1"}]}}), r"use `settings`"),
    (
        site({"gateway": {"podLabels": {"app.kubernetes.io/component": "x"}}}),
        r"gateway\.podLabels sets app\.kubernetes\.io/component, by which",
    ),
    (
        site({"gateway": {"httpRoute": {"enabled": True}}}),
        r"gateway\.httpRoute\.parentRefs is empty: name the Gateway",
    ),
    (
        site({"images": {"gateway": {"digest": ""}}}),
        r"images\.gateway\.digest is empty: .* take the digest from",
    ),
    (site({"images": {"workerGpu": {"digest": ""}}}), r"images\.workerGpu\.digest is empty"),
    (
        site({"images": {"workerCpu": {"digest": ""}}}, model={"device": "cpu"}),
        r"images\.workerCpu\.digest is empty",
    ),
    (site(IN_CHART, {"images": {"postgres": {"digest": ""}}}), r"images\.postgres\.digest is empty"),
    (site({"picker": {"enabled": True}}), r"picker\.enabled needs picker\.pods\.labels"),
    (
        site(PICKER, {"keys": {"controlToken": {"existingSecret": ""}}}),
        r"picker\.enabled needs keys\.controlToken\.existingSecret",
    ),
    (
        site({"settings": {"pool": {"control_port": 9000}}}),
        r"settings\.pool\.control_port is 9000, and the chart's workers are controlled at 8001: remove it",
    ),
    (site({"gateway": {"replicas": 2}}), r"database\.kind is sqlite with 2 gateways: .* use PostgreSQL"),
    (site({"gateway": {"kind": "Deployment"}}), r"database\.kind is sqlite and gateway\.kind is Deployment"),
    (
        site(SEVERAL, {"keys": {"signingKey": {"existingSecret": ""}}}),
        r"3 gateways sign one log: .* keys\.signingKey\.existingSecret",
    ),
    (
        site(SEVERAL, {"keys": {"tenantsMac": {"existingSecret": ""}}}),
        r"gateways need one key for the MAC of tenants and API keys.*keys\.tenantsMac\.existingSecret",
    ),
    (
        site(SEVERAL, {"gateway": {"replicas": 1}, "keys": {"signingKey": {"existingSecret": ""}}}),
        r"gateway\.kind is Deployment, so a signing key it creates would be lost",
    ),
    (
        site(SEVERAL, {"settings": {"audit": {"durability": "spool"}}}),
        r"the spool would be lost with its pod",
    ),
    (
        site(SEVERAL, {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 4, "maxReplicas": 3}}}),
        r"gateway\.autoscaling\.maxReplicas is less than minReplicas",
    ),
    (
        site(SEVERAL, {"database": {"external": {"host": ""}}}),
        r"database\.external\.host is empty: name the server",
    ),
    (
        site(SEVERAL, {"database": {"external": {"existingSecret": ""}}}),
        r"database\.external\.existingSecret is empty",
    ),
    (
        site(SEVERAL, {"caBundle": {"existingConfigMap": ""}}),
        r"sslmode is verify-full and caBundle\.existingConfigMap",
    ),
    (
        site(SEVERAL, {"database": {"external": {"to": []}}}),
        r"database\.external\.to is empty: name the server's address",
    ),
    (
        site(SEVERAL, {"database": {"external": {"owner": {"user": "owner"}}}}),
        r"database\.external\.owner\.existingSecret is empty: .* password of owner",
    ),
    (site({"database": {"kind": "inChart"}}), r"database\.inChart\.existingSecret is empty"),
    (
        site({"keys": {"controlToken": {"existingSecret": ""}}}),
        r"keys\.controlToken\.existingSecret is empty",
    ),
    (
        site({"networkPolicy": {"metrics": {"workers": True}}}),
        r"keys\.scrapeToken\.existingSecret is empty: workers answer no one without a token",
    ),
    (
        site({"gateway": {"service": {"type": "LoadBalancer"}}}),
        r"gateway\.service\.type is LoadBalancer without TLS",
    ),
    (
        site({"gateway": {"ingress": {"enabled": True, "host": "llm.example"}}}),
        r"gateway\.ingress without tlsSecret: keys and prompts would cross the network in plain text",
    ),
    (
        site({"gateway": {"ingress": {"enabled": True, "tlsSecret": "certificate"}}}),
        r"gateway\.ingress\.host is empty: without it every host name would reach the gateway",
    ),
    (
        site({"gateway": {"route": {"enabled": True}}}),
        r"gateway\.route\.termination is passthrough without a certificate",
    ),
    (site({"gateway": {"tls": {"clientCaConfigMap": "ca"}}}), r"client certificates need TLS"),
    (
        site({"gateway": {"tls": {"existingSecret": "tls", "issuerRef": {"name": "enclave"}}}}),
        r"gateway\.tls has existingSecret and issuerRef, .* remove one of them",
    ),
    (
        site({"gateway": {"tls": {"dnsNames": ["llm.bank"]}}}),
        r"dnsNames without gateway\.tls\.issuerRef\.name",
    ),
    (
        site({"gateway": {"tls": {"issuerRef": {"name": "enclave"}}}}),
        r"gateway\.tls\.issuerRef needs cert-manager, and the cluster has no cert-manager\.io/v1",
    ),
    *(
        (
            site({"gateway": {"tls": {"existingSecret": "tls"}, **way_in}}),
            r"networkPolicy\.gateway\.clients is empty, .* exposed outside",
        )
        for way_in in (
            {"service": {"type": "LoadBalancer"}},
            {"service": {"type": "NodePort"}},
            {"ingress": {"enabled": True, "host": "llm.example", "tlsSecret": "certificate"}},
            {"route": {"enabled": True}},
        )
    ),
    (
        site({"settings": {"tls": {"require_client_certificate": True}}}),
        r"settings\.tls requires client certificates and gateway\.tls\.clientCaConfigMap is empty",
    ),
    (site({"oidc": {"jwksConfigMap": "jwks"}}), r"oidc\.jwksConfigMap without settings\.oidc"),
    (
        site({"oidc": {"jwksConfigMap": "jwks"}, "settings": {"oidc": {"issuer": "https://idp.example"}}}),
        r"oidc\.jwksConfigMap without settings\.oidc: set issuer and audience",
    ),
    (
        site({"settings": {"oidc": {"issuer": "https://idp.example", "audience": "llm"}}}),
        r"settings\.oidc without oidc\.jwksConfigMap: no token is accepted",
    ),
    (
        site({"settings": {"audit": {"witnesses": [{"name": "w.example", "key": "k", "url": "http://w"}]}}}),
        r"settings\.audit\.witnesses has w\.example without networkPolicy\.gateway\.peers",
    ),
    (
        site({"settings": {"audit": {"timestamp_url": "http://t", "timestamp_certificate_file": "/t.pem"}}}),
        r"settings\.audit\.timestamp_url without networkPolicy\.gateway\.peers",
    ),
    (
        site({"settings": {"audit": {"forward": {"destination": "siem.example:6514"}}}}),
        r"settings\.audit\.forward has siem\.example:6514 without networkPolicy\.gateway\.peers",
    ),
    (
        site({"keys": {"forward": {"existingSecret": "siem-client"}}}),
        r"keys\.forward\.existingSecret without settings\.audit\.forward",
    ),
    (
        site({"networkPolicy": {"dns": {"enabled": False}}}),
        r"gateways find workers by name; allow the resolver",
    ),
    (
        site({"workers": {"urls": ["http://10.0.0.5:8000"]}}),
        r"workers\.urls without networkPolicy\.gateway\.peers: gateways could not reach them",
    ),
    (site({"models": [site()["models"][0]] * 2}), r"models: ministry-8b is defined twice"),
    (site(model={"method": "eagle3"}), r"models\.ministry-8b: method is eagle3 without a draft"),
    (site(model=DRAFTED | {"method": "ngram"}), r"there is a draft, but the method ngram uses none"),
    (
        site(model={"method": "ngram", "task": "embed"}),
        r"only the task generate speculates; set method: none",
    ),
    (
        site(model={"targetOnlyReplicas": 1}),
        r"targetOnlyReplicas, but its other workers do not speculate either",
    ),
    (
        site({"speculation": {"optOut": True}}, model=DRAFTED),
        r"speculation\.optOut is on and no worker serves it without",
    ),
    (
        site(model={"keda": {"enabled": True, "minReplicas": 4, "maxReplicas": 3}}),
        r"keda\.maxReplicas is less than keda\.minReplicas",
    ),
    (
        site(model={"keda": {"enabled": True, "minReplicas": 0}}),
        r"keda\.minReplicas is 0: without a worker requests are refused",
    ),
    (site(model={"device": "cpu", "tensorParallel": 2}), r"2 GPUs on device cpu"),
    (site(model={"device": "cpu", "nodes": 2}), r"several nodes on device cpu; set nodes to 1"),
    (site(model={"tensorParallel": 8, "nodes": 3}), r"8 GPUs do not divide among 3 nodes"),
    (site(model={"tensorParallel": 8, "gpu": {"count": 4}}), r"need 8 GPUs, gpu\.count gives 4"),
    (site(model={"target": {"claimName": ""}}), r"target\.source is pvc and target\.claimName is empty"),
    (
        site(model={"target": {"source": "hostPath"}}),
        r"target\.source is hostPath and target\.hostPath is empty",
    ),
    (
        site(model={"target": {"source": "image"}}),
        r"target\.image\.repository is empty; name the image with the weights",
    ),
    (
        site(model={"target": {"source": "initCopy", "image": {"repository": "weights"}}}),
        r"target\.image\.digest is empty: weights need a digest",
    ),
    (
        site(model=DRAFTED | {"draft": {"source": "pvc"}}),
        r"draft\.source is pvc and draft\.claimName is empty",
    ),
    *(
        (site(WEIGHTS_LOAD, {"weightsLoad": change}), message)
        for change, message in (
            ({"claimName": ""}, r"weightsLoad\.claimName is empty: name the claim to fill"),
            ({"claimName": "other"}, r"weightsLoad\.claimName is other and no model reads that claim"),
            ({"trustedKeys": {"existingConfigMap": ""}}, r"no bundle is accepted without a trusted key"),
            ({"name": "llama"}, r"weightsLoad\.name is llama and content is bundle"),
            ({"content": "directory"}, r"weightsLoad\.name is empty: give the weights a name"),
            (
                {"from": {"hostPath": ""}},
                r"weightsLoad\.from\.source is hostPath and weightsLoad\.from\.hostPath is empty",
            ),
        )
    ),
]


def refusal(values, **how):
    """The error text instead of objects."""
    with pytest.raises(RefusedError) as refused:
        render(values, **how)
    return str(refused.value)


@pytest.mark.parametrize("change", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_value_is_refused(change):
    """A misspelt switch that is silently passed over leaves a site believing that it is set."""
    said = refusal(site(change))
    assert "values don't meet the specifications of the schema" in said
    assert "is not allowed" in said


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_value_of_the_wrong_kind_is_refused(change):
    """By the schema, before any template is read."""
    assert "values don't meet the specifications of the schema" in refusal(site(change))


@pytest.mark.parametrize("change", WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_models_are_as_strict(change):
    """In an entry of `models` and in `modelDefaults` alike."""
    for values in (site(model=change), site({"modelDefaults": change})):
        assert "values don't meet the specifications of the schema" in refusal(values)


@pytest.mark.parametrize(
    ("values", "message"), CONTRADICTIONS, ids=[message[:50] for _, message in CONTRADICTIONS]
)
def test_a_contradiction_is_refused_with_what_to_do(values, message):
    """One line for each, by the names of the values."""
    assert re.search(message, refusal(values))


def test_every_contradiction_the_chart_knows_is_tried():
    """Each of its messages has a test above, or is the one on Kubernetes' own version."""
    template = (CHART / "templates" / "_preflight.tpl").read_text(encoding="utf-8")
    messages = [line for line in template.splitlines() if line and not line.startswith(("{{-", "{{/*", " "))]
    assert messages
    said = "\n".join(refusal(values) for values, _ in CONTRADICTIONS)
    said += refusal(site(model={"target": {"source": "image", "image": ARTEFACT}}), kube_version="1.32")
    for message in messages:
        pieces = re.split(r"\{\{.*?\}\}", message)
        assert re.search(".*".join(map(re.escape, pieces)), said), message


def test_several_contradictions_are_reported_together():
    """One installation attempt shows all of them."""
    said = refusal(site({"gateway": {"replicas": 2}}, model={"method": "eagle3"}))
    assert "database.kind is sqlite with 2 gateways" in said
    assert "method is eagle3 without a draft" in said


def test_an_image_volume_needs_a_kubernetes_that_has_them():
    """The version is the cluster's, so no schema can say it."""
    values = site(model={"target": {"source": "image", "image": ARTEFACT}})
    assert "needs Kubernetes 1.33 (this is v1.32.0)" in refusal(values, kube_version="1.32")
    assert render(values, kube_version="1.33").objects


def test_a_kubernetes_that_is_too_old_is_refused():
    """By the chart's `kubeVersion`."""
    assert "chart requires kubeVersion" in refusal(site(), kube_version="1.29")


def test_the_chart_alone_renders_nothing_by_accident():
    """Without images it reports what is missing."""
    assert "images.gateway.digest is empty" in refusal({})
