"""Drafts in the chart: the registry that pods share, the Job that refreshes one, and traces of workers."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from appliance.infra.settings import load_settings
from tests.deploy.chart import references, schemas
from tests.deploy.chart.helm import CHART, ROOT, RefusedError, render
from tests.deploy.chart.site import DIGEST, DRAFTED, IN_CHART, REFRESH, REGISTRY, SEVERAL, named, over, site

policies = pytest.importorskip(
    "tests.deploy.chart.policies", reason="regopy is not installed: no policy is asked"
)

pytestmark = pytest.mark.usefixtures("helm")
CLOCK = {"draftRefresh": {"enabled": False, "schedule": {"enabled": True, "timeZone": "Europe/Berlin"}}}
TRACED = {
    "settings": {"tracing": {"enabled": True, "endpoint": "http://10.0.0.7:4318/v1/traces"}},
    "networkPolicy": {"collector": {"to": [{"ipBlock": {"cidr": "10.0.0.7/32"}}]}},
}
NAMED_COLLECTOR = {"settings": {"tracing": {"endpoint": "https://collector.tracing.svc:4318/v1/traces"}}}


def refreshing(*changes, model=None, database=SEVERAL):
    """A site that refreshes its only model's draft."""
    return site(database, REFRESH, *changes, model=over(DRAFTED, model or {}))


def without(*path):
    """A change that empties one text."""
    change = ""
    for step in reversed(path):
        change = {step: change}
    return change


