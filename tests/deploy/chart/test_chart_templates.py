"""Each template: its objects, and the effect of values."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from appliance.infra.settings import CONFIG_VARIABLE
from tests.deploy.chart import schemas
from tests.deploy.chart.helm import CHART, ROOT, render
from tests.deploy.chart.references import dangling, pods
from tests.deploy.chart.site import (
    DIGEST,
    DRAFTED,
    IN_CHART,
    PICKER,
    REFRESH,
    SEVERAL,
    WEIGHTS_LOAD,
    named,
    site,
)

pytestmark = pytest.mark.usefixtures("helm")
MONITORING = "monitoring.coreos.com/v1"
CERT_MANAGER = "cert-manager.io/v1"
OUTSIDE = {"networkPolicy": {"gateway": {"clients": [{"ipBlock": {"cidr": "10.20.0.0/16"}}]}}}
EVALUATION = {"profile": "evaluation"}
OBJECT = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-ours"}}
WEIGHTS = {"repository": "weights", "digest": DIGEST}


def template(thing):
    return thing["spec"]["template"]["spec"]


def container(thing):
    return template(thing)["containers"][0]


def volumes(spec):
    return {volume["name"]: volume for volume in spec["volumes"]}


def settings(rendered, part):
    return yaml.safe_load(rendered.one("ConfigMap", part)["data"]["appliance.yaml"])


def worker(model=None, *changes, **how):
    return render(site(*changes, model=model), **how).one("Deployment")


def test_a_gateway_on_sqlite_has_a_disk_and_a_name_that_last():
    """A StatefulSet, one pod, a claim that outlives it."""
    rendered = render(site())
    gateway = rendered.one("StatefulSet")["spec"]
    assert gateway["replicas"] == 1
    assert [claim["metadata"]["name"] for claim in gateway["volumeClaimTemplates"]] == ["data"]
    assert gateway["serviceName"] in rendered.kind("Service")


def test_batch_files_of_a_gateway_go_to_the_claim_that_is_named():
    """Without one they stay on the gateway's disk; the claim of several gateways comes first."""
    claim = {"gateway": {"persistence": {"filesClaim": "files"}}}
    named = render(site(claim))
    gateway = named.one("StatefulSet")
    assert volumes(template(gateway))["files"]["persistentVolumeClaim"] == {"claimName": "files"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container(gateway)["volumeMounts"]}
    assert settings(named, "gateway")["batch"]["directory"] == f"{mounts['files']}/files"
    alone = render(site())
    assert "batch" not in settings(alone, "gateway")
    assert "files" not in volumes(template(alone.one("StatefulSet")))
    shared = {"gateway": {"sharedFiles": {"existingClaim": "shared"}}}
    several = settings(render(site(SEVERAL, claim, shared)), "gateway")
    assert several["batch"]["directory"] == "/var/lib/appliance-shared/files"


def test_gateways_on_postgresql_are_alike():
    """A Deployment with an ephemeral disk; the password is read from a file, never from a variable."""
    rendered = render(site(SEVERAL))
    gateway = rendered.one("Deployment", "gateway")
    assert gateway["spec"]["replicas"] == 3
    assert "emptyDir" in volumes(template(gateway))["data"]
    secrets = {v["secret"]["secretName"] for v in template(gateway)["volumes"] if "secret" in v}
    assert secrets == {"control-token", "signing-key", "tenants-mac", "database"}
    assert not rendered.kind("StatefulSet")


def test_a_gateway_drains_before_it_ends():
    """Kubernetes waits for the Service to forget it, for the drain, and for some more."""
    gateway = render(site({"gateway": {"drainSeconds": 900, "preStopSeconds": 20}})).one("StatefulSet")
    assert template(gateway)["terminationGracePeriodSeconds"] >= 900 + 20
    api = settings(render(site({"gateway": {"drainSeconds": 900, "preStopSeconds": 20}})), "gateway")["api"]
    assert (api["drain_seconds"], api["stop_delay_seconds"]) == (900, 20)


def test_every_container_with_settings_names_them_to_commands():
    """`kubectl exec … appliance` in a gateway or a worker needs no option."""
    mounted = 0
    for owner, pod in pods(render(site(IN_CHART, REFRESH, PICKER, model=DRAFTED)).objects):
        for each in pod["spec"]["containers"]:
            paths = [mount["mountPath"] for mount in each["volumeMounts"]]
            if "/etc/appliance/appliance.yaml" in paths:
                variable = {"name": CONFIG_VARIABLE, "value": "/etc/appliance/appliance.yaml"}
                assert variable in each["env"], owner
                mounted += 1
    assert mounted == 6


