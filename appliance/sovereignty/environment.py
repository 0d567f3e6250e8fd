"""
The offline environment of a worker: no variable in it may allow egress.

One table lists which variables must have which value, why, and where in the engine that was read.  A
worker's environment is an allow-list of the operator's variables, overlaid with the table: other variables
do not reach the worker, so a proxy, a token or a telemetry endpoint never does.

Fails closed: a variable of the table that the operator has set to another value is refused, not corrected,
because the operator had a reason that must be resolved before a worker starts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from appliance.errors import ConfigurationError
from appliance.infra.settings import TracingSettings

NOWHERE = "http://127.0.0.1:9"
"""The discard port of this machine: code that still calls out fails there at once."""


QUEUE_SPANS = 4096
"""Maximum spans of a worker that wait for the collector; at least the 512 that the library sends at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineVariable:
    """A variable that must have one value in a worker."""

    name: str
    value: str
    """The exact text; several variables accept no other spelling of yes and no."""
    why: str
    source: str
    """File that reads it, below site-packages; checked in vllm 0.32.0 and its dependencies."""
    free: bool = False
    """Whether the operator's value overrides this one, which is then the default."""


OFFLINE_VARIABLES = (
    OfflineVariable(
        name="VLLM_NO_USAGE_STATS",
        value="1",
        why="vLLM sends usage statistics unless this is exactly 1",
        source="vllm/envs.py",
    ),
    OfflineVariable(
        name="VLLM_DO_NOT_TRACK",
        value="1",
        why="vLLM prefers this over DO_NOT_TRACK, so another value would undo that one",
        source="vllm/envs.py",
    ),
    OfflineVariable(
        name="DO_NOT_TRACK",
        value="1",
        why="vLLM and the model hub's client send telemetry unless this is exactly 1",
        source="vllm/envs.py",
    ),
    OfflineVariable(
        name="VLLM_USAGE_STATS_SERVER",
        value=NOWHERE,
        why="usage statistics that are sent in spite of everything must not leave this machine",
        source="vllm/usage/usage_lib.py",
    ),
    OfflineVariable(
        name="HF_HUB_OFFLINE",
        value="1",
        why="the model hub's client looks for files on the network otherwise",
        source="huggingface_hub/constants.py",
    ),
    OfflineVariable(
        name="TRANSFORMERS_OFFLINE",
        value="1",
        why="it is the older name of HF_HUB_OFFLINE",
        source="huggingface_hub/constants.py",
    ),
    OfflineVariable(
        name="HF_HUB_DISABLE_TELEMETRY",
        value="1",
        why="the model hub's client sends telemetry otherwise",
        source="huggingface_hub/constants.py",
    ),
    OfflineVariable(
        name="DISABLE_SAFETENSORS_CONVERSION",
        value="1",
        why="transformers asks a service to convert weights that are no safetensors otherwise",
        source="transformers/modeling_utils.py",
    ),
    OfflineVariable(
        name="VLLM_USE_MODELSCOPE",
        value="0",
        why="weights would come from a hub",
        source="vllm/envs.py",
    ),
    OfflineVariable(
        name="VLLM_MEDIA_URL_ALLOW_REDIRECTS",
        value="0",
        why="a redirect leads a media request past the list of allowed domains",
        source="vllm/multimodal/media/connector.py",
    ),
    OfflineVariable(
        name="VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        value="0",
        why="a request could make the worker load an adapter from anywhere",
        source="vllm/entrypoints/serve/lora/api_router.py",
    ),
    OfflineVariable(
        name="VLLM_SERVER_DEV_MODE",
        value="0",
        why="the development routes run any method of the engine",
        source="vllm/entrypoints/launchers/api_server/routers.py",
    ),
    OfflineVariable(
        name="VLLM_USE_RUST_FRONTEND",
        value="0",
        why="that server does not run the middleware that checks the control token",
        source="vllm/envs.py",
    ),
    OfflineVariable(
        name="VLLM_ALLOW_INSECURE_SERIALIZATION",
        value="0",
        why="a message to the engine could carry code",
        source="vllm/v1/serial_utils.py",
    ),
    OfflineVariable(
        name="VLLM_DEBUG_LOG_API_SERVER_RESPONSE",
        value="false",
        why="completions would be written to the worker's log",
        source="vllm/entrypoints/serve/middleware/register.py",
    ),
    OfflineVariable(
        name="VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
        value="0",
        why="a worker whose engine died has to end, so that it is started again",
        source="vllm/entrypoints/launchers/launcher.py",
    ),
    OfflineVariable(
        name="FLASHINFER_CUBINS_REPOSITORY",
        value=NOWHERE,
        why="kernels are part of the image, never fetched at start",
        source="vllm/utils/flashinfer.py",
    ),
    OfflineVariable(
        name="OTEL_SDK_DISABLED",
        value="true",
        why="traces of a worker would be sent to an endpoint; `tracing.enabled` is how to have them",
        source="opentelemetry/sdk/trace/__init__.py",
    ),
    OfflineVariable(
        name="STANDARD_AUTO_INSTALL_REQ",
        value="false",
        why="a supervisor that vLLM installs would install what a model's directory lists",
        source="model_hosting_container_standards/common/dependency_manager.py",
    ),
    OfflineVariable(
        name="PYTHONSAFEPATH",
        value="1",
        why="modules in the directory the appliance was started in would be loaded into the worker",
        source="Python itself",
    ),
    OfflineVariable(
        name="VLLM_HOST_IP",
        value="127.0.0.1",
        why="vLLM finds its own address by connecting a socket to a public one otherwise",
        source="vllm/utils/network_utils.py",
        free=True,  # workers on several nodes need the node's own address
    ),
    OfflineVariable(
        name="VLLM_LOOPBACK_IP",
        value="127.0.0.1",
        why="names the loopback address instead of trying which one can be bound",
        source="vllm/utils/network_utils.py",
        free=True,  # a node without IPv4 needs ::1
    ),
)

PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "HOSTNAME", "LANG", "LC_*", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
    *("XDG_CONFIG_HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED", "NO_COLOR"),
    *("VLLM_*", "CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "UCX_*", "FLASHINFER_*", "TRITON_*", "HF_HOME"),
    *("OMP_*", "KMP_*", "GOMP_*", "MKL_*", "MALLOC_*", "TORCHINDUCTOR_*", "TORCH_CUDA_*", "PYTORCH_*"),
    "TIKTOKEN_CACHE_DIR",
)
"""
Patterns of the operator's variables that a worker receives: paths and performance.

Excluded are proxies, tokens, `OTEL_*` (set from the settings' section `tracing`), and `PYTHONPATH`, which
would load other code into the worker.
"""

PROXY = "requests would be sent through a proxy"
EXPORT = "traces and metrics would be sent there"
REFUSED = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "WS_PROXY", "WSS_PROXY"), PROXY),
    **dict.fromkeys(("OTEL_EXPORTER_*ENDPOINT",), EXPORT),
    "SENTRY_DSN": "reports of crashes would be sent there",
}
"""Patterns of variables, in any case, with which the appliance refuses to start, and why."""

KEPT_BACK = (
    "VLLM_API_KEY",  # the gateway sends none, every request would be refused
    "VLLM_CPU_KVCACHE_SPACE",  # overrides the launcher's --kv-cache-memory-bytes without a word
    "VLLM_LOGGING_CONFIG_PATH",  # could send log lines, and with them prompts, anywhere
    "VLLM_LORA_RESOLVER_*",
    "VLLM_MEDIA_CONNECTOR",
    "VLLM_MODEL_REDIRECT_PATH",  # serves other weights than those whose digest is in the audit log
    "VLLM_PORT*",  # Kubernetes sets it to a URL if a Service is called vllm, and vLLM then refuses to start
    "VLLM_SERVICE_*",
    "VLLM_TRACE_FUNCTION",
)
"""Patterns of `VLLM_*` variables that a worker does not receive."""


def refuse_egress_variables(environment: Mapping[str, str]) -> None:
    """
    Raise ConfigurationError for an environment that points outside.

    A worker would never receive these variables, but the operator set them for this process and must know
    that they have no effect.
    """
    for name, value in environment.items():
        for pattern, why in REFUSED.items():
            if value and fnmatchcase(name.upper(), pattern):
                raise ConfigurationError(f"{name} is set, and egress is not allowed: {why}; unset it")


def offline_environment(
    base: Mapping[str, str], *, plugins: Iterable[str] = (), tracing: TracingSettings | None = None
) -> dict[str, str]:
    """
    A worker's environment, from the operator's `base`.

    `plugins` are the vLLM plugins that a worker may load; other installed ones are ignored.  With `tracing`
    the worker exports traces to the collector, the only connection it opens itself.  Raises
    ConfigurationError if `base` sets a variable of the table to another value.
    """
    environment = {name: value for name, value in base.items() if _is_passed_on(name)}
    for row in worker_variables(plugins):
        value = base.get(row.name, row.value)
        if value != row.value and not row.free:
            message = f"{row.name} is set to {value!r} but must be {row.value!r} or unset: {row.why}"
            raise ConfigurationError(message)
        environment[row.name] = value
    if tracing is not None and tracing.enabled:
        environment |= tracing_variables(tracing)
    return environment


def tracing_variables(settings: TracingSettings) -> dict[str, str]:
    """
    Variables that make a worker trace, besides the argument with the collector's address.

    See `vllm/tracing/otel.py`.  It traces only requests that a gateway has sampled, and not its start.
    """
    made = {
        "OTEL_SDK_DISABLED": "false",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": f"{settings.timeout_seconds:g}",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_SERVICE_NAME": "sovereign-appliance-worker",
        "OTEL_BSP_SCHEDULE_DELAY": f"{settings.interval_seconds * 1000:.0f}",
        "OTEL_BSP_MAX_QUEUE_SIZE": f"{QUEUE_SPANS}",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "256",
    }
    if settings.ca_file is not None:
        made["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE"] = str(settings.ca_file)
    return made


def worker_variables(plugins: Iterable[str]) -> tuple[OfflineVariable, ...]:
    """The table, and the variable that lists the vLLM plugins a worker may load."""
    named_plugins = OfflineVariable(
        name="VLLM_PLUGINS",
        value=",".join(plugins),
        why="vLLM loads every plugin it finds otherwise, one that fetches adapters among them",
        source="vllm/plugins/__init__.py",
    )
    return (*OFFLINE_VARIABLES, named_plugins)


def _is_passed_on(name: str) -> bool:
    return _matches(name, PASSED_ON) and not _matches(name, KEPT_BACK)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