CONTRADICTIONS = [
    (
        refreshing(without("drafts", "trustedKeys", "existingConfigMap")),
        r"drafts\.existingClaim without drafts\.trustedKeys\.existingConfigMap: workers would start no draft",
    ),
    (
        refreshing(without("drafts", "existingClaim")),
        r"draftRefresh without drafts\.existingClaim: gateways and workers could not read the trained draft",
    ),
    (
        refreshing(without("gateway", "sharedFiles", "existingClaim")),
        r"draftRefresh without gateway\.sharedFiles\.existingClaim: the keys to kept content are on",
    ),
    (
        refreshing(without("keys", "draftsKey", "existingSecret")),
        r"draftRefresh without keys\.draftsKey\.existingSecret: .* no worker would trust the draft",
    ),
    (
        refreshing(without("keys", "tenantsMac", "existingSecret"), database=IN_CHART),
        r"draftRefresh without keys\.tenantsMac\.existingSecret: .* which tenants allow training",
    ),
    (
        site(REFRESH, model=DRAFTED),
        r"draftRefresh with database\.kind sqlite: .* use PostgreSQL \(external or inChart\)",
    ),
    (
        refreshing(without("draftRefresh", "purpose")),
        r"draftRefresh\.purpose is empty: give the purpose of reading content",
    ),
    (
        refreshing({"draftRefresh": {"backend": "speculators"}}),
        r"draftRefresh\.backend is speculators and draftRefresh\.steps is 0: it trains by steps",
    ),
    (
        refreshing({"draftRefresh": {"backend": "speculators", "steps": 9}}, model={"device": "cpu"}),
        r"draftRefresh\.backend is speculators and ministry-8b is on device cpu: .* use small",
    ),
    (
        refreshing({"draftRefresh": {"backend": "speculators", "steps": 9}}),
        r"draftRefresh\.image\.repository is empty: none of our images has that library; name an image",
    ),
    (
        refreshing({"draftRefresh": {"image": {"repository": "site/trainer"}}}),
        r"draftRefresh\.image\.digest is empty: a tag can change its image; give its digest",
    ),
    (
        refreshing({"draftRefresh": {"model": "ministry-70b"}}),
        r'draftRefresh\.model is "ministry-70b": name an entry of models',
    ),
    (
        refreshing(model={"method": "ngram", "draft": {"source": "none"}}),
        r"draftRefresh\.model ministry-8b has the method ngram: only eagle3 drafts can be trained",
    ),
    (
        refreshing(model={"nodes": 2, "tensorParallel": 2}),
        r"draftRefresh\.model ministry-8b is on 2 nodes: a draft is trained and evaluated on one",
    ),
    (
        refreshing(without("draftRefresh", "gpu", "type")),
        r"draftRefresh\.gpu\.type is empty: .* node label nvidia\.com/gpu\.product",
    ),
    (
        refreshing(model={"gpu": {"resource": "nvidia.com/gpu.shared"}}),
        r"gpu\.resource is nvidia\.com/gpu\.shared: a shared GPU also serves a worker",
    ),
    (
        refreshing({"draftRefresh": {"gpu": {"count": 2}}}, model={"tensorParallel": 4}),
        r"draftRefresh\.gpu\.count is 2: the target of ministry-8b needs 4 GPUs for the evaluation",
    ),
    (
        site(TRACED, {"networkPolicy": {"collector": {"to": []}}}),
        r"settings\.tracing\.enabled without networkPolicy\.collector\.to: gateways and workers could not",
    ),
    (
        site(TRACED, NAMED_COLLECTOR, {"networkPolicy": {"dns": {"enabled": False}}}),
        r"settings\.tracing\.endpoint is a name and networkPolicy\.dns\.enabled is false",
    ),
]
SITES = {
    "external PostgreSQL": refreshing(),
    "PostgreSQL in the chart": refreshing(database=IN_CHART),
    "by the clock": refreshing(CLOCK),
    "both": refreshing({"draftRefresh": {"schedule": {"enabled": True}}}),
    "on a CPU": refreshing(model={"device": "cpu"}),
    "GPUs by claim": refreshing(
        without("draftRefresh", "gpu", "type"), model={"gpu": {"resourceClaimTemplate": "gpus"}}
    ),
    "weights copied out of an image": refreshing(
        model={"draft": {"source": "initCopy", "image": {"repository": "w", "digest": "sha256:" + "1" * 64}}}
    ),
    "speculators": refreshing(
        {
            "draftRefresh": {
                "backend": "speculators",
                "steps": 2000,
                "image": {"repository": "site/trainer", "digest": DIGEST},
                "arguments": {"train": ["--python", "/opt/speculators/bin/python"]},
            }
        }
    ),
    "OpenShift": refreshing({"global": {"openshift": True}}),
    "the registry on the weights' claim": refreshing({"drafts": {"existingClaim": "weights"}}),
    "a master key and an authority": refreshing({"keys": {"payloadMasterKey": {"existingSecret": "master"}}}),
    "traces to an address": site(TRACED),
    "traces to a name": site(TRACED, NAMED_COLLECTOR, {"caBundle": {"existingConfigMap": "authorities"}}),
    "traces from several nodes": site(TRACED, model={"nodes": 2, "tensorParallel": 2}),
    "a registry without a refresh": site(REGISTRY, model=DRAFTED),
}


def flattened(objects):
    """The objects, each CronJob followed by its Job, since some checks only know Jobs."""
    made = [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": one["metadata"],
            "spec": one["spec"]["jobTemplate"]["spec"],
        }
        for one in objects
        if one["kind"] == "CronJob"
    ]
    return [*objects, *made]


def job(values):
    """The only Job that refreshes, if need be the one a CronJob would make."""
    (found,) = (
        one
        for one in flattened(render(values).objects)
        if one["kind"] == "Job" and "draft-refresh" in one["metadata"]["name"]
    )
    return found["spec"]


def pod(values):
    return job(values)["template"]["spec"]


def container(values):
    (only,) = pod(values)["containers"]
    return only


def mounts(one):
    return {mount["name"]: mount for mount in one["volumeMounts"]}


def volumes(spec):
    return {volume["name"]: volume for volume in spec["volumes"]}


