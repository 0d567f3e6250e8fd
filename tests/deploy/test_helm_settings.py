"""What the chart renders is what the appliance reads: settings files, and the variables of pods."""

from importlib.metadata import version as installed_version
from pathlib import Path

import pytest
import yaml
from sqlalchemy import make_url

import docs.chart as chart_docs
from appliance.app.worker_process import PLUGIN
from appliance.audit.checkpoint import parse_verifier_keys
from appliance.infra.postgresql import OPTIONS, SSL_MODES
from appliance.infra.settings import PREFIX, Settings, WorkerSettings, load_settings
from appliance.serving.devices import Device, DeviceKind
from appliance.serving.discovery import parse_service
from appliance.serving.engine_ports import MEETING_POINTS, engine_ports
from appliance.serving.launch import check_extra_arguments
from appliance.sovereignty.environment import offline_environment
from appliance.sovereignty.ports import gateway_ports
from docs.chart import (
    CHART,
    DECIDED_BY_THE_CHART,
    NOT_OF_A_GATEWAY,
    OF_A_WORKER_BY_THE_CHART,
    packaged_files,
)
from tests.deploy.chart.helm import HELM, RefusedError, render

IMAGES = CHART / "examples" / "images.yaml"
EXAMPLES = sorted(path for path in (CHART / "examples").glob("*.yaml") if path != IMAGES)
needs_helm = pytest.mark.skipif(
    not HELM.exists(),
    reason="NO HELM: run `make deploy`; whether the chart's settings are accepted is not tried",
)


