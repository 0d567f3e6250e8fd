"""The offline tables as files: what is in them, and that their readers read what we mean."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from appliance.app.worker_process import PLUGIN
from appliance.sovereignty.environment import OfflineVariable, offline_environment, worker_variables
from docs.offline_env import GRAFANA_VARIABLES, grafana_file, render_file, worker_file

DEPLOY = Path(__file__).parents[2] / "deploy"
SITE_PACKAGES = Path(pytest.__file__).parent.parent
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

PARSED_BY_VLLM = {
    "VLLM_NO_USAGE_STATS": True,
    "VLLM_DO_NOT_TRACK": True,
    "VLLM_USAGE_STATS_SERVER": "http://127.0.0.1:9",
    "VLLM_USE_MODELSCOPE": False,
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": False,
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": False,
    "VLLM_SERVER_DEV_MODE": False,
    "VLLM_USE_RUST_FRONTEND": False,
    "VLLM_ALLOW_INSECURE_SERIALIZATION": False,
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": False,
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": False,
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "VLLM_PLUGINS": [PLUGIN],
}
READ_BY_OTHERS = {
    "DO_NOT_TRACK": "1",  # by vLLM after VLLM_DO_NOT_TRACK, and by the hub's client
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_SAFETENSORS_CONVERSION": "1",
    "FLASHINFER_CUBINS_REPOSITORY": "http://127.0.0.1:9",
    "OTEL_SDK_DISABLED": "true",
    "STANDARD_AUTO_INSTALL_REQ": "false",
    "PYTHONSAFEPATH": "1",
}
ASK_VLLM = """
import importlib.util, json, sys
# The file alone: the package around it would load torch.
spec = importlib.util.spec_from_file_location("envs", sys.argv[1])
envs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(envs)
print(json.dumps({name: getattr(envs, name) for name in sys.argv[2:]}))
"""


def parse(text: str) -> dict[str, str]:
    """Read a file the way compose, systemd and the chart do: no quotes, no expansion."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


def as_vllm_reads(environment: dict[str, str], *names: str) -> dict[str, object]:
    envs = SITE_PACKAGES / "vllm" / "envs.py"
    answer = subprocess.run(
        [sys.executable, "-c", ASK_VLLM, str(envs), *names],
        env={"PATH": os.defpath, **environment},
        capture_output=True,
        check=True,
    )
    return json.loads(answer.stdout)


@pytest.mark.parametrize(
    ("name", "text"), [("offline.env", worker_file([PLUGIN])), ("offline-grafana.env", grafana_file())]
)
def test_file_on_disk_matches_the_table(name, text):
    """Run `python -m docs.generate` when this fails."""
    assert (DEPLOY / name).read_text(encoding="utf-8") == text


def test_the_file_is_the_environment_of_a_worker():
    """Whoever starts a worker's container by the file gives it what the launcher would."""
    assert parse(worker_file([PLUGIN])) == offline_environment({}, plugins=[PLUGIN])


def test_the_launcher_accepts_the_file():
    """A container started with it does not contradict the launcher inside."""
    offline_environment(parse(worker_file([PLUGIN])), plugins=[PLUGIN])


def test_every_value_is_known_here():
    """A new row says in this test what its reader makes of it."""
    assert parse(worker_file([PLUGIN])).keys() == PARSED_BY_VLLM.keys() | READ_BY_OTHERS.keys()


@needs_vllm
def test_vllm_parses_the_file_as_meant():
    """Read by vLLM's own code, each variable has the meaning the table promises."""
    environment = parse(worker_file([PLUGIN]))
    assert as_vllm_reads(environment, *PARSED_BY_VLLM) == PARSED_BY_VLLM
    assert environment.items() >= READ_BY_OTHERS.items()


@needs_vllm
@pytest.mark.parametrize("name", ["VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK"])
def test_vllm_takes_no_other_spelling(name):
    """Why the exact text matters: `true` leaves the telemetry on."""
    assert as_vllm_reads({name: "true"}, name) == {name: False}


@pytest.mark.parametrize("row", [*worker_variables([PLUGIN]), *GRAFANA_VARIABLES], ids=lambda row: row.name)
def test_every_line_has_reason_and_source(row):
    """A reviewer needs nothing but the file."""
    lines = render_file("x", [row]).splitlines()
    assert lines[-1] == f"{row.name}={row.value}"
    assert row.why in lines[-2]
    assert row.source in lines[-2]


def test_grafana_file_disables_every_outbound_feature():
    """Reporting, update checks, plugins, pictures, news, snapshots; and nobody sees it without a login."""
    values = parse(grafana_file())
    assert {name for name, value in values.items() if value == "true"} == {
        "GF_SECURITY_DISABLE_GRAVATAR",
        "GF_PLUGINS_PREINSTALL_DISABLED",
        "GF_PLUGINS_PUBLIC_KEY_RETRIEVAL_DISABLED",
    }
    assert {name for name, value in values.items() if value == "false"} == {
        "GF_ANALYTICS_REPORTING_ENABLED",
        "GF_ANALYTICS_CHECK_FOR_UPDATES",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES",
        "GF_ANALYTICS_FEEDBACK_LINKS_ENABLED",
        "GF_SNAPSHOTS_EXTERNAL_ENABLED",
        "GF_NEWS_NEWS_FEED_ENABLED",
        "GF_PLUGINS_PLUGIN_ADMIN_ENABLED",
        "GF_PLUGINS_PREINSTALL_AUTO_UPDATE",
        "GF_AUTH_ANONYMOUS_ENABLED",
        "GF_USERS_ALLOW_SIGN_UP",
    }


@pytest.mark.parametrize("value", ["two words", "'quoted'", "$HOME", "a#b", ""])
def test_refuses_a_value_that_needs_quotes(value):
    """Quotes are kept by one reader and removed by another."""
    row = OfflineVariable(name="X", value=value, why="y", source="z")
    with pytest.raises(ValueError, match="quotes"):
        render_file("x", [row])