def read(rendered, part, tmp_path, variables=None):
    """The settings of a ConfigMap, as the appliance reads them."""
    file = tmp_path / "appliance.yaml"
    file.write_text(rendered.one("ConfigMap", part)["data"]["appliance.yaml"], encoding="utf-8")
    return load_settings(file, environment=variables or {})


def offline():
    lines = (ROOT / "deploy" / "offline.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize(
    ("values", "message"), CONTRADICTIONS, ids=[message[:50] for _, message in CONTRADICTIONS]
)
def test_a_contradiction_about_drafts_is_refused_with_what_to_do(values, message):
    """One line for each, by the names of the values."""
    with pytest.raises(RefusedError, match=message):
        render(values)


def test_every_contradiction_about_drafts_is_tried():
    """Each message of the template has a case above."""
    template = (CHART / "templates" / "_draft_preflight.tpl").read_text(encoding="utf-8")
    messages = [line for line in template.splitlines() if line and not line.startswith(("{{-", "{{/*", " "))]
    assert len(messages) == len(CONTRADICTIONS)
    said = ""
    for values, _ in CONTRADICTIONS:
        with pytest.raises(RefusedError) as refused:
            render(values)
        said += str(refused.value)
    for message in messages:
        assert re.search(".*".join(map(re.escape, re.split(r"\{\{.*?\}\}", message))), said), message


@pytest.mark.parametrize("values", SITES.values(), ids=SITES)
def test_drafts_and_traces_keep_every_policy(values):
    """Without an exception: pods of the refresh are restricted as all others are."""
    assert policies.denied_by_any(render(values).objects, offline=offline()) == {}


@pytest.mark.parametrize("version", schemas.BOUNDS)
@pytest.mark.parametrize("values", SITES.values(), ids=SITES)
def test_kubernetes_knows_every_field_of_what_refreshes(values, version):
    """Strictly, in the oldest and newest of three minor versions."""
    rendered = render(values, kube_version=version)
    assert [fault for one in rendered.objects for fault in schemas.faults(one, version)] == []


@pytest.mark.parametrize("values", SITES.values(), ids=SITES)
def test_all_references_of_the_refresh_resolve(values):
    """Volumes, claims, Secrets, accounts; policies select a pod that is there."""
    objects = flattened(render(values).objects)
    assert references.dangling(objects, existing=named(values)) == []


def test_refresh_is_opt_in():
    """Neither Job nor CronJob, account, policy or settings; and pods share no registry."""
    rendered = render(site(SEVERAL, model=DRAFTED))
    assert not [name for name in rendered.names() if "draft-refresh" in name]
    assert not rendered.kind("CronJob")
    assert "appliance-drafts" not in json.dumps(rendered.objects)


def test_a_schedule_alone_makes_a_cron_job_that_never_runs_twice_at_once():
    """No separate Job; in the site's time zone."""
    rendered = render(refreshing(CLOCK))
    assert not [name for name in rendered.kind("Job") if "draft-refresh" in name]
    spec = rendered.one("CronJob")["spec"]
    assert (spec["schedule"], spec["timeZone"]) == ("0 22 * * 5", "Europe/Berlin")
    assert spec["concurrencyPolicy"] == "Forbid"
    clusters = over(CLOCK, without("draftRefresh", "schedule", "timeZone"))
    assert "timeZone" not in render(refreshing(clusters)).one("CronJob")["spec"]


