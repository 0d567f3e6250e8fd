"""The environment of a worker: what is let in, what is set, what is refused."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from appliance.errors import ConfigurationError
from appliance.sovereignty.environment import OFFLINE_VARIABLES, offline_environment, refuse_egress_variables

GUARDED = [row for row in OFFLINE_VARIABLES if not row.free]
SITE_PACKAGES = Path(pytest.__file__).parent.parent
HAS_VLLM = find_spec("vllm") is not None


def test_sets_every_variable_of_the_table():
    """An empty environment becomes a fully offline one."""
    environment = offline_environment({})
    assert environment == {row.name: row.value for row in OFFLINE_VARIABLES} | {"VLLM_PLUGINS": ""}


def test_names_every_variable_once():
    """No row silently overrules another."""
    names = [row.name for row in OFFLINE_VARIABLES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", GUARDED, ids=lambda row: row.name)
def test_refuses_another_value(row):
    """An operator who allows egress gets one line with the variable and the required value."""
    with pytest.raises(ConfigurationError) as refusal:
        offline_environment({row.name: "other"})
    message = str(refusal.value)
    assert row.name in message
    assert repr(row.value) in message
    assert "\n" not in message


def test_refuses_true_where_vllm_wants_exactly_one():
    """`true` reads like a yes and is none: vLLM would send statistics."""
    with pytest.raises(ConfigurationError, match="must be '1'"):
        offline_environment({"VLLM_NO_USAGE_STATS": "true"})


@pytest.mark.parametrize("row", GUARDED, ids=lambda row: row.name)
def test_accepts_the_required_value(row):
    """Who has set it right already is left in peace."""
    assert offline_environment({row.name: row.value})[row.name] == row.value


def test_lets_the_operator_choose_the_address_of_a_node():
    """Workers on several nodes have to find each other."""
    assert offline_environment({"VLLM_HOST_IP": "10.0.0.5"})["VLLM_HOST_IP"] == "10.0.0.5"


@pytest.mark.parametrize(
    "name",
    [
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "FASTAPI_CLOUD_TOKEN"),
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "AWS_SECRET_ACCESS_KEY", "NGC_API_KEY"),
        *("PYTHONPATH", "PYTHONSTARTUP", "APPLIANCE_API__PORT", "SSH_AUTH_SOCK", "SENTRY_DSN"),
        *("VLLM_API_KEY", "VLLM_LOGGING_CONFIG_PATH", "VLLM_MODEL_REDIRECT_PATH", "S3_ENDPOINT_URL"),
        *("VLLM_PORT", "VLLM_PORT_8000_TCP_ADDR", "VLLM_SERVICE_HOST", "VLLM_CPU_KVCACHE_SPACE"),
        *("CUSTOM_FASTAPI_PING_HANDLER", "SAGEMAKER_MODEL_PATH", "TIKTOKEN_ENCODINGS_BASE"),
    ],
)
def test_holds_back(name):
    """Proxies, tokens, telemetry and code stay outside a worker."""
    assert name not in offline_environment({name: "x"})


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LC_ALL"),
        *("NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CACHE_ROOT"),
        *("XDG_CACHE_HOME", "TIKTOKEN_CACHE_DIR", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_HAS_FLASHINFER_CUBIN"),
    ],
)
def test_passes_on(name):
    """What says where things are and how fast to run is the operator's to choose."""
    assert offline_environment({name: "x"})[name] == "x"


def test_allows_the_named_plugins_alone():
    """An installed plugin that was not named is not loaded."""
    assert offline_environment({}, plugins=["ours", "theirs"])["VLLM_PLUGINS"] == "ours,theirs"
    with pytest.raises(ConfigurationError, match="VLLM_PLUGINS"):
        offline_environment({"VLLM_PLUGINS": "lora_hf_hub_resolver"}, plugins=["ours"])


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
@pytest.mark.parametrize(
    "row", [row for row in OFFLINE_VARIABLES if "/" in row.source], ids=lambda row: row.name
)
def test_names_the_file_that_reads_it(row):
    """Every row can be checked against the engine that is installed."""
    assert row.name in (SITE_PACKAGES / row.source).read_text()


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_model_hub_client_is_offline():
    """The hub's client reads the environment as we mean it."""
    program = (
        "from huggingface_hub import constants as c; print(c.HF_HUB_OFFLINE, c.HF_HUB_DISABLE_TELEMETRY)"
    )
    environment = offline_environment({"PATH": os.defpath})
    answer = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert answer.stdout.split() == [b"True", b"True"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "proxy") for name in ("HTTP_PROXY", "https_proxy", "All_Proxy", "ftp_proxy", "WSS_PROXY")),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "traces"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "traces"),
        ("OTEL_EXPORTER_ZIPKIN_ENDPOINT", "traces"),
        ("SENTRY_DSN", "crashes"),
    ],
)
def test_no_part_starts_in_an_environment_that_points_outside(name, reason):
    """It does not reach the worker, and the operator gets an error."""
    with pytest.raises(ConfigurationError, match=reason) as refusal:
        refuse_egress_variables({"PATH": "/bin", name: "http://outside.example"})
    assert str(refusal.value).startswith(name)
    assert str(refusal.value).endswith("unset it")


@pytest.mark.parametrize("name", ["NO_PROXY", "OTEL_SERVICE_NAME", "OTEL_SDK_DISABLED", "PATH"])
def test_empty_variables_are_accepted(name):
    """Among them what switches something off; and an empty variable is none."""
    refuse_egress_variables({name: "x", "HTTPS_PROXY": ""})
