"""
One worker in detail: the gateways' metrics about it, and vLLM's own.
"""

from deploy.monitoring.source.common import (
    EVENTS,
    JOBS,
    KV_CACHE,
    TOKENS_GENERATED,
    WORKER,
    WORKERS,
    ZERO,
    quantiles,
)
from deploy.monitoring.source.panels import (
    PER_SECOND,
    TOKENS_PER_SECOND,
    Dashboard,
    Panel,
    Query,
    Row,
    Variable,
)

INSTANCES = Variable(
    name="instance", label="Worker (Prometheus instance)", metric="vllm:num_requests_running"
)
VLLM = 'instance=~"$instance"'

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
            title="Time to the first token",
            text="From the request's arrival in the worker to its first token.",
            queries=quantiles("vllm:time_to_first_token_seconds", VLLM, 0.5, 0.95),
            unit="s",
        ),
        Panel(
            title="Time per token",
            text="Of a request, averaged over its answer. With speculation several tokens arrive at once, so this tells more "
            "than the time between frames.",
            queries=quantiles("vllm:request_time_per_output_token_seconds", VLLM, 0.5, 0.95),
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
        Panel(
            title="Preemptions",
            text="Requests that were preempted because the KV cache was full, per second. If it stays above 0: shorter "
            "contexts, fewer concurrent requests, or more memory.",
            queries=(Query(expr=f"sum(rate(vllm:num_preemptions_total{{{VLLM}}}[$__rate_interval]))", legend="preempted"),),
            unit=PER_SECOND,
        ),
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
                    expr="process_resident_memory_bytes and on (job, instance) "
                    f"vllm:num_requests_running{{{VLLM}}}",
                    legend="{{instance}}",
                ),
            ),
            unit="bytes",
        ),
    ),
)  # fmt: skip

WORKER_DETAIL = Dashboard(
    uid="appliance-worker",
    title="Appliance: worker",
    text="The gateways' metrics about a worker, and vLLM's own.",
    variables=(JOBS, WORKERS, INSTANCES),
    events=EVENTS,
    rows=(SEEN, SPEED, INSIDE),
)