def test_it_runs_the_program_of_the_image_with_what_the_values_say():
    """The command line is one that the program takes."""
    more = {"harvest": ["--max-samples", "200"], "train": ["--unroll", "5"]}
    values = refreshing({"draftRefresh": {"minutes": 90, "arguments": more}})
    assert container(values)["command"] == ["/opt/appliance/bin/python", "-I", "/opt/appliance/refresh.py"]
    check = (
        "import json, runpy, sys; module = runpy.run_path(sys.argv[1]); "
        "asked = module['parse'](sys.argv[2:]); print(json.dumps(vars(asked), default=str))"
    )
    program = ROOT / "deploy" / "images" / "refresh.py"
    done = subprocess.run(
        [sys.executable, "-c", check, program, *container(values)["args"]],
        capture_output=True,
        text=True,
        check=True,
    )
    asked = json.loads(done.stdout)
    assert asked["purpose"] == "drafts have aged, ticket 7"
    assert asked["minutes"] == 90
    assert asked["run"] == "ministry-8b.first"
    assert asked["gpu"] is True
    assert asked["harvest"] == ["--max-samples", "200"]
    assert asked["train"] == ["--backend", "small", "--unroll", "5"]
    assert asked["evaluate"] == []
    assert asked["config"] == "/etc/appliance/appliance.yaml"
    assert asked["state"].startswith("/var/lib/appliance-drafts/")


def test_a_large_target_is_trained_in_an_image_that_the_site_names():
    """By steps, and every container of the pod is of that image, from the site's registry."""
    values = SITES["speculators"]
    assert {"--steps=2000", "--train=speculators", "--train=/opt/speculators/bin/python"} < set(
        container(values)["args"]
    )
    assert not [word for word in container(values)["args"] if word.startswith("--minutes")]
    spec = pod(over(values, {"global": {"imageRegistry": "enclave.example:5000"}}))
    assert {each["image"] for each in [*spec["containers"], *spec["initContainers"]]} == {
        f"enclave.example:5000/site/trainer@{DIGEST}"
    }


def test_each_time_of_a_schedule_is_a_run_of_its_own():
    """Named by its Job, which Kubernetes labels its pods with; a Job's own is the word in the values."""
    scheduled = container(refreshing(CLOCK))
    assert "ministry-8b.$(JOB)" in scheduled["args"]
    (variable,) = (each for each in scheduled["env"] if each["name"] == "JOB")
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['batch.kubernetes.io/job-name']"
    assert not [each for each in container(refreshing())["env"] if each["name"] == "JOB"]


def test_another_run_name_creates_another_job():
    """A Job cannot be changed, so its name follows from what it is."""

    def names(*changes):
        rendered = render(refreshing(*changes))
        return {name for name in rendered.kind("Job") if "draft-refresh" in name}

    assert names() == names()
    assert names() != names({"draftRefresh": {"run": "second"}})
    assert names() != names({"draftRefresh": {"minutes": 60}})
    assert all(len(name) <= 63 for name in names({"fullnameOverride": "r" * 53}))


def test_its_gpus_are_its_own_and_of_the_kind_that_serves():
    """Whole devices by the plugin, as many as a worker has, on nodes with the label; or by claim."""
    spec = pod(refreshing(model={"tensorParallel": 4}))
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert spec["runtimeClassName"] == "nvidia"
    for bound in ("requests", "limits"):
        assert spec["containers"][0]["resources"][bound]["nvidia.com/gpu"] == 4
    assert (
        container(refreshing({"draftRefresh": {"gpu": {"count": 2}}}))["resources"]["limits"][
            "nvidia.com/gpu"
        ]
        == 2
    )
    claimed = pod(SITES["GPUs by claim"])
    assert claimed["containers"][0]["resources"]["claims"] == [{"name": "gpus"}]
    assert "nvidia.com/gpu" not in claimed["containers"][0]["resources"]["limits"]
    assert claimed["resourceClaims"][0]["resourceClaimTemplateName"] == "gpus"
    for one in (spec, claimed):
        assert "--gpu" in one["containers"][0]["args"]


def test_on_a_cpu_it_asks_for_no_gpu():
    """For the demo, in the image of workers on CPUs."""
    spec = pod(SITES["on a CPU"])
    assert "worker-cpu@" in spec["containers"][0]["image"]
    assert "--gpu" not in spec["containers"][0]["args"]
    assert "nodeSelector" not in spec
    assert "runtimeClassName" not in spec