def test_a_worker_ends_with_its_last_request_and_not_after_a_fixed_time():
    """The worker drains by itself; no hook delays its end, and Kubernetes waits for long enough."""
    rendered = render(site({"modelDefaults": {"drainSeconds": 300}}))
    worker = rendered.one("Deployment", "ministry-8b")
    assert "lifecycle" not in container(worker)
    assert settings(rendered, "ministry-8b")["worker"]["drain_seconds"] == 300
    assert template(worker)["terminationGracePeriodSeconds"] > 300


def test_a_further_node_computes_until_the_first_one_has_ended():
    """Its hook, run here: it waits while the leader's port is open, and no longer."""
    nodes = site({"modelDefaults": {"tensorParallel": 8, "pipelineParallel": 2, "nodes": 2}})
    group = render(nodes).one("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, node = (group[f"{role}Template"]["spec"]["containers"][0] for role in ("leader", "worker"))
    assert "lifecycle" not in leader
    program = node["lifecycle"]["preStop"]["exec"]["command"][-1].replace("8000", "PORT")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = program.replace("PORT", str(listener.getsockname()[1]))
        hook = subprocess.Popen([sys.executable, "-I", "-c", code], env={"LWS_LEADER_ADDRESS": "127.0.0.1"})
        listener.accept()[0].close()
        listener.accept()[0].close()
        assert hook.poll() is None
    assert hook.wait(timeout=30) == 0


def test_a_new_worker_starts_beside_the_old_one_where_no_gpu_is_needed():
    """With GPUs, which are rarely there twice, the old one goes first; requests wait meanwhile."""
    for device, strategy in (("cpu", (1, 0)), ("gpu", (0, 1))):
        worker = render(site({"modelDefaults": {"device": device}})).one("Deployment", "ministry-8b")
        found = worker["spec"]["strategy"]["rollingUpdate"]
        assert (found["maxSurge"], found["maxUnavailable"]) == strategy


def test_a_changed_setting_restarts_what_reads_it_and_nothing_else():
    """By a checksum on the pods."""
    before, after = (render(site({"settings": {"log": {"level": level}}})) for level in ("info", "debug"))
    annotations = [
        {owner: template["metadata"].get("annotations") for owner, template in pods(one.objects)}
        for one in (before, after)
    ]
    changed = {owner for owner in annotations[0] if annotations[0][owner] != annotations[1][owner]}
    assert changed == {"StatefulSet/appliance-gateway"}


def test_autoscaler_is_opt_in_and_then_replicas_is_unset():
    """With an autoscaler the chart leaves `replicas` alone."""
    assert not render(site(SEVERAL)).kind("HorizontalPodAutoscaler")
    rendered = render(site(SEVERAL, {"gateway": {"autoscaling": {"enabled": True, "maxReplicas": 5}}}))
    assert rendered.one("HorizontalPodAutoscaler")["spec"]["maxReplicas"] == 5
    assert "replicas" not in rendered.one("Deployment", "gateway")["spec"]


def test_disruption_budgets_are_made_for_gateways_and_pools_and_can_be_left_out():
    """One for the gateways, one for each pool."""
    drafted = DRAFTED | {"targetOnlyReplicas": 1}
    assert len(render(site(model=drafted)).kind("PodDisruptionBudget")) == 3
    off = {"podDisruptionBudget": {"enabled": False}}
    assert not render(site({"gateway": off}, model=drafted | off)).kind("PodDisruptionBudget")


def test_gateways_are_spread_over_nodes():
    """As a requirement only if the values say so."""
    (host, _) = template(render(site()).one("StatefulSet"))["topologySpreadConstraints"]
    assert (host["topologyKey"], host["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    strict = {"gateway": {"topologySpread": {"whenUnsatisfiable": "DoNotSchedule"}}}
    constraints = template(render(site(strict)).one("StatefulSet"))["topologySpreadConstraints"]
    assert {one["whenUnsatisfiable"] for one in constraints} == {"DoNotSchedule"}


def test_entry_from_outside_only_where_asked():
    """Neither Ingress nor Route by default, and the Service is the cluster's own."""
    rendered = render(site())
    assert not rendered.kind("Ingress")
    assert not rendered.kind("Route")
    assert {s["spec"].get("type", "ClusterIP") for s in rendered.kind("Service").values()} == {"ClusterIP"}


def test_an_ingress_leads_to_the_gateways_over_tls():
    """Its certificate is one that a site names."""
    values = {"gateway": {"ingress": {"enabled": True, "host": "llm.example", "tlsSecret": "certificate"}}}
    spec = render(site(values, OUTSIDE)).one("Ingress")["spec"]
    assert spec["tls"] == [{"hosts": ["llm.example"], "secretName": "certificate"}]
    assert spec["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"] == "appliance-gateway"


def test_a_route_passes_tls_through():
    """OpenShift's router does not terminate it by default."""
    values = {"gateway": {"route": {"enabled": True}, "tls": {"existingSecret": "certificate"}}}
    tls = render(site(values, OUTSIDE)).one("Route")["spec"]["tls"]
    assert tls["termination"] == "passthrough"


def test_probes_speak_tls_where_the_gateway_does():
    """Otherwise no pod would ever be ready."""
    gateway = render(site({"gateway": {"tls": {"existingSecret": "certificate"}}})).one("StatefulSet")
    probes = [
        container(gateway)[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    ]
    assert {probe["scheme"] for probe in probes} == {"HTTPS"}


def test_gateway_stays_in_its_service_while_all_workers_are_away():
    """There its requests wait or get 503; without an endpoint connections would be refused."""
    probe = container(render(site()).one("StatefulSet"))["readinessProbe"]["httpGet"]
    assert probe["path"] == "/readyz?exclude=workers"


def test_cert_manager_makes_the_certificate_that_the_gateway_serves():
    """For the Services' names unless the values list others; mounted and probed like any other."""
    issuer = {"name": "enclave", "kind": "ClusterIssuer"}
    rendered = render(site({"gateway": {"tls": {"issuerRef": issuer}}}), api_versions=[CERT_MANAGER])
    assert dangling(rendered.objects, existing=named(site())) == []
    certificate = rendered.one("Certificate")
    assert not schemas.faults(certificate, schemas.VERSIONS[-1])
    spec = certificate["spec"]
    assert spec["issuerRef"] == {**issuer, "group": "cert-manager.io"}
    gateway = rendered.one("StatefulSet")
    assert volumes(template(gateway))["tls"]["secret"]["secretName"] == spec["secretName"]
    assert settings(rendered, "gateway")["tls"]["certificate_file"] == "/etc/appliance/tls/tls.crt"
    assert container(gateway)["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    services = {f"{name}.clinic.svc" for name in ("appliance-gateway", "appliance-gateway-admin")}
    assert services <= set(spec["dnsNames"])
    assert {name.split(".")[0] for name in services} <= rendered.kind("Service").keys()
    chosen = {"issuerRef": issuer, "dnsNames": ["llm.bank"]}
    rendered = render(site({"gateway": {"tls": chosen}}), api_versions=[CERT_MANAGER])
    assert rendered.one("Certificate")["spec"]["dnsNames"] == ["llm.bank"]
    assert not render(site(), api_versions=[CERT_MANAGER]).kind("Certificate")


def test_startup_may_take_as_long_as_a_site_says():
    """The startup probe allows `maxStartupMinutes`, and the gateways wait as long for a recycled worker."""
    for minutes in (10, 90):
        rendered = render(site(model={"maxStartupMinutes": minutes}))
        probe = container(rendered.one("Deployment"))["startupProbe"]
        assert probe["failureThreshold"] * probe["periodSeconds"] >= minutes * 60
        assert settings(rendered, "gateway")["recycle"]["start_seconds"] >= minutes * 60


def test_a_worker_gets_its_gpus_by_plugin_or_by_claim():
    """`nvidia.com/gpu` with a RuntimeClass; or a claim, and then not both."""
    plugin = worker({"tensorParallel": 4})
    assert container(plugin)["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert template(plugin)["runtimeClassName"] == "nvidia"
    claim = worker({"gpu": {"resourceClaimTemplate": "gpus"}})
    assert container(claim)["resources"]["claims"] == [{"name": "gpus"}]
    assert "nvidia.com/gpu" not in container(claim)["resources"]["limits"]
    assert template(claim)["resourceClaims"][0]["resourceClaimTemplateName"] == "gpus"


def test_a_worker_on_a_cpu_asks_for_no_gpu():
    """Another image, no RuntimeClass."""
    cpu = worker({"device": "cpu"})
    assert "worker-cpu@" in container(cpu)["image"]
    assert "runtimeClassName" not in template(cpu)
    assert "nvidia.com/gpu" not in container(cpu)["resources"]["limits"]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            {"source": "pvc", "claimName": "weights"},
            {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
        ),
        (
            {"source": "hostPath", "hostPath": "/srv/models"},
            {"hostPath": {"path": "/srv/models", "type": "Directory"}},
        ),
        (
            {"source": "image", "image": WEIGHTS},
            {"image": {"reference": f"weights@{DIGEST}", "pullPolicy": "IfNotPresent"}},
        ),
    ],
    ids=["pvc", "hostPath", "image"],
)
def test_weights_are_mounted_from_each_source(target, expected):
    """Read-only, each kind; nothing is downloaded."""
    spec = template(worker({"target": target}))
    assert {k: v for k, v in volumes(spec)["target"].items() if k != "name"} == expected
    (mount,) = (m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "target")
    assert mount["readOnly"] is True
    assert "initContainers" not in spec


def test_weights_are_copied_out_of_an_image_where_there_are_no_image_volumes():
    """By a container that ends, into room that is bounded."""
    spec = template(worker({"target": {"source": "initCopy", "image": WEIGHTS, "copySize": "80Gi"}}))
    (copy,) = spec["initContainers"]
    assert copy["image"] == f"weights@{DIGEST}"
    assert volumes(spec)["target"]["emptyDir"]["sizeLimit"] == "80Gi"


def test_a_speculative_model_has_a_draft_and_a_pool_without():
    """Two Deployments; only one mounts the draft, and its settings say how to draft."""
    rendered = render(site({"speculation": {"optOut": True}}, model=DRAFTED | {"targetOnlyReplicas": 2}))
    drafted, plain = (
        rendered.one("Deployment", "-m-ministry-8b"),
        rendered.one("Deployment", "-t-ministry-8b"),
    )
    assert "draft" in volumes(template(drafted))
    assert "draft" not in volumes(template(plain))
    assert plain["spec"]["replicas"] == 2
    says = yaml.safe_load(rendered.one("ConfigMap", "-m-ministry-8b")["data"]["appliance.yaml"])
    assert says["worker"]["draft"].endswith("/draft")


def test_a_model_on_several_nodes_is_a_group_that_fails_together():
    """A LeaderWorkerSet in place of the Deployment; only the leader serves."""
    rendered = render(site(model={"nodes": 2, "tensorParallel": 8, "pipelineParallel": 2}))
    group = rendered.one("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    assert group["leaderTemplate"]["spec"]["containers"][0]["ports"]
    assert "ports" not in group["workerTemplate"]["spec"]["containers"][0]
    assert not rendered.kind("Deployment")


def test_memory_is_locked_for_rdma_and_only_then():
    """The one capability that the chart ever adds."""
    plain, locked = worker(), worker({"rdma": {"enabled": True, "resources": {"rdma/hca": 1}}})
    assert "add" not in container(plain)["securityContext"]["capabilities"]
    assert container(locked)["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert container(locked)["resources"]["limits"]["rdma/hca"] == 1


def test_workers_scale_by_requests_of_their_model_not_by_processor_use():
    """KEDA, only where asked, between the bounds of the model; busy workers count with an empty queue."""
    assert not render(site()).kind("ScaledObject")
    spec = render(site(model={"keda": {"enabled": True, "maxReplicas": 6}})).one("ScaledObject")["spec"]
    assert spec["maxReplicaCount"] == 6
    query = spec["triggers"][0]["metadata"]["query"]
    assert query == 'sum(appliance_requests_in_flight{namespace="clinic",model="ministry-8b"})'


@pytest.mark.parametrize("seconds", [0, 300, 3600])
def test_autoscaler_times_are_within_kubernetes_limits(seconds):
    """A window of up to an hour, a policy for 1 to 1800 seconds; KEDA could make no autoscaler otherwise."""
    keda = {"enabled": True, "cooldownSeconds": seconds}
    spec = render(site(model={"keda": keda})).one("ScaledObject")["spec"]
    down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] == seconds
    assert down["policies"][0]["periodSeconds"] == min(max(seconds, 1), 1800)


def test_postgresql_is_in_the_chart_only_where_asked():
    """With a persistent disk and a Job that creates the tables."""
    assert not [name for name in render(site()).names() if "postgres" in name]
    rendered = render(site(IN_CHART))
    postgres = rendered.one("StatefulSet", "postgres")
    assert postgres["spec"]["volumeClaimTemplates"]
    variables = {each["name"]: each.get("value", "") for each in container(postgres)["env"]}
    assert "--encoding=UTF8" in variables["POSTGRES_INITDB_ARGS"], "the audit log refuses others"
    assert rendered.one("Job")
    assert rendered.one("NetworkPolicy", "postgres")["spec"]["egress"] == []


def test_tables_are_upgraded_by_the_chart_only_with_the_owners_password():
    """Otherwise a site runs the upgrade itself."""
    assert not render(site(SEVERAL)).kind("Job")
    owner = {"database": {"external": {"owner": {"user": "audit_owner", "existingSecret": "owner"}}}}
    job = render(site(SEVERAL, owner)).one("Job")
    assert container(job)["args"][:2] == ["audit", "upgrade-database"]


def test_the_network_is_closed_but_for_what_is_named():
    """A worker calls nothing; a gateway calls workers, database, its peers and, if allowed, a resolver."""
    peers = [{"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}], "port": 8090}]
    rendered = render(site(SEVERAL, {"networkPolicy": {"gateway": {"peers": peers}}}))
    assert rendered.one("NetworkPolicy", "workers")["spec"]["egress"] == []
    egress = rendered.one("NetworkPolicy", "gateway")["spec"]["egress"]
    assert [port["port"] for rule in egress for port in rule["ports"]] == [8000, 8001, 5432, 8090, 53, 53]
    deny = rendered.one("NetworkPolicy", "default-deny")["spec"]
    assert "ingress" not in deny
    assert "egress" not in deny


def test_workers_admit_gateways_and_the_test_that_needs_a_positive_control():
    """Else `helm test` could not tell a closed network from a worker that is down."""
    rendered = render(site())
    rule, control = rendered.one("NetworkPolicy", "workers")["spec"]["ingress"]
    assert [each["ports"][0]["port"] for each in (rule, control)] == [8000, 8001]
    assert control["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    (peer,) = rule["from"]
    asked = peer["podSelector"]
    (expression,) = asked["matchExpressions"]
    assert expression["values"] == ["gateway", "tools"]
    (tried,) = (pod for name, pod in rendered.kind("Pod").items() if name.endswith("test-egress"))
    labels = tried["metadata"]["labels"]
    assert labels[expression["key"]] in expression["values"]
    assert asked["matchLabels"].items() <= labels.items()


def test_a_resolver_is_optional_and_a_cluster_without_policies_is_the_sites_choice():
    """Both are values, and both are on."""
    without = render(site({"networkPolicy": {"dns": {"enabled": False}}, "models": []}))
    assert "53" not in json.dumps(without.one("NetworkPolicy", "gateway")["spec"]["egress"])
    assert not render(site({"networkPolicy": {"enabled": False}})).kind("NetworkPolicy")


def test_resolver_is_selected_only_by_the_sites_labels():
    """OpenShift's pods do not have those of others as well; and one on the nodes is found by its address."""

    def asked(**dns):
        policy = render(site({"networkPolicy": {"dns": dns}})).one("NetworkPolicy", "gateway")
        return policy["spec"]["egress"][-1]["to"]

    labels = {"dns.operator.openshift.io/daemonset-dns": "default"}
    assert [to["podSelector"]["matchLabels"] for to in asked()] == [{"k8s-app": "kube-dns"}]
    assert [to["podSelector"]["matchLabels"] for to in asked(podLabels=labels)] == [labels]
    assert asked(addresses=["169.254.20.10/32"])[1:] == [{"ipBlock": {"cidr": "169.254.20.10/32"}}]


def test_objects_of_monitoring_appear_where_the_cluster_knows_them():
    """And nowhere else: a cluster without them would refuse the whole release."""
    assert not [o for o in render(site()).objects if o["apiVersion"] == MONITORING]
    known = render(site(), api_versions=[MONITORING])
    assert known.kind("ServiceMonitor")
    assert known.kind("PrometheusRule")
    off = {"monitoring": {"serviceMonitor": {"enabled": False}, "rules": {"enabled": False}}}
    assert not [
        o for o in render(site(off), api_versions=[MONITORING]).objects if o["apiVersion"] == MONITORING
    ]


def test_prometheus_scrapes_workers_with_a_token_of_its_own():
    """Never with the control token, which restarts workers and opens their models."""
    scraped = {
        "networkPolicy": {"metrics": {"workers": True}},
        "keys": {"scrapeToken": {"existingSecret": "scrape-token", "key": "word"}},
    }
    rendered = render(site(scraped), api_versions=[MONITORING])
    (endpoint,) = rendered.one("ServiceMonitor", "workers")["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "scrape-token", "key": "word"}}
    pod = template(rendered.one("Deployment"))
    secret = volumes(pod)["scrape-token"]["secret"]
    assert (secret["secretName"], secret["items"]) == ("scrape-token", [{"key": "word", "path": "token"}])
    chosen = settings(rendered, "ministry-8b")["worker"]["scrape_token_file"]
    mounts = {
        mount["name"]: mount["mountPath"] for mount in container(rendered.one("Deployment"))["volumeMounts"]
    }
    assert chosen == f"{mounts['scrape-token']}/token"
    assert "scrape-token" not in volumes(template(render(site()).one("Deployment")))


def test_chart_has_the_repositorys_rules_and_dashboards():
    """Byte for byte in meaning: what compose shows is what the cluster shows."""
    rendered = render(site({"monitoring": {"dashboards": {"enabled": True}}}), api_versions=[MONITORING])
    shown = [
        json.loads(t)
        for o in rendered.kind("ConfigMap").values()
        for k, t in o["data"].items()
        if k.endswith(".json")
    ]
    monitoring = ROOT / "deploy" / "monitoring"
    dashboards = [
        json.loads(p.read_text(encoding="utf-8")) for p in (monitoring / "dashboards").glob("*.json")
    ]
    assert sorted(d["uid"] for d in shown) == sorted(d["uid"] for d in dashboards)
    assert all(d in dashboards for d in shown)
    rules = [yaml.safe_load(p.read_text(encoding="utf-8")) for p in (monitoring / "rules").glob("*.yaml")]
    specs = [o["spec"] for o in rendered.kind("PrometheusRule").values()]
    assert len(specs) == len(rules)
    assert all(spec in rules for spec in specs)
    assert not [n for n in render(site()).kind("ConfigMap") if "dashboard" in n]


def test_tests_can_be_left_out():
    """They are hooks of `helm test` otherwise, and never part of an installation."""
    made = render(site()).kind("Pod")
    assert {pod["metadata"]["annotations"]["helm.sh/hook"] for pod in made.values()} == {"test"}
    assert not render(site({"tests": {"enabled": False}})).kind("Pod")


def test_every_image_comes_from_the_sites_registry_with_its_secrets():
    """`global.imageRegistry` and `global.imagePullSecrets` reach every pod, weights included."""
    values = site(
        IN_CHART,
        {"global": {"imageRegistry": "enclave.example:5000/llm", "imagePullSecrets": ["registry"]}},
        model={"target": {"source": "initCopy", "image": WEIGHTS}},
    )
    templates = dict(pods(render(values).objects))
    assert len(templates) == 7
    for owner, one in templates.items():
        every = [*one["spec"].get("initContainers", []), *one["spec"]["containers"]]
        assert all(c["image"].startswith("enclave.example:5000/llm/") for c in every), owner
        assert one["spec"]["imagePullSecrets"] == [{"name": "registry"}], owner


def test_tags_need_global_allow_tags():
    """`global.allowTags`; a digest still decides where there is one."""
    values = site({"global": {"allowTags": True}, "images": {"gateway": {"digest": "", "tag": "edge"}}})
    rendered = render(values)
    assert container(rendered.one("StatefulSet"))["image"] == "sovereign-appliance/gateway:edge"
    assert container(rendered.one("Deployment"))["image"].endswith(DIGEST)


def test_openshift_chooses_user_ids_itself():
    """No user, group or fsGroup is named, and everything else of `restricted` stays."""
    for owner, one in pods(render(site({"global": {"openshift": True}})).objects):
        named = {**one["spec"]["securityContext"], **one["spec"]["containers"][0]["securityContext"]}
        assert not named.keys() & {"runAsUser", "runAsGroup", "fsGroup"}, owner
        assert named["runAsNonRoot"] is True, owner


def test_accounts_can_be_the_sites_own():
    """Then the chart creates none for that component."""
    rendered = render(site({"gateway": {"serviceAccountName": "theirs"}}))
    assert template(rendered.one("StatefulSet"))["serviceAccountName"] == "theirs"
    assert "appliance-gateway" not in rendered.kind("ServiceAccount")


@pytest.mark.parametrize(
    "name",
    ["gateway", "workers", "postgres", "gateway-each", "a-t", "mistralai/Mistral-Large-3:2512", "x" * 200],
)
def test_no_name_of_a_model_collides_with_anything(name):
    """Also not with a model `a` that has a target-only pool."""
    first = {**site()["models"][0], **DRAFTED, "name": "a", "targetOnlyReplicas": 1}
    second = {**site()["models"][0], **DRAFTED, "name": name}
    rendered = render(site(IN_CHART, {"models": [first, second]}))
    assert not [fault for fault in dangling(rendered.objects) if "times" in fault or "finds" in fault]
    assert all(len(o["metadata"]["name"]) <= 63 for o in rendered.objects)


def test_names_fit_whatever_the_release_is_called():
    """Kubernetes allows 63 characters, and Helm 53 for the release."""
    rendered = render(site(IN_CHART, {"fullnameOverride": "r" * 53}))
    assert all(len(o["metadata"]["name"]) <= 63 for o in rendered.objects)


def test_one_value_gives_a_demo_that_serves_with_its_draft_on_a_node_with_two_cores():
    """No digest, Secret, claim or model has to be named, and another core is left for the node's own pods."""
    rendered = render(EVALUATION)
    assert not dangling(rendered.objects)
    worker = settings(rendered, "demo-coder")["worker"]
    assert (worker["method"], worker["device"]) == ("eagle3", "cpu")
    requests = [
        container(rendered.one(kind))["resources"]["requests"] for kind in ("Deployment", "StatefulSet")
    ]
    assert [each["cpu"] for each in requests] == ["500m", "250m"]
    image = (ROOT / "deploy" / "images" / "Dockerfile").read_text(encoding="utf-8")
    assert "COPY demo /opt/appliance/demo" in image, "the weights are in the workers' image"
    for weights in ("model", "draft"):
        assert (ROOT / "demo" / "models" / Path(worker[weights]).name).is_dir()


def test_the_control_token_of_an_evaluation_is_made_once_and_kept_by_upgrades():
    """A hook of the first installation; a Secret of one's own is used instead, and production makes none."""
    token = render(EVALUATION).one("Secret")
    assert token["metadata"]["annotations"]["helm.sh/hook"] == "pre-install"
    assert len(token["stringData"]["token"]) >= 32
    for kind in ("Deployment", "StatefulSet"):
        mounted = volumes(template(render(EVALUATION).one(kind)))["control-token"]
        assert mounted["secret"]["secretName"] == token["metadata"]["name"]
    own = {**EVALUATION, "keys": {"controlToken": {"existingSecret": "ours"}}}
    assert not render(own).kind("Secret")
    assert not render(site()).kind("Secret")


def test_a_model_with_a_draft_speculates_unless_told_otherwise():
    """Giving a draft is enough."""
    draft = {"draft": DRAFTED["draft"]}
    assert settings(render(site(model=draft)), "ministry-8b")["worker"]["method"] == "eagle3"
    assert settings(render(site()), "ministry-8b")["worker"]["method"] == "none"


def test_models_may_be_a_map_to_which_files_add(tmp_path):
    """A list is replaced as a whole by the next file."""
    files = []
    for name in ("a", "b"):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump({"models": {name: {"target": site()["models"][0]["target"]}}}))
    rest = {key: value for key, value in site().items() if key != "models"}
    rendered = render(rest, files=files)
    assert {settings(rendered, f"t-{name}")["worker"]["served_name"] for name in "ab"} == {"a", "b"}


def test_a_site_adds_labels_variables_volumes_containers_and_objects():
    """To gateways and to workers, without changing the chart."""
    more = {
        "podLabels": {"team": "llm"},
        "extraEnv": [{"name": "TZ", "value": "UTC"}],
        "extraVolumes": [{"name": "ours", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "ours", "mountPath": "/ours"}],
        "sidecars": [{"name": "logs", "image": "logs@sha256:1"}],
    }
    rendered = render(site({"gateway": more, "extraObjects": [OBJECT]}, model=more))
    for kind in ("StatefulSet", "Deployment"):
        pod = rendered.one(kind)["spec"]["template"]
        ours, sidecar = pod["spec"]["containers"]
        assert pod["metadata"]["labels"]["team"] == "llm"
        assert more["extraEnv"][0] in ours["env"]
        assert more["extraVolumeMounts"][0] in ours["volumeMounts"]
        assert more["extraVolumes"][0] in pod["spec"]["volumes"]
        assert sidecar == more["sidecars"][0]
    assert "appliance-ours" in rendered.kind("ConfigMap")


def test_an_http_route_leads_to_the_api_without_a_time_limit():
    """Of the Gateway API; a stream lasts as long as its answer."""
    entry = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.bank"]}}
    route = render(site(OUTSIDE, {"gateway": entry})).one("HTTPRoute")["spec"]
    assert (route["parentRefs"], route["hostnames"]) == ([{"name": "public"}], ["llm.bank"])
    (rule,) = route["rules"]
    assert rule["timeouts"] == {"request": "0s"}
    assert rule["backendRefs"] == [{"name": "appliance-gateway", "port": 8080}]


def test_every_template_makes_something_in_these_tests():
    """A template that no test renders would be untested."""
    group = {"nodes": 2, "tensorParallel": 8, "pipelineParallel": 2}
    entries = {"gateway": {"ingress": {"enabled": True, "host": "h.example", "tlsSecret": "t"}}}
    all_on = {"monitoring": {"dashboards": {"enabled": True}}, "extraObjects": [OBJECT]}
    made = {
        source
        for values in (
            site(IN_CHART, entries, OUTSIDE, all_on, REFRESH, PICKER, WEIGHTS_LOAD, model=DRAFTED),
            site(model=group),
            EVALUATION,
            site({"gateway": {"tls": {"issuerRef": {"name": "enclave"}}}}),
        )
        for source in render(values, api_versions=[MONITORING, CERT_MANAGER]).source.values()
    }
    templates = {
        str(path.relative_to(CHART / "templates")) for path in Path(CHART / "templates").rglob("*.yaml")
    }
    assert templates - made == {"preflight.yaml"}


def test_each_port_of_a_gateway_is_open_to_those_it_is_for():
    """Clients reach the API, Prometheus and administrators the admin listener; by default only Prometheus."""
    operators = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
    }
    clients, scraper, admins = ({"podSelector": {"matchLabels": {"app": name}}} for name in "cpa")
    chosen = {"gateway": {"clients": [clients], "admins": [admins]}, "metrics": {"from": [scraper]}}
    for values, expected in (
        ({}, {8080: [{"podSelector": {}}], 8081: [operators]}),
        ({"networkPolicy": chosen}, {8080: [clients], 8081: [scraper, admins]}),
    ):
        rules = render(site(values)).one("NetworkPolicy", "gateway")["spec"]["ingress"]
        assert {rule["ports"][0]["port"]: rule["from"] for rule in rules} == expected
        assert all(len(rule["ports"]) == 1 for rule in rules)


def test_the_admin_listener_is_never_published_outside():
    """Whatever the Service of the API is: its own has no node port, and no ingress or route leads to it."""
    exposed = {
        "service": {"type": "LoadBalancer"},
        "tls": {"existingSecret": "tls"},
        "ingress": {"enabled": True, "host": "llm.bank", "tlsSecret": "tls"},
        "route": {"enabled": True},
    }
    rendered = render(site(OUTSIDE, {"gateway": exposed}), api_versions=[MONITORING])
    services = rendered.kind("Service")
    api, admin = (services[f"appliance-{name}"]["spec"] for name in ("gateway", "gateway-admin"))
    assert (api["type"], [port["targetPort"] for port in api["ports"]]) == ("LoadBalancer", ["api"])
    assert (admin["type"], [port["targetPort"] for port in admin["ports"]]) == ("ClusterIP", ["admin"])
    ways = [json.dumps(rendered.kind(kind)) for kind in ("Ingress", "Route")]
    assert not any("admin" in way or "8081" in way for way in ways)
    gateway = container(rendered.one("StatefulSet", "gateway"))
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    assert {gateway[probe]["httpGet"]["port"] for probe in probes} == {"admin"}
    monitor = rendered.one("ServiceMonitor", "gateway")["spec"]
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == ["admin"]
    labels = services["appliance-gateway-admin"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
