"""
One worker in detail: the gateways' metrics about it, and vLLM's own.
"""

from deploy.monitoring.source.common import (
    EVENTS,
    INSTALLATION,
    KV_CACHE,
    SITE,
    TOKENS_GENERATED,
    WORKER,
    WORKERS,
    ZERO,
    preemptions,
    quantiles,
)
from deploy.monitoring.source.panels import (
    TOKENS_PER_SECOND,
    Dashboard,
    Panel,
    Query,
    Row,
    Variable,
)

INSTANCES = Variable(
    name="instance", label="Worker (Prometheus instance)", metric=f"vllm:num_requests_running{{{SITE}}}"
)
VLLM = f'{SITE},instance=~"$instance"'

SEEN = Row(
    title="Gateways' metrics",
    panels=(
        Panel(
            title="Up",
            text="Whether the worker can take requests.",
            queries=(Query(expr=f"max by (worker) (appliance_worker_up{{{WORKER}}})", legend="{{worker}}"),),
            kind="state-timeline", height=6, mappings={"0": ("down", "red"), "1": ("up", "green")},
        ),
        Panel(
            title="Excluded or circuit open",
            text="Not 0: it gets no requests, because it failed the canary after a recycle (1), or because it failed "
            "several requests in a row (2).",
            queries=(
                Query(
                    expr=f"(max by (worker) (appliance_worker_left_out{{{WORKER}}}) or 0 * max by (worker) "
                    f"(appliance_worker_up{{{WORKER}}})) + 2 * (max by (worker) "
                    f"(appliance_worker_breaker_open{{{WORKER}}}) or 0 * max by (worker) "
                    f"(appliance_worker_up{{{WORKER}}}))",
                    legend="{{worker}}",
                ),
            ),
            kind="state-timeline", height=6,
            mappings={
                "0": ("no", "green"), "1": ("excluded", "red"), "2": ("circuit open", "orange"), "3": ("both", "red"),
            },
        ),
        Panel(
            title="Restarts and failed scrapes",
            text="Restarts by the supervisor, and failed scrapes of the worker, in the time range.",
            queries=(
                Query(
                    expr=f"sum(increase(appliance_worker_restarts_total{{{WORKER}}}[$__range])) or on() {ZERO}",
                    legend="restarts",
                ),
                Query(
                    expr=f"sum(increase(appliance_scrape_failures_total{{{WORKER}}}[$__range])) or on() {ZERO}",
                    legend="failed scrapes",
                ),
            ),
            kind="stat", height=6,
        ),
        Panel(
            title="Requests in the worker",
            text="`running` requests are in the batch, `waiting` ones wait inside the worker; `slots` is the maximum of one "
            "gateway, which falls when requests wait inside the worker.",
            queries=(
                Query(
                    expr=f"max by (worker) (appliance_worker_running_requests{{{WORKER}}})",
                    legend="{{worker}} running",
                ),
                Query(
                    expr=f"max by (worker) (appliance_worker_waiting_requests{{{WORKER}}})",
                    legend="{{worker}} waiting",
                ),
                Query(expr=f"max by (worker) (appliance_worker_places{{{WORKER}}})", legend="{{worker}} slots"),
            ),
        ),
        TOKENS_GENERATED,
        KV_CACHE,
    ),
)  # fmt: skip
SPEED = Row(
    title="vLLM's metrics: speed",
    panels=(
        Panel(
            title="Time to first token (TTFT) in the worker",
            text="From the request's arrival in the worker to its first token.",
            queries=quantiles("vllm:time_to_first_token_seconds", VLLM),
            unit="s",
        ),
        Panel(
            title="Time per output token (TPOT)",
            text="Of a request, averaged over its answer. With speculation several tokens arrive at once, so this tells more "
            "than the time between frames.",
            queries=quantiles("vllm:request_time_per_output_token_seconds", VLLM),
            unit="s",
        ),
        Panel(
            title="Request time by phase",
            text="Mean seconds of a request: queue in the worker, prefill, decode.",
            queries=tuple(
                Query(
                    expr=f"sum(rate(vllm:request_{part}_time_seconds_sum{{{VLLM}}}[$__rate_interval])) "
                    f"/ sum(rate(vllm:request_{part}_time_seconds_count{{{VLLM}}}[$__rate_interval]))",
                    legend=legend,
                )
                for part, legend in (("queue", "queue"), ("prefill", "prefill"), ("decode", "decode"))
            ),
            unit="s", stacked=True,
        ),
        Panel(
            title="Prompt and generation tokens",
            text="Per second. Prompt tokens from the prefix cache are included.",
            queries=(
                Query(expr=f"sum(rate(vllm:prompt_tokens_total{{{VLLM}}}[$__rate_interval]))", legend="prompt"),
                Query(expr=f"sum(rate(vllm:generation_tokens_total{{{VLLM}}}[$__rate_interval]))", legend="generation"),
            ),
            unit=TOKENS_PER_SECOND,
        ),
        Panel(
            title="Prefix cache hit rate",
            text="Fraction of prompt tokens whose KV cache was kept from an earlier request.",
            queries=(
                Query(
                    expr=f"sum(rate(vllm:prefix_cache_hits_total{{{VLLM}}}[$__rate_interval])) "
                    f"/ sum(rate(vllm:prefix_cache_queries_total{{{VLLM}}}[$__rate_interval]))",
                    legend="hits",
                ),
            ),
            unit="percentunit", maximum=1,
        ),
        preemptions(VLLM),
    ),
)  # fmt: skip
INSIDE = Row(
    title="vLLM's metrics: drafts and process",
    panels=(
        Panel(
            title="Acceptance length",
            text="Mean tokens per step with drafts: 1 plus the accepted tokens per draft. A gap: nothing was drafted.",
            queries=(
                Query(
                    expr="1 + sum by (instance) (rate("
                    f"vllm:spec_decode_num_accepted_tokens_total{{{VLLM}}}[$__rate_interval])) / (sum by (instance) "
                    f"(rate(vllm:spec_decode_num_drafts_total{{{VLLM}}}[$__rate_interval])) > 0)",
                    legend="{{instance}}",
                ),
            ),
            unit="none",
        ),
        Panel(
            title="Requests finished",
            text="Per second, by vLLM's reason: `stop` and `length` are normal, `abort` means the client left.",
            queries=(
                Query(
                    expr=f"sum by (finished_reason) (rate(vllm:request_success_total{{{VLLM}}}[$__rate_interval]))",
                    legend="{{finished_reason}}",
                ),
            ),
            unit="reqps", stacked=True,
        ),
        Panel(
            title="Memory of the server process",
            text="Resident memory of the server process, without the engine's.",
            queries=(
                Query(
                    expr="process_resident_memory_bytes and on (cluster, namespace, job, instance) "
                    f"vllm:num_requests_running{{{VLLM}}}",
                    legend="{{instance}}",
                ),
            ),
            unit="bytes",
        ),
    ),
)  # fmt: skip