@pytest.mark.parametrize("values", [SITES["external PostgreSQL"], SITES["a master key and an authority"]])
def test_it_holds_the_keys_it_needs_and_no_others(values):
    """To the database, tenants, kept content and drafts; not the log's signing key or the control token."""
    spec = pod(values)
    secrets = {v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
    master = {"master"} if values["keys"].get("payloadMasterKey") else set()
    assert secrets == {"database", "drafts-key", "tenants-mac"} | master
    assert not secrets & {"control-token", "signing-key"}
    (main,) = spec["containers"]
    shared = mounts(main)["shared"]
    assert (shared["mountPath"], shared["subPath"]) == (
        "/var/lib/appliance-shared/payload-keys",
        "payload-keys",
    ), "files of batches are not its business"
    assert all(
        mounts(main)[name]["readOnly"] for name in ("target", "draft", "settings", "database", "shared")
    )
    writable = {name for name, mount in mounts(main).items() if not mount.get("readOnly")}
    assert writable == {"drafts", "data", "cache", "tmp", "shm"}


def test_the_directory_of_keys_is_made_as_a_gateway_makes_it():
    """By a container that ends first: mounting a part that is missing would leave a directory of root's."""
    (keys,) = pod(refreshing())["initContainers"]
    assert keys["volumeMounts"] == [{"name": "shared", "mountPath": "/var/lib/appliance-shared"}]
    assert "0o700" in keys["args"][0]


def test_environment_of_the_refresh_is_valid_settings(tmp_path):
    """Its settings name files that are mounted, the pair at its places, and the log's database and origin."""
    values = refreshing(
        {"settings": {"audit": {"origin": "clinic.example/audit"}}},
        {"keys": {"payloadMasterKey": {"existingSecret": "master"}}},
    )
    rendered = render(values)
    settings = read(rendered, "draft-refresh", tmp_path)
    main = container(values)
    assert settings.audit.origin == "clinic.example/audit"
    assert settings.audit.database_url == read(rendered, "appliance-gateway", tmp_path).audit.database_url
    assert settings.worker.served_name == "ministry-8b"
    assert settings.worker.method == "eagle3"
    places = {mount["mountPath"] for mount in main["volumeMounts"]}
    for path in (
        settings.data.directory,
        settings.drafts.directory,
        settings.tenants.mac_key_file,
        settings.drafts.signing_key_file,
        settings.drafts.trusted_keys_file,
        settings.audit.payload_keys_directory,
        settings.audit.payload_master_key_file,
        settings.worker.model,
        settings.worker.draft,
    ):
        assert any(path.is_relative_to(place) for place in places), path
    environment = {each["name"]: each.get("value") for each in main["env"]}
    assert offline().items() <= environment.items()


@pytest.mark.parametrize("database", [SEVERAL, IN_CHART], ids=["external", "in the chart"])
def test_refresh_may_call_only_database_and_resolver_and_has_no_callers(database):
    """Neither gateways nor workers, and not the peers that gateways have."""
    others = [{"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}], "port": 8090}]
    peers = {"networkPolicy": {"gateway": {"peers": others}}}
    rendered = render(refreshing(peers, TRACED, database=database))
    spec = rendered.one("NetworkPolicy", "draft-refresh")["spec"]
    assert spec["ingress"] == []
    assert [[port["port"] for port in rule["ports"]] for rule in spec["egress"]] == [[5432], [53, 53]]
    labels = job(refreshing(database=database))["template"]["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    if database is IN_CHART:
        (rule,) = rendered.one("NetworkPolicy", "postgres")["spec"]["ingress"]
        assert rule["from"][0]["podSelector"]["matchExpressions"][0]["values"] == [
            "gateway",
            "tools",
            "draft-refresh",
        ]


def test_refused_refresh_fails_for_good_and_evicted_one_restarts():
    """By its exit codes; any other failure is retried within the time of the values."""
    spec = job(refreshing({"draftRefresh": {"deadlineMinutes": 90}}))
    evicted, refused = spec["podFailurePolicy"]["rules"]
    assert evicted == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailJob", [3, 64])
    assert refused["onExitCodes"]["containerName"] == "refresh"
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "or Kubernetes takes no failure policy"
    assert spec["activeDeadlineSeconds"] == 90 * 60


def test_gateways_write_the_registry_and_workers_read_it(tmp_path):
    """At the same path; workers have public keys only, so they cannot sign a draft."""
    rendered = render(site(REGISTRY, model=DRAFTED | {"targetOnlyReplicas": 1}))
    gateway = rendered.one("StatefulSet")["spec"]["template"]["spec"]
    workers = [each["spec"]["template"]["spec"] for each in rendered.kind("Deployment").values()]
    assert len(workers) == 2
    assert "readOnly" not in mounts(gateway["containers"][0])["drafts"]
    for spec in workers:
        mounted = mounts(spec["containers"][0])
        assert mounted["drafts"]["readOnly"] is True
        assert "drafts-trusted" in mounted
        assert "drafts-key" not in volumes(spec)
    gateway_settings = read(rendered, "appliance-gateway", tmp_path)
    worker_settings = read(rendered, "-m-ministry-8b", tmp_path)
    assert gateway_settings.drafts.directory == worker_settings.drafts.directory
    assert gateway_settings.drafts.trusted_keys_file == worker_settings.drafts.trusted_keys_file
    assert gateway_settings.drafts.signing_key_file is not None
    assert worker_settings.drafts.signing_key_file is None


def test_a_site_sets_its_own_bounds_for_a_trial_and_no_path(tmp_path):
    """`settings.drafts` has the numbers; where things lie is the chart's."""
    values = site(REGISTRY, {"settings": {"drafts": {"trial_drafts": 512}}}, model=DRAFTED)
    settings = read(render(values), "appliance-gateway", tmp_path)
    assert settings.drafts.trial_drafts == 512
    assert settings.drafts.directory is not None
    for field in ("directory", "trusted_keys_file", "signing_key_file"):
        with pytest.raises(RefusedError, match="settings"):
            render(site({"settings": {"drafts": {field: "/elsewhere"}}}))


@pytest.mark.parametrize(
    "change",
    [
        {"draftRefresh": {"enable": True}},
        {"draftRefresh": {"run": "two words"}},
        {"draftRefresh": {"minutes": 0}},
        {"draftRefresh": {"backend": "large"}},
        {"draftRefresh": {"purpose": "x" * 201}},
        {"draftRefresh": {"schedule": {"cron": ""}}},
        {"draftRefresh": {"arguments": {"train": [5]}}},
        {"drafts": {"claim": "drafts"}},
        {"networkPolicy": {"collector": {"port": 70000}}},
    ],
    ids=json.dumps,
)
def test_unknown_value_of_drafts_is_refused(change):
    """By the schema, before any template is read."""
    with pytest.raises(RefusedError, match="values don't meet the specifications of the schema"):
        render(site(change))


def worker_egress(values):
    return render(values).one("NetworkPolicy", "workers")["spec"]["egress"]


def test_traced_workers_may_call_only_the_collector(tmp_path):
    """One egress rule, to its address and port; without tracing there is none."""
    assert worker_egress(site()) == []
    assert worker_egress(site({"networkPolicy": TRACED["networkPolicy"]})) == [], "tracing is off"
    assert worker_egress(site(TRACED)) == [
        {"to": [{"ipBlock": {"cidr": "10.0.0.7/32"}}], "ports": [{"protocol": "TCP", "port": 4318}]}
    ]
    rendered = render(site(TRACED, {"settings": {"tracing": {"sample_ratio": 0.5}}}))
    for part in ("appliance-gateway", "-t-ministry-8b"):
        tracing = read(rendered, part, tmp_path).tracing
        assert (tracing.enabled, tracing.sample_ratio) == (True, 0.5), part
        assert tracing.endpoint == "http://10.0.0.7:4318/v1/traces"


def test_a_collector_with_a_name_has_to_be_found(tmp_path):
    """Then workers may also call the resolver, and have the authorities to verify its certificate."""
    values = SITES["traces to a name"]
    rendered = render(values)
    collector, resolver = worker_egress(values)
    assert collector["ports"] == [{"protocol": "TCP", "port": 4318}]
    assert {port["port"] for port in resolver["ports"]} == {53}
    (worker,) = rendered.kind("Deployment").values()
    spec = worker["spec"]["template"]["spec"]
    assert mounts(spec["containers"][0])["ca"]["mountPath"] == "/etc/appliance/ca"
    assert volumes(spec)["ca"]["configMap"]["name"] == "authorities"
    without_traces = render(site({"caBundle": {"existingConfigMap": "authorities"}}))
    (worker,) = without_traces.kind("Deployment").values()
    assert "ca" not in volumes(worker["spec"]["template"]["spec"])


@pytest.mark.parametrize(
    ("endpoint", "chosen", "port"),
    [
        ("http://10.0.0.7/v1/traces", 0, 80),
        ("https://10.0.0.7/v1/traces", 0, 443),
        ("http://10.0.0.7:4318/v1/traces", 14318, 14318),
        ("http://[fd00::7]:4318/v1/traces", 0, 4318),
        ("http://[fd00::7]/v1/traces", 0, 80),
    ],
)
def test_the_collectors_port_is_the_endpoints_unless_its_pods_have_another(endpoint, chosen, port):
    """A NetworkPolicy matches the pod's port, not the Service's; an IPv6 address is not a name."""
    change = {
        "settings": {"tracing": {"endpoint": endpoint}},
        "networkPolicy": {"collector": {"port": chosen}},
    }
    (rule,) = worker_egress(site(TRACED, change))
    assert rule["ports"] == [{"protocol": "TCP", "port": port}]


def test_gateways_may_call_the_collector_too():
    """By the same value, in addition to their other peers."""
    egress = render(site(TRACED)).one("NetworkPolicy", "appliance-gateway")["spec"]["egress"]
    assert [rule["ports"][0]["port"] for rule in egress] == [8000, 4318, 53]


def test_nodes_of_one_worker_still_talk_to_each_other():
    """In addition to the collector."""
    among, collector, resolver = worker_egress(SITES["traces from several nodes"])
    assert "ports" not in among
    assert collector["ports"][0]["port"] == 4318
    assert resolver["ports"][0]["port"] == 53


def test_policy_denies_a_worker_with_wider_access():
    """The policies check the egress rule for the collector like every other: an open one is denied."""
    objects = render(site(TRACED)).objects
    assert policies.denied("network", objects) == []
    (policy,) = (
        one for one in objects if one["kind"] == "NetworkPolicy" and "workers" in one["metadata"]["name"]
    )
    policy["spec"]["egress"][0]["to"] = [{"ipBlock": {"cidr": "0.0.0.0/0"}}]
    assert any("everything" in sentence for sentence in policies.denied("network", objects))
    policy["spec"]["egress"][0] = {"to": [{"ipBlock": {"cidr": "10.0.0.7/32"}}]}
    assert any("without ports" in sentence for sentence in policies.denied("network", objects))


def test_no_policy_is_lost_on_a_cron_job():
    """Its Job template is checked like a Job: a privileged container in it is found."""
    objects = render(refreshing(CLOCK)).objects
    (cron,) = (one for one in objects if one["kind"] == "CronJob")
    inside = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]
    inside["securityContext"]["privileged"] = True
    assert any("is privileged" in sentence for sentence in policies.denied("pod_security", objects))


def test_default_values_render_no_refresh():
    """Content is read only if an operator asks for it."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert values["draftRefresh"]["enabled"] is False
    assert values["draftRefresh"]["schedule"]["enabled"] is False
