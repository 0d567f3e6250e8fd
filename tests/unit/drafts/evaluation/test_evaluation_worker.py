"""The workers of an evaluation are isolated from those that serve, and have no egress."""

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.drafts.evaluation.arms import Served
from appliance.drafts.evaluation.evaluation_worker import WorkerTemplate, available_memory, context_of
from appliance.errors import ConfigurationError
from appliance.infra.settings import WorkerSettings
from appliance.serving.devices import Device, DeviceKind
from appliance.serving.weights import TensorInfo
from tests.unit.drafts.evaluation.evaluation_parts import CPU, NEW, TARGET

GIB = 2**30
GPU = Device(kind=DeviceKind.GPU, count=1, bfloat16=True)
TOKEN = Path("/data/evaluation/control.token")
WITH, ALONE = Served(target=TARGET, draft=NEW), Served(target=TARGET)


def template(settings: WorkerSettings | None = None, device: Device = CPU) -> WorkerTemplate:
    return WorkerTemplate(
        settings=settings or WorkerSettings(),
        device=device,
        python="/usr/bin/python3",
        environment={"PATH": "/usr/bin", "HOME": "/root", "HTTP_PROXY": "http://proxy", "HF_TOKEN": "hf"},
        choose_port=lambda _host: 4321,
    )


def option(plan, name: str) -> str:
    return plan.argv[plan.argv.index(name) + 1]


def test_worker_listens_on_loopback_only():
    """Whatever the settings of the serving worker are."""
    settings = WorkerSettings(host="0.0.0.0", port=8000, served_name="chat", max_num_seqs=64)
    plan = template(settings).plan(WITH, TOKEN)
    assert (plan.host, plan.port, plan.url) == ("127.0.0.1", 4321, "http://127.0.0.1:4321")
    assert option(plan, "--host") == "127.0.0.1"
    assert option(plan, "--max-num-seqs") == "8"
    assert option(plan, "--served-model-name") == "evaluated"


def test_worker_is_offline_with_our_plugin_and_its_own_token():
    """No proxy, no hub, no other plugin."""
    environment = template().plan(WITH, TOKEN).environment
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_PLUGINS"] == "appliance"
    assert environment["APPLIANCE_CONTROL_TOKEN_FILE"] == "/data/evaluation/control.token"
    assert not {"HTTP_PROXY", "HF_TOKEN", "APPLIANCE_RESTART_FILE"} & environment.keys()


def test_each_arm_serves_its_own_weights():
    assert "--speculative-config" not in template().plan(ALONE, TOKEN).argv
    assert str(NEW.path) in option(template().plan(WITH, TOKEN), "--speculative-config")
    assert option(template().plan(WITH, TOKEN), "--model") == str(TARGET.path)


def test_draft_token_schedule_and_parsers_are_not_used():
    """K is the same at every batch size here."""
    settings = WorkerSettings(
        draft_token_schedule=((1, 4, 3), (5, 64, 0)), tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    plan = template(settings).plan(WITH, TOKEN)
    assert not {"--tool-call-parser", "--reasoning-parser"} & set(plan.argv)
    assert "[1,5,3]" in option(plan, "--speculative-config")


def test_worker_of_several_nodes_is_refused():
    with pytest.raises(ConfigurationError, match="several nodes"):
        template(WorkerSettings(extra_arguments=("--nnodes", "2"))).plan(WITH, TOKEN)


@pytest.mark.parametrize(
    ("dtype", "device", "config", "expected"),
    [
        ("auto", CPU, {"dtype": "bfloat16"}, "float32"),
        ("auto", GPU, {"dtype": "bfloat16"}, "bfloat16"),
        ("auto", GPU, {"torch_dtype": "float16"}, "float16"),
        ("auto", GPU, {"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ("auto", GPU, {}, "unknown"),
        ("float32", GPU, {"dtype": "bfloat16"}, "float32"),
    ],
)
def test_dtype_is_the_one_vllm_will_choose(dtype, device, config, expected):
    """The rounding tolerance depends on it."""
    assert template(WorkerSettings(dtype=dtype), device).dtype(replace(TARGET, config=config)) == expected


def test_two_workers_run_together_if_memory_suffices():
    """On a CPU by bytes; on a GPU by the configured share."""
    large = replace(TARGET, tensors={"w": TensorInfo(shape=(2**30,), dtype="BF16")})
    pair = Served(target=large, draft=NEW), Served(target=large, draft=NEW)
    # 4 GiB of weights in float32, 1 GiB of KV cache and 3 GiB of libraries, each.
    assert template().holds(16 * GIB, *pair)
    assert not template().holds(16 * GIB - 1, *pair)
    assert not template(device=GPU).holds(2**50, *pair)
    assert template(WorkerSettings(gpu_memory_fraction=0.45), GPU).holds(0, *pair)


def test_available_memory_is_read_from_meminfo():
    text = "MemTotal:       24735540 kB\nMemAvailable:   17000000 kB\n"
    assert available_memory(text) == 17_000_000 * 1024
    assert available_memory("MemTotal: 1 kB\n") == 0


def test_context_is_that_of_the_settings_or_of_the_target():
    assert context_of(WorkerSettings(max_model_len=512), TARGET) == 512
    assert context_of(WorkerSettings(), TARGET) == 2048
    with pytest.raises(ConfigurationError, match="max_model_len"):
        context_of(WorkerSettings(), replace(TARGET, config={}))