GPU_HOSTS = Variable(name="Hostname", label="GPU host", metric='DCGM_FI_DEV_GPU_UTIL{cluster=~"$cluster"}')


def _gpu(title: str, text: str, metric: str, unit: str, maximum: float | None = None) -> Panel:
    """
    A panel of NVIDIA's DCGM exporter, with its default metrics.

    Its namespace is not ours, and its names of pods are seldom the workers' names: GPUs are selected by their host.
    Source: https://docs.nvidia.com/datacenter/dcgm/latest/reference/dcgm-exporter-metrics.html
    """
    return Panel(
        title=title, text=text, unit=unit, maximum=maximum, width=6 if unit in {"percent", "mbytes"} else 4, height=7,
        absent="No DCGM exporter is scraped",
        queries=(
            Query(
                expr=f'max by (Hostname, gpu) ({metric}{{cluster=~"$cluster",Hostname=~"$Hostname"}})',
                legend="{{Hostname}} GPU {{gpu}}",
            ),
        ),
    )  # fmt: skip


GPUS = Row(
    title="GPUs (NVIDIA's DCGM exporter)",
    panels=(
        _gpu(
            "GPU utilisation",
            "Fraction of time in which the GPU computed anything. Low while requests are queued: see Requests in the "
            "worker. High alone does not mean that it is full: see KV cache in use.",
            "DCGM_FI_DEV_GPU_UTIL", "percent", 100,
        ),
        _gpu(
            "GPU memory used",
            "vLLM takes its share when it starts (`worker.gpu_memory_fraction`), so this should not change.",
            "DCGM_FI_DEV_FB_USED", "mbytes",
        ),
        _gpu("GPU power", "Power draw of each GPU.", "DCGM_FI_DEV_POWER_USAGE", "watt"),
        _gpu(
            "GPU temperature", "If it nears the limit of the model, the GPU slows down.",
            "DCGM_FI_DEV_GPU_TEMP", "celsius",
        ),
        _gpu(
            "Last XID error",
            "Code of the last error that the driver reported; 0 if none. NVIDIA's list of XID errors says what to do.",
            "DCGM_FI_DEV_XID_ERRORS", "none",
        ),
    ),
)  # fmt: skip

WORKER_DETAIL = Dashboard(
    uid="appliance-worker",
    title="Appliance: worker",
    text="The gateways' metrics about a worker, and vLLM's own.",
    variables=(*INSTALLATION, WORKERS, INSTANCES, GPU_HOSTS),
    events=EVENTS,
    rows=(SEEN, SPEED, INSIDE, GPUS),
)