def pods(objects):
    """Each pod's spec with the name of the ConfigMap it has its settings from."""
    for each in objects:
        spec = each.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        templates = [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
        for pod in [template["spec"] for template in templates if template] + [spec] * (
            each["kind"] == "Pod"
        ):
            settings = [
                volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "settings"
            ]
            if settings:
                yield settings[0], pod


def read(objects, tmp_path):
    """The settings of every pod, as its process would read them, with its variables."""
    maps = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    for name, pod in pods(objects):
        variables = {each["name"]: each.get("value", "7") for each in pod["containers"][0]["env"]}
        expanded = {
            key: value.replace("$(NODE)", variables.get("NODE", "")).replace(
                "$(GROUP)", variables.get("GROUP", "")
            )
            for key, value in variables.items()
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(maps[name]["appliance.yaml"], encoding="utf-8")
        ours = {key: value for key, value in expanded.items() if key.startswith(PREFIX)}
        yield pod, expanded, load_settings(file, environment=ours)


def mounted(pod, path):
    return any(
        Path(path).is_relative_to(mount["mountPath"]) for mount in pod["containers"][0]["volumeMounts"]
    )


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_accepted_by_the_appliance(example, tmp_path):
    """The first start finds no error: names, types, ports and files fit each other."""
    objects = render(files=[IMAGES, example]).objects
    seen = set()
    for pod, environment, settings in read(objects, tmp_path):
        command = pod["containers"][0].get("args", ["test"])[0]
        seen.add(command)
        paths = [settings.data.control_token_file, settings.tls.certificate_file]
        if command != "picker":
            paths.append(settings.data.directory)
        if command == "worker":
            assert settings.worker.port == pod_port(pod) or not pod["containers"][0].get("ports")
            check_extra_arguments(settings.worker.extra_arguments)
            assert offline_environment(environment, plugins=(PLUGIN,))["HF_HUB_OFFLINE"] == "1"
            paths += [settings.worker.model, settings.worker.draft]
        elif command != "picker":
            assert (settings.api.port, settings.api.admin_port) == (8080, 8081)
            if settings.pool.discover:
                assert parse_service(settings.pool.discover).port == 8000
            assert {8000, 8001} <= gateway_ports(settings)
            for witness in settings.audit.witnesses:
                assert parse_verifier_keys(witness.key)
            paths += [settings.audit.signing_key_file, settings.tenants.file, settings.oidc.jwks_file]
            paths += [settings.tenants.mac_key_file]
        for path in paths:
            assert path is None or mounted(pod, path), f"{path} is not mounted in {command}"
    assert "gateway" in seen
    assert {"worker", "picker"} & seen


def pod_port(pod):
    return pod["containers"][0].get("ports", [{}])[0].get("containerPort")


@needs_helm
def test_two_nodes_know_each_other_and_only_the_first_answers(tmp_path):
    """Same model, same arguments but rank and `--headless`; both may connect to the address of the group."""
    objects = render(files=[IMAGES, CHART / "examples" / "two-node-pipeline.yaml"]).objects
    nodes = [
        settings.worker
        for pod, _, settings in read(objects, tmp_path)
        if pod["containers"][0]["name"] == "worker"
    ]
    first, further = nodes
    assert further.extra_arguments == (*first.extra_arguments, "--headless")
    assert first.extra_arguments[:2] == ("--nnodes", "2")
    assert first.model_copy(update={"extra_arguments": ()}) == further.model_copy(
        update={"extra_arguments": ()}
    )
    gpus = Device(kind=DeviceKind.GPU, count=8, bfloat16=True)
    assert engine_ports(first, gpus, range(32768, 32769)) >= MEETING_POINTS


@needs_helm
def test_a_worker_stays_ready_and_a_gateway_waits_for_as_long_as_a_start_may_take(tmp_path):
    """A worker that left DNS while its engine is restarted would be forgotten (decision 0024)."""
    objects = render(files=[IMAGES, CHART / "examples" / "kimi-k2.6.yaml"]).objects
    pods_by_role = {
        pod["containers"][0]["name"]: (pod, settings) for pod, _, settings in read(objects, tmp_path)
    }
    worker, settings = pods_by_role["worker"]
    start = settings.worker.max_startup_seconds
    assert start == 7200
    for name in ("startupProbe", "readinessProbe"):
        probe = worker["containers"][0][name]
        assert probe["periodSeconds"] * probe["failureThreshold"] > start
    assert "livenessProbe" not in worker["containers"][0]
    gateway, settings = pods_by_role["gateway"]
    assert settings.recycle.start_seconds > start
    waits = settings.api.stop_delay_seconds + settings.api.drain_seconds
    assert gateway["terminationGracePeriodSeconds"] > waits


@needs_helm
def test_the_database_url_is_one_the_driver_takes(tmp_path):
    """Its options are our own, so a misspelt one would be found only by a gateway that starts."""
    objects = render(files=[IMAGES, CHART / "examples" / "external-postgresql.yaml"]).objects
    pod, settings = next(
        (pod, settings)
        for pod, _, settings in read(objects, tmp_path)
        if pod["containers"][0]["name"] == "gateway"
    )
    query = make_url(settings.audit.database_url).query
    assert set(query) <= OPTIONS
    assert query["sslmode"] in SSL_MODES
    assert mounted(pod, query["password_file"])
    assert mounted(pod, query["sslrootcert"])


@needs_helm
def test_the_signing_key_can_be_in_a_token(tmp_path):
    """The Secret then has the PIN, which is mounted where the key's URI says."""
    values = tmp_path / "token.yaml"
    uri = "pkcs11:token=log;object=audit?module-path=/usr/lib/m.so&pin-source=/etc/appliance/signing-key/pin"
    values.write_text(yaml.safe_dump({"keys": {"signingKey": {"existingSecret": "log-pin", "key": uri}}}))
    objects = render(files=[IMAGES, CHART / "examples" / "external-postgresql.yaml", values]).objects
    pod, settings = next(
        (pod, settings)
        for pod, _, settings in read(objects, tmp_path)
        if pod["containers"][0]["name"] == "gateway"
    )
    assert str(settings.audit.signing_key_file) == uri
    assert mounted(pod, settings.audit.signing_key_file.pin)


@needs_helm
def test_unknown_setting_is_refused_before_install():
    """Helm's own check of the values knows every setting the appliance knows, and no other."""
    values = {"global": {"allowTags": True}}
    assert render({**values, "settings": {"api": {"max_body_bytes": 1048576}}}).objects
    for wrong in ({"api": {"max_bodybytes": 1048576}}, {"api": {"port": 1}}, {"api": {"max_body_bytes": 1}}):
        with pytest.raises(RefusedError, match=r"settings"):
            render({**values, "settings": wrong})


@pytest.mark.parametrize("section", DECIDED_BY_THE_CHART)
def test_what_the_chart_decides_are_settings(section):
    """A setting that changed its name would otherwise be open to values again."""
    assert DECIDED_BY_THE_CHART[section] <= set(Settings.model_fields[section].annotation.model_fields)


def test_sections_and_fields_left_out_exist():
    """As above, for workers and for whole sections."""
    assert set(Settings.model_fields) >= NOT_OF_A_GATEWAY
    assert set(WorkerSettings.model_fields) >= OF_A_WORKER_BY_THE_CHART


def test_the_chart_carries_what_others_own_and_nothing_else():
    """Offline variables, rules and dashboards have one source each; `python -m docs.generate` copies them."""
    carried = {str(path.relative_to(CHART)) for path in (CHART / "files").rglob("*") if path.is_file()}
    assert carried == set(packaged_files())
    for at, source in packaged_files().items():
        assert (CHART / at).read_bytes() == source.read_bytes(), at


def test_every_value_says_what_it_means():
    """The reference page is generated from the comments."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert {path for path, _ in chart_docs.leaves(values)} <= set(chart_docs.comments())


def test_the_chart_is_of_the_version_that_it_is_in():
    """Its default images have this version."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == installed_version("sovereign-appliance")
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["images"]
    named = yaml.safe_load(chart["annotations"]["artifacthub.io/images"])
    expected = {
        f"{image['repository']}:{image['tag'] or chart['appVersion']}"
        for image in values.values()
        if isinstance(image, dict)
    }
    assert {each["image"] for each in named} == expected


def test_every_kept_example_says_how_it_is_installed():
    """An example is read alone, and found in the guide."""
    guide = (CHART.parents[1] / "docs" / "how-to" / "install-with-helm.md").read_text(encoding="utf-8")
    for example in EXAMPLES:
        text = example.read_text(encoding="utf-8")
        assert f"-f {example.name}" in text, example.name
        assert f"`{example.name}`" in guide, example.name
        assert yaml.safe_load(text), example.name
